"""Kernels that use random numbers: distributions, dropout, gates.

The random key is an operand, so that each run of a bound call draws new numbers. One compiled loop writes the values of
all gates to one vector, whose parts are copied to the results.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from math import ceil, inf, pi
from typing import Any

import numpy as np
import torch

from graphwright.array.backend import Attrs, Call
from graphwright.array.cpu.kernel import Tensors, kernel, number
from graphwright.array.cpu.terms import PRIMITIVES, Term
from graphwright.array.cpu.words import fill_words_by_torch
from graphwright.array.dtype import bool_, float32, float64, int32
from graphwright.array.formulas import gates, specialise
from graphwright.array.spec import Spec

_gates: Any = specialise(gates, PRIMITIVES)
_CELL = 2.0**-24
"""Distance of two neighbouring random numbers: a word shifted right by 8 has 24 bits."""


def words(out: torch.Tensor, key: torch.Tensor, attrs: Attrs, shift: int = 8) -> Call:
    """Return a call that fills a contiguous int32 or int64 tensor with random words, shifted right by `shift` bits."""
    if out.device.type != "cpu":
        return partial(fill_words_by_torch, out.view(-1), key, attrs["stream"], shift)
    from graphwright.array.cpu.loops import fill_words  # loads numba

    return partial(fill_words, out.view(-1).numpy(), key.numpy(), attrs["stream"], shift)


@kernel("uniform", lambda o, i, a: [Spec(o[0].shape, int32), Spec(o[0].shape, float32)])
def uniform(outs: Tensors, ins: Tensors, attrs: Attrs, work: Tensors) -> Call:
    """Sample multiples of 2⁻²⁴ in [0, 1); 16-bit results that round up to 1 become the largest number below 1."""
    out, (drawn, wide) = outs[0], work
    draw, cell = words(drawn, ins[0], attrs), number(_CELL, wide)
    low, most = out.dtype.itemsize == 2, number(1 - torch.finfo(out.dtype).eps / 2, out)

    def run() -> None:
        draw()
        out.copy_(wide.copy_(drawn).mul_(cell))
        if low:
            torch.minimum(out, most, out=out)

    return run


def _pairs(outs: Sequence[Spec], ins: Sequence[Spec], attrs: Attrs) -> list[Spec]:
    half = (outs[0].size + 1) // 2
    return [Spec((2 * half,), int32), *[Spec((half,), float64)] * 3]


@kernel("normal", _pairs)
def normal(outs: Tensors, ins: Tensors, attrs: Attrs, work: Tensors) -> Call:
    """Sample N(0, 1) by the Box-Muller transform of pairs of random words, in float64."""
    out, (drawn, radius, angle, part) = outs[0].view(-1), work
    draw, evens, odds = words(drawn, ins[0], attrs), drawn[0::2], drawn[1::2]
    cell, one, factor, turn = (number(n, radius) for n in (_CELL, 1, -2, 2 * pi))
    halves = [(f, out[at::2], part[: len(out[at::2])]) for at, f in enumerate((torch.cos, torch.sin))]

    def run() -> None:
        draw()
        radius.copy_(evens).add_(one).mul_(cell).log_().mul_(factor).sqrt_()
        angle.copy_(odds).mul_(cell).mul_(turn)
        for function, target, source in halves:
            function(angle, out=part).mul_(radius)
            target.copy_(source)

    return run


@kernel("gumbel", lambda o, i, a: [Spec(o[0].shape, int32), Spec(o[0].shape, float64)])
def gumbel(outs: Tensors, ins: Tensors, attrs: Attrs, work: Tensors) -> list[Call]:
    drawn, u = work
    return [words(drawn, ins[0], attrs), _gumbel(u, drawn), partial(outs[0].copy_, u)]


def _gumbel(u: torch.Tensor, drawn: torch.Tensor) -> Call:
    half, cell = number(0.5, u), number(_CELL, u)
    return lambda: _gates.gumbel(Term(u, u.copy_(drawn).add_(half).mul_(cell))).write(u)


@kernel("randint", lambda o, i, a: [])
def randint(outs: Tensors, ins: Tensors, attrs: Attrs, work: Tensors) -> list[Call]:
    """Sample integers low + (word·(high - low) >> 32) from 32-bit random words."""
    out, (low, high) = outs[0], (attrs["low"], attrs["high"])
    count, half, first = (number(n, out) for n in (high - low, 32, low))
    return [words(out, ins[0], attrs, 0), lambda: out.mul_(count).bitwise_right_shift_(half).add_(first)]


@kernel("bernoulli", lambda o, i, a: [Spec(o[0].shape, int32), o[0], Spec(o[0].shape, bool_)], widen=True)
def bernoulli(outs: Tensors, ins: Tensors, attrs: Attrs, work: Tensors) -> Call:
    (p, key), (drawn, u, hit), out = ins, work, outs[0]
    draw, cell = words(drawn, key, attrs), number(_CELL, u)

    def run() -> None:
        draw()
        out.copy_(torch.lt(u.copy_(drawn).mul_(cell), p, out=hit))

    return run


@kernel("dropout", lambda o, i, a: [Spec(o[0].shape, int32), Spec(o[0].shape, bool_)])
def dropout(outs: Tensors, ins: Tensors, attrs: Attrs, work: Tensors) -> Call:
    """x / (1 - p) with probability 1 - p, else 0; no product with 0, which would turn infinity into NaN."""
    (x, key), (out, kept_key), (drawn, keep), p = ins, outs, work, attrs["p"]
    draw, zero, least, rest = words(drawn, key, attrs), number(0, x), number(ceil(p * 2**24), drawn), number(1 - p, x)

    def run() -> None:
        draw()
        torch.where(torch.ge(drawn, least, out=keep), x, zero, out=out)
        kept_key.copy_(key)
        if p != 1:
            out.div_(rest)

    return run


@kernel("stochastic_round", lambda o, i, a: [Spec(o[0].shape, int32), i[0], Spec(o[0].shape, bool_)])
def stochastic_round(outs: Tensors, ins: Tensors, attrs: Attrs, work: Tensors) -> Call:
    """Round to bfloat16 at random: add 16 random bits to the low 16 bits of a float32, then clear these."""
    (x, key), (drawn, kept, finite), out = ins, work, outs[0]
    draw, bits, rounded = words(drawn, key, attrs, 16), x.view(torch.int32), drawn.view(torch.float32)
    upper, limit = number(-(2**16), drawn), number(inf, kept)

    def run() -> None:
        draw()
        drawn.add_(bits).bitwise_and_(upper)
        torch.lt(torch.abs(x, out=kept), limit, out=finite)
        out.copy_(torch.where(finite, rounded, x, out=kept))

    return run


def _draws(outs: Sequence[Spec], ins: Sequence[Spec], attrs: Attrs) -> list[Spec]:
    weights, out = ins[0], outs[0]
    if attrs["replacement"]:
        return [Spec(out.shape, int32), Spec(out.shape, float64), Spec(weights.shape, float64)]
    return [Spec(weights.shape, int32), *[Spec(weights.shape, float64)] * 2, Spec(out.shape, float64)]


@kernel("multinomial", _draws)
def multinomial(outs: Tensors, ins: Tensors, attrs: Attrs, work: Tensors) -> list[Call]:
    """Sample by a search in cumulative weights; without replacement, by the top k of ln w + Gumbel (Vieira 2014)."""
    (weights, key), out, drawn = ins, outs[0], work[0]
    draw = words(drawn, key, attrs)
    if not attrs["replacement"]:
        _, noise, score, best = work
        top = partial(torch.topk, score, out.shape[-1], -1, out=(best, out))
        return [draw, _gumbel(noise, drawn), lambda: score.copy_(weights).log_().add_(noise), top]
    _, u, total = work
    cell, whole, last = number(_CELL, u), total[..., -1:], number(weights.shape[-1] - 1, out)

    def run() -> None:
        draw()
        torch.cumsum(total.copy_(weights), -1, out=total)
        torch.searchsorted(total, u.copy_(drawn).mul_(cell).mul_(whole), right=True, out=out)
        torch.minimum(out, last, out=out)

    return [run]


def _arrays(ins: Tensors) -> list[np.ndarray]:
    return [t.numpy() for t in ins]


@kernel("gate", lambda o, i, a: [i[0]] * 3, widen=True, host=True)
def gate(outs: Tensors, ins: Tensors, attrs: Attrs, work: Tensors) -> list[Call]:
    """Compute the values of all gates as one vector, then copy each part of it to its result."""
    from graphwright.array.cpu.loops import fill_gates  # loads numba

    sizes = list(attrs["sizes"])
    calls: list[Call] = [partial(fill_gates, *_arrays((*work, *ins)), np.cumsum(sizes, dtype=np.int64))]
    return calls + [partial(o.copy_, part) for o, part in zip(outs, torch.split(work[0], sizes), strict=True)]


@kernel("gate_grad", lambda o, i, a: [i[0]] * 4, widen=True, host=True)
def gate_grad(outs: Tensors, ins: Tensors, attrs: Attrs, work: Tensors) -> list[Call]:
    """Compute the gradient of `gate` with the same noise; upstream gradients that are not given count as 0."""
    from graphwright.array.cpu.loops import fill_gates, pull_back

    sizes, given = list(attrs["sizes"]), iter(ins[4:])
    ends = np.cumsum(sizes, dtype=np.int64)
    calls: list[Call] = [partial(fill_gates, *_arrays((*work[:3], *ins[:4])), ends)]
    for part, there in zip(torch.split(work[3], sizes), attrs["given"], strict=True):
        calls.append(partial(part.copy_, next(given)) if there else part.zero_)
    return [*calls, partial(pull_back, *_arrays((*outs, *work[1:], *ins[1:4])), ends)]
