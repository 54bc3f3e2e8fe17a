"""Program -> Plan: check what is asked, then draft, rewrites, rows, commits, liveness, layout."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from time import perf_counter

from graphwright.array import CPU, Spec, backend
from graphwright.errors import UsageError
from graphwright.plan.collector import uncollected
from graphwright.plan.commit import Commit
from graphwright.plan.draft import Draft
from graphwright.plan.executor import choose, on_vm
from graphwright.plan.layout import place, place_naive
from graphwright.plan.liveness import in_place, lifetimes
from graphwright.plan.lower import Rows
from graphwright.plan.plan import Options, Plan
from graphwright.plan.rewrites import MODES, rewrite
from graphwright.plan.table import Slot
from graphwright.program import FeedError, Program
from graphwright.program.validate import refuse_broken

_LAYOUTS = {"reuse": place, "naive": place_naive}


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
) -> Plan:
    """Plan a program for input specs.

    Args:
        inputs: a spec per declared input, all sizes numbers.
        outputs: names of the outputs wanted; all by default.
        freeze, rewrites, layout, watch, executor: see `Options`.
    Raises: InvalidProgram; FeedError listing every input that does not fit; UnknownNode; UsageError.
    """
    backend(CPU)  # loads kernels at the first plan of a process: no part of planning
    started = perf_counter()
    if rewrites not in MODES or layout not in _LAYOUTS:
        raise UsageError("no such mode", expected=f"rewrites {MODES}, layout {tuple(_LAYOUTS)}", got=(rewrites, layout))
    refuse_broken(p)
    dims = _dims(p, inputs)
    wanted = {name: p.output(name) for name in (p.output_names() if outputs is None else outputs)}
    if not wanted and not p.writes():
        raise UsageError("the program has no output and writes nothing", where=p.name)
    with uncollected():
        draft = Draft(p, dims, wanted, {name: p.value(name) for name in watch})
        if rewrites != "none":
            rewrite(draft, fast=rewrites == "fast", narrow=freeze and on_vm(executor))
        rows = Rows(draft, freeze=freeze, fold=rewrites != "none")
        commit = Commit(rows)
        lifetimes(rows)
        in_place(rows)
        choices = choose(rows, executor)
        arena = _LAYOUTS[layout](rows.buffers, len(rows.instrs))
        columns = zip(rows.values, rows.buffer_of, rows.specs, rows.layouts, rows.bases, strict=True)
        slots = tuple([Slot(i, v, b, spec.dtype, at, base) for i, (v, b, spec, at, base) in enumerate(columns)])
    return Plan(
        program=p,
        version=p.version,
        inputs=dict(inputs),
        outputs=rows.outputs,
        watched=rows.watched,
        instrs=tuple(rows.instrs),
        slots=slots,
        buffers=tuple(rows.buffers),
        folds=rows.folds,
        pruned=tuple(p.path(n) for n in draft.pruned),
        rewrites=tuple(draft.log),
        commits={p.path(n): why for n, why in commit.why.items()},
        commit_start=commit.start,
        early=commit.early,
        guards=draft.guards,
        arena_bytes=arena,
        choices=choices,
        options=Options(freeze, rewrites, layout, tuple(watch), executor),
        ms=(perf_counter() - started) * 1e3,
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
        elif given.dtype is not spec.dtype or given.symbolic or not spec.match(given.sizes, dims):
            wrong.append(f"{name}: expected {spec.bind(dims)}, got {given}")
    if wrong:
        raise FeedError("inputs do not fit:\n  " + "\n  ".join(wrong), where=p.name)
    return dims
