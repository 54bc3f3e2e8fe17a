"""Program -> Plan: check what is asked, bring the ledger up to date, then loops over all instructions and the layout.

After an edit the ledger of the plan before is taken on: rows of what the edit did not touch stay, and so do the places
of their buffers in the arena.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from difflib import get_close_matches
from time import perf_counter
from typing import TYPE_CHECKING, Any

import numpy as np

from graphwright.array import CPU, backend
from graphwright.errors import UsageError
from graphwright.plan.errors import OutOfMemory
from graphwright.plan.plan import CompileOptions, Plan
from graphwright.plan.planning.buffer_layout import BufferLayout, Patched, place_naive
from graphwright.plan.planning.commit import StateCommit
from graphwright.plan.planning.executors import EXECUTORS, VM, on_vm
from graphwright.plan.planning.fusion import fuse
from graphwright.plan.planning.lowering import LARGEST, TooLarge
from graphwright.plan.planning.native import loops
from graphwright.plan.planning.passes import ALIGN
from graphwright.plan.planning.plan_builder import PlanBuilder
from graphwright.plan.planning.remat import within
from graphwright.plan.planning.residency import OtherSide, keep_on_host
from graphwright.plan.planning.rewrites import FAST_RULES, MODES, NARROW_WEIGHT, RULES
from graphwright.program import FeedError
from graphwright.program.validate import refuse_broken

if TYPE_CHECKING:
    from graphwright.array import Device, Spec
    from graphwright.graph import NodeId
    from graphwright.program import Program

_MANY = 10_000  # objects made since the last collection


@contextmanager
def uncollected() -> Iterator[None]:
    """No cycle collection inside: tracing, planning and binding make no cycles, yet thousands of objects to visit."""
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        if gc.get_count()[0] > _MANY and not gc.get_freeze_count():
            gc.freeze()  # what was made is old at once, by moving a list: to visit it would free nothing
            gc.unfreeze()
        gc.enable()


LAYOUTS = ("reuse", "naive")
CONE, WASTE = 0.25, 1.25
"""A plan is made anew if an edit touched more than this share of its buffers, or its arena is this much too large."""
_GARBAGE = 4096  # instructions of a ledger that run no more, beyond as many again as do, from which on it is dropped


def make_plan(
    p: Program,
    inputs: Mapping[str, Spec],
    outputs: Sequence[str] | None = None,
    *,
    freeze: bool = False,
    rewrites: str = "exact",
    layout: str = "reuse",
    watch: Sequence[str] = (),
    executor: str = "aten",
    device: Device = CPU,
    remat: int | None = None,
    poison: bool = False,
    before: Plan | None = None,
) -> Plan:
    """Plan a program for input specs.

    Args:
        inputs: a spec per declared input, all sizes numbers.
        outputs: names of the outputs wanted; all by default.
        freeze, rewrites, layout, watch, executor, device, remat, poison: see `Options`.
        before: the last plan of the same program, inputs and options: what an edit left as it was is taken from it.
    Raises: InvalidProgram; FeedError listing every input that does not fit; UnknownNode; UsageError; BudgetImpossible;
        OutOfMemory for a value that no machine could hold; DeviceUnavailable.
    """
    backend(device)  # loads kernels at the first plan of a process, as the next line loads loops: no part of planning
    loops(len(p))
    started = perf_counter()
    _check_modes(p, device, rewrites=(rewrites, MODES), layout=(layout, LAYOUTS), executor=(executor, EXECUTORS))
    refuse_broken(p)
    options: dict[str, Any] = {"freeze": freeze, "rewrites": rewrites, "layout": layout, "watch": watch}
    options |= {"executor": executor, "device": device, "poison": poison}
    if remat is not None:
        plan = within(p, remat, lambda q: make_plan(q, inputs, outputs, **options))
        return replace(plan, ms=(perf_counter() - started) * 1e3)
    dims = _dims(p, inputs)
    wanted = {name: p.output(name) for name in (p.output_names() if outputs is None else outputs)}
    watched = {name: p.value(name) for name in watch}
    if not wanted and not p.assigns():
        raise UsageError(
            "no output is asked for, and the program writes nothing",
            where=p.name,
            expected=", ".join(p.output_names()) or "an output",
            got="no outputs",
            fix="outputs=None plans all" if p.output_names() else "e.set_outputs(y=node), or b.output(node, 'y')",
        )
    why = _full(before, rewrites)
    with uncollected():
        if before is None or why:
            rules = {"none": (), "exact": RULES, "fast": (*RULES, *FAST_RULES)}[rewrites]
            if rules and freeze and on_vm(executor, device):
                rules = (*rules, NARROW_WEIGHT)
            ledger = PlanBuilder(p, dims, rules, freeze=freeze, executor=executor, device=device)
            ledger.held = frozenset((*wanted.values(), *watched.values()))
        else:
            ledger = before.arranged.ledger
        looked_at = ledger.settled
        try:
            ledger.sync()
        except TooLarge:
            raise _too_large(p, dims) from None
        given, seen = (
            {name: ledger.rows[v.node].results[v.port] for name, v in named.items()} for named in (wanted, watched)
        )
        nodes = (*(v.node for v in (*wanted.values(), *watched.values())), *p.assigns())
        rows = ledger.settled - looked_at
        try:
            commit, arranged, patched = _arrange(ledger, given, seen, layout, before, why, rows, nodes)
        except OtherSide:
            plan = make_plan(p, inputs, outputs, **options)
            patched = plan.patched._replace(why="other values than before lie on the host")
            return replace(plan, patched=patched, ms=(perf_counter() - started) * 1e3)
    return Plan(
        program=p,
        version=p.version,
        inputs=dict(inputs),
        outputs=commit.outputs,
        watched=commit.watched,
        commits={ledger.rows[n].path: reason for n, reason in commit.why.items()},
        commit_start=commit.start,
        early=commit.early,
        guards=dict(ledger.guards),
        options=CompileOptions(freeze, rewrites, layout, tuple(watch), executor, device, poison=poison),
        arranged=arranged,
        patched=patched,
        ms=(perf_counter() - started) * 1e3,
    )


def _check_modes(p: Program, device: Device, **options: tuple[Any, Sequence[str]]) -> None:
    """Raises: UsageError for an option that is none of those it may be, or that the device does not have."""
    for option, (given, known) in options.items():
        if given not in known:
            raise UsageError(
                f"no such {option}",
                where=p.name,
                expected=", ".join(known),
                got=repr(given),
                fix=f"program.compile(..., {option}={get_close_matches(str(given), known, 1, 0)[0]!r})",
            )
    if options["executor"][0] == VM and device != CPU:
        raise UsageError(
            "the VM runs on the CPU only", where=p.name, expected=CPU, got=device, fix='executor="auto", or no device'
        )


def _full(before: Plan | None, rewrites: str) -> str:
    """Why nothing of the plan before can be taken on, if so."""
    if before is None:
        return "the first plan"
    if rewrites == "fast":
        return "fast rewrites look at all readers of a value"
    if not before.latest:
        return "the plan was patched already"
    if not before.guarded_fresh:
        return "a constant that a rewrite relied on changed"
    ledger = before.arranged.ledger
    if len(ledger.instrs) > 2 * len(before.arranged.order) + _GARBAGE:
        return "most rows of the ledger are of nodes that are gone"
    return ""


def _arrange(
    ledger: PlanBuilder,
    outputs: Mapping[str, int],
    watched: Mapping[str, int],
    layout: str,
    before: Plan | None,
    why: str,
    rows: int,
    nodes: tuple[NodeId, ...],
) -> tuple[StateCommit, BufferLayout, Patched]:
    """Instructions in order, buffers with times and places."""
    run = loops(len(ledger.order))
    slots = ledger.slots
    roots = [slots[s].buffer for s in (*outputs.values(), *watched.values())]
    written = ledger.writes().values()
    roots += [slots[s].buffer for pair in written for s in pair]
    need = np.zeros(len(ledger.buffers), np.bool_)
    need[roots] = True
    order = run.needed(ledger.order, *ledger.reads.arrays(), *ledger.outs.arrays(), need)
    if ledger.device != CPU:
        order = keep_on_host(ledger, order, 0 if before is None or why else len(before.arranged.home))
    commit = StateCommit(ledger, order, outputs, watched, run)
    order, count = commit.order, len(ledger.buffers)
    reads, outs, works = ledger.reads.arrays(), ledger.outs.arrays(), ledger.works.arrays()
    home, codes = np.arange(count, dtype=np.uint32), np.frombuffer(ledger.codes, np.int8)
    home[list(commit.moved)] = list(commit.moved.values())
    held = [slots[s].buffer for s in (*commit.outputs.values(), *commit.watched.values())]
    pairs = ledger.pairs.arrays()
    first, last, own = run.lifetimes(order, *reads, *outs, *works, *pairs, codes, home, np.array(held, np.uint32))
    used = last >= 0
    used[: len(need)] |= need
    fusion = fuse(ledger, order, home, first, last, own, run)
    times, steps = np.where(own, last, -1), len(order)
    sizes = np.frombuffer(ledger.sizes, np.int64)
    bound = int(run.fullest(sizes, first, times, steps))
    patched = Patched("full", "naive layout" if layout == "naive" else why, rows)
    offsets, total = None, 0
    if layout == "naive":
        offsets, total = place_naive(sizes, times)
    elif not why and before is not None:
        if rows > CONE * len(ledger.rows):
            patched = Patched("full", f"the edit touched {rows} of {len(ledger.rows)} rows", rows)
        else:
            known, chunks = before.arranged.offsets, np.array(before.arranged.ends, np.int64)
            offsets, placed, total = run.keep_places(sizes, first, times, known, steps, chunks)
            patched = Patched("patched", f"{placed} buffers placed", rows, int(placed))
            if total > WASTE * bound:
                waste = f"the arena would be {total / max(bound, 1):.2f} of the lower bound"
                offsets, patched = None, Patched("full", waste, rows)
    if offsets is None:
        offsets, total = run.place(sizes, first, times, steps)
    ends = _ends(int(total), before.arranged.ends if before is not None else (), patched.kind, ledger.device)
    arranged = BufferLayout(ledger, order, home, first, last, offsets, used, int(total), bound, ends, nodes, fusion)
    return commit, arranged, patched


def _ends(total: int, known: tuple[int, ...], kind: str, device: Device) -> tuple[int, ...]:
    """Ends of the chunks of an arena: those of the plan before where they hold it, so that memory stays where it is.

    A new one has room to grow into on the host, where memory that nobody touched costs nothing.
    """
    if kind == "full":
        known = known[:1] if known and total <= known[0] else ()
    if known and total <= known[-1]:
        return known
    room = 0 if device != CPU else total // 4 if known else total // 8
    return (*known, -(-(total + room) // ALIGN) * ALIGN)


def _too_large(p: Program, dims: Mapping[str, int]) -> OutOfMemory:
    """The error for values of more bytes than are planned."""
    bound = ((spec.bind(dims), p.path(n)) for n in p.order() for spec in p.specs(n))
    sizes = [(spec.nbytes, path) for spec, path in bound if not spec.symbolic]
    largest = tuple(sorted(sizes, key=lambda row: -row[0])[:5])
    most = max((size for size, _ in largest), default=0)  # scratch of a kernel may be what is too large
    return OutOfMemory(
        "a value of more bytes than any machine has",
        needed=most,
        lower_bound=most,
        largest=largest,
        where=p.name,
        expected=f"at most {LARGEST:,} bytes a value",
        fix="smaller sizes of the inputs, or rows in parts",
    )


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
        raise FeedError(
            "inputs do not fit:\n  " + "\n  ".join(wrong),
            where=p.name,
            expected=", ".join(f"{name}: {spec}" for name, spec in known.items()) or "no input",
            got=", ".join(f"{name}: {spec}" for name, spec in inputs.items()) or "no input",
            fix="program.compile(x=(64, 8)): for each input a shape, a Spec or an example",
        )
    return dims
