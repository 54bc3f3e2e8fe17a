"""Compile the numba loops of bulk edits ahead of their first use; numba caches them on disk."""

from __future__ import annotations

import numpy as np

from graphwright.graph.graph import Graph


def warmup() -> None:
    """Run every bulk edit once on a graph large enough for the compiled path."""
    graph = Graph(edge_columns={"weight": "f4"})
    nodes = graph.add_nodes(2048)
    ids = np.asarray(nodes)
    edges = graph.add_edges(ids[:-1], ids[1:], weight=np.zeros(len(ids) - 1, np.float32))
    graph.restore_rewires(graph.rewire_edges(edges, dst=ids[: len(edges)]))
    graph.restore_edges(graph.remove_edges(edges))
    graph.remove_nodes(nodes)
