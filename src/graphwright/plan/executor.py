"""Which executor runs an instruction: the VM, where it has a form for it and it is small enough, else ATen.

The limits are where `python -m benchmarks executors` finds the two to meet.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import cache
from typing import NamedTuple

from graphwright.array import Spec
from graphwright.array.vm.code import SHARED
from graphwright.array.vm.encode import ENCODERS, View, encode
from graphwright.errors import UsageError
from graphwright.ops import get
from graphwright.plan.lower import Rows
from graphwright.plan.table import Instr

EXECUTORS = ("auto", "vm", "aten")
VM, ATEN = "vm", "aten"
FLOPS_LIMIT, BYTES_LIMIT = 300_000_000, 1 << 20
"""Of what computes much per byte, and of the rest; above them ATen's other cores gain more than the VM saves."""
_DENSE = 16  # operations per byte from which on an op is bound by computing


class Choice(NamedTuple):
    """What runs an instruction, and why not the VM."""

    executor: str
    why: str = ""


def on_vm(executor: str) -> bool:
    """True if the VM may run instructions of a plan that asks for this executor."""
    if executor != "auto":
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


def choose(rows: Rows, executor: str) -> tuple[Choice, ...]:
    """An executor per instruction. Raises: UsageError for an unknown mode."""
    if executor not in EXECUTORS:
        raise UsageError("no such executor", expected=", ".join(EXECUTORS), got=executor)
    if executor == ATEN:
        return (Choice(ATEN),) * len(rows.instrs)
    if not on_vm(executor):
        return (Choice(ATEN, "the VM is not built: graphwright warmup"),) * len(rows.instrs)
    return tuple(_choice(rows, instr, executor == "auto") for instr in rows.instrs)


def _choice(rows: Rows, instr: Instr, limited: bool) -> Choice:
    if instr.op not in ENCODERS:
        return Choice(ATEN, "the VM has no such op")
    outs, ins = ([view_of(rows, s) for s in slots] for slots in (instr.outs, instr.ins))
    code = encode(instr.op, outs, ins, instr.attrs)
    if code is None:
        return Choice(ATEN, "no VM form for these dtypes or layouts")
    if limited and not any(row[0] in SHARED for row in code):
        specs = [rows.specs[s] for s in (*instr.ins, *instr.outs)]
        if why := _large(instr, specs):
            return Choice(ATEN, why)
    return Choice(VM)


def view_of(rows: Rows, slot: int) -> View:
    """A slot as the VM sees it, without an address."""
    layout = rows.layouts[slot]
    return View(rows.specs[slot].dtype, layout.shape, layout.strides)


def _large(instr: Instr, specs: Sequence[Spec]) -> str:
    """Why an instruction is too large for one core, or nothing."""
    ins, outs = specs[: len(instr.ins)], specs[len(instr.ins) :]
    cost = get(instr.op).cost(ins, outs, instr.attrs)
    if cost.flops > _DENSE * (cost.read + cost.write):
        return f"large: {cost.flops / 1e6:.0f} MFLOP" if cost.flops > FLOPS_LIMIT else ""
    moved = cost.read + cost.write
    return f"large: {moved / 2**20:.1f} MiB" if moved > BYTES_LIMIT else ""
