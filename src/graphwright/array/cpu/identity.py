"""Copies and fills, and the copy that refuses infinities and NaN."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from math import inf

import torch

from graphwright.array.backend import Attrs, Call, Needs
from graphwright.array.cpu.kernel import TORCH_DTYPE, Tensors, kernel, row_major
from graphwright.array.dtype import bool_
from graphwright.array.spec import Spec
from graphwright.errors import NonFinite


@kernel("cast", fresh=row_major(lambda x, dtype: x.to(TORCH_DTYPE[dtype], copy=True)))
@kernel("copy", fresh=row_major(torch.clone))
def copy(outs: Tensors, ins: Tensors, attrs: Attrs, work: Tensors) -> Call:
    """Elements into fresh memory, converted to the dtype of the output."""
    return partial(outs[0].copy_, ins[0])


@kernel("full_like", fresh=row_major(lambda x, value: torch.full_like(x, value)))
def full_like(outs: Tensors, ins: Tensors, attrs: Attrs, work: Tensors) -> Call:
    """One value everywhere."""
    return partial(outs[0].fill_, attrs["value"])


def _checks(outs: Sequence[Spec], ins: Sequence[Spec], attrs: Attrs) -> list[Spec]:
    return [ins[0], Spec(ins[0].shape, bool_), Spec((), bool_)]


@kernel("assert_finite", work=_checks, needs=Needs(answers=True))
def assert_finite(outs: Tensors, ins: Tensors, attrs: Attrs, work: Tensors) -> list[Call]:
    """A copy, after a look at the values on the host."""
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
