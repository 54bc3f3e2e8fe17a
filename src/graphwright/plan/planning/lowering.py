"""Lowering: how an op runs on given dtypes and layouts, computed once for all nodes with the same signature.

The executor "auto" selects the VM if it has code for the op and is faster, else ATen. `python -m benchmarks executors`
measures both.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

from graphwright.array import CPU, Device, DType, Layout, Spec, backend
from graphwright.array.backend import Backend, Needs
from graphwright.array.layout import is_row_major, row_major
from graphwright.array.spec import UnboundDim
from graphwright.array.storage import changes
from graphwright.array.vm.code import STORED, Code
from graphwright.array.vm.encode.operands import View
from graphwright.errors import DTypeError, ShapeError
from graphwright.ops import OPS, Op, expansion, get
from graphwright.ops.expansion import vm_form
from graphwright.plan.options import ATEN, CAPTURE, VM, CompileOptions
from graphwright.plan.planning.passes import aligned
from graphwright.plan.table import Instr, Slot

if TYPE_CHECKING:
    from graphwright.plan.planning.fusers import Fuser
    from graphwright.plan.planning.plan_tables import NodeRecord

FLOPS_LIMIT = 16_000_000
"""Floating-point operations above which ATen runs products and attention on cores without 64-byte vectors."""
_PATIENCE = 3.0
"""Seconds that a bound call waits for the VM."""
_ALWAYS = frozenset({*STORED, Code.EXPERT_RUNS})
"""Opcodes of code that is never too large: it is bound by memory, or alone in reading these weights."""
_DENSE = 16  # operations per byte above which an op is compute-bound


class ExecutorChoice(NamedTuple):
    """The executor of an instruction, "vm" or "aten", and the reason `why` it is not the VM, or ""."""

    executor: str
    why: str = ""


Chooser = Callable[[Instr, Sequence[Slot], Sequence[Slot]], ExecutorChoice]
"""A function (instruction, result slots, operand slots) -> executor."""


def chooser(executor: str, device: Device) -> Chooser:
    """Return the function that chooses executors, for these options of the plan."""
    if executor in (ATEN, CAPTURE) or device != CPU:
        no_graphs = executor == CAPTURE and device == CPU
        plain = ExecutorChoice(ATEN, "the CPU has no graphs to capture" if no_graphs else "")
        return lambda instr, outs, ins: plain
    if not on_vm(executor, device):
        from graphwright.array.vm.machine import part

        unbuilt = ExecutorChoice(ATEN, part.why)
        return lambda instr, outs, ins: unbuilt
    from graphwright.array.vm.vector import WIDE  # loads numba

    limited = executor == "auto"
    return lambda instr, outs, ins: _choose(instr, outs, ins, limited, WIDE)


def on_vm(executor: str, device: Device = CPU) -> bool:
    """Return True if a plan with this option `executor` may run instructions on the VM.

    The executor "auto" starts to build the VM if it is not built; the executor "vm" waits until it is.
    Raises: NativeCodeFailed; UsageError.
    """
    if device != CPU or executor not in ("auto", VM):
        return False
    from graphwright.array.vm.machine import part  # loads numba

    if executor == VM:
        part.require()
    else:
        part.start(changes.rise)  # compiled functions then look whether their plan is still fresh
    return part.ready


def wait_for_vm(options: CompileOptions) -> None:
    """Wait up to 3 s if plans with these options may use the VM and it is being built."""
    if options.chosen == "auto" and not on_vm(options.chosen, options.device) and options.device == CPU:
        from graphwright.array.vm.machine import part

        part.wait(_PATIENCE)


def needs(instr: Instr, kernels: Backend, spec: Callable[[int], Spec]) -> Needs:
    """Return what an instruction's kernel needs from the host, such as operand values; `spec` returns a slot's spec."""
    return expansion.needs(get(instr.op), kernels, [*map(spec, instr.outs)], [*map(spec, instr.ins)], instr.attrs)


def vm_scratch(instr: Instr, outs: Sequence[Slot], ins: Sequence[Slot]) -> tuple[Spec, ...]:
    """Return the specs of the scratch memory of the VM's code for an instruction with these results and operands."""
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
    if code and (
        code[0][0] in STORED or code[0][0] == Code.EXPERT_RUNS
    ):  # bound by memory, or the only kernel that reads these weights
        return ExecutorChoice(VM)
    if limited and (why := _too_large(instr, [s.spec for s in (*ins, *outs)], wide)):
        return ExecutorChoice(ATEN, why)
    return ExecutorChoice(VM)


