"""How ops run on given dtypes and layouts, found once for all nodes with the same signature.

The executor is the VM where it has a form for the op and is faster, else ATen: `python -m benchmarks executors`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

from graphwright.array import CPU, Device, DType, Layout, Spec, backend
from graphwright.array.backend import Backend, Needs
from graphwright.array.layout import is_row_major, row_major
from graphwright.array.vm.code import STORED
from graphwright.array.vm.encode.operands import View
from graphwright.ops import OPS, Op, expansion, get
from graphwright.ops.expansion import vm_form
from graphwright.plan.options import ATEN, CAPTURE, VM
from graphwright.plan.planning.passes import aligned
from graphwright.plan.table import Instr, Slot

if TYPE_CHECKING:
    from graphwright.plan.planning.plan_tables import NodeRecord

FLOPS_LIMIT = 16_000_000
"""Above this, ATen runs products and attention on cores without 64-byte vectors, which the VM's tiles are made for."""
_DENSE = 16  # operations per byte from which an op is bound by computing


class ExecutorChoice(NamedTuple):
    """The executor of an instruction, and the reason if it is not the VM."""

    executor: str
    why: str = ""


def chooser(executor: str, device: Device) -> Callable[[Instr, Sequence[Slot], Sequence[Slot]], ExecutorChoice]:
    """The function that chooses the executor of an instruction with slots of results and of operands."""
    if executor in (ATEN, CAPTURE) or device != CPU:
        no_graphs = executor == CAPTURE and device == CPU
        plain = ExecutorChoice(ATEN, "the CPU has no graphs to capture" if no_graphs else "")
        return lambda instr, outs, ins: plain
    if not on_vm(executor, device):
        unbuilt = ExecutorChoice(ATEN, "the VM is not built: graphwright warmup")
        return lambda instr, outs, ins: unbuilt
    from graphwright.array.vm.vector import WIDE  # loads numba

    limited = executor == "auto"
    return lambda instr, outs, ins: _choose(instr, outs, ins, limited, WIDE)


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


def needs(instr: Instr, kernels: Backend, spec: Callable[[int], Spec]) -> Needs:
    """What a kernel needs to launch an instruction; `spec` is that of a slot."""
    return expansion.needs(get(instr.op), kernels, [*map(spec, instr.outs)], [*map(spec, instr.ins)], instr.attrs)


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


LARGEST = 1 << 50
"""Maximum bytes of one value: no machine has more, and sums of thousands fit 63 bits."""


class TooLarge(Exception):
    """A value has more than `LARGEST` bytes; the planner reports which."""


class PackedSpec(NamedTuple):
    """A row-major value: bytes, bytes taken in an arena, dtype, layout, and the number of these two."""

    nbytes: int
    room: int
    dtype: DType
    layout: Layout
    number: int


class Lowering(NamedTuple):
    """How an op runs on operands of given dtypes and layouts.

    Attributes:
        number: index in `LoweringTable.all`.
        choice: its executor.
        fusible: whether it may join a fusion group.
        scratch: specs of the kernel's scratch memory.
        inplace: (result, operand) pairs of equal layout where the result may overwrite the operand.
    """

    number: int
    choice: ExecutorChoice
    fusible: bool
    scratch: tuple[Spec, ...]
    inplace: tuple[tuple[int, int], ...]


@dataclass(slots=True, eq=False)
class Signature:
    """What records of equal op, attributes, specs and operand layouts have in common.

    Attributes:
        op: the op.
        content: a number for op, attributes and specs.
        specs: specs of the results, sizes known.
        packed: the results as row-major values.
        copied: numbers of the operands that must be copied to row-major memory first.
        view_layout: the layout of a view; None if it must copy, and for other ops.
        lowering: of the instruction, if no operand is copied; None until the first one.
    """

    op: Op
    content: int
    specs: tuple[Spec, ...]
    packed: list[PackedSpec]
    copied: tuple[int, ...]
    view_layout: Layout | None
    lowering: Lowering | None = None


