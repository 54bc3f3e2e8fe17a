"""Plan: a program as tables for given input shapes. A plan is immutable; an `Executable` holds the memory of runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from hashlib import blake2b
from itertools import pairwise
from json import dumps
from time import perf_counter
from typing import TYPE_CHECKING, Any

import numpy as np

from graphwright.array import NDArray, Spec, backend
from graphwright.autograd import Variable
from graphwright.errors import UsageError
from graphwright.graph import NodeId
from graphwright.plan import table as rows
from graphwright.plan.describe import PlanDiff, compare, explain, nodes, profile, tables
from graphwright.plan.errors import PlanReplaced, StalePlan, checked_index
from graphwright.plan.options import ATEN, DEFAULT, VM, CompileOptions
from graphwright.plan.planning.fusion import cuts, kernel_of
from graphwright.plan.planning.hazards import CAPTURED, Region, regions
from graphwright.plan.planning.native import loops
from graphwright.plan.planning.passes import aligned
from graphwright.plan.planning.planner import BufferLayout, Patched, lay_out
from graphwright.plan.planning.remat import smallest_arena, within
from graphwright.plan.planning.rewrites import BY_VALUE
from graphwright.plan.running.capture import CaptureExecutable
from graphwright.plan.running.executable import BoundCall, Executable, check_override
from graphwright.plan.running.override import Override, override
from graphwright.program.validate import refuse_broken
from graphwright.report import ShortTuple

if TYPE_CHECKING:
    from graphwright.plan.planning.lowering import ExecutorChoice
    from graphwright.plan.planning.plan_tables import NodeRecord
    from graphwright.program.op_graph import Value
    from graphwright.program.program import Program


@dataclass(frozen=True, eq=False)
class Plan:
    """A program as instructions on memory at fixed offsets; see `graphwright.plan.table` for the tables.

    The tables are built when first read. Successive plans of a program share a plan builder, which numbers slots and
    buffers, so some of them may belong to deleted nodes.

    Attributes:
        program, version: the planned program and its version. The plan runs unchanged after an edit of the program.
        options: see `CompileOptions`.
        inputs: specs of the inputs, all sizes known.
        outputs, watched: name of an output or of a watched node -> slot of its value.
        commits: path of an assign node -> why its state is updated by a copy at the end instead of in place.
        commit_start: index of the first instruction of the commit, the last span of the plan, which writes states.
        early: index of an instruction before the commit -> keys of the states that it updates.
        assumptions: key of a constant whose value a rewrite relied on -> its array, and the array's version then.
        buffer_layout: instruction order, lifetimes and offsets as integer arrays, from which the tables are built.
        patched: whether the program was planned in full or an earlier plan was patched, and why.
        ms: milliseconds that planning took.
        recomputed: paths of nodes that are computed again so that the arena fits `options.remat`.
    """

    program: Program
    version: int
    options: CompileOptions
    inputs: Mapping[str, Spec]
    outputs: Mapping[str, int]
    watched: Mapping[str, int]
    commits: Mapping[str, str]
    commit_start: int
    early: Mapping[int, tuple[str, ...]]
    assumptions: Mapping[str, tuple[NDArray, int]]
    buffer_layout: BufferLayout
    patched: Patched
    ms: float
    recomputed: tuple[str, ...] = ()
    _running: dict[str, Any] = field(default_factory=dict, init=False, repr=False)

    # -- running -----------------------------------------------------------------------------------------------------
    def __call__(
        self, feeds: Mapping[str, Any] | None = None, *, borrow: bool = False, **named: Any
    ) -> dict[str, NDArray]:
        """Run on inputs by name in the plan's own executable, and return the outputs; see `Executable.run`."""
        given = {**(feeds or {}), **named}
        while True:  # an edit in another thread may hand the executable over between the two calls
            with suppress(PlanReplaced):
                return self.executable().run(given, borrow=borrow, plan=self)

    def executable(self) -> Executable:
        """Return the plan's own executable, made at the first call; its arena is shared with other plans of the device.

        Create an `Executable(plan)` for each other thread. A plan patched from this one takes the executable over.
        Raises: StalePlan if the plan was closed.
        """
        if "closed" in self._running:
            raise StalePlan("this plan was closed", where=self.program.name, fix="program.compile(...) again")
        space = self._running.get("executable")
        if space is None:  # at once: another thread may make it too, or pass it on to a later plan
            space = self._running.setdefault("executable", self.new_executable(shared=True))
        return space

    def new_executable(self, variables: Mapping[str, Variable] | None = None, *, shared: bool = False) -> Executable:
        """Return a new executable: a `CaptureExecutable` on a device with graphs, else an `Executable`."""
        poison = self.options.poison
        if self.options.captures:
            return CaptureExecutable(self, variables, poison=poison)  # graphs hold addresses: an arena of its own
        return Executable(self, variables, poison=poison, shared=shared)

    def bind(self) -> BoundCall:
        """Return a call on numpy arrays of fixed memory: write to its inputs, call it, read its outputs."""
        return BoundCall(self.new_executable())

    def close(self) -> None:
        """Free the memory of the plan's own executable; `plan(...)` then raises StalePlan."""
        self._running["closed"] = True
        self._running.pop("executable", None)

    def hand_over(self, after: Plan) -> Plan:
        """Pass this plan's executable, unless it runs, to `after`, a plan patched from this one; return `after`."""
        space = self._running.get("executable")
        if space is not None and space.adopt(after):
            after._running["executable"] = self._running.pop("executable")
        return after

    def __getitem__(self, part: slice) -> rows.PlanSlice:
        """Return `plan[i:j]`, a slice for `Executable.run`. Raises: UsageError for a bound out of range, or a step."""
        n = len(self.instrs)
        bounds = (part.start, part.stop, part.step) if isinstance(part, slice) else ("no slice",)
        if all(bound is None or isinstance(bound, int) for bound in bounds):
            start, stop = 0 if part.start is None else part.start, n if part.stop is None else part.stop
            if part.step in (None, 1) and 0 <= start <= stop <= n:
                return rows.PlanSlice(self, start, stop)
        raise UsageError("invalid slice of a plan", where=self.program.name, expected=f"plan[i:j], 0 <= i <= j <= {n}",
                         got=repr(part), fix="plan[i:i + 1] for one instruction")  # fmt: skip

    @property
    def overrides(self) -> list[Override]:
        """The active overrides, the innermost last; see `override`."""
        return self._running.setdefault("overrides", [])

    override = override
    check_override = check_override

    # -- validity ----------------------------------------------------------------------------------------------------
    @property
    def latest(self) -> bool:
        """True if this is the last plan that its builder made: only the last plan can be patched into the next one."""
        return self.buffer_layout.turn == self.buffer_layout.builder.turn

    @property
    def fresh(self) -> bool:
        """True while the program has the planned version, the constants that rewrites rely on are unchanged, and the
        VM was not built since a plan that could have used it was made.
        """
        same = self.program.plan_version == self.version and not _source_edited(self.program) and self.assumptions_hold
        return same and not self.buffer_layout.tables.lowerings.superseded

    @property
    def assumptions_hold(self) -> bool:
        """True while the constants whose values rewrites rely on are unchanged."""
        known = self.buffer_layout.builder.program.weights
        return not self.assumptions or all(
            known.array(k) is array and array.storage.version == v
            for k, (array, v) in self.assumptions.items()
            if k in known  # what read a constant that is gone was edited
        )

    def check_assumptions(self) -> None:
        """Raise StalePlan if a constant whose value a rewrite relies on has changed."""
        planned = self.buffer_layout.variables
        known = [(k, planned[k].data, array, v) for k, (array, v) in self.assumptions.items() if k in planned]
        if changed := [k for k, data, array, v in known if data is not array or array.storage.version != v]:
            fix = "program.compile(...) again; gw.compile(program) plans again by itself"
            raise StalePlan("a constant whose value this plan relies on has changed", where=self.program.name,
                            expected="the planned values", got=f"changed {', '.join(changed)}", fix=fix)  # fmt: skip

    def check_variables(self, own: Mapping[str, Variable]) -> None:
        """Raise UsageError if `own` (key -> variable) replaces a constant whose value a rewrite relies on."""
        planned, buffers = self.buffer_layout.variables, self.buffer_layout.tables.buffers
        other = [k for k in self.assumptions if k in own and k in planned and own[k] is not planned[k]]
        if not other:
            return
        used = {firing.node for firing in self.rewrites if firing.rule in BY_VALUE}
        read = {s for record in self.buffer_layout.records.values() if record.path in used for s in record.reads}
        assumed = {buffers[self.buffer_layout.tables.holders[s]][2] for s in read}
        if wrong := [k for k in other if k in assumed]:
            raise UsageError("a different variable replaces a constant whose value a rewrite of this plan relies on",
                             where=f"{self.program.name}: {', '.join(wrong)}", expected="the program's own variable",
                             got=", ".join(f"a different variable, {own[k].spec}" for k in wrong),
                             fix='program.compile(..., rewrites="none"), or drop its key from variables')  # fmt: skip

    # -- rows --------------------------------------------------------------------------------------------------------
    @cached_property
    def instrs(self) -> tuple[rows.Instr, ...]:
        """Instructions in execution order."""
        return ShortTuple(map(self.buffer_layout.tables.instrs.__getitem__, self.buffer_layout.order.tolist()))

    @property
    def instructions(self) -> tuple[rows.Instr, ...]:
        """The instructions in execution order, as `instrs`."""
        return self.instrs

    @cached_property
    def choices(self) -> tuple[ExecutorChoice, ...]:
        """The executor of each instruction, and the reason if it is not the VM."""
        return tuple(map(self.buffer_layout.tables.choice, self.buffer_layout.order.tolist()))

    @cached_property
    def slots(self) -> tuple[rows.Slot, ...]:
        """All slots, each with the index of the buffer whose memory it uses."""
        at = self.buffer_layout
        stays = (at.home == np.arange(len(at.home))).tolist()
        found = at.tables.slots[: at.slot_count]
        return tuple([s if stays[s.buffer] else s._replace(buffer=at.home_of(s.buffer)) for s in found])

    @cached_property
    def buffers(self) -> tuple[rows.Buffer, ...]:
        """Buffers; one that no instruction of this plan touches has the kind "unused"."""
        at = self.buffer_layout
        columns = (column.tolist() for column in (at.home, at.first, at.last, at.offsets, at.used, at.fusion.tiles))
        made: list[rows.Buffer] = []
        for (kind, size, key), home, first, last, offset, used, tile in zip(at.tables.buffers, *columns, strict=False):
            b = len(made)
            shown = "moved" if home != b else rows.UNUSED if not used else kind if tile < 0 else rows.TILE
            host = b in at.tables.on_host
            made.append(rows.Buffer(b, shown, size, key, first, last, offset if tile < 0 else tile, host))
        return tuple(made)

    @property
    def folds(self) -> Mapping[int, rows.Instr]:
        """Index of each buffer that is computed once, from frozen weights -> the instruction that computes it."""
        return self.buffer_layout.folds

    @cached_property
    def folding(self) -> list[rows.Instr]:
        """The instructions that compute folded values from frozen weights, ordered so that operands come first."""
        known, holders = self.buffer_layout.tables.folds, self.buffer_layout.tables.holders
        stack, found = list(self.folds.values()), {}
        while stack:
            instr = stack.pop()
            if instr.outs[0] not in found:
                found[instr.outs[0]] = instr
                stack += [known[b] for s in instr.ins if (b := holders[s]) in known]
        return [found[s] for s in sorted(found)]  # slots are numbered in order of creation

    @cached_property
    def pruned(self) -> tuple[str, ...]:
        """Paths of nodes that no output, watched value or assign node depends on, in program order."""
        return tuple(r.path for r in self._records() if r.node not in self._needed)

    @cached_property
    def rewrites(self) -> tuple[rows.Firing, ...]:
        """Applications of rewrite rules, in program order."""
        records = self.buffer_layout.records

        def name(node: NodeId | None) -> str:
            return records[node].path if node is not None and node in records else "constant"

        uses = [use for record in self._records() if record.node in self._needed for use in record.rewrites]
        found = [rows.Firing(u.rule, name(u.node), name(u.into), u.bound) for u in uses]
        return (*found, *(rows.Firing("recomputed", path, path) for path in self.recomputed))

    @cached_property
    def groups(self) -> tuple[tuple[int, ...], ...]:
        """Fusion groups: indices of consecutive elementwise instructions that run as one loop over tiles."""
        placed = zip(self.buffer_layout.fusion.starts.tolist(), self.buffer_layout.fusion.regions, strict=True)
        return tuple([tuple([i + start for i in group]) for start, region in placed for group in region.groups])

    def kernel(self, group: int) -> str:
        """Return the Triton source of a fusion group: what a plan of a GPU launches for it. `group`: index in `groups`.

        Raises: UsageError if the index is out of range.
        """
        checked_index(self, "groups", group, len(self.groups))
        regions = self.buffer_layout.fusion.regions
        found = [(region, members) for region in regions for members in region.groups][group]
        return kernel_of(self.buffer_layout, *found)[0].text

    @cached_property
    def cuts(self) -> Mapping[int, str]:
        """Index of an instruction -> why it does not continue the fusion group before it; see `FusionRegion.cuts`."""
        at = self.buffer_layout
        return cuts(at.builder, (at.order, at.home, at.first, at.last, at.home == np.arange(len(at.home))))

    @cached_property
    def segments(self) -> tuple[rows.Segment, ...]:
        """Maximal spans of consecutive instructions with the same executor; a VM segment is one call."""
        order = self.buffer_layout.order
        if not len(order):
            return ()
        native = self.buffer_layout.tables.native(order)
        ends = (np.flatnonzero(np.diff(native)) + 1).tolist()
        return tuple([rows.Segment(VM if native[a] else ATEN, a, b) for a, b in pairwise([0, *ends, len(order)])])

    def regions(self) -> tuple[Region, ...]:
        """Return spans of instructions in order: each is captured as one device graph, or has reasons why it is not."""
        return self._regions

    @cached_property
    def _regions(self) -> tuple[Region, ...]:
        return regions(self)

    @property
    def schedule(self) -> rows.DispatchSchedule:
        """Fusion groups (on a device with graphs, captured regions), their share of instructions, calls in one run."""
        total, groups = len(self.instrs), self.groups
        calls = sum(1 if s.kind == VM else s.stop - s.start for s in self.segments)
        if self.options.captures:
            groups = tuple(r.instrs for r in self.regions() if r.kind == CAPTURED)
            calls = total - sum(map(len, groups)) + len(groups)
        return rows.DispatchSchedule(groups, sum(map(len, groups)) / total if total else 0.0, calls)

    # -- memory ------------------------------------------------------------------------------------------------------
    @property
    def arena_bytes(self) -> int:
        """Bytes of the arena."""
        return self.buffer_layout.total

    @property
    def lower_bound(self) -> int:
        """The maximum of live bytes over all instructions; no arena can be smaller."""
        return self.buffer_layout.bound

    @property
    def layout(self) -> tuple[rows.ArenaSpan, ...]:
        """The arena's buffers with their offsets and lifetimes, sorted by offset."""
        found = [rows.ArenaSpan(b.index, b.offset, b.nbytes, b.first, b.last) for b in self._in_arena()]
        return tuple(sorted(found, key=lambda span: (span.offset, span.first)))

    @property
    def input_slots(self) -> tuple[int, ...]:
        """Slots of the inputs, in order of declaration."""
        return self._slots_of(rows.INPUT, rows.HOST)

    @property
    def output_slots(self) -> tuple[int, ...]:
        """Slots of the outputs, in order of declaration."""
        return tuple(self.outputs.values())

    @property
    def frozen(self) -> tuple[int, ...]:
        """Slots of params and consts, in program order."""
        return self._slots_of(rows.PARAM, rows.CONST)

    def last_use(self, slot: int) -> int | None:
        """Return the index of the last instruction that reads or writes the value of a slot.

        None for values that outlive the run: inputs, weights, states, outputs and watched values.
        Raises: UsageError if `slot` is out of range.
        """
        return self._last_uses[self.slots[checked_index(self, "slots", slot, len(self.slots))].base]

    def free_after(self, i: int) -> tuple[int, ...]:
        """Return the indices of the arena buffers whose last use is instruction `i`.

        Raises: UsageError if `i` is out of range.
        """
        return self._freed[checked_index(self, "instrs", i, len(self.instrs))]

    def arena_with_remat(self, enough: int, seconds: float = 2.0) -> int:
        """Return the bytes of the smallest arena found by recomputing values, until it has at most `enough` bytes.

        With `remat` of at least this many bytes, the program can be compiled for the same inputs.

        Args:
            seconds: when the search ends, however small the arena is by then.
        """
        once = replace(self.options, remat=None)
        return smallest_arena(self, enough, lambda q: make_plan(q, self.inputs, [*self.outputs], once), seconds)

    def memory_timeline(self) -> tuple[int, ...]:
        """Return the live bytes of the arena at each instruction."""
        change = [0] * (len(self.instrs) + 2)
        for b in self._in_arena():
            change[max(b.first, 0)] += aligned(b.nbytes)
            change[b.last + 1] -= aligned(b.nbytes)
        return tuple(np.cumsum(change)[: len(self.instrs)].tolist())

    @cached_property
    def _last_uses(self) -> dict[int, int | None]:
        uses: dict[int, int | None] = {}
        for i, instr in enumerate(self.instrs):
            for s in (*instr.ins, *instr.outs, *instr.work):
                uses[self.slots[s].base] = i
        for s in self.slots:
            if s.base == s.index and self.buffers[s.buffer].kind != rows.TEMP:
                uses[s.index] = None
        for s in (*self.outputs.values(), *self.watched.values()):
            uses[self.slots[s].base] = None
        return uses

    @cached_property
    def _freed(self) -> tuple[tuple[int, ...], ...]:
        freed: list[list[int]] = [[] for _ in range(len(self.instrs) + 1)]
        for b in self._in_arena():
            freed[b.last].append(b.index)
        return tuple(map(tuple, freed))

    def _in_arena(self) -> list[rows.Buffer]:
        return [b for b in self.buffers if b.kind in rows.ARENA and b.last >= 0]

    def _slots_of(self, *kinds: str) -> tuple[int, ...]:
        tables = self.buffer_layout.tables
        return tuple([s for s in self.buffer_layout.sources if tables.buffers[tables.holders[s]][0] in kinds])

    # -- inspection --------------------------------------------------------------------------------------------------
    def path(self, node: NodeId) -> str:
        """Return the path that a node had when the plan was made."""
        return self.buffer_layout.records[node].path

    def of(self, ref: NodeId | Value | str) -> tuple[rows.Instr, ...]:
        """Return the instructions that run a node; () for a view, an input, a weight, a state or a folded value."""
        node = self.program.node(ref)
        return tuple(i for i in self.instrs if i.node == node)

    def result_slots(self) -> list[rows.Slot]:
        """Return the slots with the results of all nodes that are not pruned, in program order."""
        slots, buffers = self.slots, self.buffers
        found = [slots[s] for record in self._records() if record.node in self._needed for s in record.own]
        return [s for s in found if s.value is not None and buffers[s.buffer].kind != rows.UNUSED]

    @cached_property
    def hash(self) -> str:
        """BLAKE2b hash of the tables in canonical numbering; equal for equal programs, shapes and options."""
        return blake2b(dumps(tables(self), sort_keys=True).encode(), digest_size=16).hexdigest()

    explain = explain
    profile = profile

    def diff(self, old: Plan) -> PlanDiff:
        """Return the differences from the plan `old` to this one."""
        return compare(old, self)

    def compact(self) -> Plan:
        """Plan the current version of the program from scratch, for the same inputs and options."""
        wanted = tuple(name for name in self.outputs if name in self.program.output_names())
        return make_plan(self.program, self.inputs, wanted, self.options)

    def to_json(self) -> dict[str, Any]:
        """Return a JSON-serialisable dict of the tables, and of the instructions and results of each node by path."""
        return {"schema": 1, "hash": self.hash, "version": self.version, **tables(self), "nodes": nodes(self)}

    def __repr__(self) -> str:
        copies = sum(1 for i in self.instrs if i.why)
        return (
            f"Plan({self.program.name!r} v{self.version}: {len(self.instrs)} instructions ({copies} copies), "
            f"arena {self.arena_bytes / 2**20:.2f} MiB, planned in {self.ms:.1f} ms)"
        )

    def _records(self) -> list[NodeRecord]:
        key, records = self.program.order_labels.key, self.buffer_layout.records
        graph = self.program.graph
        return sorted(records.values(), key=lambda r: (0, *key(r.node)) if r.node in graph else (1, 0, r.node.index))

    @cached_property
    def _needed(self) -> set[NodeId]:
        """Nodes that an output, a watched value or an assign node depends on."""
        records, stack = self.buffer_layout.records, list(self.buffer_layout.roots)
        seen = set(stack)
        while stack:
            for source in records[stack.pop()].sources:
                if source.node not in seen:
                    seen.add(source.node)
                    stack.append(source.node)
        return seen


