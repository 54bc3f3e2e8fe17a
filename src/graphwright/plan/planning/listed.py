"""The nodes of a program in order, read in bulk: rows of which nothing is known yet, and which results each reads."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from graphwright.plan.planning.row import Row
from graphwright.program import Program, Value


class Listed(NamedTuple):
    """Rows in order; results of all of them are numbered in that order.

    Attributes:
        rows: one per node.
        begins: of each row, the number of its first result; then how many there are.
        reads: numbers of the results that rows read, by row and port.
        stops: of each row, where its reads end.
    """

    rows: list[Row]
    begins: list[int]
    reads: list[int]
    stops: list[int]


def listed(p: Program) -> Listed:
    """All nodes of a program."""
    graph = p.graph
    flat = graph.csc()
    nodes = list(flat.nodes)
    order = np.array(sorted(range(len(nodes)), key=list(map(p.order_labels.key, nodes)).__getitem__), np.int64)
    place = np.empty(len(nodes), np.int64)
    place[order] = np.arange(len(nodes))
    names, ops, attrs, specs = (np.asarray(graph.nodes[c])[order].tolist() for c in ("name", "op", "attrs", "specs"))
    nodes = [nodes[i] for i in order.tolist()]
    results = np.fromiter(map(len, specs), np.int64, len(nodes))
    begins = np.concatenate([[0], np.cumsum(results)])

    targets = place[np.repeat(np.arange(len(nodes)), np.diff(flat.indptr))]
    by_port = np.lexsort((np.asarray(graph.edges["dst_port"][flat.edges]), targets))
    ports = np.asarray(graph.edges["src_port"][flat.edges])[by_port]
    reads = (begins[place[flat.indices[by_port]]] + ports).tolist()
    stops = np.cumsum(np.bincount(targets, minlength=len(nodes))).tolist()

    owners = np.repeat(np.arange(len(nodes)), results)
    values = list(
        map(Value, map(nodes.__getitem__, owners.tolist()), (np.arange(len(owners)) - begins[owners]).tolist())
    )
    sources = tuple(map(values.__getitem__, reads))
    read = [sources[a:b] for a, b in zip([0, *stops], stops, strict=False)]
    return Listed(list(map(Row, nodes, names, ops, attrs, specs, read)), begins.tolist(), reads, stops)
