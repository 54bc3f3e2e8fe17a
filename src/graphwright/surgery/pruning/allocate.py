"""Allocation: how many units each axis loses, so that a budget is met at the least predicted cost.

Each axis offers blocks of units, cheapest first; blocks of all axes are put in one order and as few as are enough are
taken. Within an axis a block is never worth less than the one before it, so that an axis is always cut from its start.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import ceil

import numpy as np

from graphwright.errors import UsageError

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
