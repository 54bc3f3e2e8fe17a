"""Policies that propose cuts: online by bands and patience, at the end by a threshold or a target.

A custom policy implements `propose(view)` for a `DifferentiableGraph` and returns proposals.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from graphwright.errors import BudgetUnreachable
from graphwright.structure.errors import whole, within
from graphwright.structure.pricing import above, check_cost, element_costs
from graphwright.structure.protection import protect

if TYPE_CHECKING:
    from graphwright.structure.elements import Element, Key
    from graphwright.structure.graph import DifferentiableGraph
    from graphwright.structure.pricing import Cost


@dataclass(frozen=True, slots=True)
class Proposal:
    """One proposed edit.

    Attributes:
        action: `cut` or `add`.
        name: of the element, or of the edge to add: `source -> junction`.
        element: to cut; None for an addition.
        p: decision probability.
        gradient: of the loss with respect to the logit, or to a gate on an absent edge; None if not computed.
        reason: for the journal.
    """

    action: str
    name: str
    p: float
    reason: str
    element: Element | None = None
    gradient: float | None = None

    def to_json(self) -> dict[str, Any]:
        """Without the element."""
        return {n: getattr(self, n) for n in ("action", "name", "p", "reason", "gradient")}


class Proposes(Protocol):
    """A policy."""

    def propose(self, view: DifferentiableGraph) -> list[Proposal]:
        """Proposed edits; nothing is changed."""
        ...


@dataclass(slots=True)
class Policy:
    """Online: cut an element after `patience` checks below `remove_below`; reset its count above `keep_above`.

    Attributes:
        max_fraction: largest share of all elements that one check cuts; at least one element.
        min_in, protect: see `protection.protect`.
        counts: element -> number of checks below, updated by each call.
    """

    keep_above: float = 0.5
    remove_below: float = 0.1
    patience: int = 3
    min_in: int = 1
    protect: Collection[str] = ()
    max_fraction: float = 0.2
    counts: dict[Key, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        within("keep_above", self.keep_above, 0, 1)
        within("remove_below", self.remove_below, 0, 1)
        within("max_fraction", self.max_fraction, 0, 1, above=True)
        whole("patience", self.patience, 1)
        whole("min_in", self.min_in)

    def propose(self, view: DifferentiableGraph) -> list[Proposal]:
        """Count one check and propose the due cuts, the least probable first."""
        among = view.elements()
        alive = {e.key for e in among}
        self.counts = {k: n for k, n in self.counts.items() if k in alive}
        for e in among:
            if e.state != "soft":
                continue
            if e.p < self.remove_below:
                self.counts[e.key] = self.counts.get(e.key, 0) + 1
            elif e.p > self.keep_above:
                self.counts.pop(e.key, None)
        due = [e for e in among if self.counts.get(e.key, 0) >= self.patience]
        due = sorted(due, key=lambda e: (e.p, e.offset))[: max(1, int(self.max_fraction * len(among)))]
        cuts, _ = protect(view.program, due, among, min_in=self.min_in, keep=self.protect)
        why = f"below {self.remove_below} in {self.patience} checks"
        return [Proposal("cut", e.name, e.p, why, e) for e in cuts]


@dataclass(frozen=True, slots=True)
class ThresholdPolicy:
    """At the end: cut all elements below a probability."""

    threshold: float = 0.5
    min_in: int = 1
    protect: Collection[str] = ()

    def __post_init__(self) -> None:
        within("threshold", self.threshold, 0, 1)

    def propose(self, view: DifferentiableGraph) -> list[Proposal]:
        """Cuts in order of the logits; of a choice all options but the most probable one."""
        among = view.elements()
        best: dict[int, Element] = {}
        for e in among:
            if e.over == "choice" and (id(e.gate) not in best or e.p > best[id(e.gate)].p):
                best[id(e.gate)] = e
        low = [e for e in among if (e.p < self.threshold if e.over != "choice" else best[id(e.gate)] is not e)]
        return [Proposal("cut", e.name, e.p, f"below {self.threshold}", e) for e in low]


@dataclass(frozen=True, slots=True)
class TopPolicy:
    """At the end: cut the least probable unprotected elements until the target is met, in elements or in cost.

    Attributes:
        target: elements that stay if above 1, else their share.
        of: `count`, or a cost as in `cost`.
        round_to: axes with more units keep a multiple of it: units are cut in blocks, the block with the lowest mean
            first. The target is met within one block.
    """

    target: float
    of: Cost = "count"
    min_in: int = 1
    protect: Collection[str] = ()
    round_to: int = 1

    def __post_init__(self) -> None:
        whole("round_to", self.round_to, 1)
        whole("min_in", self.min_in)
        within("target", self.target, 0)
        check_cost(self.of, counted=True)

    def propose(self, view: DifferentiableGraph) -> list[Proposal]:
        """Propose cuts. Raises: BudgetUnreachable if protection keeps more than the target."""
        among = view.elements()
        price, parents = _costs(view, among, self.of), above(view.program, among)
        target = self.target if self.target > 1 else self.target * float(price.sum())
        nested = not (isinstance(self.of, str) and self.of == "count")
        below: list[list[int]] = [[] for _ in among]
        for i, chain in enumerate(parents if nested else ()):
            for j in chain:
                below[j].append(i)
        waiting = iter(self._blocks(among))
        index = {e.key: i for i, e in enumerate(among)}
        cuts: list[Element] = []
        while True:  # cut up to the target at once; another round makes up for protected elements
            there = np.ones(len(among), bool)
            for e in cuts:
                there[[index[e.key], *below[index[e.key]]]] = False
            left, more = float(price[there].sum()), len(cuts)
            while left > target and (block := next(waiting, None)) is not None:
                gone = [k for i in block for k in (i, *below[i]) if there[k]]
                left, there[gone] = left - float(price[gone].sum()), False
                cuts += [among[i] for i in block]
            if len(cuts) == more:
                break
            cuts, _ = protect(view.program, cuts, among, min_in=self.min_in, keep=self.protect)
        if left > target and len(cuts) < len(among):
            raise BudgetUnreachable("protection keeps more than the target", asked=target, best=left)
        what = self.of if isinstance(self.of, str) else "the measured cost"
        return [Proposal("cut", e.name, e.p, f"among the lowest beyond {self.target:g} of {what}", e) for e in cuts]

    def _blocks(self, among: Sequence[Element]) -> list[tuple[int, ...]]:
        """Indices of elements that are cut together, the least probable first: one element, or a block of units."""
        lowest = sorted(range(len(among)), key=lambda i: (among[i].p, among[i].z, among[i].offset))
        gates: dict[int, list[int]] = {}
        for i in lowest:
            e = among[i]
            whole = e.over == "units" and e.gate.length > self.round_to
            gates.setdefault(id(e.gate) if whole else -1 - i, []).append(i)
        blocks = []
        for members in gates.values():
            step = self.round_to if len(members) > 1 else 1
            ends = [0, *range(len(members) % step or step, len(members) + 1, step)]
            blocks += [tuple(members[a:b]) for a, b in pairwise(ends)]
        rank = {i: n for n, i in enumerate(lowest)}
        return sorted(blocks, key=lambda b: (*(np.mean([(among[i].p, among[i].z) for i in b], axis=0)), rank[b[0]]))


def _costs(view: DifferentiableGraph, among: list[Element], of: Cost) -> np.ndarray:
    counting = isinstance(of, str) and of == "count"
    return np.ones(len(among)) if counting else element_costs(view.program, among, of)
