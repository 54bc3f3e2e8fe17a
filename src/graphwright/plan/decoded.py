"""A plan's tables as rows: instructions, slots, buffers and their places, made of its numbers when first asked for."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np

from graphwright.array import CPU, Device, NDArray, Spec
from graphwright.graph import NodeId
from graphwright.plan.errors import place_of
from graphwright.plan.planning.arranged import Arranged, Patched
from graphwright.plan.planning.executor import ATEN, VM, Choice
from graphwright.plan.planning.fusion import cuts
from graphwright.plan.planning.layout import aligned
from graphwright.plan.planning.row import Row
from graphwright.plan.table import (
    ARENA,
    CONST,
    HOST,
    INPUT,
    PARAM,
    TEMP,
    TILE,
    UNUSED,
    Buffer,
    Firing,
    Instr,
    Placed,
    Segment,
    Slot,
)
from graphwright.program import Program, Value


@dataclass(frozen=True)
class Options:
    """How a plan was asked for.

    Attributes:
        freeze: weights will not change under the plan's feet: conversions of them are made once per weight version.
        rewrites: "exact" (the same bits with less work), "fast" (also what rounds otherwise, each use with its bound in
            `plan.rewrites`) or "none" (one row per node).
        layout: "reuse" (dead memory is used again) or "naive" (every buffer its own place, to compare with).
        watch: names of nodes whose values are kept readable.
        executor: "aten" (the bits of a run), "vm" (all that it has a form for), "auto" (what is small enough), or on a
            device with graphs "capture" (which "auto" is there).
        device: where it runs.
        remat: most bytes of the arena: values are computed again instead of kept until it fits.
        poison: its workspaces fill dead memory with NaN, see `Workspace`.
    """

    freeze: bool = False
    rewrites: str = "exact"
    layout: str = "reuse"
    watch: tuple[str, ...] = ()
    executor: str = "aten"
    device: Device = CPU
    remat: int | None = None
    poison: bool = False


@dataclass(frozen=True, eq=False)
class Decoded:
    """What was planned, and the rows that say it; see `graphwright.plan.table` for what they are.

    Slots and buffers are numbered as the ledger of the program came to need them: some may be of nodes that are gone.

    Attributes:
        program, version: what the plan is of. It runs as planned also after the program was edited.
        inputs: specs of the inputs, all sizes known.
        outputs, watched: name -> slot.
        commits: path of a write -> why its value is copied at the end instead of updated in place.
        commit_start: first instruction of the commit segment, which writes carried state.
        early: instruction -> keys of the states it updates before the commit segment.
        guards: constants whose values a rewrite relied on, with their versions.
        options: what was asked for.
        arranged: the tables as numbers.
        patched: whether it was made anew or from the plan before, and why.
        ms: milliseconds that planning took.
        again: paths of nodes whose results are computed again to fit `Options.remat`; the program is a derived one.
    """

    program: Program
    version: int
    inputs: Mapping[str, Spec]
    outputs: Mapping[str, int]
    watched: Mapping[str, int]
    commits: Mapping[str, str]
    commit_start: int
    early: Mapping[int, tuple[str, ...]]
    guards: Mapping[str, tuple[NDArray, int]]
    options: Options
    arranged: Arranged
    patched: Patched
    ms: float
    again: tuple[str, ...] = ()
    _lazy: dict[str, Any] = field(default_factory=dict, repr=False)

    @property
    def instrs(self) -> tuple[Instr, ...]:
        """Instructions in the order in which they run."""
        return self._once("instrs", lambda: tuple(map(self.arranged.ledger.instrs.__getitem__, self._order())))

    @property
    def choices(self) -> tuple[Choice, ...]:
        """What runs each instruction, and why not the VM."""
        return self._once("choices", lambda: tuple(map(self.arranged.ledger.choice, self._order())))

    @property
    def slots(self) -> tuple[Slot, ...]:
        """Slots, each with the buffer that it lies in."""
        return self._once("slots", self._slots)

    @property
    def buffers(self) -> tuple[Buffer, ...]:
        """Buffers; of kind "unused" if nothing of the plan touches one."""
        return self._once("buffers", self._buffers)

    @property
    def folds(self) -> Mapping[int, Instr]:
        """Buffer computed once from frozen weights -> what makes it, of those that the plan reads."""
        return self.arranged.folds

    @property
    def pruned(self) -> tuple[str, ...]:
        """Paths of nodes that nothing needs, in order."""
        return self._once("pruned", lambda: tuple(r.path for r in self._rows() if r.node not in self._needed()))

    @property
    def rewrites(self) -> tuple[Firing, ...]:
        """Uses of rewrites, in order."""
        return self._once("rewrites", self._rewrites)

    @property
    def groups(self) -> tuple[tuple[int, ...], ...]:
        """Runs of elementwise instructions that the VM runs as one loop over tiles."""
        return self._once("groups", self.arranged.fusion.groups)

    @property
    def cuts(self) -> Mapping[int, str]:
        """Elementwise instruction -> why it does not continue the group before it."""
        return self._once("cuts", self._cuts)

    def _cuts(self) -> dict[int, str]:
        at = self.arranged
        own = at.home == np.arange(len(at.home))
        return cuts(at.ledger, at.order, at.home, at.first, at.last, own)

    @property
    def arena_bytes(self) -> int:
        """Size of the arena."""
        return self.arranged.total

    def _once(self, name: str, make: Callable[[], Any]) -> Any:
        if name not in self._lazy:
            self._lazy[name] = make()
        return self._lazy[name]

    def _order(self) -> list[int]:
        return self.arranged.order.tolist()

    def _slots(self) -> tuple[Slot, ...]:
        arranged = self.arranged
        count, home = len(arranged.home), arranged.home
        stay = (home == np.arange(count)).tolist()
        found = arranged.ledger.slots[: arranged.slots]
        return tuple([s if stay[s.buffer] else s._replace(buffer=arranged.place(s.buffer)) for s in found])

    def _buffers(self) -> tuple[Buffer, ...]:
        at = self.arranged
        columns = (column.tolist() for column in (at.home, at.first, at.last, at.offsets, at.used, at.fusion.tiles))
        made = []
        for b, ((kind, size, key), home, first, last, offset, used, tile) in enumerate(
            zip(at.ledger.buffers, *columns, strict=False)
        ):
            here = "moved" if home != b else UNUSED if not used else kind if tile < 0 else TILE
            there = b in at.ledger.on_host
            made.append(Buffer(b, here, size, key, first, last, offset if tile < 0 else tile, there))
        return tuple(made)

    def _rows(self) -> list[Row]:
        key, rows = self.program.order_labels.key, self.arranged.rows
        graph = self.program.graph
        return sorted(rows.values(), key=lambda r: (0, *key(r.node)) if r.node in graph else (1, 0, r.node.index))

    def shown(self) -> list[Slot]:
        """Slots of the results of nodes that the plan needs, in order."""
        slots, buffers, needed = self.slots, self.buffers, self._needed()
        found = [slots[s] for row in self._rows() if row.node in needed for s in row.own]
        return [s for s in found if s.value is not None and buffers[s.buffer].kind != UNUSED]

    def path(self, node: NodeId) -> str:
        """The name that a node had when the plan was made."""
        return self.arranged.rows[node].path

    def _needed(self) -> set[NodeId]:
        """Nodes that an output, a watch or a write reads over any path."""
        return self._once("needed", self._reached)

    def _reached(self) -> set[NodeId]:
        rows, stack = self.arranged.rows, list(self.arranged.roots)
        seen = set(stack)
        while stack:
            for source in rows[stack.pop()].sources:
                if source.node not in seen:
                    seen.add(source.node)
                    stack.append(source.node)
        return seen

    def folding(self) -> list[Instr]:
        """What makes the folded values, and what these are made of, each after what it reads."""
        return self._once("folding", self._folding)

    def _folding(self) -> list[Instr]:
        known, holders = self.arranged.ledger.folds, self.arranged.ledger.holders
        stack, found = list(self.folds.values()), {}
        while stack:
            instr = stack.pop()
            if instr.outs[0] not in found:
                found[instr.outs[0]] = instr
                stack += [known[b] for s in instr.ins if (b := holders[s]) in known]
        return [found[s] for s in sorted(found)]  # slots are numbered as they come

    def _rewrites(self) -> tuple[Firing, ...]:
        rows, needed = self.arranged.rows, self._needed()

        def name(node: NodeId | None) -> str:
            return rows[node].path if node is not None and node in rows else "constant"

        uses = [use for row in self._rows() if row.node in needed for use in row.uses]
        found = [Firing(u.rule, name(u.node), name(u.into), u.bound) for u in uses]
        return (*found, *(Firing("computed again", path, path) for path in self.again))

    @property
    def instructions(self) -> tuple[Instr, ...]:
        """The rows in the order in which they run."""
        return self.instrs

    @property
    def layout(self) -> tuple[Placed, ...]:
        """The arena: where each buffer lies, by offset."""
        found = [
            Placed(b.index, b.offset, b.nbytes, b.first, b.last)
            for b in self.buffers
            if b.kind in ARENA and b.last >= 0
        ]
        return tuple(sorted(found, key=lambda p: (p.offset, p.first)))

    @property
    def segments(self) -> tuple[Segment, ...]:
        """Runs of instructions of one executor; one of the VM is one call."""
        return self._once("segments", self._segments)

    def _segments(self) -> tuple[Segment, ...]:
        order = self.arranged.order
        if not len(order):
            return ()
        native = self.arranged.ledger.native(order)
        ends = (np.flatnonzero(np.diff(native)) + 1).tolist()
        return tuple([Segment(VM if native[a] else ATEN, a, b) for a, b in pairwise([0, *ends, len(order)])])

    @property
    def lower_bound(self) -> int:
        """Bytes live at the fullest instruction; no arena can be smaller."""
        return self.arranged.bound

    @property
    def input_slots(self) -> tuple[int, ...]:
        """Slots of the inputs, in order of declaration."""
        return self._of_kind(INPUT, HOST)

    @property
    def output_slots(self) -> tuple[int, ...]:
        """Slots of the outputs, in order of declaration."""
        return tuple(self.outputs.values())

    @property
    def frozen(self) -> tuple[int, ...]:
        """Slots bound to params and consts, in order of the nodes."""
        return self._of_kind(PARAM, CONST)

    def _of_kind(self, *kinds: str) -> tuple[int, ...]:
        slots, buffers = self.arranged.ledger.slots, self.arranged.ledger.buffers
        return tuple([s for s in self.arranged.sources if buffers[slots[s].buffer][0] in kinds])

    def last_use(self, slot: int) -> int | None:
        """The last instruction that reads the value a slot shows; where it was made if none does.

        None for values that outlive the run: inputs, weights, states, outputs and watched values.
        Raises: UsageError for an index out of range.
        """
        return self._uses()[self.slots[place_of(self, "slots", slot, len(self.slots))].base]

    def free_after(self, i: int) -> tuple[int, ...]:
        """Arena buffers whose bytes are free once instruction `i` has run, each listed after one instruction only.

        Raises: UsageError for an index out of range.
        """
        i = place_of(self, "instrs", i, len(self.instrs))
        if "free" not in self._lazy:
            free: list[list[int]] = [[] for _ in range(len(self.instrs) + 1)]
            for b in self.buffers:
                if b.kind in ARENA and b.last >= 0:
                    free[b.last].append(b.index)
            self._lazy["free"] = tuple(map(tuple, free))
        return self._lazy["free"][i]

    def _uses(self) -> dict[int, int | None]:
        if "uses" not in self._lazy:
            uses: dict[int, int | None] = {}
            for i, instr in enumerate(self.instrs):
                for s in (*instr.ins, *instr.outs, *instr.work):
                    uses[self.slots[s].base] = i
            for s in self.slots:
                if s.base == s.index and self.buffers[s.buffer].kind != TEMP:
                    uses[s.index] = None
            for s in (*self.outputs.values(), *self.watched.values()):
                uses[self.slots[s].base] = None
            self._lazy["uses"] = uses
        return self._lazy["uses"]

    def memory_timeline(self) -> tuple[int, ...]:
        """Arena bytes that are live at each instruction."""
        change = [0] * (len(self.instrs) + 2)
        for b in self.buffers:
            if b.kind in ARENA and b.last >= 0:
                change[max(b.first, 0)] += aligned(b.nbytes)
                change[b.last + 1] -= aligned(b.nbytes)
        live, line = 0, []
        for step in change[: len(self.instrs)]:
            live += step
            line.append(live)
        return tuple(line)

    def of(self, ref: NodeId | Value | str) -> tuple[Instr, ...]:
        """Instructions that run a node; none for a view, a source or a folded value."""
        node = self.program.node(ref)
        return tuple(i for i in self.instrs if i.node == node)
