"""Random numbers as rows of code: the numbers of `array.random` for a key and a stream, 16 counters at a time."""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types

from graphwright.array.formulas import philox as formulas
from graphwright.array.formulas import specialise
from graphwright.array.vm.code import BERNOULLI, DROPOUT, ZEROS
from graphwright.array.vm.elementwise import F, cell, number
from graphwright.array.vm.math import native
from graphwright.array.vm.vector import (
    F32,
    FLOATS,
    I32,
    I64,
    INTS,
    LANES,
    aligned,
    broadcast,
    constant,
    define,
    effect,
    first,
    load,
    load_first,
    load_i64,
    pointer,
    select,
    shuffle,
    store_first,
)  # fmt: skip

_LONGS = ir.VectorType(I64, LANES)
_WORDS = 4 * LANES


class _Lanes:
    """16 words while code is emitted: the operators that Philox uses append instructions."""

    def __init__(self, builder: Any, value: Any) -> None:
        self.builder, self.value = builder, value

    def __xor__(self, other: _Lanes) -> _Lanes:
        return _Lanes(self.builder, self.builder.xor(self.value, other.value))

    def __add__(self, number: Any) -> _Lanes:
        return _Lanes(self.builder, self.builder.add(self.value, constant(I32, int(number))))


def _product(x: _Lanes, factor: Any) -> tuple[_Lanes, _Lanes]:
    b = x.builder
    wide = b.mul(b.zext(x.value, _LONGS), constant(I64, int(factor)))
    return _Lanes(b, b.trunc(b.lshr(wide, constant(I64, 32)), INTS)), _Lanes(b, b.trunc(wide, INTS))


_philox: Any = specialise(formulas, {"product": _product, "wrapped": lambda x: x}).philox


def _interleaved(b: Any, x: Any, y: Any, high: int, width: int) -> Any:
    """Alternate runs of `width` lanes from the lower or upper halves of two vectors."""
    lanes = []
    for run in range(LANES // (2 * width)):
        start = high * LANES // 2 + run * width
        lanes += [start + k for k in range(width)] + [LANES + start + k for k in range(width)]
    return shuffle(b, x, y, lanes)


def _uniform(b: Any, target: Any, block: Any, stream: Any, seed: Any, step: Any) -> None:
    """Write the 4 numbers of each of 16 counters from `block` on, a multiple of 16: upper 24 bits · 2⁻²⁴."""

    def word(value: Any, shift: int) -> Any:
        return broadcast(b, b.trunc(b.lshr(value, I64(shift)) if shift else value, I32))

    lanes = ir.Constant(INTS, [I32(i) for i in range(LANES)])
    counter = b.add(word(block, 0), lanes), word(block, 32), word(stream, 0), word(step, 0)
    words = _philox(*(_Lanes(b, w) for w in (*counter, word(seed, 0), word(seed, 32))))
    u = [b.fmul(b.uitofp(b.lshr(w.value, constant(I32, 8)), FLOATS), constant(F32, 2.0**-24)) for w in words]
    for part in (0, 1):
        near, far = _interleaved(b, u[0], u[1], part, 1), _interleaved(b, u[2], u[3], part, 1)
        for half in (0, 1):
            address = b.add(target, I64(64 * (2 * part + half)))
            aligned(b.store(_interleaved(b, near, far, half, 2), pointer(b, address, FLOATS)), 4)


uniforms = define("uniforms", types.void, (types.int64,) * 5, effect(_uniform))
"""Write 64 uniform numbers: target, first block, stream, seed, step."""


@native
def noise(row: Any, scratch: Any) -> None:
    """Uniform numbers, Bernoulli samples or dropout.

    Cells 2 count, 3 out, 6 x or p, 7 address of seed and step, 8 stream, 9 kind; of dropout 10 the least uniform number
    that keeps an entry, 11 the divisor.
    """
    count, o, x, key, kind = cell(row, 2), cell(row, 3), cell(row, 6), cell(row, 7), cell(row, 9)
    least, divisor, drawn = F(number(row, 10)), F(number(row, 11)), scratch + ZEROS
    for start in range(0, count, _WORDS):
        uniforms(drawn, start // 4, cell(row, 8), load_i64(key), load_i64(key + 8))
        for i in range(start, min(count, start + _WORDS), 16):
            mask, u = first(count - i), load(drawn + 4 * (i - start))
            if kind == DROPOUT:
                u = select(u >= least, load_first(x + 4 * i, mask), 0.0) / divisor
            elif kind == BERNOULLI:
                u = select(u < load_first(x + 4 * i, mask), 1.0, 0.0)
            store_first(o + 4 * i, u, mask)
