"""Fusion groups: runs of elementwise instructions on the VM that become one loop over tiles.

Invariant: within a group, whatever is written is read and written again at the same index only, so that tile by tile
gives what instruction by instruction gives. Buffers that live inside one group need no bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from graphwright.array import Layout, bool_, float32
from graphwright.array.layout import is_row_major
from graphwright.array.vm.encode import ENCODERS, View
from graphwright.array.vm.fuse import TILES, layout_of_tiles
from graphwright.ops import OPS
from graphwright.plan.executor import VM, Choice
from graphwright.plan.lower import Rows
from graphwright.plan.table import ARENA, TEMP, Instr

_DTYPES = (float32, bool_)


class Fusion(NamedTuple):
    """What was found.

    Attributes:
        groups: instructions of each group, in order.
        cuts: instruction -> why it does not continue the group before it: not_elementwise, no_form, shape, dtype,
            layout, stateful, alias_hazard (a value would be read at another index than it is written), registers (more
            inner values than tiles) or large (left to ATen).
        tiles: buffer that lives inside one group -> the number of its tile; it needs no bytes.
        last: buffer that a group reads -> the end of the group, up to which it must be kept.
    """

    groups: list[tuple[int, ...]]
    cuts: dict[int, str]
    tiles: dict[int, int]
    last: dict[int, int]


def fuse(rows: Rows, choices: Sequence[Choice]) -> Fusion:
    """Find the groups of instructions in order, by layouts and the times of buffers; changes nothing."""
    found = Fusion([], {}, {}, {})
    if all(c.executor != VM for c in choices):
        return found
    run = _Run(rows)
    for i, instr in enumerate(rows.instrs):
        why = "" if choices[i].executor == VM else _unsuited(rows, instr, choices[i])
        why = why or run.refuses(instr)
        if why:
            run.close(found)
            if run.members or choices[i].executor == VM or OPS[instr.op].traits.elementwise:
                found.cuts[i] = why
            run = _Run(rows)
            if choices[i].executor != VM or run.refuses(instr):
                continue
        run.add(i, instr)
    run.close(found)
    return found


def _unsuited(rows: Rows, instr: Instr, choice: Choice) -> str:
    op = OPS[instr.op].traits
    if not (op.elementwise or op.nary):
        return "not_elementwise"
    if choice.why.startswith("large"):
        return "large"
    if any(rows.specs[s].dtype not in _DTYPES for s in (*instr.ins, *instr.outs)):
        return "dtype"
    return "layout" if instr.op in ENCODERS else "no_form"


class _Run:
    """Instructions that may be one group so far."""

    def __init__(self, rows: Rows) -> None:
        self.rows = rows
        self.members: list[int] = []
        self.shape: tuple[int, ...] | None = None
        self.strides: set[Layout] = set()
        self.seen: dict[int, Layout | None] = {}  # buffer -> the one layout it is looked at in; None: several
        self.written: set[int] = set()

    def refuses(self, instr: Instr) -> str:
        """Why an instruction cannot be the next member, or nothing."""
        rows = self.rows
        traits = OPS[instr.op].traits
        if not (traits.elementwise or traits.nary) or len(instr.outs) != 1:
            return "not_elementwise"
        if traits.update:
            return "stateful"
        out = rows.layouts[instr.outs[0]]
        if self.shape is not None and out.shape != self.shape:
            return "shape"
        target = rows.buffer_of[instr.outs[0]]
        looks = [(rows.buffer_of[s], rows.layouts[s]) for s in instr.ins]
        for buffer, layout in (*looks, (target, out)):
            write = buffer in self.written or buffer == target
            if write and self.seen.get(buffer, layout) != layout:
                return "alias_hazard"
        if any(buffer == target and layout != out for buffer, layout in looks):
            return "alias_hazard"
        fresh = {layout for _, layout in (*looks, (target, out)) if not _plain(layout, out.shape)} - self.strides
        if fresh and layout_of_tiles(out.shape, [*self._views(fresh), *self._views({out})]) is None:
            return "layout"
        return ""

    def _views(self, fresh: set[Layout]) -> list[View]:
        dtype = self.rows.specs[0].dtype
        return [View(dtype, at.shape, at.strides) for at in self.strides | fresh]

    def add(self, i: int, instr: Instr) -> None:
        """Take an instruction that was not refused."""
        rows = self.rows
        out = rows.layouts[instr.outs[0]]
        self.members.append(i)
        self.shape = out.shape
        self.written.add(rows.buffer_of[instr.outs[0]])
        for s in (*instr.ins, *instr.outs):
            buffer, layout = rows.buffer_of[s], rows.layouts[s]
            self.seen[buffer] = layout if self.seen.get(buffer, layout) == layout else None
            if not _plain(layout, out.shape):
                self.strides.add(layout)

    def close(self, found: Fusion) -> None:
        """Make a group of the members, or several where one would hold too many tiles."""
        members = self.members
        while len(members) > 1:
            count = self._held(members)
            if count < len(members):
                found.cuts[members[count]] = "registers"
            if count > 1:
                found.groups.append(tuple(members[:count]))
                self._settle(members[:count], found)
            members = members[count:]

    def _inner(self, members: Sequence[int], b: int) -> bool:
        buffer = self.rows.buffers[b]
        return buffer.kind == TEMP and members[0] <= buffer.first and buffer.last <= members[-1]

    def _held(self, members: Sequence[int]) -> int:
        """How many members may be one group before more than `TILES` inner values are alive."""
        rows, held = self.rows, set()
        for n, i in enumerate(members):
            b = rows.buffer_of[rows.instrs[i].outs[0]]
            if self._inner(members, b):
                held.add(b)
            if len(held) > TILES:
                return n
            held -= {x for x in held if rows.buffers[x].last == i}
        return len(members)

    def _settle(self, members: Sequence[int], found: Fusion) -> None:
        """Give inner buffers a tile in place of bytes; keep what is read to the end of the group."""
        rows = self.rows
        start, stop = members[0], members[-1]
        free = list(range(TILES - 1, -1, -1))
        dying: dict[int, list[int]] = {}
        for i in members:
            for b in [rows.buffer_of[s] for s in (*rows.instrs[i].outs, *rows.instrs[i].ins)]:
                buffer = rows.buffers[b]
                if self._inner(members, b):
                    if b not in found.tiles:
                        found.tiles[b] = free.pop()
                        dying.setdefault(buffer.last, []).append(found.tiles[b])
                elif buffer.kind in ARENA and start <= buffer.last < stop:  # no later result may take its place
                    found.last[b] = stop
            free += dying.pop(i, ())


def _plain(layout: Layout, shape: tuple[int, ...]) -> bool:
    """True for one value for all elements, and for elements that lie as those of the space do."""
    return layout.shape == shape and is_row_major(shape, layout.strides) if layout.shape else True
