"""A network that evolved, and how it came to be."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from graphwright.evolve.layers.recipe import Recipe

if TYPE_CHECKING:
    from graphwright.program import Program

Moments = dict[str, np.ndarray]
"""State of an optimizer, by name."""


@dataclass(frozen=True, slots=True)
class Birth:
    """How a network came to be.

    Attributes:
        number: in order of birth; generation: of the run; mother, father: their numbers, or None.
        mutation, site, block: what was done, where, and the name of the part it added; empty where nothing was.
        recipe: how it was trained.
        metric, loss: on the validation cases, None if it failed; failure: why.
        params, flops: numbers in its weights; floating-point operations of one case.
        author: "evolution", or "human" for an edit by hand of the mother; why: what a human said of it; edits: the
            lines of the journal.
    """

    number: int
    generation: int
    mother: int | None
    father: int | None
    mutation: str
    site: str
    block: str
    recipe: Recipe
    metric: float | None
    loss: float
    params: int
    flops: int
    failure: str = ""
    author: str = "evolution"
    why: str = ""
    edits: tuple[dict[str, Any], ...] = ()

    @property
    def what(self) -> str:
        """In words."""
        if self.author == "human":
            return f"by hand, {self.why}"
        place = f" at {self.site}" if self.site else ""
        crossed = f", crossed with {self.father}" if self.father is not None else ""
        return f"{self.mutation or 'start'}{place}{crossed}"

    def value(self, objective: str) -> float:
        """One objective, to be raised."""
        if self.metric is None:
            return float("-inf")
        if objective == "metric":
            return self.metric
        return -float({"loss": self.loss, "params": self.params, "flops": self.flops}[objective])

    def __str__(self) -> str:
        score = self.failure or f"{self.metric:.4g}"
        return f"{self.number}: {self.what}; {self.recipe}; {score}"


@dataclass(frozen=True, slots=True, eq=False)
class Member:
    """A network of the population.

    Attributes:
        birth: how it came to be, and what it scored.
        program: as it was scored; its journal says what evolution did to it.
        moments: of its optimizer, for its children to go on with.
        seedling, seeds: program and moments before training, where children get these.
    """

    birth: Birth
    program: Program
    moments: Moments
    seedling: Program | None = None
    seeds: Moments = field(default_factory=dict)

    @property
    def heritage(self) -> tuple[Program, Moments]:
        """What children begin with."""
        return (self.program, self.moments) if self.seedling is None else (self.seedling, self.seeds)

    @property
    def number(self) -> int:
        """In order of birth."""
        return self.birth.number

    @property
    def metric(self) -> float:
        """On the validation cases."""
        assert self.birth.metric is not None  # who failed is no member
        return self.birth.metric

    def __repr__(self) -> str:
        return f"Member({self.birth})"
