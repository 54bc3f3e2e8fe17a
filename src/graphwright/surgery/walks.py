"""Graph walks over a program: breadth first, along shortest paths, and along chains of single readers."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from typing import TYPE_CHECKING, TypeVar

from graphwright.graph import EdgeId, NodeId

if TYPE_CHECKING:
    from graphwright.program.program import Program


T = TypeVar("T", bound=Hashable)


def flood(start: Iterable[T], after: Callable[[T], Iterable[T]]) -> list[T]:
    """Return `start` and all items reachable from it, each once, breadth first; `after` returns the successors."""
    order = list(dict.fromkeys(start))
    seen = set(order)
    for item in order:  # grows during iteration
        for other in after(item):
            if other not in seen:
                seen.add(other)
                order.append(other)
    return order


def depends(p: Program, node: NodeId, source: NodeId, passes: Callable[[NodeId], bool] | None = None) -> bool:
    """Return whether `node` is computed from `source`, with `passes` through nodes for which it returns True only.

    Nodes before `source` in the topological order are not visited.
    """
    key, found = p.order_labels.key, p.graph.predecessors
    first = key(source)
    after = flood(
        [node], lambda n: (m for m in found(n) if m == source or (key(m) > first and (not passes or passes(m))))
    )
    return node != source and source in after


def shortest_path(p: Program, source: NodeId, target: NodeId, usable: Callable[[EdgeId], bool]) -> list[EdgeId] | None:
    """Return a shortest path of usable edges, from its last edge to its first; None if there is no path."""
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
    """Follow a chain of single readers to the first reader that `passes` rejects; return the reader and its port.

    If a node of the chain does not have exactly one reader, return that node and None.

    Args:
        passes: given a reader and the port at which it reads, returns True to continue the walk at the reader.
    """
    while len(edges := p.out_edges(node)) == 1:
        node, port = p.graph.target(edges[0]), p.edge_port(edges[0])
        if not passes(node, port):
            return node, port
    return node, None