class LoweringTable:
    """Signatures and lowerings by op, attributes and the dtypes and layouts of operands.

    Args:
        executor, device: see `CompileOptions`.

    Attributes:
        all: every lowering by number.
    """

    def __init__(self, executor: str, device: Device) -> None:
        self._choose, self._kernels = chooser(executor, device), backend(device)
        self.all: list[Lowering] = []
        self._lowerings: dict[Any, Lowering] = {}
        self._numbers: dict[tuple[Any, Layout], int] = {}
        self._shapes: list[tuple[Any, Layout]] = []
        self._packed: dict[Spec, PackedSpec] = {}
        self._signatures: dict[Any, Signature] = {}
        self._contents: dict[Any, int] = {}

    def shape_number(self, dtype: Any, layout: Layout) -> int:
        """The number of a dtype and layout."""
        found = self._numbers.setdefault((dtype, layout), len(self._numbers))
        if found == len(self._shapes):
            self._shapes.append((dtype, layout))
        return found

    def packed(self, spec: Spec) -> PackedSpec:
        """A row-major value of known sizes. Raises: TooLarge."""
        found = self._packed.get(spec)
        if found is None:
            if spec.nbytes > LARGEST:
                raise TooLarge
            layout = Layout(spec.sizes, row_major(spec.sizes))
            number = self.shape_number(spec.dtype, layout)
            found = self._packed[spec] = PackedSpec(spec.nbytes, aligned(spec.nbytes), spec.dtype, layout, number)
        return found

    def signature(self, record: NodeRecord, dims: Mapping[str, int], shapes: Sequence[int]) -> Signature:
        """The signature of a record; `shapes` are the dtype and layout numbers of all slots."""
        text = repr(record.attrs) if record.attrs else ""  # tells 0.0, -0.0, 0 and False apart
        reads = tuple([shapes[s] for s in record.reads])
        key = (record.op, text, record.specs, reads)
        found = self._signatures.get(key)
        if found is None:
            op, specs = get(record.op), tuple([spec.bind(dims) for spec in record.specs])
            dtypes, layouts = ([self._shapes[n][i] for n in reads] for i in (0, 1))
            content = self._contents.setdefault((record.op, text, specs), len(self._contents))
            if op.view is not None:
                found = Signature(op, content, specs, [], (), op.view(layouts[0], record.attrs))
            else:
                narrow = any(dtypes[i] is not specs[0].dtype for i in op.traits.narrow)
                operands = range(len(reads)) if narrow else op.row_major(len(reads))
                copied = tuple([i for i in operands if not contiguous(layouts[i])])
                found = Signature(op, content, specs, [self.packed(s) for s in specs], copied, None)
            self._signatures[key] = found
        return found

    def lowering(self, instr: Instr, slots: Sequence[Slot], shapes: Sequence[int]) -> Lowering:
        """The lowering of an instruction; `shapes` are the dtype and layout numbers of the slots."""
        ins, outs = instr.ins, instr.outs
        key = (instr.op, repr(instr.attrs) if instr.attrs else "", len(ins), *[shapes[s] for s in (*ins, *outs)])
        found = self._lowerings.get(key)
        if found is None:
            read, made = ([slots[s] for s in of] for of in (ins, outs))
            choice = self._choose(instr, made, read)
            native = choice.executor == VM
            if native:
                scratch = vm_scratch(instr, made, read)
            else:
                results, operands = ([s.spec for s in some] for some in (made, read))
                scratch = tuple(expansion.workspace(get(instr.op), self._kernels, results, operands, instr.attrs))
            pairs = [pair for pair in OPS[instr.op].inplace(len(ins), len(outs)) if pair[1] < len(ins)]
            inplace = tuple([(out, i) for out, i in pairs if shapes[outs[out]] == shapes[ins[i]]])
            found = Lowering(len(self.all), choice, native and elementwise(instr), scratch, inplace)
            self._lowerings[key] = found
            self.all.append(found)
        return found


@lru_cache(4096)
def contiguous(layout: Layout) -> bool:
    """True for row-major memory without gaps."""
    return is_row_major(layout.shape, layout.strides)
