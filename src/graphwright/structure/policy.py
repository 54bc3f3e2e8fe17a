"""Which elements go: online by bands and patience, at the end by a threshold or a target. A policy proposes, no more.

A policy of one's own implements `propose(view)` and returns proposals; the view is a `DifferentiableGraph`.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from graphwright.errors import BudgetUnreachable
from graphwright.structure.errors import whole, within
from graphwright.structure.pricing import above, check_cost, prices
from graphwright.structure.protection import Kept, protect

if TYPE_CHECKING:
    from graphwright.structure.elements import Element, Key
    from graphwright.structure.graph import DifferentiableGraph
    from graphwright.structure.pricing import Cost


@dataclass(frozen=True, slots=True)
class Proposal:
    """One edit that a policy would make.

    Attributes:
        action: `cut` or `add`.
        name: of the element, or of the edge to add: `source -> junction`.
        element: what goes; None for an addition.
        p: decision probability before.
        gradient: of the loss by the logit, or by a gate on an absent edge; None if it was not asked for.
        reason: why.
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
    """Anything that says what is to go."""

    def propose(self, view: DifferentiableGraph) -> list[Proposal]:
        """Edits; nothing is changed."""
        ...


@dataclass(slots=True)
class Policy:
    """Online: an element goes after `patience` checks below `remove_below`; one above `keep_above` begins anew.

    Attributes:
        max_fraction: of all elements, that may go in one check, at least one.
        min_in: see `protect`.
        protect: names that stay; see `protect`.
        counts: checks below, by element; kept from call to call.
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
        """Counts one check; the lowest first."""
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
        due = sorted(due, key=lambda e: (e.p, e.place))[: max(1, int(self.max_fraction * len(among)))]
        cuts, _ = protect(view.program, due, among, min_in=self.min_in, keep=self.protect)
        why = f"below {self.remove_below} in {self.patience} checks"
        return [Proposal("cut", e.name, e.p, why, e) for e in cuts]


@dataclass(frozen=True, slots=True)
class ThresholdPolicy:
    """At the end: everything below a probability goes."""

    threshold: float = 0.5
    min_in: int = 1
    protect: Collection[str] = ()

    def __post_init__(self) -> None:
        within("threshold", self.threshold, 0, 1)

    def propose(self, view: DifferentiableGraph) -> list[Proposal]:
        """In order of their logits; of a choice all options but the most probable one."""
        among = view.elements()
        best: dict[int, Element] = {}
        for e in among:
            if e.over == "choice" and (id(e.gate) not in best or e.p > best[id(e.gate)].p):
                best[id(e.gate)] = e
        low = [e for e in among if (e.p < self.threshold if e.over != "choice" else best[id(e.gate)] is not e)]
        return [Proposal("cut", e.name, e.p, f"below {self.threshold}", e) for e in low]


@dataclass(frozen=True, slots=True)
class TopPolicy:
    """At the end: the lowest go until the target is met, in elements or in cost; what protection keeps is passed over.

    Attributes:
        target: elements that stay if above 1, else their share.
        of: `count`, or what `cost` takes.
        round_to: of an axis with more units than this a multiple stays: they go in blocks, the block of the lowest mean
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
        """Raises: BudgetUnreachable if protection keeps more than the target."""
        among = view.elements()
        price, parents = _prices(view, among, self.of), above(view.program, among)
        target = self.target if self.target > 1 else self.target * float(price.sum())
        nested = not (isinstance(self.of, str) and self.of == "count")
        below: list[list[int]] = [[] for _ in among]
        for i, chain in enumerate(parents if nested else ()):
            for j in chain:
                below[j].append(i)
        waiting = iter(self._blocks(among))
        places = {e.key: i for i, e in enumerate(among)}
        cuts: list[Element] = []
        while True:  # all that the target asks for at once; what protection puts back is made up for in another round
            there = np.ones(len(among), bool)
            for e in cuts:
                there[[places[e.key], *below[places[e.key]]]] = False
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
        what = self.of if isinstance(self.of, str) else "what was measured"
        return [Proposal("cut", e.name, e.p, f"lowest beyond {self.target:g} of {what}", e) for e in cuts]

    def _blocks(self, among: Sequence[Element]) -> list[tuple[int, ...]]:
        """Places of what goes at once, the lowest first: one element, or units so many that a multiple stays."""
        lowest = sorted(range(len(among)), key=lambda i: (among[i].p, among[i].z, among[i].place))
        gates: dict[int, list[int]] = {}
        for i in lowest:
            e = among[i]
            whole = e.over == "units" and e.gate.length > self.round_to
            gates.setdefault(id(e.gate) if whole else -1 - i, []).append(i)
        blocks = []
        for places in gates.values():
            step = self.round_to if len(places) > 1 else 1
            ends = [0, *range(len(places) % step or step, len(places) + 1, step)]
            blocks += [tuple(places[a:b]) for a, b in pairwise(ends)]
        rank = {i: n for n, i in enumerate(lowest)}
        return sorted(blocks, key=lambda b: (*(np.mean([(among[i].p, among[i].z) for i in b], axis=0)), rank[b[0]]))


def _prices(view: DifferentiableGraph, among: list[Element], of: Cost) -> np.ndarray:
    counting = isinstance(of, str) and of == "count"
    return np.ones(len(among)) if counting else prices(view.program, among, of)


__all__ = ["Kept", "Policy", "Proposal", "Proposes", "ThresholdPolicy", "TopPolicy"]
