"""Runs a Triton kernel on guarded buffers and compares its results with the CPU backend's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import inf, prod
from typing import Any

import torch

import graphwright as gw
from graphwright.array.cpu.kernel import TORCH_DTYPE, kernel_of
from graphwright.array.spec import Spec
from graphwright.array.triton.kernel import table
from graphwright.ops import OPS

GUARD = 40
"""Elements before and after the array of a guarded buffer."""
DTYPES = {t: d for d, t in TORCH_DTYPE.items()}
LOW = (torch.float16, torch.bfloat16)
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_CANARY = {torch.uint8: 0xA5, torch.int16: 0x7EA5, torch.int32: 0x7FA5A5A5, torch.int64: 0x7FF5A5A5A5A5A5A5}
"""Bits of guard zones: NaN in each floating dtype."""
LAYOUTS = ("contiguous", "odd", "padded")
"""Row-major; at an odd offset; with a gap after each row of the last axis."""


@dataclass(frozen=True)
class Case:
    """One run of a kernel.

    Attributes:
        op: its name.
        ins: operands; floating ones have the dtype of the case.
        attrs: attributes.
        layout: that of operands and results.
        tolerance: largest relative error in float32; None: 1e-6. In float64 it is at most 1e-12; in 16 bits results may
            be 1 ulp off, or this if it is larger than 1e-4.
        exact: True if results must be equal, -0.0 not to 0.0.
        kept: indices of operands that it gets as they are nevertheless.
        key: True if every run checks the case.
        zero: True if the results are 0, for operands that the CPU backend does not get.
        wide: dtypes of operands that the CPU backend gets in float64; other operands it gets as they are.
    """

    op: str
    ins: Sequence[torch.Tensor]
    attrs: Mapping[str, Any] = field(default_factory=dict)
    layout: str = "contiguous"
    tolerance: float | None = None
    exact: bool = False
    wide: tuple[torch.dtype, ...] = (torch.float16, torch.bfloat16, torch.float32)
    kept: tuple[int, ...] = ()
    zero: bool = False
    key: bool = False


class Guarded:
    """A tensor inside a buffer full of canaries."""

    def __init__(self, shape: Sequence[int], dtype: torch.dtype, layout: str) -> None:
        gap = 3 if layout == "padded" and len(shape) > 1 else 0
        rows, width = prod(shape[:-1]), shape[-1] if shape else 1
        offset = GUARD + (3 if layout != "contiguous" else 0)
        bits = _BITS[dtype.itemsize]
        self.buffer = torch.full((offset + rows * (width + gap) + GUARD,), _CANARY[bits], dtype=bits)
        strides = [prod(shape[i + 1 : -1]) * (width + gap) for i in range(len(shape) - 1)] + [1] * bool(shape)
        self.bits = torch.as_strided(self.buffer, tuple(shape), strides, offset)
        self.tensor = torch.as_strided(self.buffer.view(dtype), tuple(shape), strides, offset)
        own = torch.zeros_like(self.buffer, dtype=torch.bool)
        torch.as_strided(own, tuple(shape), strides, offset).fill_(True)
        self.outside = ~own

    def intact(self) -> bool:
        """Whether all canaries are as they were."""
        return bool((self.buffer[self.outside] == _CANARY[self.buffer.dtype]).all())


def spec(t: torch.Tensor) -> Spec:
    return Spec(tuple(t.shape), DTYPES[t.dtype])


def by_cpu(op: str, outs: Sequence[torch.Tensor], ins: Sequence[torch.Tensor], attrs: Mapping[str, Any]) -> None:
    """Compute an op by the CPU backend."""
    row = kernel_of(op)
    if row is None:  # an op that the CPU computes by others
        expanded(op, outs, ins, attrs)
        return
    work = row.work([spec(o) for o in outs], [spec(i) for i in ins], attrs) if row.work else []
    calls = row.bind(outs, ins, attrs, [torch.empty(w.sizes, dtype=TORCH_DTYPE[w.dtype]) for w in work])
    for call in calls if isinstance(calls, list) else [calls]:
        call()


def expanded(op: str, outs: Sequence[torch.Tensor], ins: Sequence[torch.Tensor], attrs: Mapping[str, Any]) -> None:
    """Compute an op by its expansion."""
    expand = OPS[op].expand
    assert expand is not None, op
    found = expand(tuple(gw.tensor(i) for i in ins), dict(attrs))
    for out, made in zip(outs, found if isinstance(found, tuple) else (found,), strict=True):
        out.copy_(torch.from_dlpack(made.data))


def results(case: Case, ins: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return empty results for operands."""
    row = OPS[case.op]
    made = row.infer(*(spec(i) for i in ins), **case.attrs)
    return [torch.empty(s.sizes, dtype=TORCH_DTYPE[s.dtype]) for s in (made if isinstance(made, tuple) else (made,))]


