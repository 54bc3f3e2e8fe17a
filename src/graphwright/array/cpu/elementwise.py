"""Elementwise kernels that take more than one torch call (single calls are `aten` cells of `ops/`)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from math import inf, prod

import torch

from graphwright.array.backend import Attrs, Call, Fresh, Needs
from graphwright.array.cpu.kernel import TORCH_DTYPE, Tensors, kernel, row_major
from graphwright.array.dtype import bool_, float32, int16, int32, int64, uint8
from graphwright.array.spec import Spec
from graphwright.errors import NonFinite

aten = torch.ops.aten


@kernel("silu", fresh=row_major(torch.nn.functional.silu))
def silu(outs: Tensors, ins: Tensors, attrs: Attrs, work: Tensors) -> Call:
    """x·σ(x)."""
    return partial(aten.silu.out, ins[0], out=outs[0])


@kernel("swiglu")
def swiglu(outs: Tensors, ins: Tensors, attrs: Attrs, work: Tensors) -> list[Call]:
    """silu(a)·b; the first factor is written to the output."""
    a, b = ins
    return [partial(aten.silu.out, a.expand(outs[0].shape), out=outs[0]), partial(outs[0].mul_, b)]


@kernel("relu", fresh=row_major(lambda x: torch.clamp_min(x, 0)))
def relu(outs: Tensors, ins: Tensors, attrs: Attrs, work: Tensors) -> Call:
    """max(x, 0)."""
    return partial(torch.clamp_min, ins[0], 0, out=outs[0])


@kernel("leaky_relu")
def leaky_relu(outs: Tensors, ins: Tensors, attrs: Attrs, work: Tensors) -> Call:
    """x if x > 0 else slope·x."""
    return partial(aten.leaky_relu.out, ins[0], attrs["slope"], out=outs[0])


@kernel("elu")
def elu(outs: Tensors, ins: Tensors, attrs: Attrs, work: Tensors) -> Call:
    """x if x > 0 else alpha·(eˣ - 1)."""
    return partial(aten.elu.out, ins[0], attrs["alpha"], out=outs[0])


@kernel("gelu")
def gelu(outs: Tensors, ins: Tensors, attrs: Attrs, work: Tensors) -> Call:
    """x·Φ(x) by erf, or by tanh with `approximate="tanh"`."""
    return partial(aten.gelu.out, ins[0], approximate=attrs["approximate"], out=outs[0])


def _linear_from(x: torch.Tensor) -> float:
    """From here on softplus(x) equals x to the last digit and eˣ is finite; ATen's 20 costs float64 seven digits."""
    return 700.0 if x.dtype == torch.float64 else 80.0


@kernel("softplus")
def softplus(outs: Tensors, ins: Tensors, attrs: Attrs, work: Tensors) -> Call:
    """ln(1 + eˣ)."""
    return partial(aten.softplus.out, ins[0], 1, _linear_from(ins[0]), out=outs[0])


@kernel("logsigmoid")
def logsigmoid(outs: Tensors, ins: Tensors, attrs: Attrs, work: Tensors) -> list[Call]:
    """-softplus(-x), in the output's memory."""
    out = outs[0]
    return [
        partial(torch.neg, ins[0], out=out),
        partial(aten.softplus.out, out, 1, _linear_from(out), out=out),
        out.neg_,
    ]


def _sech_work(outs: Sequence[Spec], ins: Sequence[Spec], attrs: Attrs) -> list[Spec]:
    wide = float32 if ins[0].dtype.is_low else ins[0].dtype
    return [Spec(ins[0].shape, wide)] * 2


@kernel("sech", work=_sech_work)
def sech(outs: Tensors, ins: Tensors, attrs: Attrs, work: Tensors) -> list[Call]:
    """2e / (1 + e²) with e = e^-|x|, in float32 or wider."""
    e, square = work
    one = torch.ones((), dtype=e.dtype)
    return [
        partial(e.copy_, ins[0]),
        e.abs_,
        e.neg_,
        e.exp_,
        partial(torch.mul, e, e, out=square),
        partial(square.add_, one),
        partial(e.add_, e),
        partial(e.div_, square),
        partial(outs[0].copy_, e),
    ]


@kernel("step")
def step(outs: Tensors, ins: Tensors, attrs: Attrs, work: Tensors) -> Call:
    """1 where x > 0, else 0."""
    return partial(torch.heaviside, ins[0], torch.zeros((), dtype=ins[0].dtype), out=outs[0])


@kernel("clamp")
def clamp(outs: Tensors, ins: Tensors, attrs: Attrs, work: Tensors) -> Call:
    """Clamp between two bounds, either of which may be None."""
    return partial(torch.clamp, ins[0], attrs["low"], attrs["high"], out=outs[0])


