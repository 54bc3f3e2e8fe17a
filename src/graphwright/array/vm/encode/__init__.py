"""From an op on arrays to rows of the machine's code, or None where only another kernel can do it.

The same function answers while planning, from layouts alone, and when a plan is bound, with addresses.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from graphwright.array.vm.encode import attention, choose, elementwise, moves, noise, products, rows, updates
from graphwright.array.vm.encode.operands import ENCODERS, Row, View, copy_row

__all__ = [
    "ENCODERS",
    "Row",
    "View",
    "attention",
    "choose",
    "copy_row",
    "elementwise",
    "encode",
    "moves",
    "noise",
    "products",
    "rows",
    "updates",
]


def encode(op: str, outs: Sequence[View], ins: Sequence[View], attrs: Mapping[str, Any]) -> list[Row] | None:
    """Rows that compute `outs` from `ins`; None if there are none for these layouts and dtypes."""
    encoder = ENCODERS.get(op)
    if encoder is None:
        return None
    return encoder(outs, ins, attrs)
