"""Undo records of edits: handles, column values and adjacency-list positions.

A record does not refer to a graph, so it stays valid when the graph is saved and loaded. Records must be restored in
the reverse order of the edits; a different order raises `NotUndoable`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

from graphwright.graph.slots import Array

from ..errors import UsageError
from .handles import EdgeArray, EdgeId, NodeArray, NodeId


class RemovedEdge(NamedTuple):
    """One removed edge; `Graph.restore_edge` restores it."""

    edge: EdgeId
    source: NodeId
    target: NodeId
    columns: dict[str, Any]
    out_position: int
    in_position: int


class RemovedNode(NamedTuple):
    """One removed node with its edges in the order of removal; `Graph.restore_node` restores all of them."""

    node: NodeId
    columns: dict[str, Any]
    edges: tuple[RemovedEdge, ...]


class RewiredEdge(NamedTuple):
    """Old and new endpoints of an edge, and its old positions in adjacency lists (-1 for an unchanged endpoint)."""

    edge: EdgeId
    source: NodeId
    target: NodeId
    out_position: int
    in_position: int
    new_source: NodeId
    new_target: NodeId


@dataclass(frozen=True, slots=True)
class RemovedEdges:
    """Edges removed in bulk, in the order of removal; `Graph.restore_edges` restores them."""

    edges: EdgeArray
    sources: NodeArray
    targets: NodeArray
    columns: dict[str, Array]
    out_positions: Array
    in_positions: Array

    def __len__(self) -> int:
        return len(self.edges)


@dataclass(frozen=True, slots=True)
class RemovedNodes:
    """Nodes removed in bulk, with all their edges; `Graph.restore_nodes` restores them."""

    nodes: NodeArray
    columns: dict[str, Array]
    edges: RemovedEdges

    def __len__(self) -> int:
        return len(self.nodes)


@dataclass(frozen=True, slots=True)
class RewiredEdges:
    """Edges rewired in bulk; `Graph.restore_rewires` restores the old endpoints."""

    edges: EdgeArray
    sources: NodeArray
    targets: NodeArray
    out_positions: Array
    in_positions: Array
    new_sources: NodeArray
    new_targets: NodeArray

    def __len__(self) -> int:
        return len(self.edges)


def check_record(record: object, kind: type) -> None:
    """Raise UsageError if `record` is not an instance of `kind`."""
    if not isinstance(record, kind):
        raise UsageError("not an undo record of this kind of edit", expected=kind.__name__, got=repr(record)[:80])
