"""Pruning: remove the units and modules that matter least, restore the layers that read them, and report the cost."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from time import perf_counter
from typing import TYPE_CHECKING, Any, Literal, TypedDict, Unpack, overload

from graphwright.errors import UsageError
from graphwright.program import Program
from graphwright.report import plain
from graphwright.surgery.calibration import Calibration, MissingCalibration
from graphwright.surgery.errors import check_choices
from graphwright.surgery.matrices import program_of
from graphwright.surgery.measure import figures, scores_tokens, speed
from graphwright.surgery.pruning.allocate import SCOPES, Goal
from graphwright.surgery.pruning.plan import PrunePlan, PruneReport
from graphwright.surgery.pruning.prunable import NEURONS, Where, check_finite, prunable, scope_nodes
from graphwright.surgery.pruning.recipe import Pruner
from graphwright.surgery.pruning.scores import METHODS

if TYPE_CHECKING:
    from graphwright.models.model import Model
    from graphwright.progress import Report
    from graphwright.surgery.budgets import SizeBudget

RECIPES = ("default", "units", "modules")


@dataclass(frozen=True, slots=True)
class PruneOptions:
    """Options of `prune`.

    Attributes:
        recipe: `default` (units, and attention modules where that costs less: shares 0, 0.25 and 0.5 are tried on the
            calibration loss), `units` alone, or whole `modules` alone.
        method: score of a unit: `greedy`, `obs`, `wanda`, `magnitude`, `taylor`, `random`; see `scores`.
        scope: how units of different axes compare: `loss` (predicted loss per parameter; the default for programs that
            score tokens), `global` (error relative to a layer's output, per parameter; the default otherwise), `kind`
            (among axes of equal kind and size), `layer` (the same share of every axis).
        kinds: of units: `neurons`, `channels` (between convolutions), `head_dim` (widths of values), `kv_groups` (a key
            head with all its readers), `queries` (the same query head of each key head), `heads` (any query head).
        where: pattern or nodes that may be pruned; by default the numbered layers, or everything if there are none.
        protect: pattern or nodes that may not be pruned.
        round_to: sizes become multiples of it.
        min_keep: smallest share of an axis that stays, unless its whole module is removed.
        uniform: axes of equal kind and size keep equally many units, so that one size fits all layers.
        restore: refit the products that read the units by least squares.
        sequential: score and restore a layer on the outputs of the layers before it, which are pruned already.
        ridge: λ of the fit in units of the mean diagonal; by default 1e-4, or more where that is too little.
        seed: of `method="random"`.
        timed: measure the time per token before and after.
    """

    recipe: str = "default"
    method: str = "greedy"
    scope: str | None = None
    kinds: Sequence[str] = NEURONS
    where: Where | None = None
    protect: Where = ()
    round_to: int = 1
    min_keep: float = 0.1
    uniform: bool = False
    restore: bool = True
    sequential: bool = True
    ridge: float | None = None
    seed: int = 0
    timed: bool = True

    def __post_init__(self) -> None:
        given = {"recipe": self.recipe, "method": self.method, "scope": self.scope or SCOPES[0]}
        check_choices(given, {"recipe": RECIPES, "method": METHODS, "scope": SCOPES})
        if self.round_to < 1 or not 0 <= self.min_keep <= 1:
            raise UsageError("round_to or min_keep is out of range", expected="round_to >= 1, 0 <= min_keep <= 1",
                             got=(self.round_to, self.min_keep))  # fmt: skip

    def to_json(self) -> dict[str, Any]:
        """Plain values; nodes as text."""
        return {**plain(self), "kinds": list(self.kinds), "where": self.where and str(self.where),
                "protect": str(self.protect)}  # fmt: skip


class PruneKeywords(TypedDict, total=False):
    """`PruneOptions` as keywords."""

    recipe: str
    method: str
    scope: str | None
    kinds: Sequence[str]
    where: Where | None
    protect: Where
    round_to: int
    min_keep: float
    uniform: bool
    restore: bool
    sequential: bool
    ridge: float | None
    seed: int
    timed: bool


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
