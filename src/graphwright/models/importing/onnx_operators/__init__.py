"""The ONNX operators that can be imported, by kind."""

from __future__ import annotations

from graphwright.models.importing.onnx_operators import (
    attention,
    elementwise,
    images,
    indexing,
    networks,
    quantized,
    recurrent,
    reductions,
    shapes,
    signals,
)
from graphwright.models.importing.onnx_operators.table import OPERATORS, NotExpressible

__all__ = [
    "OPERATORS", "NotExpressible", "attention", "elementwise", "images", "indexing", "networks", "quantized",
    "recurrent", "reductions", "shapes", "signals",
]  # fmt: skip
