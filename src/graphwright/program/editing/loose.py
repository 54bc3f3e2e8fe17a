"""Edges that close a cycle, admitted by an edit with `check=False`: they stand beside the topological order.

Invariant: every edge that is not loose goes forwards in the order; whatever may run has no loose edge.
"""

from __future__ import annotations

from collections.abc import Iterable

from graphwright.graph import EdgeId, Graph, NodeId, OnlineOrder


class Forward:
    """The neighbours in a graph without its loose edges: what the order is kept of."""

    def __init__(self, graph: Graph, loose: set[EdgeId]) -> None:
        self._graph, self._loose = graph, loose

    def successors(self, n: NodeId) -> Iterable[NodeId]:
        """Nodes that must come after `n`."""
        graph, loose = self._graph, self._loose
        return [graph.target(e) for e in graph.out_edges(n) if e not in loose] if loose else graph.successors(n)

    def predecessors(self, n: NodeId) -> Iterable[NodeId]:
        """Nodes that must come before `n`."""
        graph, loose = self._graph, self._loose
        return [graph.source(e) for e in graph.in_edges(n) if e not in loose] if loose else graph.predecessors(n)


def backward(graph: Graph, order: OnlineOrder[NodeId]) -> set[EdgeId]:
    """Edges that go against an order."""
    key = order.key
    return {e for e in graph.edges() for src, dst in [graph.endpoints(e)] if key(src) >= key(dst)}
