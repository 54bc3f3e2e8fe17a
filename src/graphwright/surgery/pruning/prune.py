"""The pruning recipe: allocate units from one pass over the calibration data, then cut and restore layer by layer.

All work happens on copies, which share unchanged weights, and results in a list of steps. Several shares of attention
can thus be tried, a dry run changes nothing, and an interruption leaves the program unchanged.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from statistics import fmean
from time import perf_counter
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Unpack, overload

import numpy as np

from graphwright.arguments import checked
from graphwright.array import NDArray
from graphwright.errors import BudgetUnreachable, UsageError
from graphwright.graph import NodeId
from graphwright.program.axes.resize import ResizeAxis
from graphwright.program.editing.edits import RemoveEdge, RemoveNode, SetWeight
from graphwright.program.editing.journal import Entry
from graphwright.program.errors import NotUndoable
from graphwright.program.kinds import PARAM
from graphwright.program.op_graph import OpGraph
from graphwright.progress import Progress, ProgressCallback
from graphwright.report import Report
from graphwright.signatures import keywords
from graphwright.surgery.budgets import Ratio, SizeBudget
from graphwright.surgery.calibration import (
    Calibration,
    CalibrationSource,
    CalibrationTooSmall,
    MissingCalibration,
    Stream,
    calibration_of,
)
from graphwright.surgery.matrices import program_of
from graphwright.surgery.measure import compare_speed, figures, loss, scores_tokens
from graphwright.surgery.pruning import prunable as pr
from graphwright.surgery.pruning.allocate import Curve, Goal, allocate, smallest, unit_cost
from graphwright.surgery.pruning.plan import TOOL, PruneKeywords, PruneOptions, PrunePlan, PruneReport, PruneStep
from graphwright.surgery.pruning.prunable import PrunableAxis, ResidualBranch
from graphwright.surgery.pruning.restore import RIDGE, Gram, ProductCut, Restored, restored
from graphwright.surgery.pruning.scores import (
    CRITERIA,
    Importance,
    error_scales,
    grams,
    importance,
    need_tokens,
    unit_columns,
)

if TYPE_CHECKING:
    from graphwright.models.model import Model
    from graphwright.program.editing.transaction import Transaction
    from graphwright.program.program import Program


SHARES = (0.0, 0.25, 0.5)
"""Shares of the removal that are tried as whole attention modules."""


@dataclass(slots=True, repr=False)
class Attempt(Report):
    """A pruned copy of a program, and the steps that pruned it.

    Attributes:
        share: part of the reduction that comes from removing whole modules.
        calibration_loss: nats per token (or drift) on the calibration data; None if the attempt was given up.
        given_up: reason why the attempt was given up; None if it was not.
    """

    share: float
    program: Program
    steps: list[PruneStep] = field(default_factory=list)
    calibration_loss: float | None = None
    given_up: str | None = None
    HIDDEN: ClassVar = ("program", "steps")
    FIGURES: ClassVar = ("modules",)

    @property
    def modules(self) -> list[str]:
        """Names of the removed modules."""
        return [s.name for s in self.steps if s.what == "module"]


class Pruner:
    """The pruning of one program, on copies; collects the attempts, and warnings for the user."""

    def __init__(
        self, p: Program, calibration: Calibration, goal: Goal, options: PruneOptions, nodes: Collection[NodeId],
        progress: ProgressCallback | None,
    ) -> None:  # fmt: skip
        self.p, self.calibration, self.goal, self.options = p, calibration, goal, options
        self.nodes, self.progress = nodes, progress or (lambda _: None)
        self.feeds, self.held = calibration.feeds(p), calibration.feeds(p, held=True)
        self.reference = None if scores_tokens(p) else list(self._stream(p).outputs())
        self.warnings: list[str] = []
        self.attempts: list[Attempt] = []

    def _stream(self, p: Program, held: bool = False) -> Stream:
        """Return a run of a copy on the learning windows, or on the held-out ones."""
        return Stream(p, self.held if held else self.feeds, self.calibration.pool)

    def _importance(self, p: Program, axes: Sequence[PrunableAxis]) -> Importance:
        """Return the gradients of the loss on the learning windows."""
        return importance(p, axes, self.feeds, CRITERIA[self.options.method], self.calibration.pool)

    def run(self) -> Attempt:
        """Return the attempt of least loss on the calibration data. Raises: BudgetUnreachable if all attempts fail."""
        o = self.options
        whole = not o.uniform and any(b.kind == "attention" for b in pr.residual_branches(self.p, self.nodes))
        shares = {"default": SHARES if whole else (0.0,), "units": (0.0,), "modules": (1.0,)}[o.recipe]
        best: Attempt | None = None
        unreachable: BudgetUnreachable | None = None
        for share in shares:
            attempt = Attempt(share, self.p.fork())
            try:
                self._modules(attempt, best)
                if not attempt.given_up and self.options.recipe != "modules":
                    self._units(attempt)
            except BudgetUnreachable as error:
                attempt.given_up, unreachable = str(error.got), error
            self.attempts.append(attempt)
            if attempt.given_up:
                continue
            attempt.calibration_loss = loss(self._stream(attempt.program), self.reference)
            if best is None or best.calibration_loss is None or attempt.calibration_loss < best.calibration_loss:
                best = attempt
        if best is None:
            assert unreachable is not None
            raise unreachable
        return best

    # -- modules -----------------------------------------------------------------------------------------------------
    def _modules(self, attempt: Attempt, best: Attempt | None) -> None:
        """Remove modules for the attempt's share of the reduction; give up if the loss is not below that of `best`."""
        if not attempt.share:
            return
        p, goal, whole = attempt.program, self.goal, self.options.recipe == "modules"
        aim = goal.base - attempt.share * (goal.base - goal.most)
        kinds = ("attention", "mlp") if whole else ("attention",)
        value = loss(self._stream(p), self.reference)
        while True:
            found = [b for b in pr.residual_branches(p, self.nodes) if b.kind in kinds]
            left = goal.taken(p, goal.counted(p), {})
            if left <= aim or (not found and not whole):
                break
            if not found:
                raise BudgetUnreachable("the budget is exceeded even if all removable modules are removed",
                                        asked=goal.most, best=left, fix="pass recipe='default'")  # fmt: skip
            if not whole and left - goal.least(p, found) / 2 <= aim:
                break  # the next one would overshoot by more than half of its size
            branch, after = pr.cheapest(p, found, self._stream(p), self.reference)
            attempt.steps.append(remove_module(p, branch, value, after))
            value = after
            done = len(attempt.steps)
            self.progress(Progress("modules", done, len(found) + done, {"loss": value}))
        if done := len(attempt.steps):
            self.progress(Progress("modules", done, done, {"loss": value}))
        if not attempt.steps and not whole:
            attempt.given_up = "no module fits into this share"
        elif best is not None and best.calibration_loss is not None and value >= best.calibration_loss:
            attempt.given_up = f"a loss of {value:.4f} after removing the modules alone"

    # -- units -------------------------------------------------------------------------------------------------------
    def _units(self, attempt: Attempt) -> None:
        p, o, goal = attempt.program, self.options, self.goal
        footprint = goal.counted(p)
        if goal.taken(p, footprint, {}) <= goal.most:
            return
        axes = pr.prunable(p, [n for n in self.nodes if n in p.graph], o.kinds, o.protect)
        curves = self._curves(p, axes, footprint)
        kept = allocate(curves, lambda sizes: goal.taken(p, footprint, sizes) <= goal.most, scope=o.scope or "global",
                        round_to=o.round_to, min_keep=o.min_keep, uniform=o.uniform)  # fmt: skip
        if kept is None:
            best = goal.taken(p, footprint, smallest(curves, o.round_to, o.min_keep))
            raise BudgetUnreachable(f"the smallest allowed sizes still have more {goal.of} than the budget",
                                    asked=goal.most, best=best, where=", ".join(c.axis for c in curves[:3]),
                                    fix="pass a smaller min_keep, more kinds, or recipe='modules'")  # fmt: skip
        self._cut_all(attempt, axes, kept)

    def _curves(self, p: Program, axes: Sequence[PrunableAxis], footprint: Any) -> list[Curve]:
        """Return the error curve of each axis, from one pass over the calibration data (two with gradients)."""
        o = self.options
        criterion, by_loss = CRITERIA[o.method], o.scope == "loss"
        weighed = None
        if criterion.needs == "gradients" or (by_loss and criterion.needs == "moments"):
            weighed = self._importance(p, axes)
        stream, curves = self._stream(p), []
        for i, axis in enumerate(axes):
            moments: Sequence[Gram | None] = [None] * len(axis.consumers)
            scales = None
            if criterion.needs == "moments":
                moments = grams(axis.consumers, stream.advance(axis.start))
                scales = error_scales(p, axis, moments, weighed if by_loss else None)
            products = unit_columns(p, axis, moments, scales=scales, weighed=weighed, ridge=o.ridge, seed=o.seed)
            made = criterion.order(products, axis.size - 1)
            growth = np.concatenate([made.growth, np.full(axis.size - len(made.growth), np.inf)])
            cost = unit_cost(footprint, self.goal.of, axis.name, axis.size)
            curves.append(Curve(axis.name, axis.group.kind, axis.size, growth, cost))
            del moments  # free them before those of the next layer are made
            self.progress(Progress("scoring", i + 1, len(axes)))
        return curves

    def _cut_all(self, attempt: Attempt, axes: Sequence[PrunableAxis], kept: Mapping[str, int]) -> None:
        """Cut each axis to `kept[axis]` units and refit; if `sequential`, with inputs from the axes cut before it."""
        p, o = attempt.program, self.options
        source = p if o.sequential else p.fork()
        learn, held = self._stream(source), self._stream(source, held=True)
        names = [a.name for a in axes if kept[a.name] < a.size]
        cut = [a for a in axes if a.name in names]
        criterion = CRITERIA[o.method]
        weighed = self._importance(p, cut) if criterion.needs == "gradients" else None
        for i, name in enumerate(names):
            axis = pr.prunable_axis(p.axes()[name])
            assert axis is not None
            moments: Sequence[Gram] = grams(axis.consumers, learn.advance(axis.start))
            most = axis.size - kept[name]
            products = unit_columns(p, axis, moments, weighed=weighed, ridge=o.ridge, seed=o.seed)
            made = criterion.order(products, most)
            attempt.steps.append(self._cut(p, axis, np.sort(made.order), moments, held, made.scores))
            del moments
            self.progress(Progress("restoring" if o.restore else "cutting", i + 1, len(names)))

    def _cut(
        self, p: Program, axis: PrunableAxis, removed: np.ndarray, moments: Sequence[Gram], held: Stream,
        scored: np.ndarray,
    ) -> PruneStep:  # fmt: skip
        cuts = product_cuts(p, axis, removed)
        fits = [self._fit(axis, cut, gram) for cut, gram in zip(cuts, moments, strict=True)]

        def restore(e: Transaction) -> dict[str, NDArray]:
            weights: dict[str, NDArray] = {}
            for cut, fit in zip(cuts, fits, strict=True):
                weights |= cut.set_weights(e, fit) if fit is not None else {}
            return weights

        sides = moments, grams(axis.consumers, held.advance(axis.start))
        step = cut_units(p, axis, removed, cuts, sides, restore)
        return replace(step, ridge=max((fit.ridge for fit in fits if fit is not None), default=None),
                       quantiles=tuple(np.quantile(scored, [0, 0.25, 0.5, 0.75, 1]).tolist()))  # fmt: skip

    def _fit(self, axis: PrunableAxis, cut: ProductCut, gram: Gram) -> Restored | None:
        """Fit the remaining weights of one linear map by least squares; None if restoring is off or does not help."""
        ridge, columns = self.options.ridge, len(cut.columns)
        if not self.options.restore:
            return None
        if gram.rows < columns and ridge is None:
            raise CalibrationTooSmall("fewer calibration rows than unknowns: least squares would fit noise",
                                      where=axis.name, expected=f"{columns} rows or more, better {2 * columns}",
                                      got=f"{gram.rows} rows",
                                      fix="pass a larger max_tokens, restore=False, or ridge=0.1")  # fmt: skip
        if gram.rows < 2 * columns:
            self.warnings.append(f"{axis.name}: {gram.rows} rows for {columns} unknowns are few")
        found = restored(cut.matrix, gram, cut.columns, bias=cut.consumer.bias is not None, ridge=ridge)
        if found.ridge > RIDGE and ridge is None:
            self.warnings.append(f"{axis.name}: its inputs are nearly dependent; ridge {found.ridge:g} was used")
        return found if found.improves else None