def _view(slot: Slot) -> View:
    return View(slot.dtype, slot.layout.shape, slot.layout.strides)


def _too_large(instr: Instr, specs: Sequence[Spec], wide: bool) -> str:
    """Return the reason why ATen is faster on an instruction of this size, or "".

    `specs` are those of the operands, then of the results; `wide` is True on a core with 64-byte vectors.
    """
    form = vm_form(get(instr.op))
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
    """A value has more than `LARGEST` (2^50) bytes; the planner turns this into a PlanOutOfMemory error."""


class PackedSpec(NamedTuple):
    """A spec without named sizes, laid out row-major.

    Attributes:
        nbytes, room: size in bytes, and the bytes that it takes in an arena: `nbytes` rounded up.
        number: id that the lowering table gives to the pair (`dtype`, `layout`).
    """

    nbytes: int
    room: int
    dtype: DType
    layout: Layout
    number: int


class Lowering(NamedTuple):
    """The executor, scratch memory and fusibility of an op on operands of given dtypes and layouts.

    Attributes:
        number: index in `LoweringTable.all`.
        choice: the executor, and the reason if it is not the VM.
        fusible: whether it may join a fusion group.
        scratch: specs of the kernel's scratch memory.
        inplace: (result index, operand index) pairs of equal layout where the result may overwrite the operand.
        collective: whether it talks to other ranks.
    """

    number: int
    choice: ExecutorChoice
    fusible: bool
    scratch: tuple[Spec, ...]
    inplace: tuple[tuple[int, int], ...]
    collective: bool = False


@dataclass(slots=True, eq=False)
class Signature:
    """Planning results shared by the records of all nodes with equal op, attributes, specs and operand layouts.

    Attributes:
        op: the op.
        content: an id shared by all signatures with equal op, attributes and specs.
        specs: specs of the results, without named sizes.
        packed: per result its spec with size and layout; empty for a view.
        copied: indices of the operands that must be copied to row-major memory first.
        view_layout: the layout of the view; None if the view needs a copy, or if the op is not a view.
        lowering: lowering of the instruction if no operand is copied; None before the first such instruction.
    """

    op: Op
    content: int
    specs: tuple[Spec, ...]
    packed: list[PackedSpec]
    copied: tuple[int, ...]
    view_layout: Layout | None
    lowering: Lowering | None = None


