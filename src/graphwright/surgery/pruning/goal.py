"""A budget as something that can be asked: is it met with so many units kept?"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from graphwright.errors import UsageError
from graphwright.graph import NodeId
from graphwright.program import Program
from graphwright.program.cost import size
from graphwright.surgery.budgets import AtMost, Latency, Ratio, SizeBudget
from graphwright.surgery.measure import speed
from graphwright.surgery.pruning.footprint import Footprint
from graphwright.surgery.pruning.modules import Module


@dataclass(frozen=True, slots=True)
class Goal:
    """A budget for one program.

    Attributes:
        target: the budget.
        of: what it counts: `params`, `bytes`, `flops` or `ms`.
        base: what is there before, of the part that the budget is about.
        most: what may be left.
        nodes: that part; None for the whole program.
        feeds: a chunk of inputs to measure time with.
    """

    target: SizeBudget
    of: str
    base: int | float
    most: float
    nodes: frozenset[NodeId] | None
    feeds: Mapping[str, np.ndarray]

    @staticmethod
    def of_target(p: Program, target: SizeBudget, nodes: Collection[NodeId], feeds: Mapping[str, np.ndarray]) -> Goal:
        """A share is of the given nodes, a number is for the whole program."""
        if isinstance(target, Ratio):
            base = getattr(size(p, nodes), target.of)
            return Goal(target, target.of, base, (1 - target.share) * base, frozenset(nodes), feeds)
        if isinstance(target, Latency):
            return Goal(target, "ms", _ms(p, feeds), target.ms, None, feeds)
        if not isinstance(target, AtMost):
            raise UsageError("pruning takes a budget of size", expected="Ratio, Params, Flops, Bytes or Latency",
                             got=repr(target))  # fmt: skip
        return Goal(target, target.of, getattr(size(p), target.of), float(target.most), None, feeds)

    def counted(self, p: Program) -> Footprint:
        """How to count a program that some of the nodes may have left."""
        return Footprint(p, None if self.nodes is None else [n for n in self.nodes if n in p.graph])

    def least(self, p: Program, found: Sequence[Module]) -> float:
        """What the smallest of some modules takes; nothing where time is counted, which adds up to no sum."""
        if self.of == "ms":
            return 0.0
        footprint = self.counted(p)
        return getattr(footprint.of(), self.of) - max(getattr(footprint.of({}, m.nodes), self.of) for m in found)

    def taken(self, p: Program, footprint: Footprint, kept: Mapping[str, int]) -> float:
        """What is left with so many units; time is measured on a copy that was cut."""
        if self.of != "ms":
            return getattr(footprint.of(kept), self.of)
        return _ms(trimmed(p, kept), self.feeds)


def trimmed(p: Program, kept: Mapping[str, int]) -> Program:
    """A copy with the first so many units of each axis: of the right size, and nothing else."""
    made, axes = p.fork(), p.axes()
    with made.edit("a program of this size", author="pass", tool="prune") as e:
        for name, count in kept.items():
            if count < axes[name].size:
                e.cut_units(made.axes()[name].units(range(count, axes[name].size)), ragged=True)
    return made


def unit_cost(footprint: Footprint, of: str, name: str, size: int) -> float:
    """What one unit of an axis takes; time is taken to go with operations."""
    what = "flops" if of == "ms" else of
    whole, less = (getattr(footprint.of(kept), what) for kept in ({}, {name: size - 1}))
    return max(whole - less, 1e-9)


def _ms(p: Program, feeds: Mapping[str, np.ndarray]) -> float:
    found = speed(p, feeds)
    return found.get("ms_per_token", found.get("ms_per_run", 0.0))
