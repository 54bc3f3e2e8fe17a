"""What an edit returns so that it can be undone: handles, column values and bucket places.

Records hold handles and plain values, no reference to a graph, so they survive saving and loading. A restore needs them
in the reverse order of the edits; anything else is `NotUndoable`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

from graphwright.graph.slots import Array

from ..errors import UsageError
from .handles import EdgeArray, EdgeId, NodeArray, NodeId


class RemovedEdge(NamedTuple):
    """One removed edge: `Graph.restore_edge` brings it back."""

    edge: EdgeId
    source: NodeId
    target: NodeId
    columns: dict[str, Any]
    out_place: int
    in_place: int


class RemovedNode(NamedTuple):
    """One removed node with its edges in the order of removal: `Graph.restore_node` brings all back."""

    node: NodeId
    columns: dict[str, Any]
    edges: tuple[RemovedEdge, ...]


class RewiredEdge(NamedTuple):
    """The ends an edge had before and has now; a place is -1 where that end stayed."""

    edge: EdgeId
    source: NodeId
    target: NodeId
    out_place: int
    in_place: int
    new_source: NodeId
    new_target: NodeId


@dataclass(frozen=True, slots=True)
class RemovedEdges:
    """Edges removed in bulk, in the order of removal: `Graph.restore_edges` brings them back."""

    edges: EdgeArray
    sources: NodeArray
    targets: NodeArray
    columns: dict[str, Array]
    out_places: Array
    in_places: Array

    def __len__(self) -> int:
        return len(self.edges)


@dataclass(frozen=True, slots=True)
class RemovedNodes:
    """Nodes removed in bulk, with all their edges: `Graph.restore_nodes` brings them back."""

    nodes: NodeArray
    columns: dict[str, Array]
    edges: RemovedEdges

    def __len__(self) -> int:
        return len(self.nodes)


@dataclass(frozen=True, slots=True)
class RewiredEdges:
    """Edges rewired in bulk: `Graph.restore_rewires` puts the old ends back."""

    edges: EdgeArray
    sources: NodeArray
    targets: NodeArray
    out_places: Array
    in_places: Array
    new_sources: NodeArray
    new_targets: NodeArray

    def __len__(self) -> int:
        return len(self.edges)


def check_record(record: object, kind: type) -> None:
    """Raises: UsageError for what is no record of this kind."""
    if not isinstance(record, kind):
        raise UsageError(f"not a {kind.__name__}, which the edit returned", got=repr(record)[:80])
