"""What may be fused, per executor: the VM's loops over tiles, or a generated kernel of a device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from graphwright.array import CPU, Device, Layout, Spec, backend, bfloat16, bool_, float32
from graphwright.array.triton import expressions, fused
from graphwright.array.vm.encode.fuse import layout_of_tiles, tiles_for
from graphwright.array.vm.encode.operands import View
from graphwright.ops import OPS, get
from graphwright.plan.options import VM
from graphwright.plan.planning.lowering import ExecutorChoice
from graphwright.plan.table import Instr


class Fuser(Protocol):
    """The rules by which one executor fuses instructions."""

    def refuses(self, instr: Instr, outs: Sequence[Spec], ins: Sequence[Spec], choice: ExecutorChoice) -> str:
        """Return why an instruction can join no group, a word of `FusionRegion.cuts`, or ""."""
        ...

    def by_row(self, op: str) -> bool:
        """Return True if each entry of the op's result depends on a whole row along the last axis."""
        ...

    def walks(self, shape: tuple[int, ...], layouts: Sequence[Layout], by_row: bool) -> bool:
        """Return True if one loop over `shape` can walk operands of these layouts."""
        ...

    def most(self, shape: tuple[int, ...], by_row: bool) -> int:
        """Return how many intermediate values a group may hold at a time."""
        ...


def _reason(instr: Instr) -> str:
    """Return why an instruction is no elementwise function of its operands, or ""."""
    traits = OPS[instr.op].traits
    if traits.update:
        return "stateful"
    return "" if (traits.elementwise or traits.nary) and len(instr.outs) == 1 else "not_elementwise"


class VmFuser:
    """Groups that the VM runs tile by tile."""

    dtypes = (float32, bfloat16, bool_)

    def refuses(self, instr: Instr, outs: Sequence[Spec], ins: Sequence[Spec], choice: ExecutorChoice) -> str:
        """See `Fuser`."""
        form = get(instr.op).vm
        why = "" if form is not None and form.by_row and len(outs) == 1 else _reason(instr)
        if why:
            return why
        if choice.executor != VM and choice.why.startswith("large"):
            return "large"
        if any(spec.dtype not in self.dtypes for spec in (*ins, *outs)):
            return "dtype"
        if choice.executor == VM:
            return "" if form is not None else "not_elementwise"
        return "layout" if form is not None else "no_form"

    def by_row(self, op: str) -> bool:
        """See `Fuser`."""
        form = OPS[op].vm
        return form is not None and form.by_row

    def walks(self, shape: tuple[int, ...], layouts: Sequence[Layout], by_row: bool) -> bool:
        """See `Fuser`."""
        views = [View(float32, at.shape, at.strides) for at in layouts]
        return layout_of_tiles(shape, views, by_row) is not None

    def most(self, shape: tuple[int, ...], by_row: bool) -> int:
        """See `Fuser`."""
        return tiles_for(shape, by_row)


class KernelFuser:
    """Groups that become one generated kernel of a device, see `array.triton.fused`."""

    def refuses(self, instr: Instr, outs: Sequence[Spec], ins: Sequence[Spec], choice: ExecutorChoice) -> str:
        """See `Fuser`."""
        why = "" if self.by_row(instr.op) else _reason(instr)
        return why or expressions.refusal(instr.op, outs[0], ins, instr.attrs)

    def by_row(self, op: str) -> bool:
        """See `Fuser`."""
        return fused.by_row([op])

    def walks(self, shape: tuple[int, ...], layouts: Sequence[Layout], by_row: bool) -> bool:
        """See `Fuser`."""
        return fused.tiled(shape, [View(float32, at.shape, at.strides) for at in layouts], by_row)

    def most(self, shape: tuple[int, ...], by_row: bool) -> int:
        """See `Fuser`."""
        return fused.LIVE // 4 if by_row else fused.LIVE


def fuser(device: Device) -> Fuser | None:
    """Return the rules of a plan for a device, or None if its backend has no fused kernels."""
    if device == CPU:
        return VmFuser()
    return KernelFuser() if backend(device).fuses else None
