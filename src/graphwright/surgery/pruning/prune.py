"""Pruning: remove the units and modules that matter least, restore the layers that read them, and report the cost."""

from __future__ import annotations

from dataclasses import replace
from time import perf_counter
from typing import Any, Literal, Unpack, overload

from graphwright.models.model import Model
from graphwright.program import Program
from graphwright.progress import Report
from graphwright.surgery.budgets import SizeBudget
from graphwright.surgery.calibration import Calibration, MissingCalibration
from graphwright.surgery.matrices import program_of
from graphwright.surgery.measure import figures, scores_tokens, speed
from graphwright.surgery.pruning.allocate import Goal
from graphwright.surgery.pruning.plan import PruneKeywords, PruneOptions, PrunePlan, PruneReport
from graphwright.surgery.pruning.prunable import check_finite, prunable, scope_nodes
from graphwright.surgery.pruning.recipe import Pruner


@overload
def prune(
    program: Program | Model, target: SizeBudget, calibration: Calibration | None = None, *,
    dry_run: Literal[False] = False, report: Report | None = None, **options: Unpack[PruneKeywords],
) -> PruneReport: ...  # fmt: skip
@overload
def prune(
    program: Program | Model, target: SizeBudget, calibration: Calibration | None = None, *, dry_run: Literal[True],
    report: Report | None = None, **options: Unpack[PruneKeywords],
) -> PrunePlan: ...  # fmt: skip
def prune(
    program: Program | Model, target: SizeBudget, calibration: Calibration | None = None, *, dry_run: bool = False,
    report: Report | None = None, **options: Unpack[PruneKeywords],
) -> PruneReport | PrunePlan:  # fmt: skip
    """Make a program smaller, in one edit that can be undone.

    Args:
        program: a program; or a model, which provides the tokenizer, and calibration data if none are given.
        target: `Ratio`, `Params`, `Flops`, `Bytes` or `Latency`. A `Ratio` counts the nodes that `where` selects.
        calibration: data to learn from, and held-out data to measure on.
        dry_run: change nothing; return the plan, with its report.
        report: called with `Progress`.
        options: see `PruneOptions`.
    Returns: a `PruneReport`; with `dry_run` a `PrunePlan`.
    Raises: BudgetUnreachable with the nearest figure; NothingToPrune; MissingCalibration; CalibrationTooSmall;
        NonFiniteWeight; UsageError. After any error the program is as before.
    """
    started = perf_counter()
    given, p = PruneOptions(**options), program_of(program)
    model = None if isinstance(program, Program) else program
    nodes = scope_nodes(p, given.where)
    check_finite(p, prunable(p, nodes, given.kinds, given.protect) if given.recipe != "modules" else [])
    if calibration is None:
        if model is None:
            raise MissingCalibration("pruning a program needs calibration data", fix="Calibration(tokens)")
        calibration = Calibration.of(model)
    feeds = calibration.feeds(p, held=True)[0]
    goal = Goal.of_target(p, target, nodes, feeds)
    chosen = replace(given, scope=given.scope or ("loss" if scores_tokens(p) else "global"))
    pruner = Pruner(p, calibration, goal, chosen, nodes, report)
    made = pruner.run()
    tokenizer = None if model is None else model.tokenizer

    def measured(of: Program) -> dict[str, Any]:
        return figures(of, calibration, p, tokenizer) | (speed(of, feeds) if given.timed else {})

    before = measured(p)
    found = PruneReport(
        target=str(target),
        reached={"of": goal.of, "before": goal.base, "asked": goal.most,
                 "after": goal.taken(made.program, goal.counted(made.program), {})},
        steps=tuple(made.steps),
        before=before,
        after=measured(made.program) if made.steps else dict(before),
        export_level=None if model is None else (_export_level(model, p), _export_level(model, made.program)),
        calibration=calibration.to_json(),
        settings=chosen.to_json(),
        attempts=[a.to_json() for a in pruner.attempts],
        warnings=list(dict.fromkeys(pruner.warnings)),
    )  # fmt: skip
    plan = PrunePlan(p, found.steps, found)
    if not dry_run:
        plan.apply()
        found.journal = p.journal.hash
    found.seconds = perf_counter() - started
    return plan if dry_run else found


def _export_level(model: Model, p: Program) -> int | None:
    return model.with_program(p).export_plan().level
