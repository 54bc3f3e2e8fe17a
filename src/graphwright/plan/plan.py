"""Plan: the tables of one program for given input shapes. Immutable and shareable; memory belongs to a Workspace."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from hashlib import blake2b
from itertools import pairwise
from json import dumps
from typing import TYPE_CHECKING, Any, NamedTuple

from graphwright.array import NDArray, Spec
from graphwright.errors import ComputeError, UsageError
from graphwright.graph import NodeId
from graphwright.plan.describe import explain, tables
from graphwright.plan.draft import Firing
from graphwright.plan.executor import VM, Choice
from graphwright.plan.layout import aligned, lower_bound
from graphwright.plan.table import ARENA, CONST, INPUT, PARAM, STATE, Buffer, Instr, Schedule, Segment, Slot
from graphwright.program import Program, Value

if TYPE_CHECKING:
    from graphwright.plan.profile import Profile


class StalePlan(ComputeError):
    """The program was edited since this plan was made."""


@dataclass(frozen=True)
class Options:
    """How a plan was asked for.

    Attributes:
        freeze: weights will not change under the plan's feet: conversions of them are made once per weight version.
        rewrites: "exact" (the same bits with less work), "fast" (also what rounds otherwise, each use with its bound in
            `plan.rewrites`) or "none" (one row per node).
        layout: "reuse" (dead memory is used again) or "naive" (every buffer its own place, to compare with).
        watch: names of nodes whose values are kept readable.
        executor: "aten" (the bits of a run), "vm" (all that it has a form for) or "auto" (what is small enough).
    """

    freeze: bool = False
    rewrites: str = "exact"
    layout: str = "reuse"
    watch: tuple[str, ...] = ()
    executor: str = "aten"


class Part(NamedTuple):
    """Instructions `start..stop - 1` of a plan, to run by themselves."""

    plan: Plan
    start: int
    stop: int


@dataclass(frozen=True, eq=False)
class Plan:
    """Rows, slots, buffers and layout; see `graphwright.plan.table` for what they are.

    Attributes:
        program, version: what the plan is of; it refuses to run once the program has another version.
        inputs: specs of the inputs, all sizes known.
        outputs, watched: name -> slot.
        instrs, slots, buffers: the rows.
        folds: node -> slots of values computed once from frozen weights.
        pruned: paths of nodes that nothing needs.
        rewrites: uses of rewrites, in order.
        commits: path of a write -> why its value is copied at the end instead of updated in place.
        commit_start: first instruction of the commit segment, which writes carried state.
        early: instruction -> keys of the states it updates before the commit segment.
        guards: constants whose values a rewrite relied on, with their versions.
        choices: what runs each instruction, and why not the VM.
        groups: runs of elementwise instructions that the VM runs as one loop over tiles.
        cuts: elementwise instruction -> why it does not continue the group before it.
        arena_bytes: size of the arena.
        options: what was asked for.
        ms: milliseconds that planning took.
    """

    program: Program
    version: int
    inputs: Mapping[str, Spec]
    outputs: Mapping[str, int]
    watched: Mapping[str, int]
    instrs: tuple[Instr, ...]
    slots: tuple[Slot, ...]
    buffers: tuple[Buffer, ...]
    folds: Mapping[NodeId, tuple[int, ...]]
    pruned: tuple[str, ...]
    rewrites: tuple[Firing, ...]
    commits: Mapping[str, str]
    commit_start: int
    early: Mapping[int, tuple[str, ...]]
    guards: Mapping[str, tuple[NDArray, int]]
    choices: tuple[Choice, ...]
    groups: tuple[tuple[int, ...], ...]
    cuts: Mapping[int, str]
    arena_bytes: int
    options: Options
    ms: float
    _lazy: dict[str, Any] = field(default_factory=dict, repr=False)

    def __call__(self, feeds: Mapping[str, Any] | None = None, *, lease: bool = False, **named: Any) -> dict[str, Any]:
        """Run in the plan's own workspace; see `Workspace.run`."""
        return self.workspace().run({**(feeds or {}), **named}, lease=lease)

    def workspace(self) -> Any:
        """Memory to run in, made at the first call; others for other threads are made with `Workspace(plan)`."""
        if "workspace" not in self._lazy:
            from graphwright.plan.workspace import Workspace

            self._lazy["workspace"] = Workspace(self)
        return self._lazy["workspace"]

    @property
    def fresh(self) -> bool:
        """True while the program has the version that was planned, and the constants that rewrites relied on."""
        if self.program.version != self.version or _edited_source(self.program):
            return False
        weights = self.program.weights
        return all(weights.array(k) is array and array.storage.version == v for k, (array, v) in self.guards.items())

    @property
    def guarded(self) -> list[tuple[NDArray, int]]:
        """The constants that rewrites relied on, with the versions of their memory."""
        return list(self.guards.values())

    def check_fresh(self) -> None:
        """Raises: StalePlan if the program was edited since."""
        if not self.fresh:
            source = _edited_source(self.program)
            edited, planned = (self.program, self.version) if source is None else source
            raise StalePlan(
                "the program was edited after this plan was made",
                where=edited.name,
                expected=f"version {planned}",
                got=f"version {edited.version}",
                fix="program.compile(...) again; gw.compile(program) does it by itself",
            )

    # -- looking in --------------------------------------------------------------------------------------------------
    @property
    def instructions(self) -> tuple[Instr, ...]:
        """The rows in the order in which they run."""
        return self.instrs

    def __getitem__(self, part: slice) -> Part:
        """`plan[i:j]`, for `Workspace.run`. Raises: UsageError for bounds outside or another step."""
        n = len(self.instrs)
        start, stop = 0 if part.start is None else part.start, n if part.stop is None else part.stop
        if part.step not in (None, 1) or not 0 <= start <= stop <= n:
            raise UsageError("no such part", where=self.program.name, expected=f"0 <= i <= j <= {n}", got=part)
        return Part(self, start, stop)

    @property
    def segments(self) -> tuple[Segment, ...]:
        """Runs of instructions of one executor; one of the VM is one call."""
        ends = [i for i in range(1, len(self.choices)) if self.choices[i].executor != self.choices[i - 1].executor]
        bounds = [0, *ends, len(self.choices)]
        return tuple(Segment(self.choices[a].executor, a, b) for a, b in pairwise(bounds) if a < b)

    @property
    def schedule(self) -> Schedule:
        """Groups, and instructions as dispatches: a run of the VM is one, each other instruction too."""
        total = len(self.instrs)
        calls = sum(1 if s.kind == VM else s.stop - s.start for s in self.segments)
        return Schedule(self.groups, sum(map(len, self.groups)) / total if total else 0.0, calls)

    @property
    def input_slots(self) -> tuple[int, ...]:
        """Slots of the inputs, in order of declaration."""
        return self._of_kind(INPUT)

    @property
    def output_slots(self) -> tuple[int, ...]:
        """Slots of the outputs, in order of declaration."""
        return tuple(self.outputs.values())

    @property
    def frozen(self) -> tuple[int, ...]:
        """Slots bound to params and consts, in order of the nodes."""
        return self._of_kind(PARAM, CONST)

    def _of_kind(self, *kinds: str) -> tuple[int, ...]:
        return tuple(
            s.index
            for s in self.slots
            if s.base == s.index and self.buffers[s.buffer].kind in kinds and self._is_source(s)
        )

    def _is_source(self, slot: Slot) -> bool:
        """True for the slot of a node that stores or is fed, not for a result that was moved into its memory."""
        return slot.value is not None and self.program.op(slot.value.node) in (INPUT, PARAM, CONST, STATE)

    def last_use(self, slot: int) -> int | None:
        """The last instruction that reads the value a slot shows; where it was made if none does.

        None for values that outlive the run: inputs, weights, states, outputs and watched values.
        Raises: UsageError for an index out of range.
        """
        return self._uses()[self._slot(slot).base]

    def free_after(self, i: int) -> tuple[int, ...]:
        """Arena buffers whose bytes are free once instruction `i` has run, each listed after one instruction only."""
        if not 0 <= i < len(self.instrs):
            raise UsageError("no such instruction", expected=f"0..{len(self.instrs) - 1}", got=i)
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
                if s.base == s.index and (self._is_source(s) or self.buffers[s.buffer].kind not in ARENA):
                    uses[s.index] = None
            for s in (*self.outputs.values(), *self.watched.values()):
                uses[self.slots[s].base] = None
            self._lazy["uses"] = uses
        return self._lazy["uses"]

    def _slot(self, slot: int) -> Slot:
        if not 0 <= slot < len(self.slots):
            raise UsageError("no such slot", expected=f"0..{len(self.slots) - 1}", got=slot)
        return self.slots[slot]

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

    @property
    def lower_bound(self) -> int:
        """Bytes live at the fullest instruction; no arena can be smaller."""
        return lower_bound(self.buffers, len(self.instrs))

    @property
    def hash(self) -> str:
        """BLAKE2b of rows, slots and layout in canonical numbering; equal for equal programs and shapes."""
        if "hash" not in self._lazy:
            self._lazy["hash"] = blake2b(dumps(self.to_json(), sort_keys=True).encode(), digest_size=16).hexdigest()
        return self._lazy["hash"]

    def of(self, ref: NodeId | Value | str) -> tuple[Instr, ...]:
        """Instructions that run a node; none for a view, a source or a folded value."""
        node = self.program.node(ref)
        return tuple(i for i in self.instrs if i.node == node)

    def explain(self, ref: NodeId | Value | str) -> str:
        """What became of a node: instruction, slot, buffer, bytes and why."""
        return explain(self, ref)

    def profile(self, feeds: Mapping[str, Any], n: int = 5) -> Profile:
        """Seconds, operations and bytes per instruction and per path; see `graphwright.plan.profile`."""
        from graphwright.plan.profile import profile

        return profile(self, feeds, n)

    def to_json(self) -> dict[str, Any]:
        """The tables by position; no handle, address or time enters."""
        return tables(self)

    def __repr__(self) -> str:
        copies = sum(1 for i in self.instrs if i.why)
        return (
            f"Plan({self.program.name!r} v{self.version}: {len(self.instrs)} instructions ({copies} copies), "
            f"arena {self.arena_bytes / 2**20:.2f} MiB, planned in {self.ms:.1f} ms)"
        )


def _edited_source(p: Program) -> tuple[Program, int] | None:
    """What a derived program was made of, at any remove, if that was edited since; with the version it had."""
    while p.source is not None:
        if p.source[0].version != p.source[1]:
            return p.source
        p = p.source[0]
    return None
