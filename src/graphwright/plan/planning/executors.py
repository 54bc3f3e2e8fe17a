"""The executor of each instruction: the VM where it has a form for it and is faster, else ATen.

`python -m benchmarks executors` measures the limits.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import cache
from typing import NamedTuple

from graphwright.array import CPU, Device, Spec
from graphwright.array.vm.code import STORED
from graphwright.array.vm.encode.operands import View
from graphwright.ops import get
from graphwright.ops.expansion import vm_form
from graphwright.plan.options import ATEN, CAPTURE, VM
from graphwright.plan.table import Instr, Slot

FLOPS_LIMIT = 16_000_000
"""Above this, ATen runs products and attention on cores without 64-byte vectors, which the VM's tiles are made for."""
_DENSE = 16  # operations per byte from which an op is bound by computing


class ExecutorChoice(NamedTuple):
    """The executor of an instruction, and the reason if it is not the VM."""

    executor: str
    why: str = ""


Chooser = Callable[[Instr, Sequence[Slot], Sequence[Slot]], ExecutorChoice]
"""(instruction, slots of its results, slots of its operands) -> its executor."""


def chooser(executor: str, device: Device) -> Chooser:
    """The function that chooses the executor of an instruction."""
    if executor in (ATEN, CAPTURE) or device != CPU:
        no_graphs = executor == CAPTURE and device == CPU
        plain = ExecutorChoice(ATEN, "the CPU has no graphs to capture" if no_graphs else "")
        return lambda instr, outs, ins: plain
    if not on_vm(executor, device):
        unbuilt = ExecutorChoice(ATEN, "the VM is not built: graphwright warmup")
        return lambda instr, outs, ins: unbuilt
    from graphwright.array.vm.machine import wide_vectors

    wide, limited = wide_vectors(), executor == "auto"
    return lambda instr, outs, ins: _choose(instr, outs, ins, limited, wide)


def on_vm(executor: str, device: Device = CPU) -> bool:
    """True if a plan with this executor may run instructions on the VM."""
    if executor != "auto" or device != CPU:
        return executor == VM
    from graphwright.array.vm.machine import built  # loads numba

    if not built():
        _warn_once()
        return False
    return True


@cache
def _warn_once() -> None:
    logging.getLogger("graphwright").warning("the VM is not built, plans run on ATen: `graphwright warmup` builds it")


def elementwise(instr: Instr) -> bool:
    """True if each element of the one result depends on the same element, or row, of the operands."""
    op = get(instr.op)
    by_element = op.traits.elementwise or op.traits.nary or (op.vm is not None and op.vm.by_row)
    return by_element and op.vm is not None and len(instr.outs) == 1 and not op.traits.update


def vm_scratch(instr: Instr, outs: Sequence[Slot], ins: Sequence[Slot]) -> tuple[Spec, ...]:
    """Specs of the memory that the VM's code for an instruction works in."""
    form = vm_form(get(instr.op))
    assert form is not None, "the plan chose the VM for an op without a VM form"
    work = form.workspace([_view(s) for s in outs], [_view(s) for s in ins], instr.attrs)
    return tuple([Spec(view.shape, view.dtype) for view in work])


def _choose(instr: Instr, outs: Sequence[Slot], ins: Sequence[Slot], limited: bool, wide: bool) -> ExecutorChoice:
    form = vm_form(get(instr.op))
    if form is None:
        return ExecutorChoice(ATEN, "the VM has no such op")
    code = form.rows([_view(s) for s in outs], [_view(s) for s in ins], instr.attrs)
    if code is None:
        return ExecutorChoice(ATEN, "no VM form for these dtypes or layouts")
    if code and code[0][0] in STORED:  # bound by memory, or the only kernel that reads these weights
        return ExecutorChoice(VM)
    if limited and (why := _too_large(instr, [s.spec for s in (*ins, *outs)], wide)):
        return ExecutorChoice(ATEN, why)
    return ExecutorChoice(VM)


def _view(slot: Slot) -> View:
    return View(slot.dtype, slot.layout.shape, slot.layout.strides)


def _too_large(instr: Instr, specs: Sequence[Spec], wide: bool) -> str:
    """The reason ATen is faster on an instruction of this size, or ""."""
    form = get(instr.op).vm
    limit = None if form is None else form.limit
    if limit is not None:
        moved = sum(spec.nbytes for spec in specs)
        return f"large: {moved / 2**20:.1f} MiB" if moved > limit else ""
    if wide:
        return ""
    cost = get(instr.op).cost(specs[: len(instr.ins)], specs[len(instr.ins) :], instr.attrs)
    dense = cost.flops > _DENSE * (cost.read + cost.write)
    return f"large: {cost.flops / 1e6:.0f} MFLOP" if dense and cost.flops > FLOPS_LIMIT else ""
