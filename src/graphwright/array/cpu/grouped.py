"""Matrix products of runs of rows: one GEMM per run that is not empty; where a run ends is read when it runs."""

from __future__ import annotations

from itertools import pairwise

import torch

from graphwright.array.backend import Attrs, Call, Needs
from graphwright.array.cpu.kernel import Tensors, kernel


def _runs(offsets: torch.Tensor, rows: int) -> list[int]:
    """Where runs end. Raises: IndexError for offsets that do not go from 0 up, to `rows` at most."""
    ends: list[int] = offsets.tolist()
    if ends[0] != 0 or ends[-1] > rows or any(a > b for a, b in pairwise(ends)):
        raise IndexError(f"offsets out of range: they go from 0 up, to {rows} at most, got {ends[:8]}")
    return ends


@kernel("grouped_matmul", needs=Needs(reads=(2,)))
def grouped_matmul(outs: Tensors, ins: Tensors, attrs: Attrs, work: Tensors) -> Call:
    """Rows of run e times matrix e."""
    x, w, offsets = ins

    def run() -> None:
        ends = _runs(offsets, len(x))
        for e, (a, b) in enumerate(pairwise(ends)):
            if a < b:
                torch.mm(x[a:b], w[e], out=outs[0][a:b])
        outs[0][ends[-1] :].zero_()

    return run


@kernel("grouped_outer", needs=Needs(reads=(2,)))
def grouped_outer(outs: Tensors, ins: Tensors, attrs: Attrs, work: Tensors) -> Call:
    """Of run e, rows of x transposed times rows of y."""
    x, y, offsets = ins

    def run() -> None:
        for e, (a, b) in enumerate(pairwise(_runs(offsets, len(x)))):
            if a < b:
                torch.mm(x[a:b].t(), y[a:b], out=outs[0][e])
            else:
                outs[0][e].zero_()

    return run
