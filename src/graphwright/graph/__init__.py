"""The editable graph container: stable handles, exactly undoable edits, no tensors."""

from graphwright.graph.graph import Graph
from graphwright.graph.slots import ColumnSpec
from graphwright.graph.state import Snapshot

from .chain import Chain, canonical_json
from .errors import CapacityError, EditBusy, GraphFileError, JournalCorrupt, NotUndoable, StaleHandle
from .handles import EdgeArray, EdgeId, NodeArray, NodeId, as_edge, as_node
from .order import OnlineOrder, Relabelled
from .records import RemovedEdge, RemovedEdges, RemovedNode, RemovedNodes, RewiredEdge, RewiredEdges
from .views import ColumnView, Mask

__all__ = ["CapacityError", "Chain", "ColumnSpec", "ColumnView", "EdgeArray", "EdgeId", "EditBusy", "Graph",
           "GraphFileError", "JournalCorrupt", "Mask", "NodeArray", "NodeId", "NotUndoable", "OnlineOrder",
           "Relabelled", "RemovedEdge", "RemovedEdges", "RemovedNode", "RemovedNodes", "RewiredEdge", "RewiredEdges",
           "Snapshot", "StaleHandle", "as_edge", "as_node", "canonical_json"]  # fmt: skip
