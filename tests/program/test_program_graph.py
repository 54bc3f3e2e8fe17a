"""The graph and the weights of a program can be read, but changed only by edits."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import graphwright as gw
from graphwright.errors import UsageError
from graphwright.graph import Graph
from graphwright.program.program_graph import _CHANGES

READS = {
    "adjacency", "buffers", "contains", "copy", "csc", "csr", "edge", "edges_between", "endpoints",
    "from_coo", "from_dict", "has_edge", "hash", "in_degree", "in_edges", "locked", "memory", "neighbors",
    "next_edge", "next_edges", "next_node", "node", "normalized_adjacency", "out_degree", "out_edges",
    "predecessors", "reserve", "save_lists", "snapshot", "source", "sources", "successors", "target", "to_dict",
    "writing",
}  # fmt: skip


def net() -> gw.Program:
    return gw.trace(gw.nn.Linear(3, 2), gw.rand(4, 3))


@pytest.mark.parametrize("name", _CHANGES)
def test_methods_that_change_the_graph_are_refused(name: str) -> None:
    p = net()
    before, version = p.hash(), p.graph.version
    with pytest.raises(UsageError, match=r"changed by edits only") as caught:
        getattr(p.graph, name)(p.nodes()[0])
    assert "program.edit" in str(caught.value)
    assert (p.hash(), p.graph.version) == (before, version)


def test_every_method_of_a_graph_either_reads_or_is_refused() -> None:
    methods = {n for n in dir(Graph) if not n.startswith("_") and callable(getattr(Graph, n))}
    assert methods == READS | set(_CHANGES)


def test_columns_are_not_written() -> None:
    p = net()
    node = p.node("linear")
    for write in (
        lambda: p.graph.nodes["name"].__setitem__(node, "other"),
        lambda: p.graph.nodes.__setitem__("name", "other"),
        lambda: p.graph.nodes.add_column("extra", np.float32),
    ):
        with pytest.raises(UsageError, match="changed by edits only"):
            write()
    assert p.path(node) == "linear"
    assert "extra" not in p.graph.nodes.columns


def test_a_copy_can_be_changed() -> None:
    p = net()
    copy = p.graph.copy()
    copy.remove_node(p.node("linear"))
    assert p.node("linear") in p.graph
    assert p.node("linear") not in copy


def test_weights_are_set_by_edits() -> None:
    weights: Any = net().weights
    key = next(iter(weights))
    with pytest.raises(UsageError, match="set_weight"):
        weights[key] = np.zeros(2)
    with pytest.raises(UsageError, match="remove"):
        del weights[key]
    assert not any(hasattr(weights, name) for name in ("add", "drop", "rekey", "sort"))
