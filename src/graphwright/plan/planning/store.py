"""Store: slots, buffers and instructions that plans of one program ever needed, numbered as they come.

Invariant: nothing changes or goes away, so that what an earlier plan says by number stays true. One exception: `keep`
moves a buffer to the host before any plan has used it.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable
from operator import attrgetter
from threading import RLock
from typing import Any

import numpy as np

from graphwright.array import Layout, Spec
from graphwright.graph import NodeId
from graphwright.plan.planning.executor import VM, Choice
from graphwright.plan.planning.forms import Form, Forms, Packed
from graphwright.plan.planning.passes import ELSEWHERE, FED, TEMPORARY
from graphwright.plan.planning.row import Lists
from graphwright.plan.table import FOLDED, HOST, INPUT, TEMP, Instr, Slot
from graphwright.program import Value

walking = RLock()
"""Held by who lets a ledger grow, and by who walks its arrays otherwise: none may grow while another looks at it."""
_CODES = {INPUT: FED, TEMP: TEMPORARY}
_MAIN = 1 << 20  # place of a node's instruction behind the copies that it wants


class Store:
    """Columns, one entry a slot, buffer or instruction, as rows to look at and as arrays that native loops walk.

    What instructions of one form have in common is kept once, with the form.

    Args:
        forms: what instructions on operands of the same layouts have in common.

    Attributes:
        slots, buffers, instrs: everything that was ever needed; a buffer is (kind, bytes, key).
        frozen, holders, shapes: of each slot, whether it depends on frozen weights alone, its buffer, and a number for
            its dtype and layout.
        sizes, codes: bytes of each buffer in the arena, and where it lies.
        on_host: buffers that lie on the host, though the plan runs on another device.
        folds: folded buffer -> what makes it, when it is asked for with weights of another version.
        alike, ranks: of each instruction, the number of its form, and its place among those of its node.
        reads, outs, works, pairs: of each instruction, buffers it reads, makes and works in, and (result, operand)
            buffers that may be one.
    """

    def __init__(self, forms: Forms) -> None:
        self.forms = forms
        self.slots: list[Slot] = []
        self.frozen: list[bool] = []
        self.holders, self.shapes = array("i"), array("i")
        self.buffers: list[tuple[str, int, str]] = []
        self.sizes, self.codes = array("q"), array("b")
        self.on_host: set[int] = set()
        self.folds: dict[int, Instr] = {}
        self.instrs: list[Instr] = []
        self.alike = array("i")
        self.ranks: list[int] = []
        self.reads, self.outs, self.works = (
            Lists(self.instrs, attrgetter(name), self.holders) for name in ("ins", "outs", "work")
        )
        self._pairs: list[tuple[int, ...]] = []
        self._kept: dict[Any, Any] = {}
        self.pairs = Lists(self._pairs, lambda pairs: pairs)

    def slot(self, value: Value | None, buffer: int, dtype: Any, layout: Layout, base: int, frozen: bool) -> int:
        """A slot that shows what another one, `base`, lies in."""
        self.slots.append(Slot(index := len(self.slots), value, buffer, dtype, layout, base))
        self.frozen.append(frozen)
        self.holders.append(buffer)
        self.shapes.append(self.forms.number(dtype, layout))
        return index

    def fresh(self, value: Value | None, spec: Spec, kind: str = TEMP, key: str = "", frozen: bool = False) -> int:
        """A slot with a buffer of its own."""
        return self.new(value, self.forms.packed(spec), kind, key, frozen)

    def new(self, value: Value | None, packed: Packed, kind: str = TEMP, key: str = "", frozen: bool = False) -> int:
        """As `fresh`."""
        index, buffer = len(self.slots), len(self.buffers)
        nbytes, room, dtype, layout, shape = packed
        self.buffers.append((kind, nbytes, key))
        self.sizes.append(room)
        self.codes.append(_CODES.get(kind, ELSEWHERE))
        self.slots.append(Slot(index, value, buffer, dtype, layout, index))
        self.frozen.append(frozen)
        self.holders.append(buffer)
        self.shapes.append(shape)
        return index

    def alias(self, slot: int, base: int) -> int:
        """A slot that shows of another one's buffer what `slot` shows of its own."""
        shown, at = self.slots[slot], self.slots[base]
        return self.slot(None, at.buffer, shown.dtype, shown.layout, base, False)

    def keep(self, buffer: int) -> None:
        """Let a buffer lie on the host; one of the arena gets memory of its own there."""
        _, size, key = self.buffers[buffer]
        self.on_host.add(buffer)
        if self.codes[buffer] != ELSEWHERE:
            self.buffers[buffer], self.codes[buffer] = (HOST, size, key), ELSEWHERE

    def fold(self, instr: Instr) -> None:
        """Say what makes folded results; it is no instruction of a run."""
        for slot in instr.outs:
            self.folds[self.holders[slot]] = instr

    def instruction(self, instr: Instr, rank: int = _MAIN, form: Form | None = None) -> int:
        """A new instruction; `rank` orders those of one node."""
        form = self.forms.of(instr, self.slots, self.shapes) if form is None else form
        self.instrs.append(instr)
        self.ranks.append(rank)
        self.alike.append(form.number)
        self._pairs.append(self._may_be_one(instr, form) if form.inplace else ())
        return len(self.instrs) - 1

    def _may_be_one(self, instr: Instr, form: Form) -> tuple[int, ...]:
        """(Result, operand) buffers of which the result may take the operand's memory."""
        holders, buffers, pairs = self.holders, self.buffers, ()
        for out, place in form.inplace:
            a, b = holders[instr.outs[out]], holders[instr.ins[place]]
            if buffers[a][1] == buffers[b][1]:
                pairs += (a, b)
        return pairs

    def choice(self, q: int) -> Choice:
        """What runs an instruction, and why not the VM."""
        return self.forms.all[self.alike[q]].choice

    def native(self, order: np.ndarray) -> np.ndarray:
        """Of instructions, whether the VM runs them."""
        return self._by_form([form.choice.executor == VM for form in self.forms.all], order)

    def joins(self, order: np.ndarray) -> np.ndarray:
        """Of instructions, whether they may be part of a fusion group."""
        return self._by_form([form.joins for form in self.forms.all], order)

    def _by_form(self, facts: list[bool], order: np.ndarray) -> np.ndarray:
        if not any(facts):
            return np.zeros(len(order), np.bool_)
        with walking:  # a plan's tables are decoded by any thread
            return np.array(facts)[np.frombuffer(self.alike, np.int32)[order]]

    # -- what plans come to need again -------------------------------------------------------------------------------
    def saved(self, slot: int, node: NodeId, why: str) -> tuple[int, int]:
        """A slot that holds a copy of another one's value, and the instruction that copies."""

        def make() -> tuple[int, int]:
            at = self.slots[slot]
            target = self.fresh(at.value, at.spec)
            return target, self.instruction(Instr("copy", (slot,), (target,), (), {}, node, why))

        return self._once((slot, node, why), make)

    def committed(self, node: NodeId, new: int, target: int) -> int:
        """The instruction that copies a new value to its state."""
        copy = Instr("copy", (new,), (target,), (), {}, node, "commit")
        return self._once((node, new, target), lambda: self.instruction(copy))

    def packed(self, slot: int, node: NodeId) -> int:
        """A slot that holds, row by row, what a frozen one shows of a node's result; folded."""
        at = self.slots[slot]

        def make() -> int:
            target = self.fresh(None, at.spec, FOLDED, frozen=True)
            self.fold(Instr("copy", (slot,), (target,), (), {}, node, "it is read row by row"))
            return target

        return self._once(("packed", at.base, at.layout), make)

    def shown_as(self, slot: int, base: int) -> int:
        """A slot that shows of another one's buffer what `slot` shows of its own."""
        return self._once(("alias", slot, base), lambda: self.alias(slot, base))

    def reading(self, q: int, ins: tuple[int, ...]) -> int:
        """The instruction that does the same with other operands."""
        return self._once(("reading", q, ins), lambda: self.instruction(self.instrs[q]._replace(ins=ins)))

    def _once(self, key: Any, make: Callable[[], Any]) -> Any:
        """What was made for an earlier plan, so that it is the same number in the next."""
        if key not in self._kept:
            self._kept[key] = make()
        return self._kept[key]
