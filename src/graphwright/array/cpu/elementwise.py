"""Elementwise kernels with attributes or several torch calls; other ops name a torch function in their field `aten`."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from math import inf, prod

import torch

from graphwright.array.backend import Attrs, Call, Fresh, Needs
from graphwright.array.cpu.kernel import TORCH_DTYPE, Tensors, kernel, number, out_kernel, row_major
from graphwright.array.dtype import bool_, float32, int16, int32, int64, uint8
from graphwright.array.spec import Spec
from graphwright.errors import NonFinite

aten = torch.ops.aten


def _linear_from(x: torch.Tensor) -> float:
    """Return t from which on softplus(t) rounds to t in the dtype of x; ATen's default, 20, costs float64 7 digits."""
    return 700.0 if x.dtype == torch.float64 else 80.0


def _copy(outs: Tensors, ins: Tensors, attrs: Attrs, work: Tensors) -> Call:
    return partial(outs[0].copy_, ins[0])


out_kernel("silu", lambda i, a: partial(aten.silu.out, i[0]), row_major(torch.nn.functional.silu))
out_kernel("relu", lambda i, a: partial(torch.clamp_min, i[0], 0), row_major(lambda x: torch.clamp_min(x, 0)))
out_kernel("leaky_relu", lambda i, a: partial(aten.leaky_relu.out, i[0], a["slope"]))
out_kernel("elu", lambda i, a: partial(aten.elu.out, i[0], a["alpha"]))
out_kernel("gelu", lambda i, a: partial(aten.gelu.out, i[0], approximate=a["approximate"]))
out_kernel("softplus", lambda i, a: partial(aten.softplus.out, i[0], 1, _linear_from(i[0])))
out_kernel("step", lambda i, a: partial(torch.heaviside, i[0], number(0, i[0])))
out_kernel("clamp", lambda i, a: partial(torch.clamp, i[0], a["low"], a["high"]))
out_kernel("isnan", lambda i, a: partial(torch.ne, i[0], i[0]))


kernel("copy", fresh=row_major(torch.clone))(_copy)
kernel("cast", fresh=row_major(lambda x, dtype: x.to(TORCH_DTYPE[dtype], copy=True)))(_copy)
kernel("full_like", fresh=row_major(lambda x, value: torch.full_like(x, value)))(
    lambda o, i, a, w: partial(o[0].fill_, a["value"])
)


@kernel("swiglu")
def swiglu(outs: Tensors, ins: Tensors, attrs: Attrs, work: Tensors) -> list[Call]:
    """silu(a)·b; silu(a) is computed in the output's memory."""
    a, b = ins
    return [partial(aten.silu.out, a.expand(outs[0].shape), out=outs[0]), partial(outs[0].mul_, b)]


@kernel("junction", work=lambda o, i, a: [Spec(o[0].shape, float32)] if o[0].dtype.is_low and len(i) > 2 else [])
def junction(outs: Tensors, ins: Tensors, attrs: Attrs, work: Tensors) -> list[Call]:
    """Sum the operands in port order; three or more 16-bit ones are summed in float32 and rounded once."""
    out = outs[0]
    if not ins:
        return [out.zero_]
    if work:
        start: list[Call] = [partial(work[0].copy_, ins[0])]
        return [*start, *(partial(work[0].add_, other) for other in ins[1:]), partial(out.copy_, work[0])]
    if len(ins) == 1:
        return [partial(out.copy_, ins[0])]
    return [partial(torch.add, ins[0], ins[1], out=out), *(partial(out.add_, other) for other in ins[2:])]


_WIDE = 2048
"""Least number of elements for bit arithmetic in `where`: ATen branches, and a misprediction costs 3 ns (measured)."""
_INTEGERS = {1: uint8, 2: int16, 4: int32, 8: int64}


def _bits(outs: Sequence[Spec], ins: Sequence[Spec], attrs: Attrs) -> list[Spec]:
    out = outs[0]
    return [Spec(out.shape, _INTEGERS[out.dtype.itemsize])] if out.size >= _WIDE else []


def _chosen(ins: Tensors, attrs: Attrs) -> Fresh | None:
    small = prod(torch.broadcast_shapes(*(t.shape for t in ins))) < _WIDE
    return row_major(torch.where)(ins, attrs) if small else None


@kernel("where", _bits, fresh=_chosen)
def where(outs: Tensors, ins: Tensors, attrs: Attrs, work: Tensors) -> Call:
    """a where c, else b; large arrays use b ^ ((a ^ b) · c) on the bits, which has no branch."""
    if not work:
        return partial(torch.where, *ins, out=outs[0])
    mask = work[0]
    a, b, out = (t.view(mask.dtype).expand(mask.shape) for t in (*ins[1:], outs[0]))

    def run() -> None:
        mask.copy_(ins[0])
        torch.bitwise_xor(a, b, out=out).mul_(mask).bitwise_xor_(b)

    return run


@kernel(
    "assert_finite", work=lambda o, i, a: [i[0], Spec(i[0].shape, bool_), Spec((), bool_)], needs=Needs(answers=True)
)
def assert_finite(outs: Tensors, ins: Tensors, attrs: Attrs, work: Tensors) -> Call:
    """Check on the host that all values are finite, then copy x. Raises: NonFinite."""
    size, fine, whole = work
    answer = whole.numpy() if whole.device.type == "cpu" else whole  # a read by torch takes longer
    limit = number(inf, size)

    def run() -> None:
        torch.lt(torch.abs(ins[0], out=size), limit, out=fine)
        torch.all(fine, out=whole)
        if not answer:
            first = tuple((~fine).nonzero()[0].tolist())
            wrong = f"{fine.numel() - int(fine.sum())} of {fine.numel()} values are not finite"
            raise NonFinite(f"{wrong}, the first at {list(first)}", got=float(ins[0][first]))
        outs[0].copy_(ins[0])

    return run
