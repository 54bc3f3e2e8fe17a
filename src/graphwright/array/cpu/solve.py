"""Linear systems by LU with row exchanges."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch

from graphwright.array.backend import Attrs, Call
from graphwright.array.cpu.kernel import Tensors, kernel
from graphwright.array.dtype import int32
from graphwright.array.spec import Spec


def _factors(outs: Sequence[Spec], ins: Sequence[Spec], attrs: Attrs) -> list[Spec]:
    n = ins[0].shape[0]
    return [ins[0], Spec((n,), int32), Spec((), int32), outs[0]]


@kernel("solve", work=_factors, widen=True)
def solve(outs: Tensors, ins: Tensors, attrs: Attrs, work: Tensors) -> list[Call]:
    """The factors and the solution are column-major, as LAPACK makes them; a singular matrix is no error here."""
    lu, pivots, info, solution = work
    if ins[1].numel() == 0:
        return []
    factors, columns = lu.view(lu.shape).T, solution.view(solution.shape[::-1]).T
    return [
        partial(torch.linalg.lu_factor_ex, ins[0], out=(factors, pivots, info)),
        partial(torch.linalg.lu_solve, factors, pivots, ins[1], out=columns),
        partial(outs[0].copy_, columns),
    ]
