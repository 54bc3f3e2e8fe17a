"""Normalisations. ATen's fused forms allocate; these use planned scratch."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch

from graphwright.array.backend import Attrs, Call
from graphwright.array.cpu.kernel import Tensors, kernel
from graphwright.array.cpu.reduce import mean_calls
from graphwright.array.dtype import DType, float32
from graphwright.array.spec import Spec


def statistic(dtype: DType) -> DType:
    """The dtype in which sums over an axis are kept: float32 for 16-bit floats, else the dtype itself."""
    return float32 if dtype.is_low else dtype


def _scratch(outs: Sequence[Spec], ins: Sequence[Spec], attrs: Attrs) -> list[Spec]:
    wide = Spec(ins[0].shape, statistic(ins[0].dtype))
    row = Spec((*ins[0].shape[:-1], 1), wide.dtype)
    return [wide, row] + ([wide] if ins[0].dtype.is_low else [])


@kernel("rms_norm", work=_scratch)
def rms_norm(outs: Tensors, ins: Tensors, attrs: Attrs, work: Tensors) -> list[Call]:
    """X / sqrt(mean(x², -1) + eps), cast to the dtype of x, times w."""
    x, w, out = ins[0], ins[1], outs[0]
    square, row = work[0], work[1]
    calls: list[Call] = []
    if len(work) > 2:
        calls.append(partial(work[2].copy_, x))
        x = work[2]
    eps = torch.tensor(attrs["eps"], dtype=row.dtype)
    calls += [
        partial(torch.mul, x, x, out=square),
        *mean_calls(square, [-1], True, row),
        partial(row.add_, eps),
        row.rsqrt_,
    ]
    if len(work) > 2:  # statistics and scaling in float32, rounded once, then times w in the low dtype
        calls += [partial(torch.mul, x, row, out=square), partial(out.copy_, square), partial(out.mul_, w)]
    else:
        calls += [partial(torch.mul, x, row, out=out), partial(out.mul_, w)]
    return calls
