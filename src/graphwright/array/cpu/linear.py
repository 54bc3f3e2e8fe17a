"""Kernels of matrix products. Operands are viewed as matrices or strided batches once, when they are bound."""

from __future__ import annotations

from functools import partial
from itertools import pairwise, product

import torch

from graphwright.array.backend import Attrs, Call, Fresh, Needs
from graphwright.array.cpu.kernel import Tensors, kernel
from graphwright.array.dtype import int32
from graphwright.array.spec import Spec


def _rows(t: torch.Tensor) -> torch.Tensor | None:
    """Return a view of [..., K] as [N, K]; None if this needs a copy."""
    try:
        return t.view(-1, t.shape[-1])
    except RuntimeError:
        return None


def bmm_calls(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> list[Call]:
    """Return calls for out[i...] = a[i...] @ b[i...] with equal leading axes and any strides, without copies.

    One batched GEMM covers the last leading axis; there is one call for each index of the other leading axes.
    """
    if a.dim() == 2:
        return [partial(torch.mm, a, b, out=out)]
    indices = product(*(range(n) for n in out.shape[:-3]))
    return [partial(torch.bmm, a[index], b[index], out=out[index]) for index in indices]


@kernel("matmul", fresh=lambda ins, attrs: torch.mm if ins[0].dim() == ins[1].dim() == 2 else None)
def matmul(outs: Tensors, ins: Tensors, attrs: Attrs, work: Tensors) -> list[Call]:
    a, b, out = ins[0], ins[1], outs[0]
    if 0 in (*a.shape, *b.shape):
        return [out.zero_]
    if a.dim() == 1:
        a, out = a.unsqueeze(0), out.unsqueeze(-2) if b.dim() > 1 else out.unsqueeze(-1)
    if b.dim() == 1:
        b, out = b.unsqueeze(1), out.unsqueeze(-1)
    if b.dim() == 2 and a.dim() > 2:
        rows, target = _rows(a), _rows(out)
        if rows is not None and target is not None:
            return [partial(torch.mm, rows, b, out=target)]
    batch = out.shape[:-2]
    return bmm_calls(a.expand(*batch, *a.shape[-2:]), b.expand(*batch, *b.shape[-2:]), out)


def _fresh(ins: Tensors, attrs: Attrs) -> Fresh | None:
    return (lambda x, w, b: torch.addmm(b, x, w.t())) if ins[0].dim() == 2 and len(ins) == 3 else None


@kernel("linear", fresh=_fresh)
def linear(outs: Tensors, ins: Tensors, attrs: Attrs, work: Tensors) -> list[Call]:
    return _linear(outs[0], ins[0], ins[1], ins[2:])


def _linear(out: torch.Tensor, x: torch.Tensor, w: torch.Tensor, bias: Tensors) -> list[Call]:
    if 0 in x.shape or 0 in w.shape:
        return [partial(out.copy_, bias[0].expand(out.shape)) if len(bias) and out.numel() else out.zero_]
    rows, target = _rows(x), _rows(out)
    if rows is None or target is None:  # leading axes that do not merge: one product per leading index
        batch = out.shape[:-2]
        calls = bmm_calls(x, w.t().expand(*batch, *w.t().shape), out)
        return [*calls, partial(out.add_, bias[0])] if len(bias) else calls
    if len(bias):
        return [partial(torch.addmm, bias[0], rows, w.t(), out=target)]
    return [partial(torch.mm, rows, w.t(), out=target)]


@kernel("linear_int8", work=lambda o, i, a: [Spec(i[1].shape, i[0].dtype)])
def linear_int8(outs: Tensors, ins: Tensors, attrs: Attrs, work: Tensors) -> list[Call]:
    """Dequantise the int8 weights into scratch, then compute `linear` with them."""
    x, q, scales, *bias = ins
    wide, group = work[0], attrs["group"]
    whole = q.shape[1] // group
    calls: list[Call] = [partial(wide.copy_, q)]
    if q.numel() and whole:
        parts = wide[:, : whole * group].unflatten(1, (whole, group))
        calls.append(partial(parts.mul_, scales[:, :whole].unsqueeze(2)))
    if q.numel() and q.shape[1] % group:
        calls.append(partial(wide[:, whole * group :].mul_, scales[:, whole:]))
    return [*calls, *_linear(outs[0], x, wide, bias)]


def _runs(offsets: torch.Tensor, rows: int) -> list[int]:
    """Return group offsets as ints. Raises: IndexError if they are not sorted, from 0 to at most `rows`."""
    ends: list[int] = offsets.tolist()
    if ends[0] != 0 or ends[-1] > rows or any(a > b for a, b in pairwise(ends)):
        raise IndexError(f"invalid group offsets: expected a sorted list from 0 to at most {rows}, got {ends}")
    return ends


@kernel("grouped_matmul", needs=Needs(reads=(2,)))
def grouped_matmul(outs: Tensors, ins: Tensors, attrs: Attrs, work: Tensors) -> Call:
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
    x, y, offsets = ins

    def run() -> None:
        for e, (a, b) in enumerate(pairwise(_runs(offsets, len(x)))):
            if a < b:
                torch.mm(x[a:b].t(), y[a:b], out=outs[0][e])
            else:
                outs[0][e].zero_()

    return run


@kernel("solve", lambda o, i, a: [i[0], Spec(i[0].shape[:1], int32), Spec((), int32), o[0]], widen=True)
def solve(outs: Tensors, ins: Tensors, attrs: Attrs, work: Tensors) -> list[Call]:
    """Solve by LU in column-major buffers, as LAPACK requires; a singular matrix gives infinities and NaN."""
    lu, pivots, info, solution = work
    if ins[1].numel() == 0:
        return []
    factors, columns = lu.view(lu.shape).T, solution.view(solution.shape[::-1]).T
    return [
        partial(torch.linalg.lu_factor_ex, ins[0], out=(factors, pivots, info)),
        partial(torch.linalg.lu_solve, factors, pivots, ins[1], out=columns),
        partial(outs[0].copy_, columns),
    ]
