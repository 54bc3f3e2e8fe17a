"""Kernels of random numbers and dropout. The key is an operand, so that each run of a bound call has new numbers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from math import ceil, pi

import torch

from graphwright.array.backend import Attrs, Call
from graphwright.array.cpu.kernel import Tensors, kernel
from graphwright.array.dtype import bool_, float32, float64, int32
from graphwright.array.spec import Spec


def words(out: torch.Tensor, key: torch.Tensor, stream: int, shift: int = 8) -> Call:
    """The call that fills a contiguous int32 or int64 tensor with random words, shifted right."""
    from graphwright.array.cpu.loops import fill_words  # loads numba

    return partial(fill_words, out.view(-1).numpy(), key.numpy(), stream, shift)


def _by(method: Callable[[torch.Tensor], object], t: torch.Tensor, number: float) -> Call:
    """An in-place call with a scalar tensor; for a Python number ATen would allocate a tensor per call."""
    return partial(method, torch.tensor(number, dtype=t.dtype))


def _grid(out: torch.Tensor, drawn: torch.Tensor, offset: float = 0.0) -> list[Call]:
    """(24-bit word + offset) · 2⁻²⁴."""
    calls: list[Call] = [partial(out.copy_, drawn)]
    if offset:
        calls.append(_by(out.add_, out, offset))
    return [*calls, _by(out.mul_, out, 2.0**-24)]


def below_one(out: torch.Tensor) -> list[Call]:
    """Clip 16-bit numbers that were rounded up to 1 to the largest number below 1."""
    if out.dtype not in (torch.float16, torch.bfloat16):
        return []
    return [partial(torch.minimum, out, torch.tensor(1 - torch.finfo(out.dtype).eps / 2, dtype=out.dtype), out=out)]


@kernel("uniform", lambda o, i, a: [Spec(o[0].shape, int32), Spec(o[0].shape, float32)])
def uniform(outs: Tensors, ins: Tensors, attrs: Attrs, work: Tensors) -> list[Call]:
    """Multiples of 2⁻²⁴ in [0, 1)."""
    out, (drawn, wide) = outs[0], work
    return [
        words(drawn, ins[0], attrs["stream"]),
        *_grid(wide, drawn),
        partial(out.copy_, wide),
        *below_one(out),
    ]


def _pairs(outs: Sequence[Spec], ins: Sequence[Spec], attrs: Attrs) -> list[Spec]:
    half = (outs[0].size + 1) // 2
    return [Spec((2 * half,), int32), *[Spec((half,), float64)] * 3]


@kernel("normal", _pairs)
def normal(outs: Tensors, ins: Tensors, attrs: Attrs, work: Tensors) -> list[Call]:
    """The Box-Muller transform of pairs of words, in float64."""
    out, (drawn, radius, angle, part) = outs[0].view(-1), work
    calls = [words(drawn, ins[0], attrs["stream"]), *_grid(radius, drawn[0::2], 1.0), *_grid(angle, drawn[1::2])]
    calls += [radius.log_, _by(radius.mul_, radius, -2.0), radius.sqrt_, _by(angle.mul_, angle, 2 * pi)]
    for offset, function in enumerate((torch.cos, torch.sin)):
        target = out[offset::2]
        calls += [
            partial(function, angle, out=part),
            partial(part.mul_, radius),
            partial(target.copy_, part[: len(target)]),
        ]
    return calls


@kernel("gumbel", lambda o, i, a: [Spec(o[0].shape, int32), Spec(o[0].shape, float64)])
def gumbel(outs: Tensors, ins: Tensors, attrs: Attrs, work: Tensors) -> list[Call]:
    """-ln(-ln u), u in the middle of its 24-bit cell."""
    drawn, u = work
    calls = [words(drawn, ins[0], attrs["stream"]), *_gumbel(u, drawn)]
    return [*calls, partial(outs[0].copy_, u)]


def _gumbel(u: torch.Tensor, drawn: torch.Tensor) -> list[Call]:
    return [*_grid(u, drawn, 0.5), u.log_, u.neg_, u.log_, u.neg_]


@kernel("randint", lambda o, i, a: [])
def randint(outs: Tensors, ins: Tensors, attrs: Attrs, work: Tensors) -> list[Call]:
    """Low + the high half of word·(high - low)."""
    out, (low, high) = outs[0], (attrs["low"], attrs["high"])
    return [
        words(out, ins[0], attrs["stream"], 0),
        _by(out.mul_, out, high - low),
        _by(out.bitwise_right_shift_, out, 32),
        _by(out.add_, out, low),
    ]


@kernel("bernoulli", lambda o, i, a: [Spec(o[0].shape, int32), o[0], Spec(o[0].shape, bool_)], widen=True)
def bernoulli(outs: Tensors, ins: Tensors, attrs: Attrs, work: Tensors) -> list[Call]:
    """1 where a uniform number is below p, else 0."""
    (p, key), (drawn, u, hit) = ins, work
    return [
        words(drawn, key, attrs["stream"]),
        *_grid(u, drawn),
        partial(torch.lt, u, p, out=hit),
        partial(outs[0].copy_, hit),
    ]


@kernel("dropout", lambda o, i, a: [Spec(o[0].shape, int32), Spec(o[0].shape, bool_)])
def dropout(outs: Tensors, ins: Tensors, attrs: Attrs, work: Tensors) -> list[Call]:
    """x / (1 - p) with probability 1 - p, else 0; selected, not multiplied, so that infinity does not become NaN."""
    (x, key), (out, kept_key), (drawn, keep), p = ins, outs, work, attrs["p"]
    zero, least = torch.zeros((), dtype=x.dtype), torch.tensor(ceil(p * 2**24), dtype=torch.int32)
    calls: list[Call] = [
        words(drawn, key, attrs["stream"]),
        partial(torch.ge, drawn, least, out=keep),
        partial(torch.where, keep, x, zero, out=out),
        partial(kept_key.copy_, key),
    ]
    return calls if p == 1 else [*calls, partial(out.div_, torch.tensor(1 - p, dtype=x.dtype))]


@kernel("stochastic_round", lambda o, i, a: [Spec(o[0].shape, int32), i[0], Spec(o[0].shape, bool_)])
def stochastic_round(outs: Tensors, ins: Tensors, attrs: Attrs, work: Tensors) -> list[Call]:
    """Add 16 random bits to the low 16 bits, then clear them: the carry rounds up in proportion to their value."""
    (x, key), (drawn, kept, finite) = ins, work
    return [
        words(drawn, key, attrs["stream"], 16),
        partial(drawn.add_, x.view(torch.int32)),
        partial(drawn.bitwise_and_, torch.tensor(-(2**16), dtype=torch.int32)),
        partial(torch.abs, x, out=kept),
        partial(torch.lt, kept, torch.tensor(torch.inf), out=finite),
        partial(torch.where, finite, drawn.view(torch.float32), x, out=kept),
        partial(outs[0].copy_, kept),
    ]


def _draws(outs: Sequence[Spec], ins: Sequence[Spec], attrs: Attrs) -> list[Spec]:
    weights, out = ins[0], outs[0]
    if attrs["replacement"]:
        rows = Spec(weights.shape, float64)
        return [Spec(out.shape, int32), Spec(out.shape, float64), rows]
    return [Spec(weights.shape, int32), *[Spec(weights.shape, float64)] * 2, Spec(out.shape, float64)]


@kernel("multinomial", _draws)
def multinomial(outs: Tensors, ins: Tensors, attrs: Attrs, work: Tensors) -> list[Call]:
    """Search the cumulative weights; without replacement take the largest ln w + Gumbel noise (Vieira 2014)."""
    (weights, key), out, drawn = ins, outs[0], work[0]
    first = words(drawn, key, attrs["stream"])
    if not attrs["replacement"]:
        _, noise, score, best = work
        calls = [first, *_gumbel(noise, drawn), partial(score.copy_, weights), score.log_, partial(score.add_, noise)]
        return [*calls, partial(torch.topk, score, out.shape[-1], -1, out=(best, out))]
    _, u, total = work
    return [
        first,
        *_grid(u, drawn),
        partial(total.copy_, weights),
        partial(torch.cumsum, total, -1, out=total),
        partial(u.mul_, total[..., -1:]),
        partial(torch.searchsorted, total, u, right=True, out=out),
        partial(torch.minimum, out, torch.tensor(weights.shape[-1] - 1), out=out),
    ]
