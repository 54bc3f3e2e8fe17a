"""Constraints on sizes (budgets, equal axes, multiples, depth), gradient flow and head balance."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar

from graphwright.graph.analysis import critical_path
from graphwright.ops import OPS
from graphwright.program.cost import size
from graphwright.program.kinds import KINDS
from graphwright.program.selection import matches
from graphwright.surgery.constraints.constraint import Constraint
from graphwright.surgery.findings.diagnosis import Diagnosis
from graphwright.surgery.findings.finding import Limits, grown
from graphwright.surgery.findings.gradients import by_structure
from graphwright.surgery.findings.heads import unbalanced_heads

if TYPE_CHECKING:
    from graphwright.graph import NodeId
    from graphwright.program import Program
    from graphwright.program.axes.axes import AxisGroup
    from graphwright.surgery.findings.finding import Finding


@dataclass(frozen=True)
class Budget(Constraint):
    """Upper limits, None for no limit; without repairs.

    Attributes:
        parameters: of all weights.
        flops: operations of one run with all named sizes 1.
        bytes: of all weights, as stored.
    """

    parameters: int | None = None
    flops: int | None = None
    bytes: int | None = None
    name: ClassVar[str] = "budget"

    def violations(self, p: Program) -> list[Finding]:
        """One violation per exceeded limit."""
        taken = size(p, p.params() if self.flops is None else None)  # count operations only if they are limited
        have = {"parameters": taken.params, "flops": taken.flops, "bytes": taken.bytes}
        found = []
        for what, got in have.items():
            most = getattr(self, what)
            if most is not None and got > most:
                found.append(self.broken(p, f"too many {what}", where=what, expected=f"{most:,}", got=f"{got:,}"))
        return found


@dataclass(frozen=True)
class EqualSizes(Constraint):
    """All axes that match a pattern have one size; smaller ones are grown by units that change nothing."""

    axis: str
    name: ClassVar[str] = "uniform"

    def violations(self, p: Program) -> list[Finding]:
        """One violation per axis that is smaller than the largest."""
        groups = _matching(p, self.axis)
        most = max((g.size for g in groups), default=0)
        return [self.broken(p, "the axis is smaller than others", where=g.name, expected=str(most), got=str(g.size),
                            fixes=grown(g, most)) for g in groups if g.size < most]  # fmt: skip


@dataclass(frozen=True)
class MultipleOf(Constraint):
    """Sizes of all axes that match a pattern are multiples of `k`; others are grown by units that change nothing."""

    axis: str
    k: int
    name: ClassVar[str] = "multiple_of"

    def violations(self, p: Program) -> list[Finding]:
        """One violation per axis whose size is no multiple."""
        found = []
        for group in _matching(p, self.axis):
            if group.size % self.k:
                size = -(-group.size // self.k) * self.k
                found.append(self.broken(p, "the size is no multiple", where=group.name, got=str(group.size),
                                         expected=f"a multiple of {self.k}", fixes=grown(group, size)))  # fmt: skip
        return found


@dataclass(frozen=True)
class MaxDepth(Constraint):
    """No path through the program has more than `n` ops, not counting views; without repairs."""

    n: int
    name: ClassVar[str] = "max_depth"

    def violations(self, p: Program) -> list[Finding]:
        """One violation, with the longest path."""
        length, path = critical_path(p.graph, lambda node: float(_computes(p, node)))
        if length <= self.n:
            return []
        ops = tuple(node for node in path if _computes(p, node))
        return [self.broken(p, "the longest path is too long", *ops, where=p.path(ops[-1]), expected=f"{self.n} ops",
                            got=f"{length:.0f}", witness={"path": [p.path(n) for n in ops]})]  # fmt: skip


def _computes(p: Program, node: NodeId) -> bool:
    row = None if p.op(node) in KINDS else OPS.get(p.op(node))
    return row is not None and row.view is None


def _matching(p: Program, pattern: str) -> list[AxisGroup]:
    return [g for name, g in p.axes().items() if matches(pattern, name)]


@dataclass(frozen=True)
class GradientFlow(Constraint):
    """Trained weights have a path to the loss through differentiable ops and open gates.

    Attributes:
        params: path pattern of the weights.
        loss: name of an output; None means all floating ones.
    """

    params: str = "**"
    loss: str | None = None
    name: ClassVar[str] = "gradient_flow"

    def violations(self, p: Program) -> list[Finding]:
        """One violation per node that blocks the gradient of such a weight."""
        found = by_structure(Diagnosis(p, None, Limits(), None), self.loss)
        chosen = [f for f in found if any(matches(self.params, path) for path in f.witness["params"])]
        return [replace(f, kind=self.name) for f in chosen]


@dataclass(frozen=True)
class HeadBalance(Constraint):
    """No head's norm exceeds `ratio` times the median of its layer, or falls below 1 / `ratio` of it."""

    ratio: float = 8.0
    name: ClassVar[str] = "head_balance"

    def violations(self, p: Program) -> list[Finding]:
        """One violation per key head and its query heads; repaired by rescaling, or by cutting dead heads."""
        found = unbalanced_heads(Diagnosis(p, None, Limits(head_ratio=self.ratio), None))
        return [replace(f, kind=self.name) for f in found]
