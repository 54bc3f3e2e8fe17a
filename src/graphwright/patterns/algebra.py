"""Unions, intersections and differences of patterns, exact to the token. Methods of `Pattern`."""

# pyright: reportPrivateUsage=false
# The files of this folder share private attributes of a pattern.
from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from . import edits, masks
from .errors import PatternShape
from .masks import Blocks
from .rules import HOW, Combined, Position
from .table import FULL, RULE

if TYPE_CHECKING:
    from .pattern import Pattern

Array = npt.NDArray[Any]


def union(self: Pattern, other: Pattern) -> Pattern:
    """Return the pattern of all pairs of tokens that either pattern allows. Raises: PatternShape."""
    return _combined("or", self, other)


def intersection(self: Pattern, other: Pattern) -> Pattern:
    """Return the pattern of all pairs of tokens that both patterns allow. Raises: PatternShape."""
    return _combined("and", self, other)


def difference(self: Pattern, other: Pattern) -> Pattern:
    """Return the pattern of all pairs of tokens that this pattern allows and `other` does not. Raises: PatternShape."""
    return _combined("minus", self, other)


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
    (a_keys, a_blocks), (b_keys, b_blocks) = _held(a), _held(b)
    keys = np.union1d(a_keys, b_keys) if how == "or" else a_keys
    if how == "and":
        keys = np.intersect1d(a_keys, b_keys)
    rows, columns = a.blocks
    for part in masks.chunks(len(keys), a.block):
        own = keys[part]
        q, k = own // columns % rows, own % columns
        blocks = _joined(how, own, q, k, base, (a, a_keys, a_blocks), (b, b_keys, b_blocks))
        plane = (own // columns // rows)[blocks.kept]
        source = made.key_nodes[plane, blocks.made.k].astype(np.int64)
        target = made.query_nodes[plane, blocks.made.q].astype(np.int64)
        edits.insert(made, source, target, blocks.made)
    return made


class _Part:
    def __init__(self, made: Blocks, kept: Array) -> None:
        self.made, self.kept = made, kept


def _joined(how: str, keys: Array, q: Array, k: Array, base: Position, *sides: tuple[Pattern, Array, Blocks]) -> _Part:
    """Return the combined blocks of `keys`, and which keys they are: bool."""
    kind = np.full(len(keys), FULL, np.uint8)
    present: list[Array] = []
    full: list[Array] = []
    at: list[Array] = []
    for _, known, blocks in sides:
        index = np.searchsorted(known, keys)
        index[index == len(known)] = 0
        here = known[index] == keys if len(known) else np.zeros(len(keys), bool)
        at.append(index)
        present.append(here)
        full.append(here & (blocks.kind[index] == FULL) if len(known) else here)
    every = full[0] | full[1] if how == "or" else full[0] & (full[1] if how == "and" else ~present[1])
    open_ = np.flatnonzero(~every)
    frame = sides[0][0].frame
    seen: list[Array] = []
    for (pattern, _, blocks), index, here in zip(sides, at, present, strict=True):
        rows = open_[here[open_]]
        mask = np.zeros((len(open_), frame.block, frame.block), bool)
        mask[here[open_]] = masks.tokens(blocks.take(index[rows]), pattern.base, frame)
        seen.append(mask)
    both = HOW[how](seen[0], seen[1])
    kinds, bits = masks.classify(both, base, frame, q[open_], k[open_])
    some = both.any((1, 2))
    kind[open_] = kinds
    kept = np.ones(len(keys), bool)
    kept[open_] = some
    packed = bits[some[kinds == masks.MASKED]]
    return _Part(Blocks(q[kept], k[kept], kind[kept], packed), kept)


def _held(pattern: Pattern) -> tuple[Array, Blocks]:
    """Return the keys of all edges, sorted: (plane · rows + query block) · columns + key block; and their blocks."""
    plane, q, k = pattern.pairs().astype(np.int64).T
    rows, columns = pattern.blocks
    keys = (plane * rows + q) * columns + k
    order = np.argsort(keys)
    return keys[order], pattern.held(pattern.edges().index[order])


def _base(how: str, a: Position, b: Position) -> Position:
    """Return a base rule for a combination: kinds are derived by it, so that any choice gives the same tokens."""
    causal = a.causal and b.causal if how == "or" else a.causal or (how == "and" and b.causal)
    if how == "or":
        segments = a.segments if a.segments == b.segments else None
    else:
        segments = a.segments if a.segments is not None or how == "minus" else b.segments
    wide = a if a.window is not None or how == "minus" else b
    return Position(causal, wide.window, wide.symmetric, segments)


__all__ = ["RULE", "difference", "intersection", "union"]
