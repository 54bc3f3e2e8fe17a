"""Walks over a program: breadth first, by shortest paths of edges, and along single readers."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from typing import TYPE_CHECKING, TypeVar

from graphwright.graph import EdgeId, NodeId

if TYPE_CHECKING:
    from graphwright.program.program import Program


T = TypeVar("T", bound=Hashable)


def flood(start: Iterable[T], after: Callable[[T], Iterable[T]]) -> list[T]:
    """The start and everything that `after` leads to, each once, breadth first."""
    order = list(dict.fromkeys(start))
    seen = set(order)
    for item in order:  # grows during iteration
        for other in after(item):
            if other not in seen:
                seen.add(other)
                order.append(other)
    return order


def shortest_path(p: Program, source: NodeId, target: NodeId, usable: Callable[[EdgeId], bool]) -> list[EdgeId] | None:
    """The usable edges of a shortest path from a node to another one, the last one first; None if there is no path."""
    came: dict[NodeId, EdgeId | None] = {source: None}

    def after(node: NodeId) -> Iterable[NodeId]:
        for edge in p.out_edges(node):
            if usable(edge):
                came.setdefault(p.graph.target(edge), edge)
                yield p.graph.target(edge)

    flood([source], after)
    if target not in came:
        return None
    path: list[EdgeId] = []
    while (edge := came[target]) is not None:
        path.append(edge)
        target = p.graph.source(edge)
    return path


def next_reader(p: Program, node: NodeId, passes: Callable[[NodeId, int], bool]) -> tuple[NodeId, int | None]:
    """The nearest node after a node that is not passed, and the port at which it reads.

    If a value on the way has not exactly one reader, the node of that value and None.

    Args:
        passes: whether the walk goes on through a reader that reads at a port.
    """
    while len(edges := p.out_edges(node)) == 1:
        node, port = p.graph.target(edges[0]), p.edge_port(edges[0])
        if not passes(node, port):
            return node, port
    return node, None
