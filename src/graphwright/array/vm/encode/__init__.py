"""From an op on arrays to rows of the machine's code, or None where only another kernel can do it.

The same function answers while planning, from layouts alone, and when a plan is bound, with addresses.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from graphwright.array.vm.encode import attention, choose, elementwise, moves, noise, products, rows, updates
from graphwright.array.vm.encode.operands import ENCODERS, WORK, Row, View, copy_row

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
    "work_of",
]


def work_of(op: str, outs: Sequence[View], ins: Sequence[View], attrs: Mapping[str, Any]) -> list[View]:
    """What code works in besides the scratch, without addresses."""
    return WORK[op](outs, ins, attrs) if op in WORK else []


def encode(
    op: str,
    outs: Sequence[View],
    ins: Sequence[View],
    attrs: Mapping[str, Any],
    work: Sequence[View] | None = None,
) -> list[Row] | None:
    """Rows that compute `outs` from `ins`; None if there are none for these layouts and dtypes.

    Args:
        work: memory as `work_of` says, where the rows are to run.
    """
    encoder = ENCODERS.get(op)
    if encoder is None:
        return None
    return encoder([*outs, *(work_of(op, outs, ins, attrs) if work is None else work)], ins, attrs)
