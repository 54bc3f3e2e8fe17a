"""What was removed and where edges came from, so that undo and redo bring back the same handles at the same places.

Invariant: in `edit` mode nothing is revived. The other modes go strictly backwards (or forwards again) through what
`edit` mode did, which is what the container's restores ask for.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Literal

from graphwright.graph import RemovedNode

if TYPE_CHECKING:
    from graphwright.graph import EdgeId, Graph, NodeId, OnlineOrder, RemovedEdge, RewiredEdge

Mode = Literal["edit", "undo", "redo", "roll back"]


class Graveyard:
    """Records of removals by handle, and per edge the rewires that can be taken back and made again.

    Attributes:
        mode: what the program is doing: making new changes, or stepping through old ones.
        removed: handle -> the record that revives it.
        back: edge -> rewires to take back, the latest last; `forth`: rewires to make again.
    """

    def __init__(self) -> None:
        self.mode: Mode = "edit"
        self.removed: dict[NodeId | EdgeId, RemovedNode | RemovedEdge] = {}
        self.back: dict[EdgeId, list[RewiredEdge]] = {}
        self.forth: dict[EdgeId, list[RewiredEdge]] = {}

    def bury(self, handle: NodeId | EdgeId, record: RemovedNode | RemovedEdge) -> None:
        """Keep the record of a removal. A roll-back removes what its edit made, and that comes never back."""
        if self.mode != "roll back":
            self.removed[handle] = record

    def revive(self, graph: Graph, handle: NodeId | EdgeId | None) -> Any:
        """The handle, alive again; None if it was never buried and must be issued. Raises: NotUndoable."""
        if handle is None or handle not in self.removed:
            return None
        record = self.removed[handle]
        alive = graph.restore_node(record) if isinstance(record, RemovedNode) else graph.restore_edge(record)
        del self.removed[handle]
        return alive

    def rewire(self, graph: Graph, edge: EdgeId, source: NodeId) -> None:
        """Let an edge leave another node: in `edit` mode last in its list, else at the place it had there."""
        if graph.source(edge) == source:
            return
        if self.mode == "edit":
            self.back.setdefault(edge, []).append(graph.rewire_edge(edge, src=source))
        elif self.mode == "redo":
            self.back.setdefault(edge, []).append(graph.restore_rewire(self.forth[edge].pop()))
        else:
            again = graph.restore_rewire(self.back[edge].pop())
            if self.mode == "undo":
                self.forth.setdefault(edge, []).append(again)

    def forget(self, handles: list[NodeId | EdgeId]) -> None:
        """A new edit ended the redo branch: what only that branch made is not revived any more."""
        for handle in handles:
            self.removed.pop(handle, None)
        self.forth.clear()


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
