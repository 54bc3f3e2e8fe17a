"""The editable graph container: handles that never lie, edits that can be undone bit for bit, and no tensors."""

from .columns import ColumnSpec
from .errors import CapacityError, EditBusy, GraphFileError, JournalCorrupt, NotUndoable, StaleHandle
from .graph import Graph
from .handles import EdgeArray, EdgeId, NodeArray, NodeId, as_edge, as_node
from .order import OnlineOrder
from .records import RemovedEdge, RemovedEdges, RemovedNode, RemovedNodes, RewiredEdge, RewiredEdges
from .state import Snapshot

__all__ = [
    "CapacityError",
    "ColumnSpec",
    "EdgeArray",
    "EdgeId",
    "EditBusy",
    "Graph",
    "GraphFileError",
    "JournalCorrupt",
    "NodeArray",
    "NodeId",
    "NotUndoable",
    "OnlineOrder",
    "RemovedEdge",
    "RemovedEdges",
    "RemovedNode",
    "RemovedNodes",
    "RewiredEdge",
    "RewiredEdges",
    "Snapshot",
    "StaleHandle",
    "as_edge",
    "as_node",
]