def optimise_report(
    program: Program, calibration: Calibration, seq: int | None = None, *, tokenizer: Any = None
) -> dict[str, Any]:
    """Recompute the figures of a pruning, to compare them with `PruneReport.figures()` of that pruning.

    Args:
        program: the pruned program; its journal has the entry of the pruning, with the undo record.
        calibration: the data with which the program was pruned.
        seq: number of the journal entry; by default the last pruning that was not undone.
        tokenizer: tokenizer of the pruned model, if a model was pruned.
    Returns: a dict of before, after, layers, calibration and journal; errors of a layer are measured with the outputs
        of the already pruned layers before it.
    Raises: UsageError if the journal has no such entry, or if the pruning left key heads with unequal numbers of query
        heads; NotUndoable if the undo record was dropped.
    """
    made = [e for e in program.history.undoable if e.tool == TOOL and (seq is None or e.seq == seq)]
    if not made:
        raise UsageError("the journal has no pruning that can be undone", where=program.name,
                         got=None if seq is None else f"entry {seq}")  # fmt: skip
    entry = made[-1]
    before, after = program.at(entry.seq - 1), program.at(entry.seq)
    sides = {name: figures(p, calibration, before, tokenizer) for name, p in (("before", before), ("after", after))}
    layers = _layers(before.fork(), _steps(before.fork(), entry), calibration)
    return {**sides, "layers": layers, "calibration": calibration.to_json(), "journal": entry.hash}


