"""Which rows compute the same: the first of them in order stands for all."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from graphwright.graph import NodeId


class EqualRows:
    """Nodes by what they compute.

    Args:
        order: what nodes are ordered by.
        look: has a node looked at again, as another one may stand for it now.
    """

    def __init__(self, order: Callable[[NodeId], Any], look: Callable[[NodeId], None]) -> None:
        self._order, self._look = order, look
        self._members: dict[Any, dict[NodeId, None]] = {}
        self._first: dict[Any, NodeId] = {}

    def enter(self, node: NodeId, key: Any) -> NodeId:
        """The node that stands for what this one, looked at now, computes: itself or an earlier one."""
        members, known = self._members.setdefault(key, {}), self._first.get(key)
        members[node] = None
        there = members if known is None or known == node else (known, node)  # the first one left, or may have moved
        first = min(there, key=self._order)
        if first != known:
            self._first[key] = first
            self._look_at_others(node, key)
        return first

    def leave(self, node: NodeId, key: Any) -> None:
        """A node is gone, or computes something else."""
        members = self._members[key]
        del members[node]
        if self._first.get(key) == node:
            del self._first[key]
            self._look_at_others(node, key)
        if not members:
            del self._members[key]

    def changed(self, node: NodeId, key: Any) -> None:
        """Other slots than before hold a node's results, or it moved."""
        if self._first.get(key) == node:
            self._look_at_others(node, key)

    def _look_at_others(self, node: NodeId, key: Any) -> None:
        for other in self._members[key]:
            if other != node:
                self._look(other)
