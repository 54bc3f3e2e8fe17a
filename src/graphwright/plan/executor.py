"""Which executor runs an instruction: the VM, where it has a form for it and it is small enough, else ATen.

The limits are where `python -m benchmarks executors` finds the two to meet.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from graphwright.array import Spec
from graphwright.array.vm.encode import ENCODERS, View, encode
from graphwright.errors import UsageError
from graphwright.ops import get
from graphwright.plan.lower import Rows
from graphwright.plan.table import Instr

EXECUTORS = ("auto", "vm", "aten")
VM, ATEN = "vm", "aten"
LIMITS = {"gelu": 1 << 17, "sum": 1 << 24, "mean": 1 << 24, "amax": 1 << 24}
"""Bytes of operands and results from which on ATen's kernel of an op is faster."""
FLOPS_LIMIT = 16_000_000
"""Of products and attention where a core has no vectors of 64 bytes: the VM's tiles are made for them."""
_DENSE = 16  # operations per byte from which on an op is bound by computing


class Choice(NamedTuple):
    """What runs an instruction, and why not the VM."""

    executor: str
    why: str = ""


def choose(rows: Rows, executor: str) -> tuple[Choice, ...]:
    """An executor per instruction. Raises: UsageError for an unknown mode."""
    if executor not in EXECUTORS:
        raise UsageError("no such executor", expected=", ".join(EXECUTORS), got=executor)
    if executor == ATEN:
        return (Choice(ATEN),) * len(rows.instrs)
    from graphwright.array.vm.machine import built, wide_vectors

    if executor == "auto" and not built():
        return (Choice(ATEN, "the VM is not built: graphwright warmup"),) * len(rows.instrs)
    wide = wide_vectors()
    choices = tuple(_choice(rows, instr, executor == "auto", wide) for instr in rows.instrs)
    for i, (instr, choice) in enumerate(zip(rows.instrs, choices, strict=True)):
        if choice.executor == VM and instr.work:  # scratch of ATen's kernel
            for slot in instr.work:
                rows.buffers[rows.buffer_of[slot]].kind = "moved"
            rows.instrs[i] = instr._replace(work=())
    return choices


def _choice(rows: Rows, instr: Instr, limited: bool, wide: bool) -> Choice:
    if instr.op not in ENCODERS:
        return Choice(ATEN, "the VM has no such op")
    specs = [rows.specs[s] for s in (*instr.ins, *instr.outs)]
    if limited and (why := _large(instr, specs, wide)):
        return Choice(ATEN, why)
    outs, ins = ([view_of(rows, s) for s in slots] for slots in (instr.outs, instr.ins))
    if encode(instr.op, outs, ins, instr.attrs) is None:
        return Choice(ATEN, "no VM form for these dtypes or layouts")
    return Choice(VM)


def view_of(rows: Rows, slot: int) -> View:
    """A slot as the VM sees it, without an address."""
    layout = rows.layouts[slot]
    return View(rows.specs[slot].dtype, layout.shape, layout.strides)


def _large(instr: Instr, specs: Sequence[Spec], wide: bool) -> str:
    """Why ATen is faster on an instruction of this size, or nothing."""
    limit = LIMITS.get(instr.op)
    if limit is not None:
        moved = sum(spec.nbytes for spec in specs)
        return f"large: {moved / 2**20:.1f} MiB" if moved > limit else ""
    if wide:
        return ""
    cost = get(instr.op).cost(specs[: len(instr.ins)], specs[len(instr.ins) :], instr.attrs)
    dense = cost.flops > _DENSE * (cost.read + cost.write)
    return f"large: {cost.flops / 1e6:.0f} MFLOP" if dense and cost.flops > FLOPS_LIMIT else ""
