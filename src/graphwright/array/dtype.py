"""DType: one row per element type, with its name in every neighbouring system.

Invariant: a DType is a value; there is one instance per name, so `is` and `==` agree.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from graphwright.errors import DTypeError


@dataclass(frozen=True, slots=True, eq=False)
class DType:
    """One element type.

    Attributes:
        name: the name torch and numpy share (`float32`); `bfloat16` has no numpy twin.
        itemsize: bytes per element.
        kind: `float`, `int`, `uint` or `bool`.
        rank: place in the promotion lattice within the kind, narrow to wide.
        numpy: dtype of the host view; for `bfloat16` the bits as `uint16`.
        safetensors: tag in a checkpoint header.
        dlpack: (type code, bits) of the DLPack header.
    """

    name: str
    itemsize: int
    kind: str
    rank: int
    numpy: np.dtype
    safetensors: str
    dlpack: tuple[int, int]

    @property
    def is_float(self) -> bool:
        """True for floating types."""
        return self.kind == "float"

    @property
    def is_low(self) -> bool:
        """True for 16-bit floats, whose statistics are taken in float32."""
        return self.kind == "float" and self.itemsize == 2

    def __repr__(self) -> str:
        return f"gw.{self.name}" + ("_" if self.name == "bool" else "")

    def __reduce__(self) -> tuple:
        return dtype, (self.name,)


def _row(name: str, size: int, kind: str, rank: int, host: str, tag: str, code: int) -> DType:
    return DType(name, size, kind, rank, np.dtype(host), tag, (code, 8 * size))


float64 = _row("float64", 8, "float", 3, "f8", "F64", 2)
float32 = _row("float32", 4, "float", 2, "f4", "F32", 2)
bfloat16 = _row("bfloat16", 2, "float", 1, "u2", "BF16", 4)
float16 = _row("float16", 2, "float", 1, "f2", "F16", 2)
int64 = _row("int64", 8, "int", 4, "i8", "I64", 0)
int32 = _row("int32", 4, "int", 3, "i4", "I32", 0)
int16 = _row("int16", 2, "int", 2, "i2", "I16", 0)
int8 = _row("int8", 1, "int", 1, "i1", "I8", 0)
uint8 = _row("uint8", 1, "uint", 1, "u1", "U8", 1)
bool_ = _row("bool", 1, "bool", 0, "?", "BOOL", 6)

DTYPES: dict[str, DType] = {
    d.name: d for d in (float64, float32, bfloat16, float16, int64, int32, int16, int8, uint8, bool_)
}
BY_TAG: dict[str, DType] = {d.safetensors: d for d in DTYPES.values()}
_SHORT: dict[str, DType] = {  # as specs are printed, and as people write
    **{tag.lower(): d for tag, d in BY_TAG.items() if d.is_float},
    **{f"fp{8 * d.itemsize}": d for d in (float64, float32, float16)},
}
_BY_NUMPY: dict[np.dtype, DType] = {d.numpy: d for d in DTYPES.values() if d is not bfloat16}


def dtype(value: Any) -> DType:
    """The DType named by a DType, a name (`"bfloat16"`, `"bf16"`, `"bool_"`) or a numpy dtype.

    Raises: DTypeError for anything else.
    """
    if isinstance(value, DType):
        return value
    if isinstance(value, str) and (found := DTYPES.get(value.removesuffix("_")) or _SHORT.get(value)) is not None:
        return found
    try:
        return _BY_NUMPY[np.dtype(value)]
    except (TypeError, KeyError):
        raise DTypeError("unknown dtype", expected=", ".join(DTYPES), got=repr(value)) from None


def promote(a: DType, b: DType) -> DType:
    """The type of `a + b` for two dimensioned operands: torch's lattice."""
    if a is b:
        return a
    if a.kind == b.kind:
        if a.rank == b.rank:  # bfloat16 with float16
            return float32
        return a if a.rank > b.rank else b
    order = ("bool", "uint", "int", "float")
    low, high = sorted((a, b), key=lambda d: order.index(d.kind))
    if low.kind == "uint" and high is int8:
        return int16
    return high


def result_type(operands: list[tuple[DType, str]]) -> DType:
    """The type that operands are cast to, by torch's rule.

    Args:
        operands: (dtype, category) pairs; category is `array`, `scalar0d` or `python`. A lower category changes the
            result only when its kind is higher than that of every operand above it.
    """
    kinds = {"bool": 0, "uint": 1, "int": 1, "float": 2}
    result: DType | None = None
    for category in ("array", "scalar0d", "python"):
        level: DType | None = None
        for kind, where in operands:
            if where == category:
                level = kind if level is None else promote(level, kind)
        if level is None:
            continue
        if result is None:
            result = level
        elif kinds[level.kind] > kinds[result.kind]:
            result = float32 if category == "python" and level is float64 else level
    if result is None:
        raise DTypeError("result_type needs at least one operand")
    return result
