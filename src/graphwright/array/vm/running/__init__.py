"""Running VM code: segments of a plan, calls of the interpreter, helper threads."""
