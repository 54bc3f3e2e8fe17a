"""Which executor runs an instruction: the VM, where it has a form for it and it is small enough, else ATen.

The limits are where `python -m benchmarks executors` finds the two to meet.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from graphwright.array import Spec
from graphwright.array.vm.encode import ENCODERS, View, encode
from graphwright.errors import UsageError
from graphwright.ops import get
from graphwright.plan.table import Instr, Slot

EXECUTORS = ("auto", "vm", "aten")
VM, ATEN = "vm", "aten"
FLOPS_LIMIT, BYTES_LIMIT = 300_000_000, 1 << 20
"""Of what computes much per byte, and of the rest; above them ATen's other cores gain more than the VM saves."""
_DENSE = 16  # operations per byte from which on an op is bound by computing


class Choice(NamedTuple):
    """What runs an instruction, and why not the VM."""

    executor: str
    why: str = ""


Chooser = Callable[[Instr, Sequence[Slot], Sequence[Slot]], Choice]
"""(instruction, slots of its results, slots of its operands) -> what runs it."""


def chooser(executor: str) -> Chooser:
    """What chooses the executor of an instruction. Raises: UsageError for an unknown mode."""
    if executor not in EXECUTORS:
        raise UsageError("no such executor", expected=", ".join(EXECUTORS), got=executor)
    plain = Choice(ATEN)
    if executor == ATEN:
        return lambda instr, outs, ins: plain
    from graphwright.array.vm.machine import built

    if executor == "auto" and not built():
        unbuilt = Choice(ATEN, "the VM is not built: graphwright warmup")
        return lambda instr, outs, ins: unbuilt
    return lambda instr, outs, ins: _choice(instr, outs, ins, executor == "auto")


def _choice(instr: Instr, outs: Sequence[Slot], ins: Sequence[Slot], limited: bool) -> Choice:
    if instr.op not in ENCODERS:
        return Choice(ATEN, "the VM has no such op")
    if limited and (why := _large(instr, [s.spec for s in (*ins, *outs)])):
        return Choice(ATEN, why)
    if encode(instr.op, [view_of(s) for s in outs], [view_of(s) for s in ins], instr.attrs) is None:
        return Choice(ATEN, "no VM form for these dtypes or layouts")
    return Choice(VM)


def view_of(slot: Slot) -> View:
    """A slot as the VM sees it, without an address."""
    return View(slot.dtype, slot.layout.shape, slot.layout.strides)


def _large(instr: Instr, specs: Sequence[Spec]) -> str:
    """Why an instruction is too large for one core, or nothing."""
    ins, outs = specs[: len(instr.ins)], specs[len(instr.ins) :]
    cost = get(instr.op).cost(ins, outs, instr.attrs)
    if cost.flops > _DENSE * (cost.read + cost.write):
        return f"large: {cost.flops / 1e6:.0f} MFLOP" if cost.flops > FLOPS_LIMIT else ""
    moved = sum(spec.nbytes for spec in specs)
    return f"large: {moved / 2**20:.1f} MiB" if moved > BYTES_LIMIT else ""
