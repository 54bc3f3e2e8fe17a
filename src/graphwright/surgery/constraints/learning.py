"""Constraints on what can learn: gradients that arrive, heads in balance."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from graphwright.program import Program
from graphwright.program.paths import matches
from graphwright.surgery.constraints.constraint import Constraint
from graphwright.surgery.findings.diagnosis import Diagnosis
from graphwright.surgery.findings.finding import Finding
from graphwright.surgery.findings.gradients import by_structure
from graphwright.surgery.findings.heads import unbalanced_heads
from graphwright.surgery.findings.limits import Limits


@dataclass(frozen=True)
class GradientFlow(Constraint):
    """Trained weights have a path to the loss over differentiable ops and open gates.

    Attributes:
        params: path pattern of the weights.
        loss: name of an output; None means all floating ones.
    """

    params: str = "**"
    loss: str | None = None
    name: ClassVar[str] = "gradient_flow"

    def violations(self, p: Program) -> list[Finding]:
        """One per node that stops the gradient of such a weight."""
        found = by_structure(Diagnosis(p, None, Limits(), None), self.loss)
        chosen = [f for f in found if any(matches(self.params, path) for path in f.witness["params"])]
        return [replace(f, kind=self.name) for f in chosen]


@dataclass(frozen=True)
class HeadBalance(Constraint):
    """No head's norm is above `ratio` times the median of its layer, or below its inverse."""

    ratio: float = 8.0
    name: ClassVar[str] = "head_balance"

    def violations(self, p: Program) -> list[Finding]:
        """One per key head and its queries; repaired by rescaling, or by cutting what is dead."""
        found = unbalanced_heads(Diagnosis(p, None, Limits(head_ratio=self.ratio), None))
        return [replace(f, kind=self.name) for f in found]
