"""Functions that are one op each, from the `functional` cells of ops; `op_functions.pyi` has the signatures."""

from graphwright.ops import surface

globals().update(surface.functions())
