"""Patterns that one rule by position describes: causal attention, with a window or without."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from . import masks
from .rules import Position
from .table import FULL

if TYPE_CHECKING:
    from .pattern import Pattern


def causal_rule(pattern: Pattern) -> Position | None:
    """Return the causal rule, with a window or without, that allows exactly the pairs of every plane of a pattern.

    None if there is no such rule, or if the pattern grows by a different one.
    """
    frame, grows = pattern.frame, pattern.rule
    if frame.queries != frame.keys or frame.q_start or not pattern.causal:
        return None
    if grows is None:
        rule = Position(window=_window_of_last_query(pattern))
    elif isinstance(grows, Position) and grows == Position(window=grows.window):
        rule = grows
    else:
        return None
    wanted = masks.of_rule(rule, rule, frame, masks.candidates(rule, frame, np.arange(frame.rows)))
    where, slots = pattern.pairs(), pattern.edges().index
    order = np.lexsort((where[:, 2], where[:, 1], where[:, 0]))
    pairs = np.stack([wanted.q, wanted.k], 1)
    if len(where) != pattern.planes * len(pairs):
        return None
    for plane in range(pattern.planes):
        rows = order[plane * len(pairs) : (plane + 1) * len(pairs)]
        if not (where[rows, 0] == plane).all() or not np.array_equal(where[rows, 1:], pairs):
            return None
        if not _equal(pattern, slots[rows], wanted, rule):
            return None
    return rule


def _window_of_last_query(pattern: Pattern) -> int | None:
    """Return the number of keys that the last query of plane 0 sees, at least 1; None if it sees all keys."""
    frame, where = pattern.frame, pattern.pairs()
    rows = np.flatnonzero((where[:, 0] == 0) & (where[:, 1] == frame.rows - 1))
    seen = masks.tokens(pattern.held(pattern.edges().index[rows]), pattern.base, frame)
    count = int(seen[:, (frame.queries - 1) % frame.block].sum())
    return None if count == frame.keys else max(count, 1)


def _equal(pattern: Pattern, slots: npt.NDArray[Any], wanted: masks.Blocks, rule: Position) -> bool:
    """Return whether edges, given by their slots, allow the same pairs of tokens as the blocks of a rule."""
    held = pattern.held(slots)
    differs = np.flatnonzero((held.kind != FULL) | (wanted.kind != FULL))
    for part in masks.chunks(len(differs), pattern.block):
        ours = masks.tokens(held.take(differs[part]), pattern.base, pattern.frame)
        if not np.array_equal(ours, masks.tokens(wanted.take(differs[part]), rule, pattern.frame)):
            return False
    return True
