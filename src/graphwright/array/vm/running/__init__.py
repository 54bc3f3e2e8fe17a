"""Running VM code: segments of a plan, calls of the machine, helper threads."""
