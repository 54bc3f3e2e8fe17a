"""Random numbers: the bits of the CPU's Philox words, and what distributions and dropout compute of them."""

from __future__ import annotations

from math import ceil, pi
from typing import Any

import torch
import triton
import triton.language as tl

from graphwright.array.backend import Attrs
from graphwright.array.cpu.kernel import Bind, Tensors
from graphwright.array.triton.kernel import FLOATS, Launch, compiled, kernel
from graphwright.array.triton.rows import narrow, number, wide

COUNTERS = 256
"""Philox counters of a program, each of four words."""
UNIFORM, NORMAL, GUMBEL, BERNOULLI, INTEGERS, ROUNDED = range(6)
CELL = tl.constexpr(2.0**-24)
TURN = tl.constexpr(2.0 * pi)


@triton.jit
def _words(key, stream, COUNTERS: tl.constexpr):
    """Return uint32 words of this program's counters, [COUNTERS] each: word 0 to 3."""
    seed, step = tl.load(key, mask=stream >= 0, other=0), tl.load(key + 1, mask=stream >= 0, other=0)
    counter = tl.program_id(0).to(tl.int64) * COUNTERS + tl.arange(0, COUNTERS)
    low, high = counter.to(tl.uint32), (counter >> 32).to(tl.uint32)
    zero = tl.zeros([COUNTERS], tl.uint32)
    return tl.philox(seed, low, high, zero + stream.to(tl.uint32), zero + step.to(tl.uint32))


@triton.jit
def _flat(a, b, c, d):
    """Interleave four vectors: a[0], b[0], c[0], d[0], a[1], ..."""
    return tl.reshape(tl.join(tl.join(a, c), tl.join(b, d)), [4 * a.shape[0]])


@triton.jit
def _share(word):
    """Return 24 bits of a word as a float32 in [0, 1)."""
    return (word >> 8).to(tl.float32) * CELL


@triton.jit
def _pair(first, second):
    """Return two samples of N(0, 1) in float64 by the Box-Muller transform."""
    radius = tl.sqrt(-2.0 * tl.log(((first >> 8).to(tl.float64) + 1.0) * CELL))
    angle = (second >> 8).to(tl.float64) * CELL * TURN
    return radius * tl.cos(angle), radius * tl.sin(angle)


@triton.jit
def _from_float64(value, pointer):
    """Convert float64 to the dtype at `pointer`, by float32 if it has 16 bits."""
    if pointer.dtype.element_ty == tl.float64:
        return value
    else:
        return value.to(tl.float32).to(pointer.dtype.element_ty)


@compiled
def draw(
    key, x, out, count: tl.int64, stream: tl.int64, low: tl.int64, span: tl.int64, most: tl.float64,
    KIND: tl.constexpr, COUNTERS: tl.constexpr,
):  # fmt: skip
    """Fill `out` with samples of a distribution; x are probabilities, or values to round to bfloat16 at random."""
    a, b, c, d = _words(key, stream, COUNTERS)
    at = tl.program_id(0).to(tl.int64) * (4 * COUNTERS) + tl.arange(0, 4 * COUNTERS)
    inside = at < count
    if KIND == 1:
        first, second = _pair(a, b)
        third, fourth = _pair(c, d)
        tl.store(out + at, _from_float64(_flat(first, second, third, fourth), out), mask=inside)
    else:
        word = _flat(a, b, c, d)
        if KIND == 0:
            u = _share(word).to(out.dtype.element_ty).to(tl.float32)
            tl.store(out + at, tl.minimum(u, number(most, u)).to(out.dtype.element_ty), mask=inside)
        elif KIND == 2:
            u = ((word >> 8).to(tl.float64) + 0.5) * CELL
            tl.store(out + at, _from_float64(-tl.log(-tl.log(u)), out), mask=inside)
        elif KIND == 3:
            p = wide(tl.load(x + at, mask=inside, other=0.0))
            tl.store(out + at, narrow((_share(word).to(p.dtype) < p).to(tl.float32), out), mask=inside)
        elif KIND == 4:
            product = (word.to(tl.uint64) * span.to(tl.uint64)) >> 32
            tl.store(out + at, product.to(tl.int64) + low, mask=inside)
        else:
            value = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
            moved = value.to(tl.int32, bitcast=True) + (word >> 16).to(tl.int32)
            rounded = (moved & -65536).to(tl.float32, bitcast=True)
            result = tl.where(tl.abs(value) < float("inf"), rounded, value)
            tl.store(out + at, result.to(out.dtype.element_ty), mask=inside)


