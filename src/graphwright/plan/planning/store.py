"""Store: slots, buffers and instructions that plans of one program ever needed, numbered as they come.

Invariant: nothing changes or goes away, so that what an earlier plan says by number stays true. One exception: `keep`
moves a buffer to the host before any plan has used it.
"""

from __future__ import annotations

from array import array
from typing import Any

from graphwright.array import Layout, Spec
from graphwright.plan.planning.executor import VM, Choice
from graphwright.plan.planning.forms import Form, Forms
from graphwright.plan.planning.row import Lists
from graphwright.plan.table import HOST, INPUT, TEMP, Instr, Slot
from graphwright.program import Value

FED, TEMPORARY, ELSEWHERE = 0, 1, 2
"""Inputs, other buffers of the arena, and buffers that lie outside of it."""
_CODES = {INPUT: FED, TEMP: TEMPORARY}
_MAIN = 1 << 20  # place of a node's instruction behind the copies that it wants


class Store:
    """Columns, one entry a slot, buffer or instruction, as rows to look at and as arrays that native loops walk.

    Args:
        forms: what instructions on operands of the same layouts have in common.

    Attributes:
        slots, buffers, instrs, choices: everything that was ever needed; a buffer is (kind, bytes, key).
        frozen, holders, shapes: of each slot, whether it depends on frozen weights alone, its buffer, and a number for
            its dtype and layout.
        sizes, codes: bytes of each buffer in the arena, and where it lies.
        on_host: buffers that lie on the host, though the plan runs on another device.
        native, joins, ranks: of each instruction, whether the VM runs it, whether it may be part of a fusion group, and
            its place among those of its node.
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
        self.instrs: list[Instr] = []
        self.choices: list[Choice] = []
        self.native, self.joins = array("b"), array("b")
        self.ranks: list[int] = []
        self.reads, self.outs, self.works = Lists(self.holders), Lists(self.holders), Lists(self.holders)
        self.pairs = Lists()

    def slot(self, value: Value | None, buffer: int, dtype: Any, layout: Layout, base: int, frozen: bool) -> int:
        """A slot that shows what another one, `base`, lies in."""
        return self._enter(value, buffer, dtype, layout, base, frozen, self.forms.number(dtype, layout))

    def _enter(
        self, value: Value | None, buffer: int, dtype: Any, layout: Layout, base: int, frozen: bool, shape: int
    ) -> int:
        index = len(self.slots)
        self.slots.append(Slot(index, value, buffer, dtype, layout, index if base < 0 else base))
        self.frozen.append(frozen)
        self.holders.append(buffer)
        self.shapes.append(shape)
        return index

    def fresh(self, value: Value | None, spec: Spec, kind: str = TEMP, key: str = "", frozen: bool = False) -> int:
        """A slot with a buffer of its own."""
        size, room, layout, shape = self.forms.packed(spec)
        buffer = len(self.buffers)
        self.buffers.append((kind, size, key))
        self.sizes.append(room)
        self.codes.append(_CODES.get(kind, ELSEWHERE))
        return self._enter(value, buffer, spec.dtype, layout, -1, frozen, shape)

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

    def instruction(self, instr: Instr, rank: int = _MAIN, form: Form | None = None) -> int:
        """A new instruction; `rank` orders those of one node."""
        form = self.forms.of(instr, self.slots, self.shapes) if form is None else form
        self.instrs.append(instr)
        self.ranks.append(rank)
        self.choices.append(form.choice)
        self.native.append(form.choice.executor == VM)
        self.joins.append(form.joins)
        self.reads.add(instr.ins)
        self.outs.add(instr.outs)
        self.works.add(instr.work)
        holders, buffers, pairs = self.holders, self.buffers, []
        for out, place in form.inplace:
            a, b = holders[instr.outs[out]], holders[instr.ins[place]]
            if buffers[a][1] == buffers[b][1]:
                pairs += (a, b)
        self.pairs.add(pairs)
        return len(self.instrs) - 1
