"""Error statistics per layer and over all layers, without storing the errors; two reports can be merged."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import inf, sqrt
from typing import Any

import numpy as np

from graphwright.report import ReportBase

TOP = 10
"""Layers that the text shows."""


@dataclass(frozen=True, slots=True)
class Moments:
    """Count, mean, population standard deviation, minimum and maximum of some numbers.

    Attributes:
        squares: sum of squared differences from the mean.
    """

    count: int = 0
    mean: float = 0.0
    squares: float = 0.0
    least: float = inf
    most: float = -inf

    @staticmethod
    def of(values: Any) -> Moments:
        """Moments of the entries of an array."""
        a = np.asarray(values, np.float64).reshape(-1)
        if not a.size:
            return Moments()
        mean = float(a.mean())
        return Moments(a.size, mean, float(((a - mean) ** 2).sum()), float(a.min()), float(a.max()))

    @property
    def std(self) -> float:
        """Population standard deviation."""
        return sqrt(self.squares / self.count) if self.count else 0.0

    def __or__(self, other: Moments) -> Moments:
        """Moments of the numbers of both (Chan, Golub and LeVeque 1979)."""
        count = self.count + other.count
        if not self.count or not other.count:
            return self if self.count else other
        step = other.mean - self.mean
        return Moments(
            count,
            self.mean + step * other.count / count,
            self.squares + other.squares + step**2 * self.count * other.count / count,
            min(self.least, other.least),
            max(self.most, other.most),
        )

    def to_json(self) -> dict[str, float | None]:
        """Plain values; `min` and `max` are None if there are no numbers."""
        ends = (self.least, self.most) if self.count else (None, None)
        return {"count": self.count, "mean": self.mean, "std": self.std, "min": ends[0], "max": ends[1]}


@dataclass(frozen=True, slots=True, repr=False)
class ErrorReport(ReportBase):
    """Errors by layer.

    Attributes:
        layers: name -> moments of its errors.
        facts: name -> other facts of the layer: `drift` (relative, of its output), `ratio` (parameters before / after),
            `seconds`.
    """

    layers: dict[str, Moments] = field(default_factory=dict)
    facts: dict[str, dict[str, float]] = field(default_factory=dict)

    def add(self, name: str, errors: Any, **facts: float) -> None:
        """Add errors of a layer to those it has already, and replace its facts."""
        self._add(name, Moments.of(errors), facts)

    def _add(self, name: str, found: Moments, facts: dict[str, float]) -> None:
        self.layers[name] = self.layers.get(name, Moments()) | found
        if facts:
            self.facts[name] = {**self.facts.get(name, {}), **facts}

    @property
    def whole(self) -> Moments:
        """Moments over all layers."""
        total = Moments()
        for found in self.layers.values():
            total |= found
        return total

    def __or__(self, other: ErrorReport) -> ErrorReport:
        """A report on the errors of both."""
        made = ErrorReport()
        for report in (self, other):
            for name, found in report.layers.items():
                made._add(name, found, report.facts.get(name, {}))
        return made

    def worst(self) -> list[str]:
        """Layer names by their largest error, descending."""
        return sorted(self.layers, key=lambda name: (-self.layers[name].most, name))

    def to_json(self) -> dict[str, Any]:
        """Plain values of all layers, the worst first."""
        rows = [{"layer": n, **self.layers[n].to_json(), **self.facts.get(n, {})} for n in self.worst()]
        return {"global": self.whole.to_json(), "layers": rows}

    def __str__(self) -> str:
        names = self.worst()
        width = max((len(n) for n in (*names[:TOP], "all layers")), default=0)
        lines = [f"{'':<{width}}  {'count':>9} {'mean':>10} {'std':>10} {'min':>10} {'max':>10}"]
        for name in ["all layers", *names[:TOP]]:
            m = self.whole if name == "all layers" else self.layers[name]
            ends = (m.least, m.most) if m.count else (0.0, 0.0)
            facts = "  ".join(f"{k} {v:.4g}" for k, v in self.facts.get(name, {}).items())
            numbers = " ".join(f"{v:>10.3e}" for v in (m.mean, m.std, *ends))
            lines.append(f"{name:<{width}}  {m.count:>9} {numbers}  {facts}".rstrip())
        if len(names) > TOP:
            lines.append(f"... {len(names) - TOP} more layers, in to_json()")
        return "\n".join(lines)
