"""Allocation: choose how many units each axis loses, so that a budget is met at the least predicted error.

The units of each axis form blocks, cheapest first. The blocks of all axes are sorted by error per cost; the shortest
prefix that meets the budget is cut. Within an axis the sort keys never decrease, so its blocks are cut in order.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import ceil, prod
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from graphwright.array import Spec
from graphwright.errors import UsageError
from graphwright.graph import NodeId
from graphwright.ops.axes import Atom, Term, atoms, resized, resolve
from graphwright.program.cost import ModelSize, counted, ones, op_flops, size
from graphwright.program.op_graph import Value
from graphwright.surgery.budgets import AtMost, Latency, Ratio, SizeBudget
from graphwright.surgery.measure import milliseconds
from graphwright.surgery.pruning.prunable import ResidualBranch

if TYPE_CHECKING:
    from graphwright.program.program import Program


WIDE = ("heads", "kv_groups", "queries", "experts")
"""Kinds whose units are many rows of a weight each."""


@dataclass(frozen=True, slots=True)
class Curve:
    """The predicted error of removing the units of an axis one by one; axes of equal `kind` and `size` are comparable.

    Attributes:
        growth: squared error [size] that each removal adds, in the order of removal; infinite for the last unit.
        cost: cost of one unit, in the quantity that the budget counts.
    """

    axis: str
    kind: str
    size: int
    growth: np.ndarray
    cost: float


class _UnitBlock(NamedTuple):
    value: float
    axes: tuple[str, ...]
    size: int


def allocate(
    curves: Sequence[Curve], met: Callable[[Mapping[str, int]], bool], *, scope: str = "global", round_to: int = 16,
    min_keep: float = 0.1, uniform: bool = False,
) -> dict[str, int] | None:  # fmt: skip
    """Map each axis to the number of units that remain; return None if even the smallest sizes exceed the budget.

    Args:
        curves: per axis, the predicted error of removing its units one by one.
        met: function that returns whether sizes meet the budget; it must be monotone: if sizes meet the budget, so do
            all smaller sizes.
        scope, round_to, min_keep, uniform: see `PruneOptions`. Scope `loss` equals `global` here.
    """
    sizes = {c.axis: c.size for c in curves}
    groups: dict[object, list[Curve]] = {}  # axes that are cut together: each by itself, or all of equal kind and size
    for c in curves:
        groups.setdefault((c.kind, c.size) if uniform else c.axis, []).append(c)
    blocks = [b for group in groups.values() for b in _blocks(group, scope, round_to, min_keep)]
    if scope == "kind":  # values are ranks among blocks of the same kind, 0 to 1
        kinds = {c.axis: (c.kind, c.size) for c in curves}
        own = [sorted((b for b in blocks if kinds[b.axes[0]] == kind), key=lambda b: b.value)
               for kind in dict.fromkeys(kinds.values())]  # fmt: skip
        blocks = [b._replace(value=i / len(each)) for each in own for i, b in enumerate(each)]
    blocks.sort(key=lambda b: b.value)  # stable: blocks of one axis keep their order

    def after(n: int) -> dict[str, int]:
        return sizes | {axis: b.size for b in blocks[:n] for axis in b.axes}

    if not met(after(len(blocks))):
        return None
    return after(bisect_left(range(len(blocks)), True, key=lambda n: met(after(n))))


def smallest(curves: Sequence[Curve], round_to: int, min_keep: float) -> dict[str, int]:
    """Map each axis to its smallest allowed number of units."""
    return {c.axis: _allowed_sizes(c, round_to, min_keep)[-1] for c in curves}


def _allowed_sizes(c: Curve, round_to: int, min_keep: float) -> list[int]:
    """Return, descending, the current size and multiples of a step, down to the share `min_keep` of the size.

    The step is `round_to`, on short axes the largest power of two up to a quarter of the size, and 1 for heads, each of
    which is many rows.
    """
    quarter = max(c.size // 4, 1)
    step = 1 if c.kind in WIDE else round_to if round_to <= quarter else 1 << quarter.bit_length() - 1
    least = max(ceil(min_keep * c.size - 1e-9), 1)
    return [c.size, *(k for k in range((c.size - 1) // step * step, 0, -step) if k >= least)]


def _blocks(group: Sequence[Curve], scope: str, round_to: int, min_keep: float) -> list[_UnitBlock]:
    size, cost = group[0].size, sum(c.cost for c in group)
    total = np.concatenate([[0.0], np.cumsum(np.sum([c.growth for c in group], axis=0))])
    kept, values = _allowed_sizes(group[0], round_to, min_keep), []
    for before, now in pairwise(kept):
        grown = (total[size - now] - total[size - before]) / (cost * (before - now))
        values.append((size - now) / size if scope == "layer" else grown)
    values = np.maximum.accumulate(values) if values else []
    return [_UnitBlock(float(v), tuple(c.axis for c in group), k) for v, k in zip(values, kept[1:], strict=True)]


class Footprint:
    """Counts of parameters, bytes and operations of nodes (by default all), as functions of the sizes of the axes."""

    def __init__(self, p: Program, nodes: Collection[NodeId] | None = None) -> None:
        self.p, self.axes = p, p.axes()
        params, ops = counted(p, nodes)
        self._dims = ones(p)
        self._params_of = {n: (p.spec(n).size, p.spec(n).nbytes) for n in params}
        self._sizes: dict[NodeId, list[tuple[str, Term | tuple[Term, ...]]]] = {}
        for node, name, term in self.axes.solution.sizes:
            self._sizes.setdefault(node, []).append((name, term))
        self._flops_of = {n: op_flops(p, n, self._dims) for n in ops}
        self._with: dict[Atom, list[NodeId]] = {}
        dims = self.axes.solution.dims
        for node in [*params, *ops]:
            values = [Value(node, i) for i in range(len(p.specs(node)))] + list(p.operands(node))
            for atom in {a for v in values for t in dims[v] for a in atoms(t)}:
                self._with.setdefault(atom, []).append(node)

    def of(self, kept: Mapping[str, int] | None = None, removed: Collection[NodeId] = ()) -> ModelSize:
        """Return the counts if each axis had `kept[axis]` units and the nodes `removed` did not exist.

        For query heads that are grouped by key heads, counts are taken to be proportional to the number of units.
        """
        maps: dict[Atom, np.ndarray] = {}
        shares: dict[tuple[Atom, ...], float] = {}
        for name, count in (kept or {}).items():
            group = self.axes[name]
            if len(group.atoms) == 1:
                maps[group.atoms[0]] = np.arange(count)
            else:
                shares[group.atoms] = count / group.size
        touched = {n for a in (*maps, *(a for s in shares for a in s)) for n in self._with.get(a, ())}
        dims, params, size, flops = self.axes.solution.dims, 0.0, 0.0, 0.0
        for node, (count, nbytes) in self._params_of.items():
            left = 0.0 if node in removed else 1.0
            if node in touched and left:
                sizes = [n if isinstance(n := resized(t, maps), int) else 1 for t in dims[Value(node)]]
                left = prod(sizes) / max(count, 1) * _share(dims[Value(node)], shares)
            params, size = params + count * left, size + nbytes * left
        for node, count in self._flops_of.items():
            if node in touched and node not in removed:
                terms = [t for v in self.p.operands(node) for t in dims[v]]
                count = self._flops(node, maps) * _share(terms, shares)
            flops += 0 if node in removed else count
        return ModelSize(params, size, flops)

    def _flops(self, node: NodeId, maps: Mapping[Atom, np.ndarray]) -> float:
        p, dims = self.p, self.axes.solution.dims

        def spec(value: Value) -> Spec:
            return Spec(tuple(resized(t, maps) for t in dims[value]), p.spec(value).dtype)

        attrs = dict(p.attrs(node))
        for name, term in self._sizes.get(node, ()):
            sizes = [resized(resolve(t), maps) for t in (term if isinstance(term, tuple) else (term,))]
            attrs[name] = tuple(sizes) if isinstance(term, tuple) else sizes[0]
        return op_flops(p, node, self._dims, spec, attrs)


def _share(terms: Collection[Term], shares: Mapping[tuple[Atom, ...], float]) -> float:
    """Return the share of a tensor with dimensions `terms` that remains, given `shares` of axes (tuples of atoms)."""
    inside = {a for t in terms for a in atoms(t)}
    return prod(left for group, left in shares.items() if set(group) <= inside)


@dataclass(frozen=True, slots=True)
class Goal:
    """A size budget, applied to one program.

    Attributes:
        of: the counted quantity: `params`, `bytes`, `flops` or `ms`.
        base: the quantity before pruning, summed over `nodes`.
        most: upper limit of the quantity after pruning.
        nodes: the counted nodes; None for the whole program.
        feeds: a chunk of inputs on which time is measured.
    """

    of: str
    base: int | float
    most: float
    nodes: frozenset[NodeId] | None
    feeds: Mapping[str, np.ndarray]

    @staticmethod
    def of_target(p: Program, target: SizeBudget, nodes: Collection[NodeId], feeds: Mapping[str, np.ndarray]) -> Goal:
        """Return the goal for a budget. A `Ratio` counts the given nodes, other budgets count the whole program."""
        if isinstance(target, Ratio):
            base = getattr(size(p, nodes), target.of)
            return Goal(target.of, base, (1 - target.share) * base, frozenset(nodes), feeds)
        if isinstance(target, Latency):
            return Goal("ms", milliseconds(p, feeds), target.ms, None, feeds)
        if not isinstance(target, AtMost):
            raise UsageError("the target of pruning is not a size budget", where="target", got=repr(target),
                             expected="Ratio, Params, Flops, Bytes or Latency")  # fmt: skip
        return Goal(target.of, getattr(size(p), target.of), float(target.most), None, feeds)

    def counted(self, p: Program) -> Footprint:
        """Return the footprint of a pruned copy `p`: of the `nodes` that it still has, or of all if `nodes` is None."""
        return Footprint(p, None if self.nodes is None else [n for n in self.nodes if n in p.graph])

    def least(self, p: Program, found: Sequence[ResidualBranch]) -> float:
        """Return the counted quantity of the smallest branch; 0 for a time budget, because times do not add up."""
        if self.of == "ms":
            return 0.0
        footprint = self.counted(p)
        return getattr(footprint.of(), self.of) - max(getattr(footprint.of({}, m.nodes), self.of) for m in found)

    def taken(self, p: Program, footprint: Footprint, kept: Mapping[str, int]) -> float:
        """Return the counted quantity if each axis keeps `kept[axis]` units; time is measured on a trimmed copy."""
        if self.of != "ms":
            return getattr(footprint.of(kept), self.of)
        return milliseconds(trimmed(p, kept), self.feeds)


def trimmed(p: Program, kept: Mapping[str, int]) -> Program:
    """Return a copy in which each axis has its first `kept[axis]` units only, for measuring time."""
    made, axes = p.fork(), p.axes()
    with made.edit("trim to this size", author="pass", tool="prune") as e:
        for name, count in kept.items():
            if count < axes[name].size:
                e.cut_units(made.axes()[name].units(range(count, axes[name].size)), ragged=True)
    return made


def unit_cost(footprint: Footprint, of: str, name: str, size: int) -> float:
    """Return how much removing one unit of an axis lowers the quantity `of`; for time, count operations instead."""
    what = "flops" if of == "ms" else of
    whole, less = (getattr(footprint.of(kept), what) for kept in ({}, {name: size - 1}))
    return max(whole - less, 1e-9)