@compiled
def drop(
    x, key, out, kept_key, count: tl.int64, stream: tl.int64, least: tl.int64, rest: tl.float64, COUNTERS: tl.constexpr
):  # fmt: skip
    """Compute x / rest where the 24 bits of a word are at least `least`, else 0; copy the key."""
    a, b, c, d = _words(key, stream, COUNTERS)
    at = tl.program_id(0).to(tl.int64) * (4 * COUNTERS) + tl.arange(0, 4 * COUNTERS)
    inside = at < count
    values = wide(tl.load(x + at, mask=inside, other=0.0))
    kept = (_flat(a, b, c, d) >> 8).to(tl.int64) >= least
    tl.store(out + at, narrow(tl.where(kept, values / number(rest, values), 0.0), out), mask=inside)
    lane = tl.arange(0, 2)
    ours = lane + 2 * tl.program_id(0) < 2
    tl.store(kept_key + lane, tl.load(key + lane, mask=ours, other=0), mask=ours)


def _takes(outs: Tensors, ins: Tensors, attrs: Attrs) -> str:
    if not all(t.is_contiguous() for t in (*ins, *outs)):
        return "an operand is not contiguous"
    if not {t.dtype for t in (*outs, *ins)} <= {*FLOATS, torch.int64}:
        return "no kernel for these dtypes"
    return "" if outs[0].dtype != torch.float64 or len(ins) == 1 else "no kernel for float64"


def _drawn(kind: int) -> Bind:
    def bind(outs: Tensors, ins: Tensors, attrs: Attrs, work: Tensors) -> Launch:
        out, key, low = outs[0], ins[-1], attrs.get("low", 0)
        most = 1 - torch.finfo(out.dtype).eps / 2 if out.dtype in FLOATS else 0.0
        numbers = (out.numel(), attrs["stream"], low, attrs.get("high", 1) - low, most)
        constants: dict[str, Any] = {"KIND": kind, "COUNTERS": COUNTERS}
        return Launch(draw, (-(-out.numel() // (4 * COUNTERS)),), (key, ins[0], out, *numbers), constants)

    return bind


for _name, _kind in {
    "uniform": UNIFORM, "normal": NORMAL, "gumbel": GUMBEL, "bernoulli": BERNOULLI, "randint": INTEGERS,
    "stochastic_round": ROUNDED,
}.items():  # fmt: skip
    kernel(_name, takes=_takes)(_drawn(_kind))


def _takes_dropout(outs: Tensors, ins: Tensors, attrs: Attrs) -> str:
    contiguous = all(t.is_contiguous() for t in (*ins, *outs))
    return "" if contiguous and ins[0].dtype in FLOATS else "an operand is not contiguous, or not floating"


@kernel("dropout", takes=_takes_dropout)
def dropout(outs: Tensors, ins: Tensors, attrs: Attrs, work: Tensors) -> Launch:
    (x, key), (out, kept_key), p = ins, outs, attrs["p"]
    numbers = (x.numel(), attrs["stream"], ceil(p * 2**24), 1 - p if p != 1 else 1.0)
    programs = max(-(-x.numel() // (4 * COUNTERS)), 1)
    return Launch(drop, (programs,), (x, key, out, kept_key, *numbers), {"COUNTERS": COUNTERS})