def bound(case: Case, outs: Sequence[torch.Tensor], ins: Sequence[torch.Tensor], work: Sequence[torch.Tensor]) -> list:
    calls = table()[case.op].bind(outs, ins, case.attrs, work)
    return calls if isinstance(calls, list) else [calls]


def scratch(case: Case, outs: Sequence[torch.Tensor], ins: Sequence[torch.Tensor]) -> list[Guarded]:
    row = table()[case.op]
    specs = row.work([spec(o) for o in outs], [spec(i) for i in ins], case.attrs) if row.work else []
    return [Guarded(w.sizes, TORCH_DTYPE[w.dtype], "contiguous") for w in specs]


def wrong(case: Case, runs: int) -> str:
    """Run a case; return "" or what is wrong with it."""
    kept = {k % len(case.ins) for k in case.kept}
    wide = [t.double() if t.dtype in case.wide and i not in kept else t for i, t in enumerate(case.ins)]
    wanted = results(case, wide)
    if case.zero:
        wanted = [w.zero_() for w in wanted]
    else:
        by_cpu(case.op, wanted, wide, case.attrs)
    outs = [Guarded(o.shape, o.dtype, case.layout) for o in results(case, case.ins)]
    ins = [Guarded(i.shape, i.dtype, case.layout) for i in case.ins]
    for made, given in zip(ins, case.ins, strict=True):
        made.tensor.copy_(given)
    before = [i.buffer.clone() for i in ins]
    o, i = [t.tensor for t in outs], [t.tensor for t in ins]
    if reason := table()[case.op].takes(o, i, case.attrs):
        return f"is not supported: {reason}"
    work = scratch(case, o, i)
    first: list[torch.Tensor] = []
    for _ in range(runs):  # the second run finds other scratch and results
        for call in bound(case, o, i, [w.tensor for w in work]):
            call()
        if first and not all(torch.equal(a, b.bits) for a, b in zip(first, outs, strict=True)):
            return "two runs differ"
        first = [t.bits.clone() for t in outs]
    if not all(t.intact() for t in (*outs, *work)):
        return "writes outside of its results"
    if not all(torch.equal(a, b.buffer) for a, b in zip(before, ins, strict=True)):
        return "writes to its operands"
    found = [
        f"result {n}: {text}" for n, (x, y) in enumerate(zip(o, wanted, strict=True)) if (text := apart(case, x, y))
    ]
    return "; ".join(found)


def apart(case: Case, x: torch.Tensor, y: torch.Tensor) -> str:
    """Return "" if x is y to the accuracy of the case, else the difference."""
    if not y.dtype.is_floating_point or case.exact:
        off = x.to(y.dtype) != y
        if y.dtype.is_floating_point:
            off = (off & ~(x.isnan() & y.isnan())) | (x.signbit() != y.signbit())
        return f"{int(off.sum())} of {y.numel()} differ" if bool(off.any()) else ""
    if y.numel() == 0:
        return ""
    a, b = x.double(), y.double()
    if not torch.equal(a.isnan(), b.isnan()) or not torch.equal(a.isinf(), b.isinf()):
        return "NaN or infinity elsewhere"
    finite = b.isfinite()
    a, b = a[finite], b[finite]
    if not b.numel():
        return ""
    mean = b.abs().mean()
    scale = b.abs() + (mean if mean > 1e-12 else 1.0)
    off = (a - b).abs()
    if x.dtype in LOW and (case.tolerance or 0) < 1e-4:
        fine = (off <= 3e-6 * scale) | ((_steps(x[finite]) - _steps(y[finite].to(x.dtype))).abs() <= 1)
        return "" if bool(fine.all()) else f"more than 1 ulp: {float((off / scale.clamp(min=1e-300)).max()):.2g}"
    limit = case.tolerance or {torch.float32: 1e-6, torch.float64: 1e-12}[x.dtype]
    if x.dtype is torch.float64:
        limit = min(limit, 1e-12)
    worst = float((off / scale.clamp(min=1e-300)).max())
    return "" if worst <= limit else f"relative error {worst:.2g}"


def _steps(x: torch.Tensor) -> torch.Tensor:
    """Return integers whose differences are the numbers of representable values between 16-bit floats."""
    bits = x.view(torch.int16).to(torch.int32)
    return torch.where(bits >= 0, bits, -(bits & 0x7FFF))


__all__ = ["LAYOUTS", "Case", "Guarded", "bound", "inf", "results", "scratch", "wrong"]
