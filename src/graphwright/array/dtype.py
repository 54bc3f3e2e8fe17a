"""DType: one instance per element type, with its name in torch, numpy, safetensors, DLPack, Triton and ONNX.

Invariant: there is one instance per name, so `is` and `==` agree.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np

from graphwright.errors import DTypeError


@dataclass(frozen=True, slots=True, eq=False)
class DType:
    """One element type.

    Attributes:
        name: the name in torch and numpy (`float32`); numpy has no `bfloat16`.
        itemsize: bytes per element.
        kind: `float`, `int`, `uint`, `bool`, or `float8`, which is only stored and cast.
        rank: order of promotion within the kind; wider dtypes have a higher rank.
        numpy: dtype of host arrays; for floats that numpy lacks, the unsigned integer that holds their bits.
        safetensors: tag in a checkpoint header.
        dlpack: (type code, bits) of the DLPack header.
        triton: name in `triton.language`.
        onnx: number in `onnx.TensorProto.DataType`.
        as_bits: True for floats that numpy does not have: bfloat16 and the two 8-bit ones.
        is_float: True for floating types that support arithmetic.
        is_low: True for 16-bit floats, whose statistics are computed in float32.
    """

    name: str
    itemsize: int
    kind: str
    rank: int
    numpy: np.dtype
    safetensors: str
    dlpack: tuple[int, int]
    triton: str
    onnx: int
    as_bits: bool
    is_float: bool
    is_low: bool

    def __repr__(self) -> str:
        return f"gw.{self.name}" + ("_" if self.name == "bool" else "")

    def __reduce__(self) -> tuple:
        return dtype, (self.name,)


DTYPES: dict[str, DType] = {}


def _row(name: str, size: int, kind: str, rank: int, host: str, tag: str, code: int, triton: str, onnx: int) -> DType:
    numpy, is_float = np.dtype(host), kind == "float"
    as_bits = kind.startswith("float") and numpy.kind == "u"
    facts = (name, size, kind, rank, numpy, tag, (code, 8 * size), triton, onnx)
    made = DTYPES[name] = DType(*facts, as_bits=as_bits, is_float=is_float, is_low=is_float and size == 2)
    return made


float64 = _row("float64", 8, "float", 3, "f8", "F64", 2, "float64", 11)
float32 = _row("float32", 4, "float", 2, "f4", "F32", 2, "float32", 1)
bfloat16 = _row("bfloat16", 2, "float", 1, "u2", "BF16", 4, "bfloat16", 16)
float16 = _row("float16", 2, "float", 1, "f2", "F16", 2, "float16", 10)
float8_e4m3fn = _row("float8_e4m3fn", 1, "float8", 0, "u1", "F8_E4M3", 10, "float8e4nv", 17)
float8_e5m2 = _row("float8_e5m2", 1, "float8", 0, "u1", "F8_E5M2", 12, "float8e5", 19)
int64 = _row("int64", 8, "int", 4, "i8", "I64", 0, "int64", 7)
int32 = _row("int32", 4, "int", 3, "i4", "I32", 0, "int32", 6)
int16 = _row("int16", 2, "int", 2, "i2", "I16", 0, "int16", 5)
int8 = _row("int8", 1, "int", 1, "i1", "I8", 0, "int8", 3)
uint8 = _row("uint8", 1, "uint", 1, "u1", "U8", 1, "uint8", 2)
bool_ = _row("bool", 1, "bool", 0, "?", "BOOL", 6, "int1", 9)

BY_TAG: dict[str, DType] = {d.safetensors: d for d in DTYPES.values()}
_SHORT: dict[str, DType] = {  # short names, as specs print them
    **{tag.lower(): d for tag, d in BY_TAG.items() if d.is_float},
    **{f"fp{8 * d.itemsize}": d for d in (float64, float32, float16)},
}
_BY_NUMPY: dict[np.dtype, DType] = {d.numpy: d for d in DTYPES.values() if not d.as_bits}


def decode(bits: np.ndarray, kind: DType) -> np.ndarray:
    """Convert bit patterns of a float dtype that numpy lacks to float32, exactly."""
    if kind is bfloat16:  # the upper half of a float32
        return np.asarray(bits.astype(np.uint32) << 16).view(np.float32)  # shifting a 0-d array gives a scalar
    return _float8_values(4 if kind is float8_e4m3fn else 5)[bits]


@cache
def _float8_values(exponent_bits: int) -> np.ndarray:
    """Return the 256 values of E4M3FN (no infinities, one NaN per sign) or E5M2 (as IEEE 754).

    Source: Micikevicius et al. 2022, "FP8 Formats for Deep Learning", table 1.
    """
    code = np.arange(256)
    fraction_bits = 7 - exponent_bits
    exponent, fraction = (code & 0x7F) >> fraction_bits, code & (2**fraction_bits - 1)
    normal = exponent > 0
    scale = np.exp2(np.where(normal, exponent, 1) - (2.0 ** (exponent_bits - 1) - 1))
    value = (normal + fraction / 2.0**fraction_bits) * scale
    if exponent_bits == 5:
        value = np.where(exponent == 31, np.where(fraction == 0, np.inf, np.nan), value)
    else:
        value = np.where(code & 0x7F == 0x7F, np.nan, value)
    return np.where(code < 128, value, -value).astype(np.float32)


def dtype(value: Any) -> DType:
    """Return the DType for a DType, a numpy dtype or a name (`"bfloat16"`, `"bf16"`, `"bool_"`). Raises: DTypeError."""
    if isinstance(value, DType):
        return value
    if isinstance(value, str) and (found := DTYPES.get(value.removesuffix("_")) or _SHORT.get(value)) is not None:
        return found
    try:
        return _BY_NUMPY[np.dtype(value)]
    except (TypeError, KeyError, ValueError):
        raise DTypeError("unknown dtype", expected=", ".join(DTYPES), got=repr(value)) from None


class finfo:
    """The limits of a floating dtype. Raises: DTypeError for another dtype.

    Attributes:
        bits: bits of an entry.
        eps: distance from 1 to the next larger number.
        max, min: the largest and the lowest finite number.
        tiny: the smallest positive normal number.
        dtype: name of the dtype.
    """

    def __init__(self, kind: Any = "float32") -> None:
        row = dtype(kind)
        if not row.is_float:
            raise DTypeError("finfo needs a floating dtype", expected="a floating dtype", got=row, fix="use iinfo")
        exponent, fraction = {"float64": (11, 52), "float32": (8, 23), "bfloat16": (8, 7), "float16": (5, 10)}[row.name]
        self.bits, self.dtype, self.eps = 8 * row.itemsize, row.name, 2.0**-fraction
        self.max = (2.0 - self.eps) * 2.0 ** (2 ** (exponent - 1) - 1)
        self.min, self.tiny = -self.max, 2.0 ** (2 - 2 ** (exponent - 1))


class iinfo:
    """The limits of an integer dtype: `bits`, `max`, `min`, `dtype`. Raises: DTypeError for another dtype."""

    def __init__(self, kind: Any) -> None:
        row = dtype(kind)
        if row.kind not in ("int", "uint"):
            raise DTypeError("iinfo needs an integer dtype", expected="an integer dtype", got=row, fix="use finfo")
        limits = np.iinfo(row.numpy)
        self.bits, self.dtype, self.max, self.min = limits.bits, row.name, int(limits.max), int(limits.min)


def promote(a: DType, b: DType) -> DType:
    """Return torch's dtype of `a + b` for arrays that are not 0-d. Raises: DTypeError for float8 and another dtype."""
    if a is b:
        return a
    if "float8" in (a.kind, b.kind):
        what = "8-bit floats cannot be combined with other dtypes"
        raise DTypeError(what, got=f"{a!r}, {b!r}", fix="cast the 8-bit floats first")
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
    """Return the dtype to which an op casts its operands, as in torch.

    Args:
        operands: (dtype, category) pairs; category is, from high to low, `array`, `scalar0d` or `python`. A lower
            category changes the result only if its kind is higher than that of every operand in a higher category.
    Raises: DTypeError for an 8-bit float with a different dtype, or for an empty list of operands.
    """
    kinds = {"bool": 0, "uint": 1, "int": 1, "float": 2, "float8": 2}
    result: DType | None = None
    for category in ("array", "scalar0d", "python"):
        level: DType | None = None
        for kind, where in operands:
            if where == category:
                level = kind if level is None else promote(level, kind)
        if level is None:
            continue
        if result is None:
            result = float32 if category == "python" and level is float64 else level
        elif kinds[level.kind] > kinds[result.kind]:
            result = promote(result, float32 if category == "python" and level is float64 else level)
    if result is None:
        raise DTypeError("result_type needs at least one operand, but the list is empty")
    return result
