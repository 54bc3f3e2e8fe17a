"""The editable graph container: handles that never lie, edits that can be undone bit for bit, and no tensors."""

from .chain import Chain, canonical_json
from .columns import ColumnSpec
from .errors import CapacityError, EditBusy, GraphFileError, JournalCorrupt, NotUndoable, StaleHandle
from .graph import Graph
from .handles import EdgeArray, EdgeId, NodeArray, NodeId, as_edge, as_node
from .order import OnlineOrder, Relabelled
from .records import RemovedEdge, RemovedEdges, RemovedNode, RemovedNodes, RewiredEdge, RewiredEdges
from .state import Snapshot
from .views import ColumnView, Mask

__all__ = [
    "CapacityError",
    "Chain",
    "ColumnSpec",
    "ColumnView",
    "EdgeArray",
    "EdgeId",
    "EditBusy",
    "Graph",
    "GraphFileError",
    "JournalCorrupt",
    "Mask",
    "NodeArray",
    "NodeId",
    "NotUndoable",
    "OnlineOrder",
    "Relabelled",
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
    "canonical_json",
]
