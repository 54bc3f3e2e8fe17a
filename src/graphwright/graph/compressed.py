"""The live graph as compressed rows or columns and as matrices, for algorithms that want arrays. Methods of `Graph`.

Live slots are mapped to 0..n-1 in slot order, so holes left by deletions do not show.
"""

# pyright: reportPrivateUsage=false
# The files of this folder share what a graph keeps.
from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from ..errors import DTypeError, UsageError
from .columns import Array
from .handles import INDEX, EdgeArray, NodeArray

if TYPE_CHECKING:
    from .graph import Graph


class Compressed(NamedTuple):
    """Row i is `nodes[i]`: its edges are `edges[indptr[i]:indptr[i + 1]]`, their far ends `nodes[indices[...]]`."""

    indptr: Array
    indices: Array
    edges: EdgeArray
    nodes: NodeArray


class Adjacency(NamedTuple):
    """A sparse matrix over `nodes`: row i has `values[indptr[i]:indptr[i + 1]]` at `indices[...]`, ascending.

    `scipy.sparse.csr_matrix((values, indices, indptr))` takes it as it is.
    """

    indptr: Array
    indices: Array
    values: Array
    nodes: NodeArray


def adjacency(self: Graph, weights: str | None = None) -> Adjacency:
    """A[i, j] = number of edges from node i to node j, or the sum of their `weights`; float64. O(V + E log E).

    Raises: UsageError for a column that is not declared, DTypeError for one that holds no numbers.
    """
    with self._lock:
        rows = csr(self)
        return _matrix(rows, *_entries(self, rows, weights))


def normalized_adjacency(self: Graph, weights: str | None = None) -> Adjacency:
    """D^-1/2 (A + I) D^-1/2, D the row sums of A + I (Kipf and Welling 2017, eq. 2). O(V + E log E).

    Raises: as `adjacency`; UsageError naming the first node whose row sum is not positive.
    """
    with self._lock:
        rows = csr(self)
        near, far, values = _entries(self, rows, weights)
        loops = np.arange(len(rows.nodes))
        near, far = np.append(near, loops), np.append(far, loops)
        values = np.append(values, np.ones(len(loops)))
        sums = np.bincount(near, values, len(loops))
        if not (sums > 0).all():
            node = rows.nodes[int(np.argmin(sums > 0))]
            raise UsageError("a row sum must be positive", where=repr(node), got=float(sums.min()))
        return _matrix(rows, near, far, values / np.sqrt(sums[near] * sums[far]))


def from_coo(
    cls: type[Graph],
    rows: Any,
    columns: Any,
    nodes: int | None = None,
    edge_columns: Mapping[str, Any] | None = None,
    **values: Any,
) -> Graph:
    """A graph with an edge rows[k] -> columns[k] for each k, between nodes numbered in slot order.

    Args:
        rows, columns: integers from 0 on, equally many.
        nodes: how many there are; by default as many as the numbers say.
        edge_columns: as of `Graph`.
        values: one value per edge, or one for all, by column.
    Raises: UsageError for numbers that are no node, or of unequal count; as `add_edges`.
    """
    ends = [np.atleast_1d(np.asarray(end)) for end in (rows, columns)]
    least = max((int(end.max()) + 1 for end in ends if end.size), default=0)
    count = least if nodes is None else nodes
    if any(end.ndim != 1 or (end.size and end.dtype.kind not in "iu") for end in ends) or len(ends[0]) != len(ends[1]):
        raise UsageError("rows and columns are as many integers", got=f"{ends[0].shape} and {ends[1].shape}")
    if any(end.size and end.min() < 0 for end in ends) or least > count:
        raise UsageError("a number that is no node", expected=f"0 to {count - 1}", got=least - 1)
    g = cls(edge_columns=edge_columns)
    made = g.add_nodes(count)
    g.add_edges(*(made.ids[end.astype(np.int64)] for end in ends), **values)
    return g


def _entries(self: Graph, rows: Compressed, weights: str | None) -> tuple[Array, Array, Array]:
    near = np.repeat(np.arange(len(rows.nodes)), np.diff(rows.indptr))
    if weights is None:
        return near, rows.indices, np.ones(len(near))
    column = self._edge_table.column(weights)
    if column.dtype.kind not in "iufb":
        raise DTypeError("a weight is a number", where=weights, got=column.dtype)
    return near, rows.indices, column.take(rows.edges.ids & INDEX).astype(np.float64)


def _matrix(rows: Compressed, near: Array, far: Array, values: Array) -> Adjacency:
    """Entries at one place are summed, in order."""
    n = len(rows.nodes)
    places, of = np.unique(near * n + far, return_inverse=True)
    indptr = np.zeros(n + 1, np.int64)
    np.cumsum(np.bincount(places // max(n, 1), minlength=n), out=indptr[1:])
    return Adjacency(indptr, places % max(n, 1), np.bincount(of, values, len(places)), rows.nodes)


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
