"""Unions, intersections and differences of patterns, exact to the token. Methods of `Pattern`."""

# pyright: reportPrivateUsage=false
# The files of this folder share private attributes of a pattern.
from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from . import edits, masks
from .changes import SCALARS
from .errors import PatternShape
from .masks import Blocks
from .rules import HOW, Combined, Position
from .table import FULL, MASKED

if TYPE_CHECKING:
    from .pattern import Pattern

Array = npt.NDArray[Any]


def union(self: Pattern, other: Pattern) -> Pattern:
    """Return the pattern of all pairs of tokens that either pattern allows. Raises: PatternShape."""
    return _combined("or", self, other) if isinstance(other, type(self)) else NotImplemented


def intersection(self: Pattern, other: Pattern) -> Pattern:
    """Return the pattern of all pairs of tokens that both patterns allow. Raises: PatternShape."""
    return _combined("and", self, other) if isinstance(other, type(self)) else NotImplemented


def difference(self: Pattern, other: Pattern) -> Pattern:
    """Return the pattern of all pairs of tokens that this pattern allows and `other` does not. Raises: PatternShape."""
    return _combined("minus", self, other) if isinstance(other, type(self)) else NotImplemented


def _combined(how: str, a: Pattern, b: Pattern) -> Pattern:
    shapes = [(p.frame, p.planes) for p in (a, b)]
    if shapes[0] != shapes[1]:
        raise PatternShape("patterns of different shapes cannot be combined", expected=shapes[0], got=shapes[1],
                           fix="give both the same tokens, block, planes and q_start")  # fmt: skip
    base = _base(how, a.base, b.base)
    made = type(a)(a.tokens, a.block, a.planes, base.causal, a.q_start, base.window, base.symmetric, base.segments,
                   name=a.name)  # fmt: skip
    if a.rule is not None and b.rule is not None:
        made.rule = Combined(how, a.rule, b.rule)
    sides = _Side.of(a), _Side.of(b)
    keys = sides[0].keys
    if how != "minus":
        keys = (np.union1d if how == "or" else np.intersect1d)(keys, sides[1].keys)
    rows, columns = a.blocks
    for part in masks.chunks(len(keys), a.block):
        at = [side.find(keys[part]) for side in sides]
        blocks, kept = _joined(how, keys[part] // columns % rows, keys[part] % columns, base, sides, at)
        plane = keys[part][kept] // columns // rows
        source = made.key_nodes[plane, blocks.k].astype(np.int64)
        target = made.query_nodes[plane, blocks.q].astype(np.int64)
        edits.insert(made, source, target, blocks, **_columns(sides, [each[kept] for each in at]))
    return made


class _Side(NamedTuple):
    """The edges of a pattern, sorted by key: (plane · rows + query block) · columns + key block."""

    pattern: Pattern
    keys: Array
    blocks: Blocks
    slots: Array

    @classmethod
    def of(cls, pattern: Pattern) -> _Side:
        plane, q, k = pattern.pairs().astype(np.int64).T
        rows, columns = pattern.blocks
        keys = (plane * rows + q) * columns + k
        order = np.argsort(keys)
        slots = pattern.edges().index[order]
        return cls(pattern, keys[order], pattern.held(slots), slots)

    def find(self, keys: Array) -> Array:
        """Return the index of each key, or -1."""
        if not len(self.keys):
            return np.full(len(keys), -1)
        at = np.minimum(np.searchsorted(self.keys, keys), len(self.keys) - 1)
        return np.where(self.keys[at] == keys, at, -1)

    def full(self, at: Array) -> Array:
        """Return whether there are edges at these indices that allow all pairs."""
        return (at >= 0) & (np.append(self.blocks.kind, MASKED)[at] == FULL)

    def seen(self, at: Array) -> Array:
        """Return the masks at these indices, bool [n, block, block]; without an edge none is set."""
        block = self.pattern.block
        masks_of = np.zeros((len(at), block, block), bool)
        masks_of[at >= 0] = masks.tokens(self.blocks.take(at[at >= 0]), self.pattern.base, self.pattern.frame)
        return masks_of


def _joined(
    how: str, q: Array, k: Array, base: Position, sides: tuple[_Side, _Side], at: list[Array]
) -> tuple[Blocks, Array]:
    """Return the combined blocks, and for which of (q, k) there is one: bool."""
    full = [side.full(each) for side, each in zip(sides, at, strict=True)]
    every = {"or": full[0] | full[1], "and": full[0] & full[1], "minus": full[0] & (at[1] < 0)}[how]
    rest = np.flatnonzero(~every)
    seen = HOW[how](*(side.seen(each[rest]) for side, each in zip(sides, at, strict=True)))
    some = seen.any((1, 2))
    kind, kept = np.full(len(q), FULL, np.uint8), np.ones(len(q), bool)
    kept[rest] = some
    kind[rest[some]], bits = masks.classify(seen[some], base, sides[0].pattern.frame, q[rest[some]], k[rest[some]])
    return Blocks(q[kept], k[kept], kind[kept], bits), kept


def _columns(sides: tuple[_Side, _Side], at: list[Array]) -> dict[str, Array]:
    """Return the columns of edges: those of the first pattern that has the edge."""
    found: dict[str, Array] = {}
    first = at[0] >= 0
    for name, dtype in SCALARS.items():
        found[name] = np.empty(len(first), dtype)
        for side, each, rows in zip(sides, at, (first, ~first), strict=True):
            found[name][rows] = side.pattern._columns[name][side.slots[each[rows]]]
    return found


def _base(how: str, a: Position, b: Position) -> Position:
    """Return a base rule for a combination: kinds are derived by it, so that any choice gives the same tokens."""
    causal = a.causal and b.causal if how == "or" else a.causal or (how == "and" and b.causal)
    if how == "or":
        segments = a.segments if a.segments == b.segments else None
    else:
        segments = a.segments if a.segments is not None or how == "minus" else b.segments
    wide = a if a.window is not None or how == "minus" else b
    return Position(causal, wide.window, wide.symmetric, segments)
