"""Comparisons, logic and tests for special values, into bools; the choice by a condition."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from math import inf, prod

import torch

from graphwright.array.backend import Attrs, Call, Fresh
from graphwright.array.cpu.kernel import Tensors, kernel, pointwise, row_major
from graphwright.array.dtype import int16, int32, int64, uint8
from graphwright.array.spec import Spec

pointwise(
    eq=torch.eq,
    ne=torch.ne,
    lt=torch.lt,
    le=torch.le,
    gt=torch.gt,
    ge=torch.ge,
    logical_and=torch.logical_and,
    logical_or=torch.logical_or,
    logical_xor=torch.logical_xor,
    logical_not=torch.logical_not,
)

_WIDE = 2048
"""Elements from which a choice is arithmetic on bits: ATen's branches, and a guess gone wrong costs 3 ns (measured)."""
_INTEGERS = {1: uint8, 2: int16, 4: int32, 8: int64}


def _bits(outs: Sequence[Spec], ins: Sequence[Spec], attrs: Attrs) -> list[Spec]:
    out = outs[0]
    return [Spec(out.shape, _INTEGERS[out.dtype.itemsize])] if out.size >= _WIDE else []


def _chosen(ins: Tensors, attrs: Attrs) -> Fresh | None:
    small = prod(torch.broadcast_shapes(*(t.shape for t in ins))) < _WIDE
    return row_major(torch.where)(ins, attrs) if small else None


@kernel("where", _bits, fresh=_chosen)
def where(outs: Tensors, ins: Tensors, attrs: Attrs, work: Tensors) -> list[Call]:
    """A or b; of many elements b ^ ((a ^ b) · c), which does not branch."""
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
    """NaN is what differs from itself."""
    return partial(torch.ne, ins[0], ins[0], out=outs[0])


def _magnitude(outs: Sequence[Spec], ins: Sequence[Spec], attrs: Attrs) -> list[Spec]:
    return [ins[0]] if ins[0].dtype.is_float else []


def _against_infinity(compare: Callable[..., object], whole: bool) -> Callable:
    """|x| compared with infinity; `whole` is the answer for whole numbers."""

    def bind(outs: Tensors, ins: Tensors, attrs: Attrs, work: Tensors) -> list[Call]:
        if not work:
            return [partial(outs[0].fill_, whole)]
        limit = torch.tensor(inf, dtype=ins[0].dtype)
        return [partial(torch.abs, ins[0], out=work[0]), partial(compare, work[0], limit, out=outs[0])]

    return bind


kernel("isinf", work=_magnitude)(_against_infinity(torch.eq, False))
kernel("isfinite", work=_magnitude)(_against_infinity(torch.lt, True))
