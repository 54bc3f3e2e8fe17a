"""Plan: the tables of one program for given input shapes. Immutable and shareable; memory belongs to a Workspace."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from hashlib import blake2b
from itertools import pairwise
from json import dumps
from typing import TYPE_CHECKING, Any, NamedTuple

from graphwright.array import CPU, Device, NDArray, Spec
from graphwright.errors import ComputeError, UsageError
from graphwright.graph import NodeId
from graphwright.plan.describe import explain, nodes, tables
from graphwright.plan.draft import Firing
from graphwright.plan.executor import CAPTURE, VM, Choice
from graphwright.plan.layout import aligned, lower_bound
from graphwright.plan.table import ARENA, CONST, HOST, INPUT, PARAM, STATE, Buffer, Instr, Schedule, Segment, Slot
from graphwright.program import Program, Value

if TYPE_CHECKING:
    from graphwright.autograd import Variable
    from graphwright.plan.compare import PlanDiff
    from graphwright.plan.override import Kernel, Override
    from graphwright.plan.profile import Profile
    from graphwright.plan.regions import Region


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
        executor: "aten" (the bits of a run), "vm" (all that it has a form for), "auto" (what is small enough), or on a
            device with graphs "capture" (which "auto" is there).
        device: where it runs.
        remat: most bytes of the arena: values are computed again instead of kept until it fits.
    """

    freeze: bool = False
    rewrites: str = "exact"
    layout: str = "reuse"
    watch: tuple[str, ...] = ()
    executor: str = "aten"
    device: Device = CPU
    remat: int | None = None


class Placed(NamedTuple):
    """Bytes of the arena: whose they are, and between which instructions, both included."""

    buffer: int
    offset: int
    nbytes: int
    first: int
    last: int


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
    arena_bytes: int
    options: Options
    ms: float
    _lazy: dict[str, Any] = field(default_factory=dict, repr=False)

    def __call__(self, feeds: Mapping[str, Any] | None = None, *, lease: bool = False, **named: Any) -> dict[str, Any]:
        """Run in the plan's own workspace; see `Workspace.run`."""
        return self.workspace().run({**(feeds or {}), **named}, lease=lease)

    def workspace(self) -> Any:
        """Memory to run in, made at the first call, with an arena that plans share which do not run at the same time.

        Others for other threads are made with `Workspace(plan)`.
        """
        if "workspace" not in self._lazy:
            self._lazy["workspace"] = self.new_workspace(shared=True)
        return self._lazy["workspace"]

    def new_workspace(self, variables: Mapping[str, Variable] | None = None, *, shared: bool = False) -> Any:
        """Other memory to run in, of the kind that the plan's executor asks for; see `Workspace`."""
        from graphwright.plan.capture import CaptureWorkspace
        from graphwright.plan.workspace import Workspace

        if self._captures:
            return CaptureWorkspace(self, variables)  # graphs hold addresses: an arena of its own
        return Workspace(self, variables, shared=shared)

    @property
    def _captures(self) -> bool:
        return self.options.device != CPU and self.options.executor in ("auto", CAPTURE)

    @property
    def overrides(self) -> list[Override]:
        """What stands for instructions now, the innermost last."""
        return self._lazy.setdefault("overrides", [])

    def override(self, fn: Kernel, segment: int | None = None) -> AbstractContextManager[Override]:
        """Inside the block a function runs the plan, or one segment of it; see `graphwright.plan.override`."""
        from graphwright.plan.override import override

        return override(self, fn, segment)

    def check_override(self, feeds: Mapping[str, Any], rtol: float = 1e-5, atol: float = 1e-6) -> None:
        """Run with and without what is overridden, on copies of the variables, and compare outputs and states.

        Raises: OverrideMismatch naming each that differs; UsageError if nothing is overridden; as `Workspace.run`.
        """
        from graphwright.plan.override import check

        check(self, feeds, rtol, atol)

    def regions(self) -> tuple[Region, ...]:
        """What graphs of the device would hold, and per other instruction why not; see `graphwright.plan.regions`."""
        if "regions" not in self._lazy:
            from graphwright.plan.regions import regions

            self._lazy["regions"] = regions(self)
        return self._lazy["regions"]

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
    def layout(self) -> tuple[Placed, ...]:
        """The arena: where each buffer lies, by offset."""
        found = [Placed(b.index, b.offset, b.nbytes, b.first, b.last) for b in self.buffers if b.kind in ARENA]
        return tuple(sorted(found, key=lambda p: (p.offset, p.first)))

    @property
    def segments(self) -> tuple[Segment, ...]:
        """Runs of instructions of one executor; one of the VM is one call."""
        ends = [i for i in range(1, len(self.choices)) if self.choices[i].executor != self.choices[i - 1].executor]
        bounds = [0, *ends, len(self.choices)]
        return tuple(Segment(self.choices[a].executor, a, b) for a, b in pairwise(bounds) if a < b)

    @property
    def groups(self) -> tuple[tuple[int, ...], ...]:
        """Runs of instructions that are one call."""
        return tuple(tuple(range(s.start, s.stop)) for s in self.segments if s.kind == VM)

    @property
    def schedule(self) -> Schedule:
        """Instructions as dispatches: a run of the VM is one, a captured region too, and each other instruction."""
        groups, total = self.groups, len(self.instrs)
        if self._captures:
            groups = tuple(r.instrs for r in self.regions() if r.kind == CAPTURE)
        covered = sum(len(group) for group in groups)
        return Schedule(groups, covered / total if total else 0.0, total - covered + len(groups))

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
            self._lazy["hash"] = blake2b(dumps(tables(self), sort_keys=True).encode(), digest_size=16).hexdigest()
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

    def diff(self, old: Plan) -> PlanDiff:
        """What changed from another plan to this one; see `graphwright.plan.compare`."""
        from graphwright.plan.compare import compare

        return compare(old, self)

    def to_json(self) -> dict[str, Any]:
        """The tables by position, and by path what became of each node; as JSON can have it."""
        return {"schema": 1, "hash": self.hash, "version": self.version, **tables(self), "nodes": nodes(self)}

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