def _steps(p: Program, entry: Entry) -> list[PruneStep]:
    """Return the pruning steps of a journal entry in order, with the weights that were set after each cut."""
    if entry.undo is None:
        raise NotUndoable("no undo data was stored for this entry", where=f"entry {entry.seq}")
    found, weights, node = list[PruneStep](), dict[str, NDArray](), None
    for edit in reversed(entry.undo.forward):
        if isinstance(edit, SetWeight):
            weights.setdefault(edit.key, edit.array)
        elif isinstance(edit, ResizeAxis):
            (axis,) = edit.axes
            removed = tuple(map(int, np.delete(np.arange(axis.of), axis.old)))
            found.append(PruneStep("units", axis.axis, removed, axis.of, weights))
            weights = {}
        elif isinstance(edit, RemoveNode):
            node = edit.node
        elif not isinstance(edit, RemoveEdge):
            raise UsageError("cannot recompute a pruning that left key heads with unequal numbers of query heads",
                             where=f"entry {entry.seq}", fix="use the report that `prune` returned")  # fmt: skip
        elif p.graph.target(edit.edge) != node:  # other edges enter the node that is removed next
            found.append(PruneStep("module", p.path(edit.edge)))
    return found[::-1]


def _layers(p: Program, steps: list[PruneStep], calibration: Calibration) -> list[dict[str, Any]]:
    """Apply the steps again, measure their effect, and return the figures of each step."""
    reference = None if scores_tokens(p) else list(calibration.stream(p).outputs())
    streams, rows = (calibration.stream(p), calibration.stream(p, held=True)), []
    for step in steps:
        if step.what == "module":
            plain = loss(calibration.stream(p), reference)
            made = remove_module(p, next(b for b in pr.residual_branches(p) if b.name == step.name), plain, plain)
            made = replace(made, error=loss(calibration.stream(p), reference))
        else:
            axis = pr.prunable_axis(p.axes()[step.name])
            assert axis is not None
            moments = [grams(axis.consumers, stream.advance(axis.start)) for stream in streams]
            cuts = product_cuts(p, axis, step.units)
            made = cut_units(p, axis, step.units, cuts, moments, step.restore)
        rows.append(made.figures())
    return rows


