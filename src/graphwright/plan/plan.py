"""Plan: the tables of one program for given input shapes. Immutable and shareable; memory belongs to a Executable."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from hashlib import blake2b
from itertools import pairwise
from json import dumps
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from graphwright.array import CPU
from graphwright.errors import ComputeError, UsageError
from graphwright.plan.describe import explain, nodes, tables
from graphwright.plan.errors import place_of
from graphwright.plan.planning.buffer_layout import aligned
from graphwright.plan.planning.executors import ATEN, CAPTURE, VM
from graphwright.plan.planning.fusion import cuts
from graphwright.plan.planning.rewrites import BY_VALUE
from graphwright.plan.table import (
    ARENA,
    CONST,
    HOST,
    INPUT,
    PARAM,
    TEMP,
    TILE,
    UNUSED,
    ArenaSpan,
    Buffer,
    DispatchSchedule,
    Firing,
    Segment,
)

if TYPE_CHECKING:
    from graphwright.array import Device, NDArray, Spec
    from graphwright.autograd import Variable
    from graphwright.graph import NodeId
    from graphwright.plan.describe import PlanDiff
    from graphwright.plan.planning.buffer_layout import BufferLayout, Patched
    from graphwright.plan.planning.executors import ExecutorChoice
    from graphwright.plan.planning.hazards import Region
    from graphwright.plan.planning.records import NodeRecord
    from graphwright.plan.profile import Profile
    from graphwright.plan.running.executable import BoundCall
    from graphwright.plan.running.override import Kernel, Override
    from graphwright.plan.table import (
        Instr,
        Slot,
    )
    from graphwright.program import Program, Value


@dataclass(frozen=True)
class CompileOptions:
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
        poison: its workspaces fill dead memory with NaN, see `Executable`.
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
    options: CompileOptions
    arranged: BufferLayout
    patched: Patched
    ms: float
    again: tuple[str, ...] = ()
    _lazy: dict[str, Any] = field(default_factory=dict, repr=False)

    @property
    def instrs(self) -> tuple[Instr, ...]:
        """Instructions in the order in which they run."""
        return self._once("instrs", lambda: tuple(map(self.arranged.ledger.instrs.__getitem__, self._order())))

    @property
    def choices(self) -> tuple[ExecutorChoice, ...]:
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

    def _rows(self) -> list[NodeRecord]:
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
    def layout(self) -> tuple[ArenaSpan, ...]:
        """The arena: where each buffer lies, by offset."""
        found = [
            ArenaSpan(b.index, b.offset, b.nbytes, b.first, b.last)
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


class StalePlan(ComputeError):
    """What this plan relied on is not so any more: a constant that a rewrite looked at, or the shape of a weight."""


class PlanSlice(NamedTuple):
    """Instructions `start..stop - 1` of a plan, to run by themselves."""

    plan: Plan
    start: int
    stop: int


class Plan(Decoded):
    """Rows, slots, buffers and layout, read as `Decoded` says; here what runs them and what compares them."""

    # -- running -----------------------------------------------------------------------------------------------------
    def __call__(self, feeds: Mapping[str, Any] | None = None, *, borrow: bool = False, **named: Any) -> dict[str, Any]:
        """Run in the plan's own workspace; see `Executable.run`."""
        return self.executable().run({**(feeds or {}), **named}, borrow=borrow)

    def executable(self) -> Any:
        """Memory to run in, made at the first call, with an arena that plans share which do not run at the same time.

        Others for other threads are made with `Executable(plan)`. It goes over to the plan patched from this one.
        Raises: StalePlan once the plan was closed.
        """
        if "closed" in self._lazy:
            raise StalePlan("this plan was closed", where=self.program.name, fix="program.compile(...) again")
        if "executable" not in self._lazy:
            self._lazy["executable"] = self.new_executable(shared=True)
        return self._lazy["executable"]

    def close(self) -> None:
        """Give the memory back; until then the plan runs as planned, whatever becomes of the program."""
        self._lazy["closed"] = True
        self._lazy.pop("executable", None)

    def hand_over(self, after: Plan) -> Plan:
        """Let the plan patched from this one have the workspace, if there is one that is not running; returns it."""
        space = self._lazy.get("executable")
        if space is not None and space.adopt(after):
            after._lazy["executable"] = self._lazy.pop("executable")
        return after

    def new_executable(self, variables: Mapping[str, Variable] | None = None, *, shared: bool = False) -> Any:
        """Other memory to run in, of the kind that the plan's executor asks for; see `Executable`."""
        from graphwright.plan.running.capture import CaptureExecutable
        from graphwright.plan.running.executable import Executable

        poison = self.options.poison
        if self._captures:
            return CaptureExecutable(self, variables, poison=poison)  # graphs hold addresses: an arena of its own
        return Executable(self, variables, poison=poison, shared=shared)

    def bind(self) -> BoundCall:
        """Inputs as memory to write to and outputs as memory to read, of their own: a run is one call; see `Bound`."""
        from graphwright.plan.running.executable import BoundCall

        return BoundCall(self.new_executable())

    @property
    def _captures(self) -> bool:
        return self.options.device != CPU and self.options.executor in ("auto", CAPTURE)

    def __getitem__(self, part: slice) -> PlanSlice:
        """`plan[i:j]`, for `Executable.run`. Raises: UsageError for bounds outside or another step."""
        n = len(self.instrs)
        bounds = (part.start, part.stop, part.step) if isinstance(part, slice) else ("no slice",)
        if all(bound is None or isinstance(bound, int) for bound in bounds):
            start, stop = 0 if part.start is None else part.start, n if part.stop is None else part.stop
            if part.step in (None, 1) and 0 <= start <= stop <= n:
                return PlanSlice(self, start, stop)
        raise UsageError(
            "no such part",
            where=self.program.name,
            expected=f"plan[i:j], 0 <= i <= j <= {n}",
            got=repr(part),
            fix="plan.instrs[i] is one instruction",
        )

    @property
    def overrides(self) -> list[Override]:
        """What stands for instructions now, the innermost last."""
        return self._lazy.setdefault("overrides", [])

    def override(self, fn: Kernel, segment: int | None = None) -> AbstractContextManager[Override]:
        """Inside the block a function runs the plan, or one segment of it; see `graphwright.plan.running.override`.

        Raises: UsageError for no such segment, or what cannot be called.
        """
        from graphwright.plan.running.override import override

        return override(self, fn, segment)

    def check_override(self, feeds: Mapping[str, Any], rtol: float = 1e-5, atol: float = 1e-6) -> None:
        """Run with and without what is overridden, on copies of the variables, and compare outputs and states.

        Raises: OverrideMismatch naming each that differs; UsageError if nothing is overridden; as `Executable.run`.
        """
        from graphwright.plan.running.override import check

        check(self, feeds, rtol, atol)

    def regions(self) -> tuple[Region, ...]:
        """What graphs of the device would hold, and per other instruction why not; see `plan.planning.regions`."""
        if "regions" not in self._lazy:
            from graphwright.plan.planning.hazards import regions

            self._lazy["regions"] = regions(self)
        return self._lazy["regions"]

    # -- how long it is of use ---------------------------------------------------------------------------------------
    @property
    def latest(self) -> bool:
        """True for the plan that was made last of its ledger, which the next one can be patched from."""
        return self.arranged.turn == self.arranged.ledger.turn

    @property
    def fresh(self) -> bool:
        """True while the program has the version that was planned, and the constants that rewrites relied on."""
        if self.program.version != self.version or _edited_source(self.program):
            return False
        return self.guarded_fresh

    @property
    def guarded_fresh(self) -> bool:
        """True while the constants that rewrites relied on are what they were."""
        known = self.arranged.ledger.program.weights
        return not self.guards or all(
            k in known and known.array(k) is array and array.storage.version == v
            for k, (array, v) in self.guards.items()
        )

    @property
    def guarded(self) -> list[tuple[NDArray, int]]:
        """The constants that rewrites relied on, with the versions of their memory."""
        return list(self.guards.values())

    def check_fresh(self) -> None:
        """Raises: StalePlan if a constant that a rewrite relied on was changed; an edit may have taken it away."""
        planned = self.arranged.variables
        if changed := [
            k
            for k, (array, v) in self.guards.items()
            if k in planned and (planned[k].data is not array or array.storage.version != v)
        ]:
            raise StalePlan(
                "a constant that this plan relied on was changed",
                where=self.program.name,
                got=", ".join(changed),
                fix="program.compile(...) again; gw.compile(program) does it by itself",
            )

    def check_variables(self, own: Mapping[str, Variable]) -> None:
        """Raises: UsageError for another variable in the place of a constant whose value is part of the plan."""
        planned, ledger = self.arranged.variables, self.arranged.ledger
        other = [k for k in self.guards if k in own and k in planned and own[k] is not planned[k]]
        used = {firing.node for firing in self.rewrites if firing.rule in BY_VALUE} if other else set()
        read = {s for row in self.arranged.rows.values() if row.path in used for s in row.reads} if used else set()
        relied = {ledger.buffers[ledger.slots[s].buffer][2] for s in read}
        if wrong := [k for k in other if k in relied]:
            raise UsageError(
                "a rewrite relied on the value of a constant, and another variable is given for it",
                where=f"{self.program.name}: {', '.join(wrong)}",
                expected="the program's own variable",
                got=", ".join(f"another {own[k].spec}" for k in wrong),
                fix='program.compile(..., rewrites="none"), or variables without it',
            )

    # -- looking in --------------------------------------------------------------------------------------------------
    @property
    def schedule(self) -> DispatchSchedule:
        """Groups (on a device captured regions), and instructions as dispatches.

        A run of the VM is one, a captured region too, and each other instruction.
        """
        total, groups = len(self.instrs), self.groups
        calls = sum(1 if s.kind == VM else s.stop - s.start for s in self.segments)
        if self._captures:
            groups = tuple(r.instrs for r in self.regions() if r.kind == CAPTURE)
            calls = total - sum(map(len, groups)) + len(groups)
        return DispatchSchedule(groups, sum(map(len, groups)) / total if total else 0.0, calls)

    def compact(self) -> Plan:
        """A plan of the program as it is now, of the same inputs and options, made from nothing."""
        from graphwright.plan.planning.planner import make_plan

        o = self.options
        wanted = tuple(name for name in self.outputs if name in self.program.output_names())
        return make_plan(
            self.program,
            self.inputs,
            wanted,
            freeze=o.freeze,
            rewrites=o.rewrites,
            layout=o.layout,
            watch=o.watch,
            executor=o.executor,
            device=o.device,
            remat=o.remat,
            poison=o.poison,
        )

    @property
    def hash(self) -> str:
        """BLAKE2b of rows, slots and layout in canonical numbering; equal for equal programs and shapes."""
        if "hash" not in self._lazy:
            self._lazy["hash"] = blake2b(dumps(tables(self), sort_keys=True).encode(), digest_size=16).hexdigest()
        return self._lazy["hash"]

    def explain(self, ref: NodeId | Value | str) -> str:
        """What became of a node: instruction, slot, buffer, bytes and why."""
        return explain(self, ref)

    def profile(self, feeds: Mapping[str, Any], n: int = 5) -> Profile:
        """Seconds, operations and bytes per instruction and per path; see `graphwright.plan.profile`."""
        from graphwright.plan.profile import profile

        return profile(self, feeds, n)

    def diff(self, old: Plan) -> PlanDiff:
        """What changed from another plan to this one; see `graphwright.plan.describe`."""
        from graphwright.plan.describe import compare

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
