"""Pruning: units and modules that matter least go, what reads them is restored, and the report says what it cost."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from time import perf_counter
from typing import TYPE_CHECKING, Any, Literal, TypedDict, Unpack, overload

from graphwright.errors import UsageError
from graphwright.program import Program
from graphwright.surgery.calibration import Calibration, MissingCalibration
from graphwright.surgery.measure import facts, speaks, speed
from graphwright.surgery.pruning.allocate import Goal
from graphwright.surgery.pruning.criteria import need_method
from graphwright.surgery.pruning.plan import PrunePlan
from graphwright.surgery.pruning.prunable import NEURONS, check_finite, prunable, scope
from graphwright.surgery.pruning.recipe import Pruner, Settings
from graphwright.surgery.pruning.report import PruneReport

if TYPE_CHECKING:
    from graphwright.models.model import Model
    from graphwright.progress import Report
    from graphwright.surgery.budgets import SizeBudget


class Options(TypedDict, total=False):
    """Keywords of `prune`; its signature has their defaults."""

    recipe: str
    method: str
    scope: str | None
    kinds: Sequence[str]
    where: Any
    protect: Any
    round_to: int
    min_keep: float
    uniform: bool
    restore: bool
    sequential: bool
    ridge: float | None
    seed: int
    timed: bool
    report: Report | None


@overload
def prune(
    program: Program | Model,
    calibration: Calibration | None = None,
    target: SizeBudget | None = None,
    *,
    dry_run: Literal[False] = False,
    **options: Unpack[Options],
) -> PruneReport: ...
@overload
def prune(
    program: Program | Model,
    calibration: Calibration | None = None,
    target: SizeBudget | None = None,
    *,
    dry_run: Literal[True],
    **options: Unpack[Options],
) -> PrunePlan: ...
def prune(
    program: Program | Model,
    calibration: Calibration | None = None,
    target: SizeBudget | None = None,
    *,
    recipe: str = "default",
    method: str = "greedy",
    scope: str | None = None,
    kinds: Sequence[str] = NEURONS,
    where: Any = None,
    protect: Any = (),
    round_to: int = 1,
    min_keep: float = 0.1,
    uniform: bool = False,
    restore: bool = True,
    sequential: bool = True,
    ridge: float | None = None,
    seed: int = 0,
    timed: bool = True,
    dry_run: bool = False,
    report: Report | None = None,
) -> PruneReport | PrunePlan:
    """Make a program smaller, in one edit that can be undone.

    Args:
        program: or a model, which brings its tokenizer, and text of its own if no calibration is given.
        calibration: data to learn from, and held-out data to measure on.
        target: what must go or may stay: `Ratio`, `Params`, `Flops`, `Bytes` or `Latency`. A `Ratio` is of the nodes
            `where` says, by default of the numbered layers (of everything, if there are none).
        recipe: `default` (units, and attention modules where that costs less: shares 0, 0.25 and 0.5 are tried on the
            calibration loss), `units` alone, or whole `modules` alone.
        method: score of a unit: `greedy`, `obs`, `wanda`, `magnitude`, `taylor`, `random`; see `scores`.
        scope: what is compared: `loss` (predicted loss per parameter, of all axes; the default for programs that score
            tokens), `global` (error relative to a layer's output, per parameter; the default else), `kind` (among equal
            axes), `layer` (the same share of every axis).
        kinds: of units, see `prunable`: neurons and inner channels by default.
        where: pattern or nodes that may be pruned.
        protect: pattern or nodes that may not.
        round_to: sizes become multiples of it.
        min_keep: share of an axis that stays at least, unless its module goes.
        uniform: equal axes keep equally many units, so that a class with one size for all layers can hold them.
        restore: give the products that read the units the least-squares weights for what is left.
        sequential: score and restore a layer on what the layers before it, pruned already, give.
        ridge: λ of the fit in units of the mean diagonal; by default 1e-4, more where that is too little.
        seed: of `method="random"`.
        timed: measure the time per token before and after.
        dry_run: change nothing; return the plan, with its report.
        report: called with `Progress`.
    Returns: a `PruneReport`; with `dry_run` a `PrunePlan`.
    Raises: BudgetUnreachable with the nearest figure; NothingToPrune; MissingCalibration; CalibrationTooSmall;
        NonFiniteWeight; UsageError. After any error the program is as before.
    """
    started = perf_counter()
    model = None if isinstance(program, Program) else program
    p = program if isinstance(program, Program) else program.program
    if target is None:
        raise UsageError("prune to what?", expected="a target", fix="target=Ratio(0.3)")
    need_method(method)
    settings = Settings(recipe, method, scope, tuple(kinds), protect, round_to, min_keep, uniform, restore, sequential,
                        ridge, seed)  # fmt: skip
    nodes = _scope(p, where)
    check_finite(p, prunable(p, nodes, settings.kinds, protect) if recipe != "modules" else [])
    if calibration is None:
        if model is None:
            raise MissingCalibration("pruning measures what a model does on data", fix="Calibration(tokens)")
        calibration = Calibration.of(model)
    feeds = calibration.feeds(p, held=True)[0]
    goal = Goal.of_target(p, target, nodes, feeds)
    pruner = Pruner(p, calibration, goal, settings, nodes, report)
    made = pruner.run()
    tokenizer = None if model is None else model.tokenizer

    def measured(of: Program) -> dict[str, Any]:
        return facts(of, calibration, p, tokenizer) | (speed(of, feeds) if timed else {})

    before = measured(p)
    after = measured(made.program) if made.steps else dict(before)
    found = PruneReport(
        target=str(target),
        reached={"of": goal.of, "before": goal.base, "asked": goal.most,
                 "after": goal.taken(made.program, goal.counted(made.program), {})},
        steps=tuple(made.steps),
        before=before,
        after=after,
        rung=None if model is None else (_rung(model, p), _rung(model, made.program)),
        calibration=calibration.to_json(),
        settings={f.name: getattr(settings, f.name) for f in fields(settings)} | {
            "scope": scope or ("loss" if speaks(p) else "global"), "kinds": list(kinds), "protect": str(protect),
        },
        attempts=[a.to_json() for a in pruner.attempts],
        warnings=list(dict.fromkeys(pruner.warnings)),
    )  # fmt: skip
    plan = PrunePlan(p, tuple(made.steps), found)
    if not dry_run:
        plan.apply()
        found.journal = p.journal.hash
    found.seconds = perf_counter() - started
    return plan if dry_run else found


_scope = scope  # `prune` has an argument of this name


def _rung(model: Model, p: Program) -> int | None:
    return model.with_program(p).export_plan().level
