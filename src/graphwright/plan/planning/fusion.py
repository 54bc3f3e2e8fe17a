"""Fusion groups: consecutive elementwise instructions that become one loop over tiles (spans of elements).

What may join is decided by the rules of the plan's executor (`fusers.py`): the VM, or generated kernels of a device.

Invariant: within a group, each element of a written value is read and overwritten at its own index only, so running
tile by tile equals running instruction by instruction. A buffer that is used inside one group only needs no bytes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from graphwright.array import Layout
from graphwright.array.layout import is_row_major
from graphwright.array.triton import fused
from graphwright.array.vm.encode.operands import View
from graphwright.ops import OPS
from graphwright.plan.planning.passes import TEMPORARY
from graphwright.plan.table import Instr

if TYPE_CHECKING:
    from graphwright.plan.planning.plan_builder import PlanBuilder
    from graphwright.plan.planning.planner import BufferLayout


@dataclass(frozen=True, eq=False, slots=True)
class FusionRegion:
    """A maximal run of fusible instructions, and its fusion groups, each of which runs as one loop over tiles.

    Attributes:
        instrs: ids of the instructions. A position, below, is an index in this tuple.
        groups: per group the positions of its instructions.
        tiles: buffer that is used inside one group only -> number of the scratch tile that holds its values instead. It
            is 0 for scratch memory of a kernel that the group replaces.
        ends: buffer that is last used inside a group, but has no tile -> position of the group's last instruction,
            until which its bytes are needed.
        cuts: position -> why an instruction does not continue the group before it: not_elementwise, no_form (the
            executor lacks the op), shape, dtype, layout, stateful, alias_hazard (a value would be read at an index
            other than the one written), registers (the group needs more tiles than there are) or large (ATen is
            faster).
    """

    instrs: tuple[int, ...]
    groups: list[tuple[int, ...]] = field(default_factory=list)
    tiles: dict[int, int] = field(default_factory=dict)
    ends: dict[int, int] = field(default_factory=dict)
    cuts: dict[int, str] = field(default_factory=dict)

    def rows(self) -> list[tuple[int, int, int]]:
        """Return the rows (buffer, tile, -1) of `tiles`, followed by the rows (buffer, -1, end) of `ends`."""
        return [*((b, tile, -1) for b, tile in self.tiles.items()), *((b, -1, end) for b, end in self.ends.items())]


class Fusion(NamedTuple):
    """The fusion regions of a plan; a region that an edit does not change is the same object in the next plan.

    Attributes:
        starts: index of the first instruction of each region.
        regions: the regions.
        tiles: per buffer the number of its scratch tile, or -1.
        keys: (start index of each region's key, all keys in one array); the next plan finds its unchanged regions by
            equal keys.
        rows: (start index of each region's rows, all rows as an array [n, 3]); rows as `FusionRegion.rows` returns.
    """

    starts: np.ndarray
    regions: list[FusionRegion]
    tiles: np.ndarray
    keys: tuple[np.ndarray, np.ndarray]
    rows: tuple[np.ndarray, np.ndarray]

    def between(self, start: int, stop: int) -> list[tuple[int, FusionRegion]]:
        """Return (index of its first instruction, region) for each region that overlaps the span `start..stop - 1`."""
        first = max(int(np.searchsorted(self.starts, start, "right")) - 1, 0)
        end = int(np.searchsorted(self.starts, stop))
        placed = zip(self.starts[first:end].tolist(), self.regions[first:end], strict=True)
        return [(begin, region) for begin, region in placed if start < begin + len(region.instrs)]


def _listed(rows: Sequence[Sequence[tuple[int, int, int]]]) -> tuple[np.ndarray, np.ndarray]:
    """Concatenate lists of rows, one list per region; return (start index of each list, array [n, 3] of all rows)."""
    at = np.array([0, *accumulate(map(len, rows))], np.int64)
    return at, np.array([row for some in rows for row in some], np.int32).reshape(-1, 3)


_NO_TIMES = np.zeros(0, np.int64)
NO_FUSION = Fusion(_NO_TIMES, [], np.zeros(0, np.int32), (np.zeros(1, np.int64), np.zeros(0, np.int32)), _listed([]))


class InstructionViews:
    """The arrays of a plan as memory views, which are faster than numpy arrays for reading single elements."""

    def __init__(self, builder: PlanBuilder, numbers: tuple[np.ndarray, ...]) -> None:
        self.builder, self.slots, self.holders = builder, builder.tables.slots, builder.tables.holders
        rules = builder.tables.lowerings.fuser
        assert rules is not None, "plans whose executor fuses nothing have no fusible instruction"
        self.fuser = rules
        views: list[Any] = [column.data for column in numbers]
        self.order, self.home, self.first, self.last, self.own = views

    def instr(self, i: int) -> Instr:
        """Return the `i`-th instruction in execution order."""
        return self.builder.tables.instrs[self.order[i]]

    def refuses(self, i: int) -> str:
        """Return why the `i`-th instruction can join no group, or ""."""
        instr, choice = self.instr(i), self.builder.tables.choice(self.order[i])
        outs, ins = ([self.slots[s].spec for s in some] for some in (instr.outs, instr.ins))
        return self.fuser.refuses(instr, outs, ins, choice)

    def buffer(self, slot: int) -> int:
        """Return the buffer whose memory a slot uses."""
        return self.home[self.holders[slot]]

    def inner(self, b: int, start: int, stop: int) -> bool:
        """Return True if `b` is a temporary buffer with own bytes that only instructions `start..stop` (incl.) need."""
        temporary = self.own[b] and self.builder.tables.codes[b] == TEMPORARY
        return temporary and start <= self.first[b] and self.last[b] <= stop


def fuse(builder: PlanBuilder, numbers: tuple[np.ndarray, ...], run: Any) -> Fusion:
    """Find the fusion groups of a plan, and update the lifetimes of their buffers in `last` and `own`.

    The builder keeps the groups of each region for the next plan.

    Args:
        numbers: (order, home, first, last, own): the ids of the instructions in execution order; then per buffer the
            buffer whose memory it uses, the first and last instruction that needs it, and whether it has own bytes.
        run: the functions of module `passes`, compiled or as Python.
    """
    order, home, first, last, own = numbers
    joins = builder.tables.fusible(order)
    if not joins.any():
        return NO_FUSION._replace(tiles=np.full(len(last), -1, np.int32))
    before = builder.fusion or NO_FUSION
    edges = np.flatnonzero(np.diff(np.concatenate(([0], joins.view(np.int8), [0])))).reshape(-1, 2)
    spans = edges[edges[:, 1] - edges[:, 0] > 1]
    reads, outs = builder.tables.reads.arrays(), builder.tables.outs.arrays()
    codes = np.frombuffer(builder.tables.codes, np.int8)
    at, keys, known = run.region_keys(order, spans, *reads, *outs, codes, home, first, last, own, *before.keys)
    regions = list(map([*before.regions, FusionRegion(())].__getitem__, known.tolist()))
    fresh = np.flatnonzero(known < 0).tolist()
    if fresh:
        rows = InstructionViews(builder, numbers)
        for s in fresh:
            regions[s] = _found_in(rows, *spans[s].tolist())
    starts, made = spans[:, 0].copy(), _listed([regions[s].rows() for s in fresh])
    begins, updated, tiles = run.update_lifetimes(starts, known, *before.rows, *made, last, own)
    builder.fusion = Fusion(starts, regions, tiles, (at, keys), (begins, updated))
    return builder.fusion


def _found_in(rows: InstructionViews, start: int, stop: int) -> FusionRegion:
    """Return the instructions `start..stop - 1` as one region with its fusion groups."""
    found = FusionRegion(tuple(rows.order[start:stop]))
    run = _GroupBuilder(rows, found, start)
    for i in range(start, stop):
        instr = rows.instr(i)
        alone = rows.refuses(i)
        why = alone or run.refuses(instr)
        if why:
            run.close()
            if run.members or not alone or OPS[instr.op].traits.elementwise:
                found.cuts[i - start] = why
            run = _GroupBuilder(rows, found, start)
            if alone or run.refuses(instr):
                continue
        run.add(i, instr)
    run.close()
    return found


def cuts(builder: PlanBuilder, numbers: tuple[np.ndarray, ...]) -> dict[int, str]:
    """Map the index of each instruction that cannot join the fusion group before it to the reason.

    The reasons are the words of `FusionRegion.cuts`; `numbers` is (order, home, first, last, own) as in `fuse`.
    """
    if not builder.tables.fusible(numbers[0]).any():
        return {}
    return _found_in(InstructionViews(builder, numbers), 0, len(numbers[0])).cuts


class _GroupBuilder:
    def __init__(self, rows: InstructionViews, found: FusionRegion, start: int) -> None:
        self.rows, self.found, self.start = rows, found, start
        self.members: list[int] = []
        self.shape: tuple[int, ...] | None = None
        self.by_row = False
        self.strides: set[Layout] = set()
        self.seen: dict[int, Layout | None] = {}  # buffer -> the one layout of its views; None for several
        self.written: set[int] = set()

    def refuses(self, instr: Instr) -> str:
        """Return the reason why an instruction cannot join the group, a word of `FusionRegion.cuts`, or ""."""
        rows = self.rows
        out = rows.slots[instr.outs[0]].layout
        if self.shape is not None and out.shape != self.shape:
            return "shape"
        target = rows.buffer(instr.outs[0])
        looks = [(rows.buffer(s), rows.slots[s].layout) for s in instr.ins]
        for buffer, layout in (*looks, (target, out)):
            write = buffer in self.written or buffer == target
            if write and self.seen.get(buffer, layout) != layout:
                return "alias_hazard"
        if any(buffer == target and layout != out for buffer, layout in looks):
            return "alias_hazard"
        fresh = {layout for _, layout in (*looks, (target, out)) if not _plain(layout, out.shape)} - self.strides
        by_row = rows.fuser.by_row(instr.op)
        again = by_row and not self.by_row  # tiles were independent of rows so far
        layouts = [*(self.strides | fresh | {out})]
        if (fresh or again) and not rows.fuser.walks(out.shape, layouts, by_row or self.by_row):
            return "layout"
        return ""

    def add(self, i: int, instr: Instr) -> None:
        """Add the `i`-th instruction of the plan to the group; `refuses` must have returned "" for it."""
        rows = self.rows
        out = rows.slots[instr.outs[0]].layout
        self.members.append(i)
        self.shape, self.by_row = out.shape, self.by_row or rows.fuser.by_row(instr.op)
        self.written.add(rows.buffer(instr.outs[0]))
        for s in (*instr.ins, *instr.outs):
            buffer, layout = rows.buffer(s), rows.slots[s].layout
            self.seen[buffer] = layout if self.seen.get(buffer, layout) == layout else None
            if not _plain(layout, out.shape):
                self.strides.add(layout)

    def close(self) -> None:
        """Make the added instructions one group, or several if one group would need more tiles than there are."""
        members = self.members
        while len(members) > 1:
            count = self._held(members)
            if count < len(members):
                self.found.cuts[members[count] - self.start] = "registers"
            if count > 1:
                self.found.groups.append(tuple([i - self.start for i in members[:count]]))
                self._assign_tiles(members[:count])
            members = members[count:]

    def _held(self, members: Sequence[int]) -> int:
        """Return how many of `members` (indices of instructions) fit one group, where each live buffer takes a tile."""
        rows, held, most = self.rows, set(), self._tiles()
        for n, i in enumerate(members):
            b = rows.buffer(rows.instr(i).outs[0])
            if rows.inner(b, members[0], members[-1]):
                held.add(b)
            if len(held) > most:
                return n
            held -= {x for x in held if rows.last[x] == i}
        return len(members)

    def _assign_tiles(self, members: Sequence[int]) -> None:
        """Assign a tile to each buffer that only these instructions use; keep their other buffers live to the end."""
        rows, tiles = self.rows, self.found.tiles
        start, stop = members[0], members[-1]
        free = list(range(self._tiles() - 1, -1, -1))
        dying: dict[int, list[int]] = {}
        for i in members:
            tiles |= dict.fromkeys(map(rows.buffer, rows.instr(i).work), 0)  # a fused op needs no scratch memory
            for b in self._touched(i):
                if b not in tiles and rows.inner(b, start, stop):
                    tiles[b] = free.pop()
                    dying.setdefault(int(rows.last[b]), []).append(tiles[b])
            free += dying.pop(i, ())
        for i in members:
            for b in self._touched(i):
                if b not in tiles and rows.own[b] and start <= rows.last[b] < stop:  # no later result replaces it
                    self.found.ends[b] = stop - self.start

    def _tiles(self) -> int:
        return self.rows.fuser.most(self.shape or (), self.by_row)

    def _touched(self, i: int) -> Iterator[int]:
        instr = self.rows.instr(i)
        return (self.rows.buffer(s) for s in (*instr.outs, *instr.ins))


def kernel_of(layout: BufferLayout, region: FusionRegion, group: Sequence[int]) -> tuple[fused.Kernel, list[int]]:
    """Return the generated kernel of a group of a region, and the slots whose addresses are its first arguments."""
    tables, slots = layout.tables, dict[fused.Operand, int]()

    def operand(slot: int) -> fused.Operand:
        at, home = tables.slots[slot], layout.home_of(tables.holders[slot])
        view, tile = View(at.dtype, at.layout.shape, at.layout.strides), region.tiles.get(home)
        if tile is not None:
            return fused.Operand(tile, view, inner=True)
        made = fused.Operand((home, at.dtype, at.layout), view)
        slots.setdefault(made, slot)
        return made

    instrs = [tables.instrs[region.instrs[i]] for i in group]
    members = [fused.Member(i.op, i.attrs, operand(i.outs[0]), [operand(s) for s in i.ins]) for i in instrs]
    made = fused.kernel(tables.slots[instrs[0].outs[0]].layout.shape, members)
    return made, [slots[o] for o in made.memory]


def _plain(layout: Layout, shape: tuple[int, ...]) -> bool:
    """Return True if the layout is that of a scalar, or is row-major and has this shape."""
    return layout.shape == shape and is_row_major(shape, layout.strides) if layout.shape else True
