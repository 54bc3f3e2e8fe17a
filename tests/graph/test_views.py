"""Tables of live rows: masks, writing through masks, and columns that come later."""

import numpy as np
import pytest

from graphwright.errors import DTypeError, UsageError
from graphwright.graph import Graph, StaleHandle

from .model import new_graph, random_session


def holey():
    g = Graph({"k": "i2"}, {"w": "f4", "tag": object})
    nodes = g.add_nodes(10, k=range_list(10))
    edges = g.add_edges(nodes, nodes[::-1], w=range_list(10), tag=[f"t{i}" for i in range(10)])
    g.remove_edges(edges[[2, 3, 7]])
    g.remove_node(nodes[0])  # takes edges 0 and 9
    return g, nodes, edges


def range_list(n):
    return list(range(n))


def test_a_column_returns_live_rows_in_slot_order_with_its_dtype():
    g, nodes, edges = holey()
    w = g.edges["w"]
    assert (len(w), w.dtype, np.asarray(w).dtype) == (5, np.float32, np.float32)
    assert list(w) == [1, 4, 5, 6, 8] == [g.edge(e, "w") for e in g.edges()]
    assert list(g.edges["tag"]) == ["t1", "t4", "t5", "t6", "t8"]
    assert list(g.nodes["k"]) == list(range(1, 10))
    assert (w[edges[4]], list(w[edges[[8, 1]]])) == (4, [8, 1])
    assert len(g.nodes) == 9
    assert nodes[1] in g.nodes
    assert nodes[1] not in g.edges
    assert (g.nodes.columns, g.edges.columns) == (("k",), ("w", "tag"))


def test_a_mask_never_contains_a_deleted_row():
    g, _, edges = holey()
    mask = g.edges["w"] >= 0
    assert mask.count == len(mask) == 5
    assert set(mask.ids.tolist()) == set(map(int, g.edges()))
    assert list((g.edges["w"] > 4).ids) == [edges[5], edges[6], edges[8]]
    for session_seed in range(5):
        g = random_session(new_graph(), 150, session_seed).graph
        mask = (g.edges["weight"] < 40) | (g.edges["weight"] >= 40)
        assert list(mask.ids) == list(g.edges())


def test_masks_combine_and_select_for_bulk_edits():
    g, _, edges = holey()
    w = g.edges["w"]
    both = (w > 1) & ~(w == 5) & (g.edges["tag"] != "t8")
    assert list(both.ids) == [edges[4], edges[6]]
    assert list(((w < 2) ^ (w < 5)).ids) == [edges[4]]
    assert list(np.asarray(w + w > 10)) == [False, False, False, True, True]  # arithmetic gives arrays
    g.remove_edges(both)
    assert list(g.edges["w"]) == [1, 5, 8]
    g.remove_edges(np.asarray(g.edges["w"]) > 6)
    assert list(g.edges["w"]) == [1, 5]
    record = g.rewire_edges(g.edges["w"] == 5, src=g.nodes()[0])
    assert list(record.edges) == [edges[5]]
    g.remove_nodes(g.nodes["k"] > 2)
    assert list(g.nodes["k"]) == [1, 2]


def test_a_mask_made_before_a_deletion_raises_stale_handle():
    g, nodes, edges = holey()
    mask = g.edges["w"] == 4
    g.remove_edge(edges[4])
    reused = g.add_edge(nodes[1], nodes[1], w=99)
    assert reused.index == edges[4].index
    state = g.hash(positions=True)
    with pytest.raises(StaleHandle):
        g.remove_edges(mask)
    with pytest.raises(StaleHandle):
        g.edges["w"][mask] = 0
    with pytest.raises(UsageError, match="different rows"):
        _ = mask & (g.edges["w"] > 0)
    with pytest.raises(UsageError, match="one flag per live row"):
        g.remove_edges(np.ones(99, bool))
    with pytest.raises(UsageError, match="truth value of a mask"):
        bool(g.edges["w"] > 0)
    assert g.hash(positions=True) == state


def test_columns_can_be_written_by_mask_by_handle_and_whole():
    g, _, edges = holey()
    version = g.version
    w = g.edges["w"]
    w[w > 4] = 0.5
    assert list(w) == [1, 4, 0.5, 0.5, 0.5]
    w[edges[1]] = 7
    w[edges[[4, 8]]] = [10, 20]
    assert list(w) == [7, 10, 0.5, 0.5, 20]
    g.edges["tag"][w > 6] = "big"
    assert list(g.edges["tag"]) == ["big", "big", "t5", "t6", "big"]
    g.edges["w"] = np.arange(5)
    assert list(w) == [0, 1, 2, 3, 4]
    w[:] = 2
    assert list(w) == [2] * 5
    assert w.dtype == np.float32
    assert g.version > version + 5
    state = g.hash()
    for bad, error in [("x", DTypeError), ([1, 2], UsageError)]:
        with pytest.raises(error):
            w[...] = bad
    with pytest.raises(UsageError, match="addressed by handle"):
        w[1:3] = 0
    assert g.hash() == state


def test_columns_added_later_hold_the_default_in_every_row():
    g, nodes, _ = holey()
    g.edges.add_column("gate", "i4", -1)
    assert list(g.edges["gate"]) == [-1] * 5
    e = g.add_edge(nodes[1], nodes[1])
    assert g.edge(e, "gate") == -1
    record = g.remove_edge(e)
    g.edges.add_column("late", object, "new")
    g.restore_edge(record)  # made before the column was there
    assert (g.edge(e, "gate"), g.edge(e, "late")) == (-1, "new")
    with pytest.raises(UsageError, match="no such column"):
        g.edges["nothing"]
