"""Functions that are one op each, generated from the ops' `functional` cells; `op_functions.pyi` has the signatures."""

from graphwright.ops import surface

globals().update(surface.functions())
