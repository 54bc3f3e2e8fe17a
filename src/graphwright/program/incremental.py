"""Incremental walks over a graph: visit changed nodes in topological order, and readers only if a result changed."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from heapq import heappop, heappush
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from graphwright.graph import NodeId
    from graphwright.program.program import Program


class IncrementalWalk:
    """A worklist of nodes in topological order, without duplicates.

    Iterating removes the next node; the loop body adds the nodes that depend on a result it changed. So every node is
    visited after all its changed operands, and readers of unchanged results are not visited.

    Args:
        p: the program whose order is followed.
        nodes: where to start.
        backwards: visit the last node first, for values that flow from readers to operands.
    """

    def __init__(self, p: Program, nodes: Iterable[NodeId] = (), *, backwards: bool = False) -> None:
        self._key, self._backwards = p.order_labels.key, backwards
        self._heap: list[tuple[tuple[int, int], NodeId]] = []
        self._waiting: set[NodeId] = set()
        self.add(nodes)

    def add(self, nodes: Iterable[NodeId]) -> None:
        """Add nodes to the worklist; a node that is already on it is not added again."""
        for node in nodes:
            if node not in self._waiting:
                self._waiting.add(node)
                label, created = self._key(node)
                heappush(self._heap, ((-label, -created) if self._backwards else (label, created), node))

    def __iter__(self) -> Iterator[NodeId]:
        while self._heap:
            node = heappop(self._heap)[1]
            self._waiting.discard(node)
            yield node
