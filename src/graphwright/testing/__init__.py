"""Public test harnesses, which are themselves tested with planted bugs."""
