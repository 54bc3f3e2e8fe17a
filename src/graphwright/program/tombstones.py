"""Records of removed nodes and edges and of rewired edges, so that undo and redo restore the same handles.

Invariant: in mode `edit` no record is restored. Undo and roll-back revert the changes of mode `edit` in reverse order,
and redo repeats them in the original order, as the restore functions of the graph require.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, Literal

from graphwright.graph import Graph, RemovedNode

if TYPE_CHECKING:
    from graphwright.graph import EdgeId, NodeId, RemovedEdge, RewiredEdge

Mode = Literal["edit", "undo", "redo", "roll back"]


class Tombstones:
    """Records of removed nodes and edges by handle, and per edge the rewires that undo reverts and redo repeats.

    Attributes:
        mode: whether the program makes new changes or steps through old ones.
        removed: handle -> the record that restores it.
        back, forth: edge -> the rewires that undo reverts, and those that redo repeats, the latest last.
    """

    def __init__(self) -> None:
        self.mode: Mode = "edit"
        self.removed: dict[NodeId | EdgeId, RemovedNode | RemovedEdge] = {}
        self.back: dict[EdgeId, list[RewiredEdge]] = {}
        self.forth: dict[EdgeId, list[RewiredEdge]] = {}

    def add(self, handle: NodeId | EdgeId, record: RemovedNode | RemovedEdge) -> None:
        """Store the record of a removal; do nothing in a roll-back, whose removals are never undone."""
        if self.mode != "roll back":
            self.removed[handle] = record

    def restore(self, graph: Graph, handle: NodeId | EdgeId | None) -> Any:
        """Restore a removed node or edge; return its handle, or None if it has no record. Raises: NotUndoable."""
        if handle is None or handle not in self.removed:
            return None
        record = self.removed[handle]
        alive = (
            Graph.restore_node(graph, record) if isinstance(record, RemovedNode) else Graph.restore_edge(graph, record)
        )
        del self.removed[handle]
        return alive

    def rewire(self, graph: Graph, edge: EdgeId, source: NodeId) -> None:
        """Change an edge's source. In mode `edit` it becomes the last out-edge, else it returns to its old position."""
        if graph.source(edge) == source:
            return
        if self.mode == "edit":
            self.back.setdefault(edge, []).append(Graph.rewire_edge(graph, edge, src=source))
        elif self.mode == "redo":
            self.back.setdefault(edge, []).append(Graph.restore_rewire(graph, self.forth[edge].pop()))
        else:
            again = Graph.restore_rewire(graph, self.back[edge].pop())
            if self.mode == "undo":
                self.forth.setdefault(edge, []).append(again)

    def copy(self) -> Tombstones:
        """Return an independent copy."""
        twin = Tombstones()
        twin.removed = dict(self.removed)
        twin.back = {edge: list(records) for edge, records in self.back.items()}
        twin.forth = {edge: list(records) for edge, records in self.forth.items()}
        return twin

    def drop(self, handles: Iterable[NodeId | EdgeId]) -> None:
        """Drop the records of these removals, which no undo step restores any more."""
        for handle in handles:
            self.removed.pop(handle, None)

    def forget(self, handles: Iterable[NodeId | EdgeId]) -> None:
        """Drop the records of these removals and of all rewires that redo would repeat; redo has become impossible."""
        self.drop(handles)
        self.forth.clear()


class ForwardNeighbours:
    """Predecessors and successors in the graph without its back edges, for which the topological order is defined."""

    def __init__(self, graph: Graph, back_edges: set[EdgeId]) -> None:
        self._graph, self._back = graph, back_edges

    def successors(self, n: NodeId) -> Iterable[NodeId]:
        """Return the nodes that must come after `n`."""
        graph, back = self._graph, self._back
        return [graph.target(e) for e in graph.out_edges(n) if e not in back] if back else graph.successors(n)

    def predecessors(self, n: NodeId) -> Iterable[NodeId]:
        """Return the nodes that must come before `n`."""
        graph, back = self._graph, self._back
        return [graph.source(e) for e in graph.in_edges(n) if e not in back] if back else graph.predecessors(n)


def edges_against(graph: Graph, key: Callable[[NodeId], Any]) -> set[EdgeId]:
    """Return the edges that do not go forwards in the order that a sort key defines."""
    return {e for e in graph.edges() for src, dst in [graph.endpoints(e)] if key(src) >= key(dst)}
