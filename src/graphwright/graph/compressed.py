"""The live graph as compressed rows or columns, for algorithms that want arrays. Methods of `Graph`.

Live slots are mapped to 0..n-1 in slot order, so holes left by deletions do not show.
"""

# pyright: reportPrivateUsage=false
# The files of this folder share what a graph keeps.
from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from .columns import Array
from .handles import EdgeArray, NodeArray

if TYPE_CHECKING:
    from .graph import Graph


class Compressed(NamedTuple):
    """Row i is `nodes[i]`: its edges are `edges[indptr[i]:indptr[i + 1]]`, their far ends `nodes[indices[...]]`."""

    indptr: Array
    indices: Array
    edges: EdgeArray
    nodes: NodeArray


def csr(self: Graph) -> Compressed:
    """Out-edges by node, each row in slot order. O(V + E log E)."""
    return _compress(self, self._source.data, self._target.data)


def csc(self: Graph) -> Compressed:
    """In-edges by node, each row in slot order. O(V + E log E)."""
    return _compress(self, self._target.data, self._source.data)


def _compress(self: Graph, near: Array, far: Array) -> Compressed:
    with self._lock:
        nodes, edges = self._node_table.live_slots(), self._edge_table.live_slots()
        dense = np.empty(self._node_table.size, np.int64)
        dense[nodes] = np.arange(len(nodes))
        rows, columns = dense[near[edges]], dense[far[edges]]
        order = np.argsort(rows, kind="stable")
        indptr = np.zeros(len(nodes) + 1, np.int64)
        np.cumsum(np.bincount(rows, minlength=len(nodes)), out=indptr[1:])
        edge_ids = EdgeArray(self._edge_table.ids[edges[order]])
        return Compressed(indptr, columns[order], edge_ids, NodeArray(self._node_table.ids[nodes]))