class LoweringTable:
    """A cache of signatures and lowerings; its keys are op, attributes, and dtypes and layouts of the operands.

    Args:
        executor, device: see `CompileOptions`.
        fuser: the rules of fusion groups, or None.

    Attributes:
        all: all lowerings, indexed by number.
        waiting: True if the VM was not built when this table was made, so that all instructions run on ATen.
    """

    def __init__(self, executor: str, device: Device, fuser: Fuser | None) -> None:
        self.waiting = executor == "auto" and device == CPU and not on_vm(executor, device)
        self._choose, self._kernels, self.fuser = chooser(executor, device), backend(device), fuser
        self.all: list[Lowering] = []
        self._lowerings: dict[Any, Lowering] = {}
        self._numbers: dict[tuple[Any, Layout], int] = {}
        self._shapes: list[tuple[Any, Layout]] = []
        self._packed: dict[Spec, PackedSpec] = {}
        self._signatures: dict[Any, Signature] = {}
        self._contents: dict[Any, int] = {}
        self._checked: set[Any] = set()

    @property
    def superseded(self) -> bool:
        """True if the VM was not built when this table was made, and now is."""
        if not self.waiting:
            return False
        from graphwright.array.vm.machine import part

        return part.ready

    def shape_number(self, dtype: Any, layout: Layout) -> int:
        """Return the id of a (dtype, layout) pair; a pair that is new gets the next free id."""
        found = self._numbers.setdefault((dtype, layout), len(self._numbers))
        if found == len(self._shapes):
            self._shapes.append((dtype, layout))
        return found

    def packed(self, spec: Spec) -> PackedSpec:
        """Return size, row-major layout and number of a spec without named sizes. Raises: TooLarge above 2^50 bytes."""
        found = self._packed.get(spec)
        if found is None:
            if spec.nbytes > LARGEST:
                raise TooLarge
            layout = Layout(spec.sizes, row_major(spec.sizes))
            number = self.shape_number(spec.dtype, layout)
            found = self._packed[spec] = PackedSpec(spec.nbytes, aligned(spec.nbytes), spec.dtype, layout, number)
        return found

    def signature(self, record: NodeRecord, dims: Mapping[str, int], shapes: Sequence[int]) -> Signature:
        """Return the signature of a record, given the named sizes and per slot the id of its (dtype, layout) pair."""
        text = repr(record.attrs) if record.attrs else ""  # tells 0.0, -0.0, 0 and False apart
        reads = tuple([shapes[s] for s in record.reads])
        key = (record.op, text, record.specs, reads)
        found = self._signatures.get(key)
        if found is None:
            op, specs = get(record.op), tuple([spec.bind(dims) for spec in record.specs])
            if any(spec.symbolic for spec in specs):
                what, expected = "no input of the program has this named size", ", ".join(dims) or "static sizes"
                raise UnboundDim(what, where=record.path, expected=expected, got=", ".join(map(repr, specs)))
            dtypes, layouts = ([self._shapes[n][i] for n in reads] for i in (0, 1))
            content = self._contents.setdefault((record.op, text, specs), len(self._contents))
            if op.view is not None:
                try:
                    view = op.view(layouts[0], record.attrs)
                except ShapeError as error:  # for the named sizes of this plan
                    error.where = f"{record.path} ({record.op}), {error.where}"
                    raise
                found = Signature(op, content, specs, [], (), view)
            else:
                read = [Spec(layout.shape, dtype) for dtype, layout in (self._shapes[n] for n in reads)]
                may = op.narrow(read, record.attrs) if op.narrow is not None else ()
                narrow = any(dtypes[i] is not specs[0].dtype for i in may)
                operands = range(len(reads)) if narrow else op.row_major(len(reads))
                copied = tuple([i for i in operands if not contiguous(layouts[i])])
                found = Signature(op, content, specs, [self.packed(s) for s in specs], copied, None)
            self._signatures[key] = found
        return found

    def check_sizes(self, record: NodeRecord, dims: Mapping[str, int], shapes: Sequence[int]) -> None:
        """Raise ShapeError if the op refuses a size computed from names, such as a window larger than its axis."""
        if not any(isinstance(d, str) and d not in dims for spec in record.specs for d in spec.shape):
            return
        ins = [Spec(layout.shape, dtype) for dtype, layout in (self._shapes[shapes[s]] for s in record.reads)]
        key = (record.op, repr(record.attrs), *ins)
        if key not in self._checked:
            with suppress(DTypeError):  # a conversion before the op may be left out of the plan
                get(record.op).specs(ins, record.attrs, record.path)
            self._checked.add(key)

    def lowering(self, instr: Instr, slots: Sequence[Slot], shapes: Sequence[int]) -> Lowering:
        """Return the lowering of an instruction, given all slots and per slot the id of its (dtype, layout)."""
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
            specs = [s.spec for s in made], [s.spec for s in read]
            fusible = self.fuser is not None and not self.fuser.refuses(instr, *specs, choice)
            together = OPS[instr.op].traits.collective
            found = Lowering(len(self.all), choice, fusible, scratch, inplace, together)
            self._lowerings[key] = found
            self.all.append(found)
        return found


@lru_cache(4096)
def contiguous(layout: Layout) -> bool:
    """Return True if a layout is row-major without gaps."""
    return is_row_major(layout.shape, layout.strides)
