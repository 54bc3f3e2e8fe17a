"""Instructions of a plan as rows of the VM, at the addresses that a workspace gave their slots."""

from __future__ import annotations

from collections.abc import Callable, Sequence, Set
from typing import Any

from graphwright.array import CPU, NDArray, backend
from graphwright.array.vm.encode import View, encode
from graphwright.array.vm.encode.fuse import Inner, Member, encode_group
from graphwright.array.vm.encode.share import Cut, cut
from graphwright.plan.plan import Plan
from graphwright.plan.table import Instr

_NOTHING = cut(())

ViewOf = Callable[[int], NDArray]


class Code:
    """Rows by instruction and by fusion group, kept from plan to plan of one ledger."""

    def __init__(self) -> None:
        self._rows: dict[int, Cut] = {}
        self._groups: dict[Any, Cut] = {}

    def between(self, plan: Plan, start: int, stop: int, at: ViewOf) -> list[Cut]:
        """Rows of a plan's instructions from one place to another; those of a whole group with its first.

        Args:
            at: slot -> where it lies.
        """
        arranged, known = plan.arranged, self._rows
        numbers = arranged.order[start:stop].tolist()
        code = [_NOTHING] * len(numbers)
        grouped: set[int] = set()
        for group in plan.groups:
            if start <= group[0] and group[-1] < stop:
                code[group[0] - start] = self._of_group(plan, numbers[group[0] - start : group[-1] + 1 - start], at)
                grouped.update(range(group[0] - start, group[-1] + 1 - start))
        for i, q in enumerate(numbers):
            if i not in grouped:
                if q not in known:
                    known[q] = _rows(arranged.ledger.instrs[q], at)
                code[i] = known[q]
        return code

    def forget(self, instrs: Set[int]) -> None:
        """Instructions that went, or touch what lies elsewhere now."""
        for q in instrs & self._rows.keys():
            del self._rows[q]
        self._groups = {key: rows for key, rows in self._groups.items() if instrs.isdisjoint(key[0])}

    def clear(self) -> None:
        """Forget all."""
        self._rows.clear()
        self._groups.clear()

    def _of_group(self, plan: Plan, numbers: Sequence[int], at: ViewOf) -> Cut:
        ledger, tiles, place = plan.arranged.ledger, plan.arranged.tiles, plan.arranged.place
        instrs = [ledger.instrs[q] for q in numbers]
        inner = {s: tiles.get(place(ledger.slots[s].buffer)) for i in instrs for s in (*i.outs, *i.ins)}
        key = (tuple(numbers), tuple(inner.values()))
        if key in self._groups:
            return self._groups[key]

        def operand(slot: int) -> View | Inner:
            tile = inner[slot]
            return _addressed(at(slot)) if tile is None else Inner(tile)

        members = []
        for instr in instrs:
            dtypes = [ledger.slots[s].dtype for s in (*instr.outs, *instr.ins)]
            outs, ins = ([operand(s) for s in slots] for slots in (instr.outs, instr.ins))
            members.append(Member(instr.op, outs, ins, instr.attrs, dtypes))
        rows = encode_group(ledger.slots[instrs[0].outs[0]].layout.shape, members)
        assert rows is not None, "the plan made a group where there are tiles"
        self._groups[key] = found = cut(rows)
        return found


def _addressed(array: NDArray) -> View:
    return View(array.dtype, array.shape, array.strides, backend(CPU).address(array))


def _rows(instr: Instr, at: ViewOf) -> Cut:
    outs, ins, work = ([_addressed(at(s)) for s in slots] for slots in (instr.outs, instr.ins, instr.work))
    rows = encode(instr.op, outs, ins, instr.attrs, work)
    assert rows is not None, "the plan chose the VM where it has a form"
    return cut(rows)