# -- one step ----------------------------------------------------------------------------------------------------------
def remove_module(p: Program, branch: ResidualBranch, before: float, after: float) -> PruneStep:
    """Remove a residual branch; return the step. `before`, `after`: known losses before and after the removal."""

    def remove(e: Transaction) -> dict[str, NDArray]:
        pr.remove_branch(e, branch)
        return {}

    keys = [p.key(n) for n in branch.nodes if p.op(n) == PARAM]
    return _made(p, PruneStep("module", branch.name, error=after, plain=before), keys, remove)


def product_cuts(p: Program, axis: PrunableAxis, removed: Sequence[int] | np.ndarray) -> list[ProductCut]:
    """Record each linear map that reads an axis, before the units `removed` are cut from the axis."""
    keep = np.ones(axis.size, bool)
    keep[list(removed)] = False
    return [ProductCut.of(p, c, keep) for c in axis.consumers]


def cut_units(
    p: Program, axis: PrunableAxis, removed: Sequence[int] | np.ndarray, cuts: Sequence[ProductCut],
    moments: Sequence[Sequence[Gram]], restore: Callable[[Transaction], Mapping[str, NDArray]],
) -> PruneStep:  # fmt: skip
    """Remove units, restore the linear maps that read them, and measure the errors of the maps' outputs.

    Args:
        cuts: the linear maps before the cut, from `product_cuts`.
        moments: (on the learning windows, on the held-out windows), each with the moments of every map's input.
        restore: called after the cut, in the same edit, to set weights; returns a dict from key to stored value.
    """

    def cut(e: Transaction) -> Mapping[str, NDArray]:
        e.cut_units(axis.group.units(removed), ragged=True)
        return restore(e)

    step = PruneStep("units", axis.name, tuple(map(int, removed)), axis.size, ragged=len(axis.group.atoms) > 1)
    step = _made(p, step, [m.key for m in axis.group.members if m.key is not None], cut)
    inside, outside = (fmean(c.error(p, g) for c, g in zip(cuts, side, strict=True)) for side in moments)
    plain = fmean(c.plain(g) for c, g in zip(cuts, moments[0], strict=True))
    return replace(step, error=inside, plain=plain, held_out=outside)


