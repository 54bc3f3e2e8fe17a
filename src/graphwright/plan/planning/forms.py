"""What planning knows of an op for given dtypes and layouts, found once for all nodes that do the same."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

from graphwright.array import Layout, Spec
from graphwright.array.layout import is_row_major, row_major
from graphwright.ops import OPS
from graphwright.plan.planning.executor import VM, Choice, Chooser, may_join
from graphwright.plan.planning.layout import aligned
from graphwright.plan.table import Instr, Slot


class Form(NamedTuple):
    """What instructions of one op on operands of the same layouts have in common.

    Attributes:
        choice: what runs them.
        joins: whether they may be part of a fusion group.
        scratch: specs of what the kernel works in.
        inplace: (result, operand) of the same layout, where the result may take the operand's memory.
    """

    choice: Choice
    joins: bool
    scratch: tuple[Spec, ...]
    inplace: tuple[tuple[int, int], ...]


class Forms:
    """Forms by op, attributes and the numbers of operands' dtypes and layouts.

    Args:
        choose: what runs an instruction.
        workspace: scratch that a kernel wants, by op, specs of results and operands, and attributes.
    """

    def __init__(self, choose: Chooser, workspace: Callable[..., Sequence[Spec]]) -> None:
        self._choose, self._workspace = choose, workspace
        self._known: dict[Any, Form] = {}
        self._numbers: dict[tuple[Any, Layout], int] = {}
        self._packed: dict[Spec, tuple[int, int, Layout, int]] = {}

    def number(self, dtype: Any, layout: Layout) -> int:
        """The number of a dtype and a layout."""
        return self._numbers.setdefault((dtype, layout), len(self._numbers))

    def packed(self, spec: Spec) -> tuple[int, int, Layout, int]:
        """Of a value of known sizes that lies row by row: bytes, those taken in an arena, layout, and its number."""
        found = self._packed.get(spec)
        if found is None:
            layout = Layout(spec.sizes, row_major(spec.sizes))
            found = spec.nbytes, aligned(spec.nbytes), layout, self.number(spec.dtype, layout)
            self._packed[spec] = found
        return found

    def of(self, instr: Instr, slots: Sequence[Slot], numbers: Sequence[int]) -> Form:
        """The form of an instruction; `numbers` are those of the slots."""
        ins, outs = instr.ins, instr.outs
        key = (instr.op, repr(instr.attrs) if instr.attrs else "", len(ins), *[numbers[s] for s in (*ins, *outs)])
        found = self._known.get(key)
        if found is None:
            read, made = ([slots[s] for s in of] for of in (ins, outs))
            choice = self._choose(instr, made, read)
            native = choice.executor == VM  # which has scratch of its own
            specs = [s.spec for s in made], [s.spec for s in read]
            scratch = () if native else tuple(self._workspace(instr.op, *specs, instr.attrs))
            pairs = [pair for pair in OPS[instr.op].inplace(len(ins), len(outs)) if pair[1] < len(ins)]
            alike = tuple([(out, place) for out, place in pairs if numbers[outs[out]] == numbers[ins[place]]])
            found = self._known[key] = Form(choice, native and may_join(instr), scratch, alike)
        return found


@lru_cache(4096)
def adjacent(layout: Layout) -> bool:
    """True if elements lie row by row without gaps."""
    return is_row_major(layout.shape, layout.strides)
