"""The operators of torch that can be imported, by kind."""

from __future__ import annotations

from graphwright.models.importing.operators import (
    complex,
    elementwise,
    indexing,
    networks,
    recurrent,
    reductions,
    shapes,
)
from graphwright.models.importing.operators.table import OPERATORS, find, operator_name

__all__ = [
    "OPERATORS",
    "complex",
    "elementwise",
    "find",
    "indexing",
    "networks",
    "operator_name",
    "recurrent",
    "reductions",
    "shapes",
]