def _made(
    p: Program, step: PruneStep, keys: Sequence[str], edit: Callable[[Transaction], Mapping[str, NDArray]]
) -> PruneStep:
    """Run `edit` in an edit of `p`; return `step` with the weights it set, and digests and shapes of weights `keys`."""
    digests, sizes = {k: p.weights.digest(k) for k in keys}, {k: p.weights.array(k).shape for k in keys}
    with p.edit(f"prune {step.name}", author="pass", tool=TOOL) as e:
        weights = edit(e)
    after = {k: p.weights.array(k).shape if p.weights.has_key(k) else () for k in keys}
    shapes = {k: (a, after[k]) for k, a in sizes.items() if after[k] != a}
    params = sum(prod(a) - (prod(b) if b else 0) for a, b in shapes.values())
    return replace(step, weights=weights, digests=digests, shapes=shapes, params=params)


@overload
def prune(
    program: Program | Model, target: SizeBudget | float, calibration: CalibrationSource | None = None, *,
    dry_run: Literal[False] = False, progress: ProgressCallback | None = None, **options: Unpack[PruneKeywords],
) -> PruneReport: ...  # fmt: skip
@overload
def prune(
    program: Program | Model, target: SizeBudget | float, calibration: CalibrationSource | None = None, *,
    dry_run: Literal[True], progress: ProgressCallback | None = None, **options: Unpack[PruneKeywords],
) -> PrunePlan: ...  # fmt: skip
@checked
@keywords(PruneOptions)
def prune(
    program: Program | Model, target: SizeBudget | float, calibration: CalibrationSource | None = None, *,
    dry_run: bool = False, progress: ProgressCallback | None = None, **options: Unpack[PruneKeywords],
) -> PruneReport | PrunePlan:  # fmt: skip
    """Make a program smaller, in one edit that can be undone.

    Args:
        program: a program; or a model, which also provides the tokenizer, and calibration data by default.
        target: `Ratio`, `Params`, `Flops`, `Bytes` or `Latency`; a number is the share of a `Ratio`. A `Ratio` counts
            the nodes that `where` selects.
        calibration: data to learn from, and held-out data to measure on; or a source of `Calibration` to make them
            from: a text, texts or ids; arrays by input name, or a list of such batches; for a program whose one input
            is not a text, an array of samples or a list of batches.
        dry_run: change nothing, and return a plan (`compress` and `orthogonalize` return the report of a copy).
        progress: called with `Progress`.
        options: see `PruneOptions`.
    Returns: a `PruneReport`; with `dry_run` a `PrunePlan`.
    Raises: BudgetUnreachable with the smallest size that can be reached; NothingToPrune; MissingCalibration;
        CalibrationTooSmall; NonFiniteWeight; UsageError. MissingCalibration too if `taylor` or scope `loss` is asked
        for, which need the loss of next tokens, and the program has none. After any error the program is unchanged.
    """
    started = perf_counter()
    given, p = PruneOptions(**options), program_of(program)
    target = Ratio(target) if isinstance(target, int | float) else target
    model = None if isinstance(program, OpGraph) else program
    if CRITERIA[given.method].needs == "gradients":
        need_tokens(p, f"method={given.method!r}", "pass another method, e.g. 'greedy'")
    if given.scope == "loss":
        need_tokens(p, "scope='loss'", "pass scope='global'")
    nodes = pr.scope_nodes(p, given.where)
    pr.check_finite(p, pr.prunable(p, nodes, given.kinds, given.protect) if given.recipe != "modules" else [])
    data = calibration_of(program, calibration)
    if data is None:
        if model is None:
            inputs = ", ".join(f"{name!r}: array" for name in p.input_names())
            raise MissingCalibration("pruning a program needs calibration data", where=p.name,
                                     fix=f"pass calibration={{{inputs}}}")  # fmt: skip
        data = Calibration.of(model)
    feeds = data.feeds(p, held=True)[0]
    goal = Goal.of_target(p, target, nodes, feeds)
    chosen = replace(given, scope=given.scope or ("loss" if scores_tokens(p) else "global"))
    pruner = Pruner(p, data, goal, chosen, nodes, progress)
    made = pruner.run()
    tokenizer = None if model is None else model.tokenizer

    before, after = (figures(of, data, p, tokenizer) for of in (p, made.program))
    speed = compare_speed(p, made.program, feeds) if made.steps and (given.timed or goal.of == "ms") else None
    sizes = {"before": goal.base, "after": goal.taken(made.program, goal.counted(made.program), {})}
    if goal.of == "ms" and speed is not None:
        sizes = {"before": speed.before, "after": speed.after}
    found = PruneReport(
        target=str(target), steps=tuple(made.steps), before=before, after=after, speed=speed,
        reached={"of": goal.of, **sizes, "asked": goal.most},
        files=None if model is None else _files(model, made.program),
        calibration=data.to_json(), settings=chosen.to_json(),
        attempts=[a.to_json() for a in pruner.attempts], warnings=list(dict.fromkeys(pruner.warnings)),
    )  # fmt: skip
    plan = PrunePlan(p, found.steps, found)
    if not dry_run:
        plan.apply()
        found.journal = p.journal.hash
    found.seconds = perf_counter() - started
    return plan if dry_run else found


def _files(model: Model, pruned: Program) -> dict[str, Any]:
    """Return level and bytes of the weights that exports write: `before`; pruned, by preference: `class`, `size`."""
    from graphwright.models.export.ladder import PREFERENCES, Ladder

    ladder = Ladder(model.with_program(pruned))
    plans = {"before": model.export_plan(), **{prefer: ladder.plan(prefer) for prefer in PREFERENCES}}
    return {name: {"level": plan.level, "bytes": plan.bytes} for name, plan in plans.items()}
