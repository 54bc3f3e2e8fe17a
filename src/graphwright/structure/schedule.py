"""How a temperature falls: T(0) = start, T(steps) = end, monotone, and end from there on."""

from __future__ import annotations

from dataclasses import dataclass
from math import cos, pi

from graphwright.errors import UsageError
from graphwright.structure.ranges import whole

FORMS = ("exponential", "linear", "cosine")


@dataclass(frozen=True, slots=True)
class Schedule:
    """A temperature over steps; with 0 steps it stays at the start.

    Attributes:
        start, end: temperatures > 0, end <= start.
        steps: after which the end is reached.
        form: `exponential`, `linear` or `cosine`.
    Raises: UsageError.
    """

    start: float = 1.0
    end: float = 0.1
    steps: int = 0
    form: str = "exponential"

    def __post_init__(self) -> None:
        if self.form not in FORMS:
            raise UsageError(f"the form is {self.form!r}: expected one of {', '.join(FORMS)}")
        if not 0 < self.end <= self.start:
            raise UsageError(f"from {self.start} to {self.end}: expected 0 < end <= start")
        whole("steps", self.steps)

    def at(self, step: int) -> float:
        """The temperature of a step, counted from 0."""
        if not self.steps:
            return self.start
        x = min(max(step, 0) / self.steps, 1.0)
        if self.form == "exponential":
            return max(self.end, self.start * (self.end / self.start) ** x)
        if self.form == "linear":
            return self.start + (self.end - self.start) * x
        return self.end + (self.start - self.end) * (1 + cos(pi * x)) / 2
