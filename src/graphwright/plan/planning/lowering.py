"""What planning knows of an op for given dtypes and layouts, found once for all nodes that do the same."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

from graphwright.array import Layout
from graphwright.array.layout import is_row_major, row_major
from graphwright.ops import OPS, get
from graphwright.plan.planning.buffer_layout import aligned
from graphwright.plan.planning.executors import VM, may_join, work_of_vm

if TYPE_CHECKING:
    from graphwright.array import DType, Spec
    from graphwright.ops import Op
    from graphwright.plan.planning.executors import Chooser, ExecutorChoice
    from graphwright.plan.planning.records import NodeRecord
    from graphwright.plan.table import Instr, Slot

LARGEST = 1 << 50
"""Bytes of one value, from which on nothing is planned: no machine has them, and sums of thousands fit 63 bits."""


class TooLarge(Exception):
    """A value of more bytes than `LARGEST`; the planner says which."""


class PackedSpec(NamedTuple):
    """A value that lies row by row: bytes, those taken in an arena, dtype, layout, and the number of these two."""

    nbytes: int
    room: int
    dtype: DType
    layout: Layout
    number: int


class Lowering(NamedTuple):
    """What instructions of one op on operands of the same layouts have in common.

    Attributes:
        number: its place among all.
        choice: what runs them.
        joins: whether they may be part of a fusion group.
        scratch: specs of what the kernel works in.
        inplace: (result, operand) of the same layout, where the result may take the operand's memory.
    """

    number: int
    choice: ExecutorChoice
    joins: bool
    scratch: tuple[Spec, ...]
    inplace: tuple[tuple[int, int], ...]


class Signature:
    """What rows of one op, with the same attributes, specs and layouts of what they read, have in common.

    Attributes:
        op: the op.
        does: a number for op, attributes and specs.
        specs: of the results, sizes known.
        made: of each result, as `Forms.packed` says.
        copied: places of operands that are copied first, since they do not lie row by row.
        shown: the layout that a view has, or None where it must copy, and for what is no view.
        form: of the instruction, where nothing is copied; None before the first.
    """

    __slots__ = ("copied", "does", "form", "made", "op", "shown", "specs")

    def __init__(
        self,
        op: Op,
        does: int,
        specs: tuple[Spec, ...],
        made: list[PackedSpec],
        copied: tuple[int, ...],
        shown: Layout | None,
    ) -> None:
        self.op, self.does, self.specs, self.made, self.copied, self.shown = op, does, specs, made, copied, shown
        self.form: Lowering | None = None


class LoweringTable:
    """Forms by op, attributes and the numbers of operands' dtypes and layouts.

    Args:
        choose: what runs an instruction.
        workspace: scratch that a kernel wants, by op, specs of results and operands, and attributes.

    Attributes:
        all: by number.
    """

    def __init__(self, choose: Chooser, workspace: Callable[..., Sequence[Spec]]) -> None:
        self._choose, self._workspace = choose, workspace
        self.all: list[Lowering] = []
        self._known: dict[Any, Lowering] = {}
        self._numbers: dict[tuple[Any, Layout], int] = {}
        self._shapes: list[tuple[Any, Layout]] = []
        self._packed: dict[Spec, PackedSpec] = {}
        self._alike: dict[Any, Signature] = {}
        self._does: dict[Any, int] = {}

    def number(self, dtype: Any, layout: Layout) -> int:
        """The number of a dtype and a layout."""
        found = self._numbers.setdefault((dtype, layout), len(self._numbers))
        if found == len(self._shapes):
            self._shapes.append((dtype, layout))
        return found

    def packed(self, spec: Spec) -> PackedSpec:
        """A value of known sizes that lies row by row. Raises: TooLarge."""
        found = self._packed.get(spec)
        if found is None:
            if spec.nbytes > LARGEST:
                raise TooLarge
            layout = Layout(spec.sizes, row_major(spec.sizes))
            number = self.number(spec.dtype, layout)
            found = self._packed[spec] = PackedSpec(spec.nbytes, aligned(spec.nbytes), spec.dtype, layout, number)
        return found

    def alike(self, row: NodeRecord, dims: Mapping[str, int], shapes: Sequence[int]) -> Signature:
        """What a row shares with others; `shapes` are the numbers of all slots."""
        text = repr(row.attrs) if row.attrs else ""  # 0.0, -0.0, 0 and False differ
        reads = tuple([shapes[s] for s in row.reads])
        key = (row.op, text, row.specs, reads)
        found = self._alike.get(key)
        if found is None:
            op, specs = get(row.op), tuple([spec.bind(dims) for spec in row.specs])
            dtypes, layouts = ([self._shapes[n][i] for n in reads] for i in (0, 1))
            does = self._does.setdefault((row.op, text, specs), len(self._does))
            if op.view is not None:
                found = Signature(op, does, specs, [], (), op.view(layouts[0], row.attrs))
            else:
                narrow = any(dtypes[place] is not specs[0].dtype for place in op.traits.narrow)
                places = range(len(reads)) if narrow else op.row_major(len(reads))
                copied = tuple([place for place in places if not adjacent(layouts[place])])
                found = Signature(op, does, specs, [self.packed(s) for s in specs], copied, None)
            self._alike[key] = found
        return found

    def of(self, instr: Instr, slots: Sequence[Slot], numbers: Sequence[int]) -> Lowering:
        """The form of an instruction; `numbers` are those of the slots."""
        ins, outs = instr.ins, instr.outs
        key = (instr.op, repr(instr.attrs) if instr.attrs else "", len(ins), *[numbers[s] for s in (*ins, *outs)])
        found = self._known.get(key)
        if found is None:
            read, made = ([slots[s] for s in of] for of in (ins, outs))
            choice = self._choose(instr, made, read)
            native = choice.executor == VM
            if native:
                scratch = work_of_vm(instr, made, read)
            else:
                scratch = tuple(self._workspace(instr.op, [s.spec for s in made], [s.spec for s in read], instr.attrs))
            pairs = [pair for pair in OPS[instr.op].inplace(len(ins), len(outs)) if pair[1] < len(ins)]
            alike = tuple([(out, place) for out, place in pairs if numbers[outs[out]] == numbers[ins[place]]])
            found = self._known[key] = Lowering(len(self.all), choice, native and may_join(instr), scratch, alike)
            self.all.append(found)
        return found


@lru_cache(4096)
def adjacent(layout: Layout) -> bool:
    """True if elements lie row by row without gaps."""
    return is_row_major(layout.shape, layout.strides)
