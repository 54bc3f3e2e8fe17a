"""Running figures of a segment: totals, and a curve of at most 128 points, whose spacing doubles when it is full."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from math import isfinite
from typing import Any

import numpy as np

from graphwright.program.files import forms

POINTS = 128
LATE = 256
"""Steps that wait at most for the figures of a controller."""


@dataclass(slots=True)
class Curve:
    """Means of some figures over equal spans of steps.

    Attributes:
        stride: steps per point.
        points: dicts with `step`, the last step of the span, and the mean of each figure over it.
        waiting: figures of the steps since the last point: name -> [sum, count].
        count: number of these steps.
    """

    stride: int = 1
    points: list[dict[str, float]] = field(default_factory=list)
    waiting: dict[str, list[float]] = field(default_factory=dict)
    count: int = 0

    def add(self, step: int, values: Mapping[str, float]) -> None:
        """Add the figures of a step; values that are not finite are left out."""
        for name, value in values.items():
            if isfinite(value):
                total = self.waiting.setdefault(name, [0.0, 0])
                total[0] += value
                total[1] += 1
        self.count += 1
        if self.count == self.stride:
            self.points.append({"step": step, **{n: total / n_ for n, (total, n_) in self.waiting.items()}})
            self.waiting, self.count = {}, 0
        if len(self.points) == POINTS and not self.count:
            self.points = [_mean(*pair) for pair in zip(self.points[::2], self.points[1::2], strict=True)]
            self.stride *= 2

    def rank_correlations(self) -> dict[str, dict[str, float]]:
        """Return Spearman's rank correlation of each two figures over the points that have both, by both names.

        A pair with fewer than three such points, or with a constant figure, is left out.
        """
        names = sorted({name for point in self.points for name in point if name != "step"})
        found: dict[str, dict[str, float]] = {}
        for one, other in combinations(names, 2):
            rows = np.array([(p[one], p[other]) for p in self.points if one in p and other in p]).reshape(-1, 2)
            if len(rows) > 2 and np.ptp(rows, axis=0).all():
                found.setdefault(one, {})[other] = float(np.corrcoef(_ranks(rows[:, 0]), _ranks(rows[:, 1]))[0, 1])
        return found


def _ranks(x: np.ndarray) -> np.ndarray:
    """Return the ranks of numbers; equal ones have their mean rank."""
    _, group, sizes = np.unique(x, return_inverse=True, return_counts=True)
    return (np.cumsum(sizes) - (sizes - 1) / 2)[group]


def _mean(first: Mapping[str, float], second: Mapping[str, float]) -> dict[str, float]:
    names = dict.fromkeys((*first, *second))
    found = {n: [row[n] for row in (first, second) if n in row] for n in names}
    return {**{n: sum(values) / len(values) for n, values in found.items()}, "step": second["step"]}


@dataclass(slots=True)
class Figures:
    """What the log says of a segment when it ends.

    Attributes:
        start: age of the life when it began, in steps.
        steps: steps so far.
        items: rows of all batches.
        tokens: entries of the first integer input of all batches; 0 without one.
        loss_first, loss_last: loss of the first and of the last step.
        curve: loss, and figures of the controller.
        waiting: (step, loss) of the latest steps, for which the controller has no figures yet.
        measured: sum, number and least of each figure of the controller, over all steps.
        ended: whether the segment is over.
        skipped, streak: steps whose update was skipped, and those at the end in a row.
    """

    start: int
    steps: int = 0
    items: int = 0
    tokens: int = 0
    loss_first: float | None = None
    loss_last: float | None = None
    curve: Curve = field(default_factory=Curve)
    waiting: list[tuple[int, float]] = field(default_factory=list)
    measured: dict[str, list[float]] = field(default_factory=dict)
    ended: bool = False
    skipped: int = 0
    streak: int = 0

    def add(self, loss: float, items: int, tokens: int) -> None:
        """Add a step, which waits for its figures; its update was skipped if the loss is not finite."""
        self.steps += 1
        self.items += items
        self.tokens += tokens
        if not isfinite(loss):
            self.skipped, self.streak = self.skipped + 1, self.streak + 1
            return
        self.loss_first = loss if self.loss_first is None else self.loss_first
        self.loss_last, self.streak = loss, 0
        self.waiting.append((self.start + self.steps, loss))
        if len(self.waiting) > LATE:
            self.enter()

    def enter(self, rows: Sequence[Mapping[str, float]] = ()) -> None:
        """Enter the waiting steps into the curve; `rows` are the figures of the latest of them, in order."""
        for left, (step, loss) in zip(range(len(self.waiting), 0, -1), self.waiting, strict=True):
            values = rows[-left] if left <= len(rows) else {}
            self.curve.add(step, {"loss": loss, **values})
            for name, value in values.items():
                if isfinite(value):
                    total, count, least = self.measured.get(name, (0.0, 0, value))
                    self.measured[name] = [total + value, count + 1, min(least, value)]
        self.waiting = []

    def summary(self) -> dict[str, dict[str, float]]:
        """Return mean and least value of each figure of the controller."""
        return {n: {"mean": total / count, "least": least} for n, (total, count, least) in self.measured.items()}

    def to_json(self) -> dict[str, Any]:
        """Return all fields as JSON values, which later steps do not change."""
        curve = self.curve
        waiting = {name: list(pair) for name, pair in curve.waiting.items()}
        points = {"stride": curve.stride, "points": list(curve.points), "waiting": waiting, "count": curve.count}
        measured = {name: list(row) for name, row in self.measured.items()}
        return {**{name: getattr(self, name) for name in self.__slots__}, "curve": points, "measured": measured,
                "waiting": [list(row) for row in self.waiting]}  # fmt: skip

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Figures:
        """Return the figures of a dict of `to_json`. Raises: ProgramFileError."""
        forms.table(data, cls.__dataclass_fields__, "segment")
        for name in ("start", "steps", "items", "tokens", "skipped", "streak"):
            forms.integer(data[name], field=f"segment.{name}")
        forms.flag(data["ended"], "segment.ended")
        curve = Curve(**forms.table(data["curve"], Curve.__dataclass_fields__, "segment.curve"))
        forms.integer(curve.stride, 1, field="segment.curve.stride")
        curve.points = [dict(point) for point in forms.array(curve.points, None, "segment.curve.points")]
        curve.waiting = {n: list(pair) for n, pair in forms.table(curve.waiting, None, "segment.curve.waiting").items()}
        rows = forms.table(data["measured"], None, "segment.measured")
        measured = {n: list(forms.array(row, 3, "segment.measured")) for n, row in rows.items()}
        at = "segment.waiting"
        pairs = [forms.array(row, 2, at) for row in forms.array(data["waiting"], None, at)]
        waiting = [(forms.integer(step, field=at), forms.number(loss, at)) for step, loss in pairs]
        return cls(**{**data, "curve": curve, "measured": measured, "waiting": waiting})
