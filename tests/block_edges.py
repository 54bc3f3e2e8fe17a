"""Edges of attention patterns by their blocks."""

from __future__ import annotations

from graphwright.graph import EdgeId
from graphwright.patterns import Pattern


def edges_of(pattern: Pattern, *pairs: tuple[int, ...]) -> list[EdgeId]:
    """The edges of pairs (query, key) or (query, key, plane), which the pattern has."""
    found = [edge for pair in pairs if (edge := pattern.edge_between(*pair)) is not None]
    assert len(found) == len(pairs)
    return found
