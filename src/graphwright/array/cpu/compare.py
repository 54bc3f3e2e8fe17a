"""Comparisons, logic and tests for special values, into bools; the choice by a condition."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from math import inf

import torch

from graphwright.array.backend import Attrs, Call
from graphwright.array.cpu.kernel import Tensors, kernel, pointwise
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
    where=torch.where,
)


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
