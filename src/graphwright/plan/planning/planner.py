"""Planner: update the builder, prune, order state writes, then compute lifetimes, fusion groups and the layout.

After an edit the builder of the previous plan is reused: records that the edit did not touch are kept, with the arena
offsets of their buffers.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from itertools import compress
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from graphwright.array import CPU, Device, Spec
from graphwright.autograd import Variable
from graphwright.errors import UsageError
from graphwright.graph import NodeId
from graphwright.plan.errors import PlanOutOfMemory
from graphwright.plan.options import CompileOptions
from graphwright.plan.planning.commit import StateCommit
from graphwright.plan.planning.fusion import fuse
from graphwright.plan.planning.lowering import LARGEST, TooLarge, on_vm
from graphwright.plan.planning.native import loops
from graphwright.plan.planning.overlap import with_early_starts
from graphwright.plan.planning.passes import ALIGN
from graphwright.plan.planning.plan_builder import PlanBuilder
from graphwright.plan.planning.residency import HomeChanged, HostPlacement
from graphwright.plan.planning.rewrites import FAST_RULES, NARROW_WEIGHT, RULES
from graphwright.plan.table import Instr
from graphwright.program.errors import FeedError
from graphwright.program.op_graph import Value

if TYPE_CHECKING:
    from graphwright.plan.plan import Plan
    from graphwright.plan.planning.fusion import Fusion
    from graphwright.plan.planning.plan_tables import NodeRecord, PlanTables
    from graphwright.program.program import Program


class Patched(NamedTuple):
    """The way a plan was made: in full ("full") or from the previous plan ("patched"), the reason `why`, the number of
    nodes that were visited and, for a patched plan, the number of buffers that got a new offset.
    """

    kind: str
    why: str
    nodes: int = 0
    buffers: int = 0

    def __str__(self) -> str:
        return f"{self.kind}: {self.why} ({self.nodes} nodes visited)"


@dataclass(eq=False)
class BufferLayout:
    """Instruction order, lifetimes and offsets of one plan.

    Attributes:
        builder: the plan builder. Its tables only grow, so ids of slots, buffers and instructions stay valid.
        order: ids of the instructions in execution order.
        home, first, last, offsets: per buffer, the buffer whose memory it uses, the first and last instruction that
            needs it, and its offset in the arena (or -1).
        used: mask of the buffers that the plan touches.
        total, bound: bytes of the arena, and the maximum of live bytes over all instructions.
        ends: ends of the arena's chunks; each buffer is inside one chunk.
        roots: the nodes of outputs and watched values, and the assign nodes.
        fusion: the fusion groups.
        turn, slot_count: the builder's number of plans and of slots when this plan was made.
        sources: slots of the inputs, params, consts and states that the plan uses, in program order.
        read, written: keys of the variables that the plan reads, and of the states that it writes.
        variables: the variables of all params, consts and states, by key.
        folds: folded buffer that the plan uses -> the instruction that computes it.
    """

    builder: PlanBuilder
    order: np.ndarray
    home: np.ndarray
    first: np.ndarray
    last: np.ndarray
    offsets: np.ndarray
    used: np.ndarray
    total: int
    bound: int
    ends: tuple[int, ...]
    roots: tuple[NodeId, ...]
    fusion: Fusion

    def __post_init__(self) -> None:
        builder, tables, used = self.builder, self.builder.tables, self.used
        self.tables: PlanTables = tables
        self.turn, self.slot_count = builder.turn, len(tables.slots)
        known, weights = builder.sources(), builder.program.weights
        read = used[known.holders].tolist()
        self.sources = tuple(compress(known.slots, read))
        self.read = [key for key in compress(known.keys, read) if key is not None]
        self.variables: dict[str, Variable] = {key: weights[key] for key in known.keys if key is not None}
        folded = np.fromiter(tables.folds, np.int64, len(tables.folds))
        self.folds: dict[int, Instr] = {b: tables.folds[b] for b in folded[used[folded]].tolist()}
        self.written = [tables.buffers[tables.slots[state].buffer][2] for state, _ in builder.writes().values()]

    @cached_property
    def records(self) -> dict[NodeId, NodeRecord]:
        """The node records as they were when the plan was made."""
        return self.builder.records_at(self.turn)

    def moved_since(self, before: BufferLayout) -> np.ndarray:
        """Return the mask of buffers whose address differs from their address in `before`, an earlier plan."""
        count = len(before.home)
        home, moved = self.home[:count], np.zeros(len(self.home), np.bool_)
        moved[:count] = before.offsets != self.offsets[:count]
        return (home != before.home) | moved[home]

    def home_of(self, buffer: int) -> int:
        """Return the buffer whose memory `buffer` uses."""
        return int(self.home[buffer])


def naive_offsets(sizes: np.ndarray, last: np.ndarray) -> tuple[np.ndarray, int]:
    """Give every used buffer (last >= 0) its own memory, in order; return offsets and the total bytes."""
    rooms = np.where(last >= 0, -(-sizes // ALIGN) * ALIGN, 0)
    offsets = np.where(last >= 0, np.cumsum(rooms) - rooms, -1)
    return offsets, int(np.max(offsets + sizes, where=last >= 0, initial=0))


CONE, WASTE = 0.25, 1.25
"""A plan is made in full if an edit touched a larger share of its nodes, or its arena exceeds the bound by more."""
_MANY = 10_000  # objects made since the last collection
_FROZEN = [False]  # whether objects that the application froze were found
_GARBAGE = 4096  # a builder is dropped if its dead instructions outnumber the live ones by more


Named = Mapping[str, Value]
Planned = tuple[StateCommit, BufferLayout, Patched]
"""The results of planning that `Plan` needs besides the program and the options."""


@contextmanager
def uncollected() -> Iterator[None]:
    """Suspend garbage collection: tracing, planning and binding make thousands of objects, but no reference cycles."""
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        if gc.get_count()[0] > _MANY and not _has_frozen_objects():
            gc.freeze()  # moves the new objects to the oldest generation without a visit
            gc.unfreeze()
        gc.enable()


def _has_frozen_objects() -> bool:
    """Return True if the application has frozen objects, or had some at an earlier call.

    `gc.get_freeze_count` visits all frozen objects, which takes 0.1 s per million: it is not called again once it found
    some.
    """
    _FROZEN[0] = _FROZEN[0] or gc.get_freeze_count() > 0
    return _FROZEN[0]


def lay_out(
    p: Program, inputs: Mapping[str, Spec], outputs: Sequence[str] | None, options: CompileOptions, before: Plan | None
) -> Planned:
    """Compute the state writes and the buffer layout of a plan, reusing the previous plan `before` if possible.

    `inputs` are specs without named sizes; `outputs` are names of outputs, or None for all.
    """
    dims = _dims(p, inputs)
    wanted = {name: p.output(name) for name in (p.output_names() if outputs is None else outputs)}
    watched = {name: p.value(name) for name in options.watch}
    if not wanted and not p.assigns():
        names = ", ".join(p.output_names())
        fix = "outputs=None, to compute all" if names else "e.set_outputs(y=node), or b.output(node, 'y')"
        raise UsageError("nothing to compute: no output was selected, and the program writes no state", where=p.name,
                         expected=names or "an output of the program", got="no outputs", fix=fix)  # fmt: skip
    why = _why_full(before, options.rewrites)
    with uncollected():
        if before is None or why:
            rules = {"none": (), "exact": RULES, "fast": (*RULES, *FAST_RULES)}[options.rewrites]
            if rules and options.freeze and on_vm(options.chosen, options.device):
                rules = (*rules, NARROW_WEIGHT)
            builder = PlanBuilder(p, dims, rules, options)
            builder.given_out = frozenset((*wanted.values(), *watched.values()))
        else:
            builder = before.buffer_layout.builder
        visited = builder.visited
        try:
            builder.update()
        except TooLarge:
            raise _too_large(p, dims) from None
        try:
            return _arrange(builder, wanted, watched, options.layout, before, why, builder.visited - visited)
        except HomeChanged:
            commit, layout, patched = lay_out(p, inputs, outputs, options, None)
            why = "a value moved between host and device memory"
            return commit, layout, patched._replace(why=why)


def _why_full(before: Plan | None, rewrites: str) -> str:
    """Return the reason why the previous plan cannot be patched, or ""; `rewrites` as in `CompileOptions`."""
    if before is None:
        return "the first plan"
    if rewrites == "fast":
        return "fast rewrites depend on all readers of a value"
    if not before.latest:
        return "the plan was patched already"
    if before.buffer_layout.tables.lowerings.superseded:
        return "the VM is built now"
    if not before.assumptions_hold:
        return "a constant that a rewrite assumed has changed"
    layout = before.buffer_layout
    if len(layout.tables.instrs) > 2 * len(layout.order) + _GARBAGE:
        return "most instructions of the builder are unused"
    return ""


def _arrange(
    builder: PlanBuilder, wanted: Named, watched: Named, mode: str, before: Plan | None, why: str, visited: int
) -> Planned:
    """Order the instructions, and compute the fusion groups and the lifetimes and offsets of buffers.

    `wanted` and `watched` map names to values. `mode` is `CompileOptions.layout`, `why` the reason why the plan
    `before` cannot be patched, or "", and `visited` the number of nodes whose records were updated.
    """
    run, tables = loops(len(builder.order.now)), builder.tables
    old = None if before is None else before.buffer_layout
    outputs, seen = (
        {name: builder.records[v.node].results[v.port] for name, v in named.items()} for named in (wanted, watched)
    )
    nodes = (*(v.node for v in (*wanted.values(), *watched.values())), *builder.program.assigns())
    holders = tables.holders
    roots = [holders[s] for s in (*outputs.values(), *seen.values())]
    roots += [holders[s] for pair in builder.writes().values() for s in pair]
    need = np.zeros(len(tables.buffers), np.bool_)
    need[roots] = True
    together = builder.order.now[tables.collective(builder.order.now)].tolist()
    need[[holders[s] for q in together for s in tables.instrs[q].outs]] = True  # the other ranks run them too
    order = run.needed(builder.order.now, *tables.reads.arrays(), *tables.outs.arrays(), need)
    if together:
        order = with_early_starts(order, tables)
    if builder.device != CPU:
        order = HostPlacement(builder, order).apply(0 if old is None or why else len(old.home))
    commit = StateCommit(builder, order, outputs, seen, run)
    order, count = commit.order, len(tables.buffers)
    reads, outs, works = tables.reads.arrays(), tables.outs.arrays(), tables.works.arrays()
    home, codes = np.arange(count, dtype=np.uint32), np.frombuffer(tables.codes, np.int8)
    home[list(commit.moved)] = list(commit.moved.values())
    held = [holders[s] for s in (*commit.outputs.values(), *commit.watched.values())]
    pairs = tables.pairs.arrays()
    first, last, own = run.lifetimes(order, *reads, *outs, *works, *pairs, codes, home, np.array(held, np.uint32))
    used = last >= 0
    used[: len(need)] |= need
    fusion = fuse(builder, (order, home, first, last, own), run)
    times, steps = np.where(own, last, -1), len(order)
    sizes = np.frombuffer(tables.sizes, np.int64)
    bound = int(run.fullest(sizes, first, times, steps))
    patched = Patched("full", "naive layout" if mode == "naive" else why, visited)
    offsets, total = None, 0
    if mode == "naive":
        offsets, total = naive_offsets(sizes, times)
    elif not why and old is not None:
        if visited > CONE * len(builder.records):
            patched = Patched("full", f"the edit touched {visited} of {len(builder.records)} nodes", visited)
        else:
            chunks = np.array(old.ends, np.int64)
            offsets, placed, total = run.keep_offsets(sizes, first, times, old.offsets, steps, chunks)
            patched = Patched("patched", f"{placed} buffers placed", visited, int(placed))
            if total > WASTE * bound:
                waste = f"the arena would be {total / max(bound, 1):.2f} times the lower bound"
                offsets, patched = None, Patched("full", waste, visited)
    if offsets is None:
        offsets, total = run.assign_offsets(sizes, first, times, steps)
    ends = _chunk_ends(int(total), old.ends if old is not None else (), patched.kind, builder.device)
    layout = BufferLayout(builder, order, home, first, last, offsets, used, int(total), bound, ends, nodes, fusion)
    return commit, layout, patched


def _chunk_ends(total: int, known: tuple[int, ...], kind: str, device: Device) -> tuple[int, ...]:
    """Return the ends of the chunks of an arena of `total` bytes; `kind` is "full" or "patched", as in `Patched`.

    They are `known`, the previous plan's, if these suffice, so that no address changes. A new chunk on the host has
    spare room, because memory that is never touched costs nothing there.
    """
    if kind == "full":
        known = known[:1] if known and total <= known[0] else ()
    if known and total <= known[-1]:
        return known
    room = 0 if device != CPU else total // 4 if known else total // 8
    return (*known, -(-(total + room) // ALIGN) * ALIGN)


def _too_large(p: Program, dims: Mapping[str, int]) -> PlanOutOfMemory:
    bound = ((spec.bind(dims), p.path(n)) for n in p.order() for spec in p.specs(n))
    sizes = [(spec.nbytes, path) for spec, path in bound if not spec.symbolic]
    largest = tuple(sorted(sizes, key=lambda row: -row[0])[:5])
    most = max((size for size, _ in largest), default=0)  # the scratch of a kernel may be larger
    return PlanOutOfMemory("a value is larger than the memory of any machine", needed=most, lower_bound=most,
                       largest=largest, where=p.name, expected=f"at most {LARGEST:,} bytes a value",
                       fix="smaller input sizes, or a smaller batch")  # fmt: skip


def _dims(p: Program, inputs: Mapping[str, Spec]) -> dict[str, int]:
    """Return the value of each named size, given the inputs' specs. Raises: FeedError listing all that do not fit."""
    dims: dict[str, int] = {}
    known = {p.path(n): p.spec(n) for n in p.inputs()}
    wrong = [f"{name}: not an input" for name in inputs if name not in known]
    for name, spec in known.items():
        given = inputs.get(name)
        if given is None:
            wrong.append(f"{name}: missing, expected {spec}")
            continue
        known_sizes = not given.symbolic and min(given.sizes, default=0) >= 0
        if not known_sizes or given.dtype is not spec.dtype or not spec.match(given.sizes, dims):
            wrong.append(f"{name}: expected {spec.bind(dims)}, got {given}")
    if wrong:
        raise FeedError("inputs do not fit:\n  " + "\n  ".join(wrong), where=p.name,
                        expected=", ".join(f"{name}: {spec}" for name, spec in known.items()) or "no input",
                        got=", ".join(f"{name}: {spec}" for name, spec in inputs.items()) or "no input",
                        fix="pass each input's shape, Spec or example: program.compile(x=(64, 8))")  # fmt: skip
    return dims
