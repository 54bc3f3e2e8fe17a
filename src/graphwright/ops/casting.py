"""Casts of an op's operands: by torch's promotion rules, and under autocast as the op's trait `amp` says."""

from __future__ import annotations

from collections.abc import Sequence

from graphwright.array import DType, bfloat16, float16, float32, result_type
from graphwright.array import dtype as named
from graphwright.errors import DTypeError
from graphwright.ops.registry import Op

OperandKind = tuple[DType, str]
"""Dtype of an operand, and whether it is an `array`, a `scalar0d` or a `python` number."""


def target_dtype(row: Op, kinds: Sequence[OperandKind], low: DType | None) -> DType | None:
    """Return the dtype that the operands are cast to, or None for no cast.

    Args:
        kinds: per operand, cast or not, its dtype, and `array`, `scalar0d` or `python` (a Python number).
        low: the 16-bit dtype of autocast, or None outside autocast.
    """
    free = [kind for i, kind in enumerate(kinds) if i not in row.traits.fixed]
    first = next((dtype for dtype, how in free if how != "python"), float32)
    if row.traits.promotes and not first.is_float:
        common = result_type(free)
        return common if common.is_float else float32
    rule = row.traits.amp
    if rule == "low":
        return low if first.is_float else None
    if rule == "f32" and low is not None and first.is_low:
        return float32
    if rule == "inner":
        return first
    if rule in ("promote", "f32") and len(free) > 1:
        common = result_type(free)
        return float32 if row.traits.divides and not common.is_float else common
    return None


def is_cast(row: Op, port: int, dtype: DType, target: DType | None) -> bool:
    """Return True if operand number `port`, of this dtype, is among the operands that are cast to `target`."""
    if target in (None, dtype) or port in row.traits.fixed:
        return False
    return dtype.is_float or row.traits.promotes or row.traits.amp in ("promote", "f32")


def low_dtype(dtype: object) -> DType:
    """Parse a 16-bit float dtype. Raises: DTypeError for any other dtype."""
    kind = named(dtype)
    if kind not in (bfloat16, float16):
        raise DTypeError("invalid dtype of autocast", expected="bfloat16 or float16", got=kind)
    return kind
