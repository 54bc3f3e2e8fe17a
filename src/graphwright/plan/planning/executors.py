"""Which executor runs an instruction: the VM, where it has a form for it and it is small enough, else ATen.

The limits are where `python -m benchmarks executors` finds the two to meet.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import cache
from typing import TYPE_CHECKING, NamedTuple

from graphwright.array import CPU, Spec
from graphwright.array.vm.code import STORED
from graphwright.array.vm.encode.operands import View
from graphwright.ops import get
from graphwright.ops.expansion import vm_form
from graphwright.plan.table import Instr, Slot

if TYPE_CHECKING:
    from graphwright.array import Device

EXECUTORS = ("auto", "vm", "aten", "capture")
VM, ATEN, CAPTURE = "vm", "aten", "capture"
FLOPS_LIMIT = 16_000_000
"""Of products and attention where a core has no vectors of 64 bytes: the VM's tiles are made for them."""
_DENSE = 16  # operations per byte from which on an op is bound by computing


class ExecutorChoice(NamedTuple):
    """What runs an instruction, and why not the VM."""

    executor: str
    why: str = ""


Chooser = Callable[[Instr, Sequence[Slot], Sequence[Slot]], ExecutorChoice]
"""(instruction, slots of its results, slots of its operands) -> what runs it."""


def chooser(executor: str, device: Device) -> Chooser:
    """What chooses the executor of an instruction."""
    if executor in (ATEN, CAPTURE) or device != CPU:
        plain = ExecutorChoice(
            ATEN, "the CPU has no graphs to capture" if executor == CAPTURE and device == CPU else ""
        )
        return lambda instr, outs, ins: plain
    if not on_vm(executor, device):
        unbuilt = ExecutorChoice(ATEN, "the VM is not built: graphwright warmup")
        return lambda instr, outs, ins: unbuilt
    from graphwright.array.vm.machine import wide_vectors

    wide, limited = wide_vectors(), executor == "auto"
    return lambda instr, outs, ins: _choice(instr, outs, ins, limited, wide)


def on_vm(executor: str, device: Device = CPU) -> bool:
    """True if the VM may run instructions of a plan that asks for this executor."""
    if executor != "auto" or device != CPU:
        return executor == VM
    from graphwright.array.vm.machine import built  # loads numba

    if not built():
        _say()
        return False
    return True


@cache
def _say() -> None:
    """Once per process: what the plans miss."""
    logging.getLogger("graphwright").warning("the VM is not built, plans run on ATen: `graphwright warmup` builds it")


def may_join(instr: Instr) -> bool:
    """True if an instruction computes each element of its one result from elements, or the row, at the same place."""
    op = get(instr.op)
    traits = op.traits
    by_place = traits.elementwise or traits.nary or (op.vm is not None and op.vm.by_row)
    return by_place and op.vm is not None and len(instr.outs) == 1 and not traits.update


def _choice(instr: Instr, outs: Sequence[Slot], ins: Sequence[Slot], limited: bool, wide: bool) -> ExecutorChoice:
    form = vm_form(get(instr.op))
    if form is None:
        return ExecutorChoice(ATEN, "the VM has no such op")
    code = form.rows([view_of(s) for s in outs], [view_of(s) for s in ins], instr.attrs)
    if code is None:
        return ExecutorChoice(ATEN, "no VM form for these dtypes or layouts")
    if code and code[0][0] in STORED:  # of any size: what bounds it is memory, or no other kernel reads these weights
        return ExecutorChoice(VM)
    if limited and (why := _large(instr, [s.spec for s in (*ins, *outs)], wide)):
        return ExecutorChoice(ATEN, why)
    return ExecutorChoice(VM)


def view_of(slot: Slot) -> View:
    """A slot as the VM sees it, without an address."""
    return View(slot.dtype, slot.layout.shape, slot.layout.strides)


def work_of_vm(instr: Instr, outs: Sequence[Slot], ins: Sequence[Slot]) -> tuple[Spec, ...]:
    """What the VM's code for an instruction works in, besides its scratch."""
    form = vm_form(get(instr.op))
    assert form is not None, "the plan chose the VM where the op has a form"
    work = form.workspace([view_of(s) for s in outs], [view_of(s) for s in ins], instr.attrs)
    return tuple([Spec(view.shape, view.dtype) for view in work])


def _large(instr: Instr, specs: Sequence[Spec], wide: bool) -> str:
    """Why ATen is faster on an instruction of this size, or nothing."""
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
