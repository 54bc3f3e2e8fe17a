"""Kernels that run the VM's code of one op, where the VM is built, so that eager code is as fast as a plan."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from graphwright.array.backend import Attrs, Call
from graphwright.array.cpu.kernel import DTYPE_OF, Tensors
from graphwright.array.dtype import int64
from graphwright.array.layout import row_major
from graphwright.array.spec import Spec
from graphwright.array.vm.code import SCRATCH
from graphwright.array.vm.encode.operands import View, VmForm


def work_of(form: VmForm, outs: Sequence[Spec], ins: Sequence[Spec], attrs: Attrs) -> list[Spec]:
    """Return the specs of the scratch that `by_vm` needs."""
    views = form.workspace([_packed(s) for s in outs], [_packed(s) for s in ins], attrs)
    return [*(Spec(v.shape, v.dtype) for v in views), Spec((SCRATCH // 8 + 8,), int64)]


def by_vm(
    form: VmForm, outs: Tensors, ins: Tensors, attrs: Attrs, work: Tensors, failed: Callable[[], Any]
) -> Call | None:
    """Return a call of an op's VM form; None off the CPU, without the VM, or without code for these dtypes or layouts.

    Args:
        work: the memory that `work_of` describes.
        failed: a function that raises the error of an operand with an index out of range.
    """
    from graphwright.array.vm.machine import part  # loads numba

    if not part.ready or outs[0].device.type != "cpu":
        return None
    *own, scratch = work
    rows = form.rows([_view(t) for t in outs], [_view(t) for t in ins], attrs, [_view(t) for t in own])
    if rows is None:
        return None
    from graphwright.array.vm.running.segment import VmSegment

    zeros, segment = scratch[:24], VmSegment([rows], scratch.numpy().view("u1"))

    def run() -> None:
        zeros.zero_()
        if segment.run() is not None:
            failed()

    return run


def _packed(spec: Spec) -> View:
    return View(spec.dtype, spec.sizes, row_major(spec.sizes))


def _view(t: torch.Tensor) -> View:
    return View(DTYPE_OF[t.dtype], tuple(t.shape), t.stride(), t.data_ptr())
