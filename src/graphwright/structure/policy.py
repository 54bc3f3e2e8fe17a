"""Policies, which propose cuts during or after training, and gains of missing edges, which propose additions.

A custom policy implements `propose(view)` for a `DifferentiableGraph` and returns proposals. `protect` rejects cuts of
the last path from an input to an output, of the last unit of an axis and of the last option of a choice. One backward
pass scores all missing edges: to first order, a new edge u -> v, which adds y_u to junction v, adds Σ ⟨dL/dy_v, y_u⟩ to
the loss.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from math import inf
from typing import TYPE_CHECKING, Annotated, Any, Protocol

import numpy as np

from graphwright.array import from_numpy
from graphwright.autograd import Tensor, as_tensor, enable_grad, grad
from graphwright.errors import BudgetUnreachable
from graphwright.graph import EdgeId, NodeId
from graphwright.ops import traits
from graphwright.program import Program, Value
from graphwright.program.kinds import ASSIGN, INPUT, SOURCES
from graphwright.program.run import check_feeds
from graphwright.settings import AtLeastOne, Count, NotNegative, Range, Settings, Share
from graphwright.structure.costs import Cost, above, check_cost, element_costs
from graphwright.structure.elements import Element, Key, edge_of
from graphwright.structure.errors import WouldDisconnect

if TYPE_CHECKING:
    from graphwright.structure.graph import DifferentiableGraph, Task
    from graphwright.structure.losses import Terms


@dataclass(frozen=True, slots=True)
class ProtectedElement:
    """An element whose proposed cut was rejected: its name, and the reason why it is needed."""

    name: str
    reason: str


def protect(
    p: Program, cuts: Sequence[Element], among: Sequence[Element], *, min_in: int = 1, keep: Collection[str] = (),
    strict: bool = False,
) -> tuple[list[Element], list[ProtectedElement]]:  # fmt: skip
    """Divide proposed cuts into allowed cuts and protected elements; return both.

    If the cuts would disconnect an output from all inputs, the elements of one path from an input to it are protected:
    the path on which the lowest decision probability is highest; among equal paths, the first in the order of edges.

    Args:
        among: all elements; min_in: number of units per gated axis, and of options per choice, that must remain.
        keep: names of elements to protect, and of nodes that must keep a path from an input.
        strict: raise if an element would be protected.
    Raises: WouldDisconnect if `strict`.
    """
    back: dict[str, str] = {e.name: "protected by name" for e in cuts if e.name in keep}
    going = {e.name: e for e in cuts if e.name not in back}
    for gate in {id(e.gate): e.gate for e in among}.values():
        mine = [e for e in among if e.gate is gate]
        if gate.over in ("units", "choice"):
            leaving = sorted((e for e in mine if e.name in going), key=lambda e: (-e.p, e.index))
            for e in leaving[: max(0, min(min_in, len(mine)) - len(mine) + len(leaving))]:
                back[e.name] = f"at least {min_in} of {gate.owner} must remain"
                del going[e.name]
    required = [v.node for v in p.outputs()] + [p.node(n) for n in keep if n not in {e.name for e in among}]
    for node in required:
        while path := widest(p, node, _closed(p, going.values())):
            for name in path:
                back[name] = f"{p.path(node)} would be unreachable"
                going.pop(name, None)
    if back and strict:
        names = ", ".join(back)
        fix = 'pass protection="keep" to skip these cuts'
        raise WouldDisconnect("the cuts include protected elements", where=p.name, got=names, fix=fix)
    return list(going.values()), [ProtectedElement(name, reason) for name, reason in back.items()]


def _closed(p: Program, going: Iterable[Element]) -> dict[EdgeId | NodeId, Element]:
    """Map each edge or node that the cuts of the elements `going` set to zero to the element that causes it."""
    found: dict[EdgeId | NodeId, Element] = {}
    for e in going:
        if e.over in ("edges", "choice"):
            if (edge := edge_of(p, e)) is not None:
                found[edge] = e
        elif e.over in ("nodes", "layers"):
            found.update(dict.fromkeys(e.gate.sites, e))
    return found


def widest(p: Program, target: NodeId, closed: dict[EdgeId | NodeId, Element]) -> list[str] | None:
    """Return the names of the closed elements on the widest path from an input to `target`.

    The width of a path is the smallest p of its closed elements, or infinity if it has none. Returns None if the widest
    path has no closed element, or if there is no path. One sweep in topological order stores (width, previous edge) per
    node; ties prefer the more probable edge, then the first.
    """
    best: dict[NodeId, tuple[float, EdgeId | None]] = {}
    needed = p.reachable([target])
    for node in (n for n in p.order() if n in needed):
        if p.op(node) in SOURCES:
            if p.op(node) == INPUT:
                best[node] = (inf, None)
            continue
        rank, width, chosen = (-inf, -inf), -inf, None
        for edge in p.in_edges(node):
            before, own = best.get(p.graph.source(edge)), closed[edge].p if edge in closed else inf
            if before is not None and ((here := min(before[0], own)), own) > rank:
                rank, width, chosen = (here, own), here, edge
        if chosen is not None:
            best[node] = (min(width, closed[node].p if node in closed else inf), chosen)
    if target not in best or best[target][0] == inf:
        return None
    names: dict[str, None] = {}
    node: NodeId | None = target
    while node is not None:
        edge = best[node][1]
        names |= {closed[at].name: None for at in (edge, node) if at is not None and at in closed}
        node = None if edge is None else p.graph.source(edge)
    return list(names)


@dataclass(frozen=True, slots=True)
class Proposal:
    """One proposed edit.

    Attributes:
        action: `cut` or `add`.
        name: name of the element to cut, or the edge to add: `source -> junction`.
        p: decision probability; reason: text for the journal.
        element: the element to cut; None for an addition.
        gradient: d loss / d logit, or for an addition d loss / d gate on the new edge; None if not computed.
    """

    action: str
    name: str
    p: float
    reason: str
    element: Element | None = None
    gradient: float | None = None


class Proposes(Protocol):
    """Interface of a policy: an object with a method `propose(view)`."""

    def propose(self, view: DifferentiableGraph) -> list[Proposal]:
        """Return the proposed cuts and additions of edges; the program is not changed."""
        ...


@dataclass(slots=True)
class Policy(Settings):
    """A policy that cuts an element during training after `patience` checks with a probability below `remove_below`.

    A check with a probability above `keep_above` resets the element's count; a check in between does not change it.

    Attributes:
        min_in: number of units per gated axis, and of options per choice, that must remain.
        protect: names of elements to protect, and of nodes that must keep a path from an input.
        max_fraction: largest share of all elements that one check may cut; a single cut is always allowed.
        counts: dict from element keys to numbers of checks below `remove_below`, updated by `propose`.
    """

    keep_above: Share = 0.5
    remove_below: Share = 0.1
    patience: AtLeastOne = 3
    min_in: Count = 1
    protect: Collection[str] = ()
    max_fraction: Annotated[float, Range(0, 1, above=True)] = 0.2
    counts: dict[Key, int] = field(default_factory=dict)

    def propose(self, view: DifferentiableGraph) -> list[Proposal]:
        """Check all elements, and propose to cut each that reached `patience`, the lowest probability first."""
        among = view.elements()
        alive = {e.key for e in among}
        self.counts = {k: n for k, n in self.counts.items() if k in alive}
        for e in (e for e in among if e.state == "soft"):
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
class ThresholdPolicy(Settings):
    """A policy that cuts, at the end of training, all elements with a decision probability below a threshold.

    `min_in` and `protect` are as in `Policy`.
    """

    threshold: Share = 0.5
    min_in: Count = 1
    protect: Collection[str] = ()

    def propose(self, view: DifferentiableGraph) -> list[Proposal]:
        """Propose cuts in the order of elements; of each choice, propose all options except the most probable one."""
        among = view.elements()
        best: dict[int, Element] = {}
        for e in among:
            if e.over == "choice" and (id(e.gate) not in best or e.p > best[id(e.gate)].p):
                best[id(e.gate)] = e
        low = [e for e in among if (e.p < self.threshold if e.over != "choice" else best[id(e.gate)] is not e)]
        return [Proposal("cut", e.name, e.p, f"below {self.threshold}", e) for e in low]


@dataclass(frozen=True, slots=True)
class TopPolicy(Settings):
    """A policy that cuts, at the end of training, the least probable unprotected elements until the target is met.

    Attributes:
        target: number of elements or cost to keep, if above 1; else the share to keep.
        of: `count` for a number of elements, or a cost as in the penalty `cost`.
        min_in, protect: as in `Policy`.
        round_to: an axis with more units than this keeps a multiple of this number. Units are cut in blocks, the block
            with the lowest mean probability first, so the result may be below the target by up to one block.
    """

    target: NotNegative
    of: Cost = "count"
    min_in: Count = 1
    protect: Collection[str] = ()
    round_to: AtLeastOne = 1

    def __post_init__(self) -> None:
        Settings.__post_init__(self)
        check_cost(self.of, counted=True)

    def propose(self, view: DifferentiableGraph) -> list[Proposal]:
        """Propose cuts that meet the target. Raises: BudgetUnreachable if the protected elements alone exceed it."""
        among = view.elements()
        counting = isinstance(self.of, str) and self.of == "count"
        costs = np.ones(len(among)) if counting else element_costs(view.program, among, self.of)
        target = self.target if self.target > 1 else self.target * float(costs.sum())
        below: list[list[int]] = [[] for _ in among]
        for i, chain in enumerate(() if counting else above(view.program, among)):
            for j in chain:
                below[j].append(i)
        waiting = iter(self._blocks(among))
        index = {e.key: i for i, e in enumerate(among)}
        cuts: list[Element] = []
        while True:  # cut until the target is met; repeat, since `protect` may give elements back
            there = np.ones(len(among), bool)
            for e in cuts:
                there[[index[e.key], *below[index[e.key]]]] = False
            left, more = float(costs[there].sum()), len(cuts)
            while left > target and (block := next(waiting, None)) is not None:
                gone = [k for i in block for k in (i, *below[i]) if there[k]]
                left, there[gone] = left - float(costs[gone].sum()), False
                cuts += [among[i] for i in block]
            if len(cuts) == more:
                break
            cuts, _ = protect(view.program, cuts, among, min_in=self.min_in, keep=self.protect)
        if left > target and len(cuts) < len(among):
            raise BudgetUnreachable("the protected elements alone exceed the target", asked=target, best=left,
                                    fix="raise the target, or protect fewer elements")  # fmt: skip
        what = self.of if isinstance(self.of, str) else "the measured cost"
        return [Proposal("cut", e.name, e.p, f"among the lowest beyond {self.target:g} of {what}", e) for e in cuts]

    def _blocks(self, among: Sequence[Element]) -> list[tuple[int, ...]]:
        """Group the indices that are cut together, the least probable first: one element, or a block of units."""
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


_STEP = 1e-2
"""Relative step of the second difference of the loss; its square is well above float32 rounding."""


def absent(p: Program) -> list[tuple[Value, Value]]:
    """Return all unconnected pairs (source, junction) of equal spec that an edge can connect without a cycle.

    Sources are inputs and results of ops, except results of nodes that multiply by a gate.
    """
    order = {node: i for i, node in enumerate(p.order())}
    there = {(p.edge_value(e), p.graph.target(e)) for j in p.junctions() for e in p.in_edges(j)}
    gates = [gate for gate in p.gates().values() if gate.over != "pattern"]
    sites = {site: p.operands(site)[0] for gate in gates for site in gate.sites}
    there |= {(sites[v.node], j) for v, j in there if v.node in sites}
    none = SOURCES - {INPUT} | {ASSIGN}
    sources = [Value(n) for n in p.nodes() if p.op(n) not in none and not traits(p.op(n)).gates
               and n not in sites and p.specs(n)[0].dtype.is_float]  # fmt: skip
    found = []
    for junction in p.junctions():
        after, spec = p.dependents([junction]), p.spec(junction)
        found += [(value, Value(junction)) for value in sources
                  if p.spec(value) == spec and value.node not in after and (value, junction) not in there]  # fmt: skip
    return sorted(found, key=lambda pair: (order[pair[1].node], order[pair[0].node]))


def gains(
    view: DifferentiableGraph, task: Task, batch: Mapping[str, Any], *, newton: bool = False
) -> list[tuple[str, float]]:
    """Return a pair (edge, gain) for each missing edge, the largest gain first.

    The gain of an edge u -> v is the estimated decrease of the loss L if it is added: -Σ ⟨dL/dy_v, y_u⟩; y are values.

    Args:
        newton: estimate to second order: gain²/(2d) if gain and d, the second difference of the loss, are positive.
    """
    p = view.program
    pairs = absent(p)
    if not pairs:
        return []
    feeds = {n: as_tensor(v) for n, v in batch.items()}
    dims = check_feeds(p, {n: feeds[n] for n in p.input_names()})[1]
    junctions, sources = (list(dict.fromkeys(ends)) for ends in zip(*((j, s) for s, j in pairs), strict=True))
    probed = p.fork()
    with probed.edit("a zero input for every junction, to take gradients of the sums") as e:
        probes = {j: e.input(f"probe.{p.path(j)}", p.spec(j).shape, p.spec(j).dtype) for j in junctions}
        for j, probe in probes.items():
            e.connect(probe, j.node)
    zeros = {j: np.zeros(p.spec(j).bind(dims).sizes, p.spec(j).dtype.numpy) for j in junctions}
    leaves = {j: Tensor(from_numpy(zero), True) for j, zero in zeros.items()}
    seen = type(view)(probed, view.seed)

    def loss(moved: Mapping[Value, Tensor]) -> tuple[Tensor, Terms]:
        given = {probed.path(probes[j]): moved.get(j, leaves[j]) for j in junctions}
        found, _, terms = seen.evaluate({**feeds, **given}, task, keep=sources)
        return found, terms

    with enable_grad():
        here, terms = loss({})
        slopes = grad(here, [leaves[j] for j in junctions], allow_unused=True)
    by = {j: None if g is None else g.numpy("float64") for j, g in zip(junctions, slopes, strict=True)}
    values = {s: terms.values[s].numpy("float64") for s in sources}
    found = []
    for source, junction in pairs:
        slope = by[junction]
        if slope is not None:
            n = float((slope * values[source]).sum())
            gain = -n
            if newton:
                steps = ((sign * _STEP * values[source]).astype(zeros[junction].dtype) for sign in (-1, 1))
                before, after = (loss({junction: as_tensor(x)})[0].item() for x in steps)
                d = (before - 2 * here.item() + after) / _STEP**2
                gain = n * n / (2 * d) if n < 0 and d > 0 else min(-n, 0.0)
            found.append((f"{p.path(source)} -> {p.path(junction)}", gain))
    return sorted(found, key=lambda row: (-row[1], row[0]))


def additions(
    view: DifferentiableGraph, task: Task, batch: Mapping[str, Any], *, least: float = 0.0, newton: bool = False
) -> list[Proposal]:
    """Propose the missing edges with a gain above `least` (and above 0), largest first; gains are only estimates."""
    ranked, least = gains(view, task, batch, newton=newton), max(least, 0.0)
    return [Proposal("add", name, 0.0, f"gains {gain:.3g}", None, -gain) for name, gain in ranked if gain > least]
