"""Program -> numbers of a plan: update the builder, prune, order state writes, then lifetimes, fusion and layout.

After an edit the builder of the previous plan is reused: records that the edit did not touch stay, and so do the
offsets of their buffers in the arena.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import numpy as np

from graphwright.array import CPU, Device, Spec
from graphwright.errors import UsageError
from graphwright.plan.errors import OutOfMemory
from graphwright.plan.options import CompileOptions
from graphwright.plan.planning.buffer_layout import BufferLayout, Patched, place_naive
from graphwright.plan.planning.commit import StateCommit
from graphwright.plan.planning.fusion import fuse
from graphwright.plan.planning.lowering import LARGEST, TooLarge, on_vm
from graphwright.plan.planning.native import loops
from graphwright.plan.planning.passes import ALIGN
from graphwright.plan.planning.plan_builder import PlanBuilder
from graphwright.plan.planning.residency import HomeChanged, HostPlacement
from graphwright.plan.planning.rewrites import FAST_RULES, NARROW_WEIGHT, RULES
from graphwright.program import FeedError, Program, Value

if TYPE_CHECKING:
    from graphwright.plan.plan import Plan

CONE, WASTE = 0.25, 1.25
"""A plan is made in full if an edit touched a larger share of its nodes, or its arena is so many times the bound."""
_MANY = 10_000  # objects made since the last collection
_GARBAGE = 4096  # dead instructions beyond as many as there are live ones, from which a builder is dropped


Planned = tuple[StateCommit, BufferLayout, Patched]
"""A program as numbers: what `Plan` needs besides the program and the options."""


@contextmanager
def uncollected() -> Iterator[None]:
    """Suspend cycle collection: tracing, planning and binding make no cycles, yet thousands of objects to visit."""
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        if gc.get_count()[0] > _MANY and not gc.get_freeze_count():
            gc.freeze()  # moves the new objects to the oldest generation without a visit
            gc.unfreeze()
        gc.enable()


def lay_out(
    p: Program, inputs: Mapping[str, Spec], outputs: Sequence[str] | None, options: CompileOptions, before: Plan | None
) -> Planned:
    """Plan a program for input specs; see `make_plan`."""
    dims = _dims(p, inputs)
    wanted = {name: p.output(name) for name in (p.output_names() if outputs is None else outputs)}
    watched = {name: p.value(name) for name in options.watch}
    if not wanted and not p.assigns():
        raise UsageError(
            "nothing to compute: no output was selected, and the program writes no state",
            where=p.name,
            expected=", ".join(p.output_names()) or "an output",
            got="no outputs",
            fix="outputs=None plans all" if p.output_names() else "e.set_outputs(y=node), or b.output(node, 'y')",
        )
    why = _why_full(before, options.rewrites)
    with uncollected():
        if before is None or why:
            rules = {"none": (), "exact": RULES, "fast": (*RULES, *FAST_RULES)}[options.rewrites]
            if rules and options.freeze and on_vm(options.executor, options.device):
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
            why = "other values than before are in host memory"
            return commit, layout, patched._replace(why=why)


def _why_full(before: Plan | None, rewrites: str) -> str:
    """The reason nothing of the previous plan can be reused, or ""."""
    if before is None:
        return "the first plan"
    if rewrites == "fast":
        return "fast rewrites depend on all readers of a value"
    if not before.latest:
        return "the plan was patched already"
    if not before.assumptions_hold:
        return "a constant that a rewrite assumed has changed"
    layout = before.buffer_layout
    if len(layout.tables.instrs) > 2 * len(layout.order) + _GARBAGE:
        return "most records are of deleted nodes"
    return ""


def _arrange(
    builder: PlanBuilder,
    wanted: Mapping[str, Value],
    watched: Mapping[str, Value],
    mode: str,
    before: Plan | None,
    why: str,
    visited: int,
) -> Planned:
    """Order the instructions, and compute lifetimes, fusion groups and offsets of the buffers."""
    run, tables = loops(len(builder.order)), builder.tables
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
    order = run.needed(builder.order, *tables.reads.arrays(), *tables.outs.arrays(), need)
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
        offsets, total = place_naive(sizes, times)
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
        offsets, total = run.place(sizes, first, times, steps)
    ends = _chunk_ends(int(total), old.ends if old is not None else (), patched.kind, builder.device)
    layout = BufferLayout(builder, order, home, first, last, offsets, used, int(total), bound, ends, nodes, fusion)
    return commit, layout, patched


def _chunk_ends(total: int, known: tuple[int, ...], kind: str, device: Device) -> tuple[int, ...]:
    """Ends of an arena's chunks: those of the previous plan if they suffice, so that no address changes.

    A new chunk has room to grow on the host, where untouched memory costs nothing.
    """
    if kind == "full":
        known = known[:1] if known and total <= known[0] else ()
    if known and total <= known[-1]:
        return known
    room = 0 if device != CPU else total // 4 if known else total // 8
    return (*known, -(-(total + room) // ALIGN) * ALIGN)


def _too_large(p: Program, dims: Mapping[str, int]) -> OutOfMemory:
    bound = ((spec.bind(dims), p.path(n)) for n in p.order() for spec in p.specs(n))
    sizes = [(spec.nbytes, path) for spec, path in bound if not spec.symbolic]
    largest = tuple(sorted(sizes, key=lambda row: -row[0])[:5])
    most = max((size for size, _ in largest), default=0)  # the scratch of a kernel may be larger
    return OutOfMemory("a value has more bytes than any machine", needed=most, lower_bound=most, largest=largest,
                       where=p.name, expected=f"at most {LARGEST:,} bytes a value",
                       fix="smaller input sizes, or a smaller batch")  # fmt: skip


def _dims(p: Program, inputs: Mapping[str, Spec]) -> dict[str, int]:
    """Numbers for named sizes. Raises: FeedError."""
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
                        fix="program.compile(x=(64, 8)): for each input a shape, a Spec or an example")  # fmt: skip
    return dims
