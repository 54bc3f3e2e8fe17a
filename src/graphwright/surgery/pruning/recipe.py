"""The recipe: which units go by one pass over the calibration data, then layer by layer on the model pruned so far.

Everything happens on a copy, which shares what it does not change; the result is a list of steps. So trying several
shares of attention, and planning alone, cost the program nothing, and an interruption loses nothing.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from statistics import fmean
from typing import TYPE_CHECKING, Any

import numpy as np

from graphwright.errors import BudgetUnreachable, UsageError
from graphwright.progress import Progress
from graphwright.surgery.calibration import CalibrationTooSmall, Stream
from graphwright.surgery.measure import loss, speaks
from graphwright.surgery.pruning.allocate import Curve, allocate, smallest, unit_cost
from graphwright.surgery.pruning.modules import cheapest, modules, remove_module
from graphwright.surgery.pruning.plan import TOOL, Step, quantiles
from graphwright.surgery.pruning.prunable import of_group, prunable
from graphwright.surgery.pruning.restore import RIDGE, Change, restored
from graphwright.surgery.pruning.statistics import grams, importance, removal, scales

if TYPE_CHECKING:
    from graphwright.array import NDArray
    from graphwright.graph import NodeId
    from graphwright.program import Program
    from graphwright.progress import Report
    from graphwright.surgery.calibration import Calibration
    from graphwright.surgery.pruning.allocate import Goal
    from graphwright.surgery.pruning.modules import Module
    from graphwright.surgery.pruning.prunable import Prunable
    from graphwright.surgery.pruning.restore import Gram, Restored

SHARES = (0.0, 0.25, 0.5)
"""Shares of what is to go that whole attention modules are tried for."""
RECIPES = ("default", "units", "modules")
DATA_FREE = ("magnitude", "random")


@dataclass(frozen=True, slots=True)
class Settings:
    """How to prune; the arguments of `prune`, which explains them."""

    recipe: str = "default"
    method: str = "greedy"
    scope: str | None = None
    kinds: tuple[str, ...] = ()
    protect: Any = ()
    round_to: int = 1
    min_keep: float = 0.1
    uniform: bool = False
    restore: bool = True
    sequential: bool = True
    ridge: float | None = None
    seed: int = 0


@dataclass(slots=True)
class Attempt:
    """One way to meet the budget.

    Attributes:
        share: of what is to go that whole modules were meant to be.
        program: a copy, pruned.
        steps: what was done to it.
        loss: on the calibration data, nats per token (or drift); None where it was given up.
        why: if it was given up.
    """

    share: float
    program: Program
    steps: list[Step] = field(default_factory=list)
    loss: float | None = None
    why: str = ""

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        gone = [s.name for s in self.steps if s.what == "module"]
        return {"share": self.share, "modules": gone, "calibration_loss": self.loss, "given_up": self.why or None}


class Pruner:
    """One pruning of one program, on copies of it.

    Attributes:
        p, calibration, goal, settings: what is pruned, on what, how far and how.
        warnings: what the user should know.
        attempts: see `Attempt`.
    """

    def __init__(
        self, p: Program, calibration: Calibration, goal: Goal, settings: Settings, nodes: Collection[NodeId],
        report: Report | None,
    ) -> None:  # fmt: skip
        if settings.recipe not in RECIPES:
            raise UsageError("no such recipe", expected=", ".join(RECIPES), got=settings.recipe)
        self.p, self.calibration, self.goal, self.settings = p, calibration, goal, settings
        self.nodes, self.report = nodes, report
        self.feeds, self.held = calibration.feeds(p), calibration.feeds(p, held=True)
        self.reference = None if speaks(p) else list(Stream(p, self.feeds).outputs())
        self.warnings: list[str] = []
        self.attempts: list[Attempt] = []

    def run(self) -> Attempt:
        """The attempt with the least loss on the calibration data. Raises: BudgetUnreachable."""
        shares = {"default": SHARES, "units": (0.0,), "modules": (1.0,)}[self.settings.recipe]
        best: Attempt | None = None
        unreachable: BudgetUnreachable | None = None
        for share in shares:
            attempt = Attempt(share, self.p.fork())
            try:
                self._modules(attempt, best)
                if not attempt.why and self.settings.recipe != "modules":
                    self._units(attempt)
            except BudgetUnreachable as error:
                attempt.why, unreachable = str(error.got), error
            self.attempts.append(attempt)
            if attempt.why:
                continue
            attempt.loss = loss(Stream(attempt.program, self.feeds), self.reference)
            if best is None or best.loss is None or attempt.loss < best.loss:
                best = attempt
        if best is None:
            assert unreachable is not None
            raise unreachable
        return best

    # -- modules -----------------------------------------------------------------------------------------------------
    def _modules(self, attempt: Attempt, best: Attempt | None) -> None:
        """Take modules off until they are this share of what is to go; give up where that alone is worse already."""
        if not attempt.share:
            return
        p, goal = attempt.program, self.goal
        aim = goal.base - attempt.share * (goal.base - goal.most)
        kinds = ("attention",) if self.settings.recipe == "default" else ("attention", "mlp")
        value = loss(Stream(p, self.feeds), self.reference)
        while True:
            found = [m for m in modules(p, self.nodes) if m.kind in kinds]
            left = goal.taken(p, goal.counted(p), {})
            whole = self.settings.recipe == "modules"
            if left <= aim or (not found and not whole):
                break
            if not found:
                raise BudgetUnreachable("no module is left to remove", asked=goal.most, best=left)
            if not whole and left - goal.least(p, found) / 2 <= aim:
                break  # the next one would overshoot by more than half of it
            module, after = cheapest(p, found, Stream(p, self.feeds), self.reference)
            self._take(attempt, module, value, after)
            value = after
            self._tell("modules", len(attempt.steps), len(found) + len(attempt.steps), loss=value)
        if not attempt.steps and self.settings.recipe != "modules":
            attempt.why = "no module fits into this share"
        elif best is not None and best.loss is not None and value >= best.loss:
            attempt.why = f"a loss of {value:.4f} with the modules alone gone"

    def _take(self, attempt: Attempt, module: Module, before: float, after: float) -> None:
        p = attempt.program
        keys = list(dict.fromkeys(p.key(n) for n in module.nodes if p.op(n) == "param"))
        step = {k: p.weights.digest(k) for k in keys}
        sizes = {k: p.weights.array(k).shape for k in keys}
        params = sum(p.spec(n).size for n in module.nodes if p.op(n) == "param")
        with p.edit(f"remove {module.name}", author="pass", tool=TOOL) as e:
            remove_module(e, module)
        attempt.steps.append(Step("module", module.name, digests=step, params=params, error=after, plain=before,
                                  shapes={k: (s, ()) for k, s in sizes.items() if k not in p.weights}))  # fmt: skip

    # -- units -------------------------------------------------------------------------------------------------------
    def _units(self, attempt: Attempt) -> None:
        p, s, goal = attempt.program, self.settings, self.goal
        footprint = goal.counted(p)
        if goal.taken(p, footprint, {}) <= goal.most:
            return
        axes = prunable(p, [n for n in self.nodes if n in p.graph], s.kinds, s.protect)
        curves = self._curves(p, axes, footprint)
        kept = allocate(
            curves,
            lambda sizes: goal.taken(p, footprint, sizes) <= goal.most,
            scope=s.scope or ("loss" if speaks(p) else "global"),
            round_to=s.round_to, min_keep=s.min_keep, uniform=s.uniform,
        )  # fmt: skip
        if kept is None:
            best = goal.taken(p, footprint, smallest(curves, s.round_to, s.min_keep))
            raise BudgetUnreachable(
                f"the smallest sizes still take more {goal.of} than the budget leaves",
                asked=goal.most, best=best, where=", ".join(c.axis for c in curves[:3]),
                fix="a smaller min_keep, more kinds, or recipe='modules'",
            )  # fmt: skip
        self._carve(attempt, axes, kept)

    def _curves(self, p: Program, axes: Sequence[Prunable], footprint: Any) -> list[Curve]:
        """What each axis loses, from one pass over the data (and one for gradients)."""
        s = self.settings
        data_free = s.method in DATA_FREE
        by_loss = s.scope == "loss" or (s.scope is None and speaks(p))
        weighed = None
        if s.method == "taylor" or (by_loss and not data_free):
            weighed = importance(p, axes, self.feeds)
        stream, curves = Stream(p, self.feeds), []
        for i, axis in enumerate(axes):
            self._tell("scoring", i, len(axes))
            moments: Sequence[Gram | None] = [None] * len(axis.consumers)
            effects: list[np.ndarray] = []
            if s.method == "taylor" and weighed is not None:
                effects = [weighed.effect[c.node] for c in axis.consumers]
            elif not data_free:
                stream.advance(axis.start)
                moments = grams(p, axis.consumers, stream)
            own = None if data_free or s.method == "taylor" else scales(p, axis, moments, weighed if by_loss else None)
            made = removal(p, axis, moments, s.method, scales=own, effects=effects, ridge=s.ridge, seed=s.seed)
            growth = np.concatenate([made.growth, np.full(axis.size - len(made.growth), np.inf)])
            cost = unit_cost(footprint, self.goal.of, axis.name, axis.size)
            curves.append(Curve(axis.name, axis.group.kind, axis.size, growth, cost))
            del moments  # before those of the next layer are made
        return curves

    def _carve(self, attempt: Attempt, axes: Sequence[Prunable], kept: Mapping[str, int]) -> None:
        """Cut and restore axis by axis, each on what the ones before it, pruned already, give."""
        p, s = attempt.program, self.settings
        source = p if s.sequential else p.fork()
        learn, held = Stream(source, self.feeds), Stream(source, self.held)
        names = [a.name for a in axes if kept[a.name] < a.size]
        effects = {}
        if s.method == "taylor":
            effects = dict(importance(p, [a for a in axes if a.name in names], self.feeds).effect)
        for i, name in enumerate(names):
            self._tell("restoring" if s.restore else "cutting", i, len(names))
            axis = of_group(p.axes()[name])
            assert axis is not None
            for stream in (learn, held):
                stream.advance(axis.start)
            moments: Sequence[Gram] = grams(source, axis.consumers, learn)
            most = axis.size - kept[name]
            own = [effects[c.node] for c in axis.consumers] if effects else ()
            made = removal(p, axis, moments, s.method, effects=own, most=most, ridge=s.ridge, seed=s.seed)
            attempt.steps.append(self._cut(p, axis, np.sort(made.order[:most]), moments, held, made.scores))
            del moments

    def _cut(
        self, p: Program, axis: Prunable, gone: np.ndarray, moments: Sequence[Gram], held: Stream, scored: np.ndarray
    ) -> Step:
        keys = list(dict.fromkeys(m.key for m in axis.group.members if m.key is not None))
        digests = {k: p.weights.digest(k) for k in keys}
        sizes = {k: p.weights.array(k).shape for k in keys}
        keep = np.ones(axis.size, bool)
        keep[gone] = False
        checked = grams(held.p, axis.consumers, held)
        changes = [Change.of(p, c, keep) for c in axis.consumers]
        fits = [self._fit(axis, change, gram) for change, gram in zip(changes, moments, strict=True)]
        weights: dict[str, NDArray] = {}
        with p.edit(f"prune {axis.name}", author="pass", tool=TOOL) as e:
            e.cut_units(axis.group.units(gone), ragged=True)
            for change, fit in zip(changes, fits, strict=True):
                if fit is not None:
                    weights |= change.put(e, fit)
        outside = [c.error(p, gram) for c, gram in zip(changes, checked, strict=True)]
        inside = [c.error(p, gram) for c, gram in zip(changes, moments, strict=True)]
        changed = {k: (a, b) for k, a in sizes.items() if (b := p.weights.array(k).shape) != a}
        return Step(
            "units", axis.name, tuple(map(int, gone)), axis.size, weights, digests, changed,
            params=sum(prod(a) - prod(b) for a, b in changed.values()),
            error=fmean(inside), plain=fmean(c.plain(g) for c, g in zip(changes, moments, strict=True)),
            held_out=fmean(outside), ridge=max((fit.ridge for fit in fits if fit is not None), default=None),
            quantiles=quantiles(scored), ragged=len(axis.group.atoms) > 1,
        )  # fmt: skip

    def _fit(self, axis: Prunable, change: Change, gram: Gram) -> Restored | None:
        """Least squares for one product; None where it is not wanted, or no better."""
        if not self.settings.restore:
            return None
        self._check_rows(axis, gram, len(change.columns))
        c, ridge = change.consumer, self.settings.ridge
        found = restored(change.matrix, gram, change.columns, bias=c.bias is not None, ridge=ridge)
        if found.ridge > RIDGE and ridge is None:
            self.warnings.append(f"{axis.name}: its inputs are nearly dependent; ridge {found.ridge:g} was used")
        return found if found.worth else None

    def _check_rows(self, axis: Prunable, gram: Gram, columns: int) -> None:
        """Raises: CalibrationTooSmall for fewer rows than columns, unless a ridge is given."""
        if gram.rows < columns and self.settings.ridge is None:
            raise CalibrationTooSmall(
                "fewer rows than unknowns: least squares would fit noise",
                where=axis.name, expected=f"{2 * columns} rows or more", got=f"{gram.rows} rows",
                fix="more max_tokens, restore=False, or ridge=0.1",
            )  # fmt: skip
        if gram.rows < 2 * columns:
            self.warnings.append(f"{axis.name}: {gram.rows} rows for {columns} unknowns are few")

    def _tell(self, what: str, done: int, total: int, **facts: float) -> None:
        if self.report is not None:
            self.report(Progress(what, done, total, facts))