@kernel("junction", work=lambda o, i, a: [Spec(o[0].shape, float32)] if o[0].dtype.is_low and len(i) > 2 else [])
def junction(outs: Tensors, ins: Tensors, attrs: Attrs, work: Tensors) -> list[Call]:
    """Sum in port order; three or more 16-bit operands are summed in float32 and rounded once."""
    out = outs[0]
    if not ins:
        return [out.zero_]
    if len(ins) == 1:
        return [partial(out.copy_, ins[0])]
    target = work[0] if work else out
    calls: list[Call] = [partial(torch.add, ins[0], ins[1], out=target)]
    calls += [partial(target.add_, other) for other in ins[2:]]
    if work:
        calls = [partial(target.copy_, ins[0]), *(partial(target.add_, other) for other in ins[1:])]
        calls.append(partial(out.copy_, target))
    return calls


_WIDE = 2048
"""Elements from which on `where` is arithmetic on bits: ATen branches, and a misprediction costs 3 ns (measured)."""
_INTEGERS = {1: uint8, 2: int16, 4: int32, 8: int64}


def _bits(outs: Sequence[Spec], ins: Sequence[Spec], attrs: Attrs) -> list[Spec]:
    out = outs[0]
    return [Spec(out.shape, _INTEGERS[out.dtype.itemsize])] if out.size >= _WIDE else []


def _chosen(ins: Tensors, attrs: Attrs) -> Fresh | None:
    small = prod(torch.broadcast_shapes(*(t.shape for t in ins))) < _WIDE
    return row_major(torch.where)(ins, attrs) if small else None


@kernel("where", _bits, fresh=_chosen)
def where(outs: Tensors, ins: Tensors, attrs: Attrs, work: Tensors) -> list[Call]:
    """a or b; for many elements b ^ ((a ^ b) · c), which does not branch."""
    if not work:
        return [partial(torch.where, *ins, out=outs[0])]
    mask = work[0]
    a, b, out = (t.view(mask.dtype).expand(mask.shape) for t in (*ins[1:], outs[0]))
    return [
        partial(mask.copy_, ins[0]),
        partial(torch.bitwise_xor, a, b, out=out),
        partial(out.mul_, mask),
        partial(out.bitwise_xor_, b),
    ]


@kernel("isnan")
def isnan(outs: Tensors, ins: Tensors, attrs: Attrs, work: Tensors) -> Call:
    """x != x."""
    return partial(torch.ne, ins[0], ins[0], out=outs[0])


def _magnitude(outs: Sequence[Spec], ins: Sequence[Spec], attrs: Attrs) -> list[Spec]:
    return [ins[0]] if ins[0].dtype.is_float else []


def _against_infinity(compare: Callable[..., object], whole: bool) -> Callable:
    """Compare |x| with infinity; `whole` is the result for integers."""

    def bind(outs: Tensors, ins: Tensors, attrs: Attrs, work: Tensors) -> list[Call]:
        if not work:
            return [partial(outs[0].fill_, whole)]
        limit = torch.tensor(inf, dtype=ins[0].dtype)
        return [partial(torch.abs, ins[0], out=work[0]), partial(compare, work[0], limit, out=outs[0])]

    return bind


kernel("isinf", work=_magnitude)(_against_infinity(torch.eq, False))
kernel("isfinite", work=_magnitude)(_against_infinity(torch.lt, True))


@kernel("cast", fresh=row_major(lambda x, dtype: x.to(TORCH_DTYPE[dtype], copy=True)))
@kernel("copy", fresh=row_major(torch.clone))
def copy(outs: Tensors, ins: Tensors, attrs: Attrs, work: Tensors) -> Call:
    """Copy elements, converted to the dtype of the output."""
    return partial(outs[0].copy_, ins[0])


@kernel("full_like", fresh=row_major(lambda x, value: torch.full_like(x, value)))
def full_like(outs: Tensors, ins: Tensors, attrs: Attrs, work: Tensors) -> Call:
    """Fill with one value."""
    return partial(outs[0].fill_, attrs["value"])


def _checks(outs: Sequence[Spec], ins: Sequence[Spec], attrs: Attrs) -> list[Spec]:
    return [ins[0], Spec(ins[0].shape, bool_), Spec((), bool_)]


@kernel("assert_finite", work=_checks, needs=Needs(answers=True))
def assert_finite(outs: Tensors, ins: Tensors, attrs: Attrs, work: Tensors) -> list[Call]:
    """Copy after checking the values on the host."""
    size, fine, whole = work
    answer = whole.numpy()

    def check() -> None:
        if not answer:
            first = tuple((~fine).nonzero()[0].tolist())
            raise NonFinite(
                f"{fine.numel() - int(fine.sum())} of {fine.numel()} values are not finite, the first at {list(first)}",
                got=float(ins[0][first]),
            )

    return [
        partial(torch.abs, ins[0], out=size),
        partial(torch.lt, size, torch.tensor(inf, dtype=size.dtype), out=fine),
        partial(torch.all, fine, out=whole),
        check,
        partial(outs[0].copy_, ins[0]),
    ]
