"""Allocation: how many units each axis loses, so that a budget is met at the least predicted cost.

Each axis offers blocks of units, cheapest first; blocks of all axes are put in one order and as few as are enough are
taken. Within an axis a block is never worth less than the one before it, so that an axis is always cut from its start.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import ceil, prod
from typing import TYPE_CHECKING

import numpy as np

from graphwright.array import Spec
from graphwright.errors import UsageError
from graphwright.ops.axes import atoms, resized, resolve
from graphwright.program import Value
from graphwright.program.cost import ModelSize, counted, ones, op_flops, size
from graphwright.surgery.budgets import AtMost, Latency, Ratio
from graphwright.surgery.measure import speed

if TYPE_CHECKING:
    from graphwright.graph import NodeId
    from graphwright.ops.axes import Atom, Term
    from graphwright.program import Program
    from graphwright.surgery.budgets import SizeBudget
    from graphwright.surgery.pruning.modules import Module

SCOPES = ("loss", "global", "kind", "layer")


@dataclass(frozen=True, slots=True)
class Curve:
    """What an axis loses, unit by unit.

    Attributes:
        axis: its name.
        kind: axes of one kind and size are equal ones.
        size: units now.
        growth: [size] squared error that each removal adds, in the order of removal; the last one stays.
        cost: what one unit takes, in what the budget counts.
    """

    axis: str
    kind: str
    size: int
    growth: np.ndarray
    cost: float


@dataclass(frozen=True, slots=True)
class _Block:
    value: float
    axes: tuple[str, ...]
    kept: int


def allocate(
    curves: Sequence[Curve],
    met: Callable[[Mapping[str, int]], bool],
    *,
    scope: str = "global",
    round_to: int = 1,
    min_keep: float = 0.1,
    uniform: bool = False,
) -> dict[str, int] | None:
    """Axis -> units kept; None if even the smallest sizes do not meet the budget.

    Args:
        curves: of the axes.
        met: whether a budget is met with so many units kept; true stays true with fewer.
        scope: `global` and `loss` compare the growth of error per cost of all axes (in the units of the curves), `kind`
            those of equal axes, each kind losing the same share; `layer` takes the same share of every axis.
        round_to: sizes are multiples of it, but for axes that lose nothing.
        min_keep: share of an axis that stays at least.
        uniform: equal axes keep equally many units.
    """
    if scope not in SCOPES:
        raise UsageError("no such scope", expected=", ".join(SCOPES), got=scope)
    if round_to < 1 or not 0 <= min_keep <= 1:
        raise UsageError("sizes cannot be like this", expected="round_to >= 1, 0 <= min_keep <= 1",
                         got=(round_to, min_keep))  # fmt: skip
    sizes = {c.axis: c.size for c in curves}
    blocks = [b for group in _groups(curves, uniform) for b in _blocks(group, scope, round_to, min_keep)]
    if scope == "kind":
        blocks = _ranked(blocks, {c.axis: (c.kind, c.size) for c in curves})
    blocks.sort(key=lambda b: b.value)  # stable: blocks of an axis stay in order

    def after(n: int) -> dict[str, int]:
        return sizes | {axis: b.kept for b in blocks[:n] for axis in b.axes}

    low, high = 0, len(blocks)
    if not met(after(high)):
        return None
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if met(after(middle)) else (middle + 1, high)
    return after(high)


def smallest(curves: Sequence[Curve], round_to: int, min_keep: float) -> dict[str, int]:
    """Axis -> the fewest units that may stay."""
    return {c.axis: _kept(c.size, round_to, min_keep)[-1] for c in curves}


def _kept(size: int, round_to: int, min_keep: float) -> list[int]:
    """Sizes an axis can have, falling: as it is, then multiples."""
    least = max(ceil(min_keep * size - 1e-9), 1)
    return [size, *(k for k in range((size - 1) // round_to * round_to, 0, -round_to) if k >= least)]


def _groups(curves: Sequence[Curve], uniform: bool) -> list[list[Curve]]:
    """Axes that are cut together: each alone, or all equal ones."""
    if not uniform:
        return [[c] for c in curves]
    found: dict[tuple[str, int], list[Curve]] = {}
    for c in curves:
        found.setdefault((c.kind, c.size), []).append(c)
    return list(found.values())


def _blocks(group: Sequence[Curve], scope: str, round_to: int, min_keep: float) -> list[_Block]:
    size, cost = group[0].size, sum(c.cost for c in group)
    total = np.concatenate([[0.0], np.cumsum(np.sum([c.growth for c in group], axis=0))])
    kept, values = _kept(size, round_to, min_keep), []
    for before, now in pairwise(kept):
        grown = (total[size - now] - total[size - before]) / (cost * (before - now))
        values.append((size - now) / size if scope == "layer" else grown)
    values = np.maximum.accumulate(values) if values else []
    return [_Block(float(v), tuple(c.axis for c in group), k) for v, k in zip(values, kept[1:], strict=True)]


def _ranked(blocks: Sequence[_Block], kinds: Mapping[str, tuple[str, int]]) -> list[_Block]:
    """Values replaced by the place among blocks of the same kind, 0 to 1."""
    found: list[_Block] = []
    for kind in dict.fromkeys(kinds.values()):
        own = sorted((b for b in blocks if kinds[b.axes[0]] == kind), key=lambda b: b.value)
        found += [_Block(i / len(own), b.axes, b.kept) for i, b in enumerate(own)]
    return found


class Footprint:
    """Sizes of a program, or of the part below some nodes, for any numbers of units.

    Args:
        p: the program as it is now.
        nodes: which parameters and operations count; all by default.
    """

    def __init__(self, p: Program, nodes: Collection[NodeId] | None = None) -> None:
        self.p, self.axes = p, p.axes()
        self._params, self._ops = counted(p, nodes)
        self._dims = ones(p)
        self._params_of = {n: (p.spec(n).size, p.spec(n).nbytes) for n in self._params}
        self._sizes: dict[NodeId, list[tuple[str, Term | tuple[Term, ...]]]] = {}
        for node, name, term in self.axes.solution.sizes:
            self._sizes.setdefault(node, []).append((name, term))
        self._flops_of = {n: op_flops(p, n, self._dims) for n in self._ops}
        self._with: dict[Atom, list[NodeId]] = {}
        dims = self.axes.solution.dims
        for node in [*self._params, *self._ops]:
            values = [Value(node, i) for i in range(len(p.specs(node)))] + list(p.operands(node))
            for atom in {a for v in values for t in dims[v] for a in atoms(t)}:
                self._with.setdefault(atom, []).append(node)

    def of(self, kept: Mapping[str, int] | None = None, gone: Collection[NodeId] = ()) -> ModelSize:
        """The sizes with so many units of axes kept, and some nodes gone.

        Of heads in any number per key head (an axis of several) each takes the same share of what they all take.
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
        away = set(gone)
        for node, (count, nbytes) in self._params_of.items():
            if node in away:
                continue
            left = 1.0
            if node in touched:
                terms = dims[Value(node)]
                left = prod(_number(resized(t, maps)) for t in terms) / max(count, 1) * _share(terms, shares)
            params, size = params + count * left, size + nbytes * left
        for node, count in self._flops_of.items():
            if node in away:
                continue
            terms = [t for v in self.p.operands(node) for t in dims[v]] if node in touched else []
            flops += self._flops(node, maps) * _share(terms, shares) if node in touched else count
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


def _number(size: int | str) -> int:
    return size if isinstance(size, int) else 1


def _share(terms: Collection[Term], shares: Mapping[tuple[Atom, ...], float]) -> float:
    """What is left of something along these dimensions, where they hold all atoms of an axis."""
    inside = {a for t in terms for a in atoms(t)}
    return prod(left for group, left in shares.items() if set(group) <= inside)


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
