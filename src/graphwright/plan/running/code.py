"""Instructions of a plan as rows of the VM, at the addresses that a workspace gave their slots."""

from __future__ import annotations

from collections.abc import Callable, Sequence, Set
from itertools import repeat

from graphwright.array import CPU, NDArray, backend
from graphwright.array.vm.encode import View, encode
from graphwright.array.vm.encode.fuse import Inner, Member, encode_group
from graphwright.array.vm.encode.share import Cut, cut
from graphwright.plan.plan import Plan
from graphwright.plan.planning.arranged import Arranged
from graphwright.plan.planning.fusion import Stretch
from graphwright.plan.table import Instr

_NOTHING, _UNKNOWN = cut(()), cut(())

ViewOf = Callable[[int], NDArray]


class Code:
    """Rows by instruction and by stretch of fusion groups, kept from plan to plan of one ledger."""

    def __init__(self) -> None:
        self._rows: dict[int, Cut] = {}
        self._parts: dict[Stretch, dict[tuple[int, int], list[Cut]]] = {}
        self._within: dict[int, Stretch] = {}

    def between(self, plan: Plan, start: int, stop: int, at: ViewOf) -> list[Cut]:
        """Rows of a plan's instructions from one place to another; those of a whole group with its first.

        Args:
            at: slot -> where it lies.
        """
        arranged = plan.arranged
        numbers = arranged.order[start:stop].tolist()
        code = list(map(self._rows.get, numbers, repeat(_UNKNOWN)))
        for begin, stretch in arranged.fusion.between(start, stop):
            end, known = begin + len(stretch.instrs), self._parts_of(stretch)
            part = (max(start - begin, 0), min(stop, end) - begin)
            if part not in known:
                known[part] = self._of_part(arranged, stretch, *part, at)
            code[max(begin - start, 0) : end - start] = known[part]
        return self._filled(arranged, numbers, code, at)

    def forget(self, instrs: Set[int]) -> None:
        """Instructions that went, or touch what lies elsewhere now."""
        for q in instrs & self._rows.keys():
            del self._rows[q]
        for q in instrs & self._within.keys():
            self._parts.pop(self._within.pop(q), None)

    def clear(self) -> None:
        """Forget all."""
        self._rows.clear()
        self._parts.clear()
        self._within.clear()

    def _parts_of(self, stretch: Stretch) -> dict[tuple[int, int], list[Cut]]:
        """What is known of a stretch; another one that had some of its instructions is of no plan any more."""
        if stretch not in self._parts:
            for q in stretch.instrs:
                if q in self._within:
                    self._parts.pop(self._within[q], None)
                self._within[q] = stretch
            self._parts[stretch] = {}
        return self._parts[stretch]

    def _of_part(self, arranged: Arranged, stretch: Stretch, start: int, stop: int, at: ViewOf) -> list[Cut]:
        """Rows of some instructions of a stretch; those of a group of which not all are there, by themselves."""
        numbers = stretch.instrs[start:stop]
        code = list(map(self._rows.get, numbers, repeat(_UNKNOWN)))
        for group in stretch.groups:
            first, last = group[0], group[-1] + 1
            if start <= first and last <= stop:
                rows = _group(arranged, stretch, first, last, at)
                code[first - start : last - start] = [rows, *[_NOTHING] * (last - first - 1)]
        return self._filled(arranged, numbers, code, at)

    def _filled(self, arranged: Arranged, numbers: Sequence[int], code: Sequence[Cut], at: ViewOf) -> list[Cut]:
        """Rows of instructions, with those made that are not there."""
        made = list(code)
        for i in [i for i, rows in enumerate(code) if rows is _UNKNOWN] if _UNKNOWN in code else ():
            made[i] = self._rows[numbers[i]] = _rows(arranged.ledger.instrs[numbers[i]], at)
        return made


def _group(arranged: Arranged, stretch: Stretch, first: int, last: int, at: ViewOf) -> Cut:
    ledger = arranged.ledger

    def operand(slot: int) -> View | Inner:
        tile = stretch.tiles.get(arranged.place(ledger.slots[slot].buffer))
        return _addressed(at(slot)) if tile is None else Inner(tile)

    members, instrs = [], [ledger.instrs[q] for q in stretch.instrs[first:last]]
    for instr in instrs:
        dtypes = [ledger.slots[s].dtype for s in (*instr.outs, *instr.ins)]
        outs, ins = ([operand(s) for s in slots] for slots in (instr.outs, instr.ins))
        members.append(Member(instr.op, outs, ins, instr.attrs, dtypes))
    rows = encode_group(ledger.slots[instrs[0].outs[0]].layout.shape, members)
    assert rows is not None, "the plan made a group where there are tiles"
    return cut(rows)


def _addressed(array: NDArray) -> View:
    return View(array.dtype, array.shape, array.strides, backend(CPU).address(array))


def _rows(instr: Instr, at: ViewOf) -> Cut:
    outs, ins, work = ([_addressed(at(s)) for s in slots] for slots in (instr.outs, instr.ins, instr.work))
    rows = encode(instr.op, outs, ins, instr.attrs, work)
    assert rows is not None, "the plan chose the VM where it has a form"
    return cut(rows)