def make_plan(
    p: Program, inputs: Mapping[str, Spec], outputs: Sequence[str] | None = None, options: CompileOptions = DEFAULT,
    *, before: Plan | None = None,
) -> Plan:  # fmt: skip
    """Plan a program for input specs.

    Args:
        inputs: for each declared input a spec without named sizes.
        outputs: names of the outputs to compute; all by default.
        before: the last plan of the same program, inputs and options; parts of it that no edit changed are reused.
    Raises: InvalidProgram if the program has defects; FeedError listing every input that does not fit; UnknownNode for
        an unknown output or watched node; UsageError for an unknown option value, or if there is nothing to compute;
        BudgetImpossible if `options.remat` cannot be met; PlanOutOfMemory if a value is too large for any machine;
        DeviceUnavailable.
    """
    backend(options.device)  # loads kernels; the next line loads loops: once per process, not counted in `ms`
    loops(len(p))
    started = perf_counter()
    options.check(p.name)
    refuse_broken(p)
    if options.remat is not None:
        once = replace(options, remat=None)
        plan, recomputed = within(p, options.remat, lambda q: make_plan(q, inputs, outputs, once))
        ms = (perf_counter() - started) * 1e3
        return replace(plan, options=options, recomputed=recomputed, ms=ms)
    commit, layout, patched = lay_out(p, inputs, outputs, options, before)
    records = layout.builder.records
    return Plan(program=p, version=p.plan_version, options=options, inputs=dict(inputs), outputs=commit.outputs,
                watched=commit.watched, commits={records[n].path: reason for n, reason in commit.why.items()},
                commit_start=commit.start, early=commit.early, assumptions=dict(layout.builder.assumptions),
                buffer_layout=layout, patched=patched, ms=(perf_counter() - started) * 1e3)  # fmt: skip


def _source_edited(p: Program) -> bool:
    """Return True if a program that this one was derived from, directly or indirectly, was edited since."""
    while p.source is not None:
        if p.source[0].plan_version != p.source[1]:
            return True
        p = p.source[0]
    return False
