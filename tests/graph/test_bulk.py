"""Bulk edits: equal to the loop of single edits, checked as a whole, undone as a whole."""

import random
from collections.abc import Sequence
from functools import partial

import numpy as np
import pytest

from graphwright.errors import DTypeError, UsageError
from graphwright.graph import EdgeArray, Graph, NodeArray, NotUndoable, StaleHandle, buckets
from graphwright.graph.handles import H
from seeds import seeds

from .model import new_graph, random_session


@pytest.fixture(params=["loop", "compiled"])
def path(request, monkeypatch):
    """Both ways a batch can run, whatever its size."""
    limit = 0 if request.param == "compiled" else 10**9
    monkeypatch.setattr(buckets, "BULK_MIN", limit)


def twins(seed, **options):
    rng = random.Random(seed)
    session = random_session(new_graph(block=rng.choice([1, 4, 16]), **options), 150, seed)
    return rng, session.graph, session.graph.copy()


def picked(rng: random.Random, of: Sequence[H], most: int) -> list[H]:
    return rng.sample(of, rng.randint(0, min(most, len(of))))


@pytest.mark.usefixtures("path")
@seeds(40)
def test_each_bulk_edit_equals_the_loop_of_single_edits(seed):
    rng, many, loop = twins(seed, max_generation=rng_choice(seed))
    steps = ["add_nodes", "add_edges", "remove_edges", "rewire_edges", "remove_nodes"]
    rng.shuffle(steps)
    for step in steps:
        nodes, edges = list(many.nodes()), list(many.edges())
        if step == "add_nodes":
            names = [f"b{i}" for i in range(rng.randint(0, 30))]
            ids = many.add_nodes(len(names), name=names)
            assert list(ids) == [loop.add_node(name=name) for name in names]
        elif step == "add_edges" and nodes:
            rows = [(rng.choice(nodes), rng.choice(nodes), rng.random()) for _ in range(rng.randint(0, 60))]
            ids = many.add_edges([r[0] for r in rows], [r[1] for r in rows], weight=[r[2] for r in rows])
            assert list(ids) == [loop.add_edge(s, t, weight=w) for s, t, w in rows]
        elif step == "remove_edges":
            chosen = picked(rng, edges, 60)
            record = many.remove_edges(chosen)
            singles = [loop.remove_edge(e) for e in chosen]
            assert list(record.edges) == [r.edge for r in singles]
            assert record.out_positions.tolist() == [r.out_position for r in singles]
            assert record.in_positions.tolist() == [r.in_position for r in singles]
        elif step == "rewire_edges":
            chosen = picked(rng, edges, 60)
            ends = [[rng.choice(nodes) for _ in chosen] if rng.random() < 0.7 else None for _ in range(2)]
            many.rewire_edges(chosen, src=ends[0], dst=ends[1])
            for i, e in enumerate(chosen):
                loop.rewire_edge(e, *(end[i] if end else None for end in ends))
        elif step == "remove_nodes":
            gone = picked(rng, nodes, 12)
            record = many.remove_nodes(gone)
            singles = [loop.remove_node(n) for n in gone]
            assert list(record.edges.edges) == [e.edge for r in singles for e in r.edges]
        assert many.hash(positions=True) == loop.hash(positions=True), step
    saved, same = many.to_dict(), loop.to_dict()
    assert saved | {"version": 0} == same | {"version": 0}  # free lists and high-water marks too: equal handles to come


def rng_choice(seed):
    return 3 if seed % 3 == 0 else 2**31 - 1


@pytest.mark.usefixtures("path")
@seeds(12)
def test_bulk_edits_are_undone_and_redone_bit_for_bit(seed):
    rng, g, _ = twins(seed)
    nodes, edges = list(g.nodes()), list(g.edges())
    start = g.hash(positions=True)

    ids = g.add_edges([rng.choice(nodes) for _ in range(40)], [rng.choice(nodes) for _ in range(40)])
    added = g.hash(positions=True)
    undone = g.remove_edges(ids[::-1])
    assert g.hash(positions=True) == start
    g.restore_edges(undone)
    assert g.hash(positions=True) == added

    rewired = g.rewire_edges(picked(rng, edges, 50), dst=rng.choice(nodes))
    after = g.hash(positions=True)
    back = g.restore_rewires(rewired)
    assert g.hash(positions=True) == added
    again = g.restore_rewires(back)
    assert g.hash(positions=True) == after
    g.restore_rewires(again)

    removed = g.remove_nodes(picked(rng, nodes, 10))
    gone = g.remove_edges(g.edges())
    g.restore_edges(gone)
    g.restore_nodes(removed)
    assert g.hash(positions=True) == added


@pytest.mark.usefixtures("path")
def test_restores_out_of_order_leave_the_graph_unchanged():
    g = new_graph(block=4)
    nodes = g.add_nodes(4)
    edges = g.add_edges(nodes[[0, 0, 0, 0, 0, 1, 2, 3]], nodes[[1, 1, 2, 2, 3, 3, 0, 0]])
    first, second = g.remove_edges(edges[:2]), g.remove_edges(edges[2:4])
    state = g.hash(positions=True)
    with pytest.raises(NotUndoable):
        g.restore_edges(first)
    assert g.hash(positions=True) == state
    g.rewire_edge(edges[4], src=nodes[2])  # the slots still fit, the indices of the out-list do not
    state = g.hash(positions=True)
    with pytest.raises(NotUndoable):
        g.restore_edges(second)
    assert g.hash(positions=True) == state
    moved = g.rewire_edges(edges[5:8], src=nodes[0], dst=nodes[1])
    g.remove_edge(edges[4])
    g.rewire_edge(edges[6], dst=nodes[3])
    g.rewire_edge(edges[6], dst=nodes[1])
    state = g.hash(positions=True)
    lonely = g.remove_nodes(nodes[3:4])
    with pytest.raises(StaleHandle):
        g.rewire_edges(edges[5:8], dst=nodes[3])
    g.restore_nodes(lonely)
    assert g.hash(positions=True) == state
    g.rewire_edge(edges[7], src=nodes[1])
    state = g.hash(positions=True)
    with pytest.raises(NotUndoable):
        g.restore_rewires(moved)
    assert g.hash(positions=True) == state


@pytest.mark.usefixtures("path")
def test_undo_of_a_rewire_restores_positions_that_were_taken():
    g = Graph(block=2)
    a, b, c = g.add_nodes(3)
    edges = g.add_edges([a] * 5, [b] * 5)
    moved = g.rewire_edges(edges[:3], src=c, dst=c)
    g.rewire_edge(edges[4], dst=a)  # leaves b's list, so its next index is another one
    g.add_edge(c, a)
    g.rewire_edge(edges[3], dst=c)
    state = g.hash(positions=True)
    with pytest.raises(NotUndoable):
        g.restore_rewires(moved)
    assert g.hash(positions=True) == state


@pytest.mark.usefixtures("path")
@seeds(60)
def test_a_restore_after_other_edits_is_complete_or_changes_nothing(seed):
    """Later rewires keep the free lists as they were, so restores get far before an index does not fit."""
    rng = random.Random(seed)
    outcomes = set()
    for _ in range(12):
        g = Graph(block=rng.choice([1, 2, 4]))
        nodes = list(g.add_nodes(5))
        edges = list(g.add_edges([rng.choice(nodes) for _ in range(24)], [rng.choice(nodes) for _ in range(24)]))
        chosen = rng.sample(edges, 8)
        edit = rng.choice(["edges", "rewires", "node", "rewire", "nodes"])
        if edit == "edges":
            restore = partial(g.restore_edges, g.remove_edges(chosen))
        elif edit == "nodes":
            restore = partial(g.restore_nodes, g.remove_nodes(nodes[:2]))
        elif edit == "node":
            restore = partial(g.restore_node, g.remove_node(nodes[0]))
        elif edit == "rewires":
            ends = [[rng.choice(nodes) for _ in chosen] for _ in range(2)]
            restore = partial(g.restore_rewires, g.rewire_edges(chosen, *ends))
        else:
            restore = partial(g.restore_rewire, g.rewire_edge(chosen[0], rng.choice(nodes), rng.choice(nodes)))
        alive, rest = list(g.nodes()), [e for e in g.edges() if e not in chosen[:8]]
        for e in rng.sample(rest, min(len(rest), rng.randint(1, 3))):
            g.rewire_edge(e, **{rng.choice(["src", "dst"]): rng.choice(alive)})
        state = g.hash(positions=True)
        try:
            restore()
            outcomes.add("fits")
        except NotUndoable:
            assert g.hash(positions=True) == state
            outcomes.add("refused")
        assert Graph.from_dict(g.to_dict()).hash(positions=True) == g.hash(
            positions=True
        )  # the loader checks every list
        for n in g.nodes():
            assert all(g.source(e) == n for e in g.out_edges(n))
            assert all(g.target(e) == n for e in g.in_edges(n))
    assert "refused" in outcomes


def test_one_invalid_row_in_100_000_leaves_the_graph_unchanged():
    g = Graph({}, {"port": "u1"})
    nodes = g.add_nodes(1000)
    rng = np.random.default_rng(0)
    src, dst = nodes.ids[rng.integers(0, 1000, 100_000)], nodes.ids[rng.integers(0, 1000, 100_000)]
    edges = g.add_edges(src, dst, port=3)
    dead = g.remove_edge(edges[500]).edge
    state, version = g.hash(positions=True), g.version
    bad = dst.copy()
    bad[77_777] = dead
    ports = np.full(100_000, 3)
    ports[99_999] = 256
    stale = edges.ids.copy()
    double = np.delete(edges.ids, 500)
    double[50_000] = double[60_000]
    cases = [
        (UsageError, "row 77777", lambda: g.add_edges(src, bad)),
        (DTypeError, "256", lambda: g.add_edges(src, dst, port=ports)),
        (StaleHandle, "row 500", lambda: g.remove_edges(stale)),
        (UsageError, "more than once", lambda: g.remove_edges(double)),
        (UsageError, "more than once", lambda: g.rewire_edges(double, src=nodes[0])),
        (UsageError, "row 77776", lambda: g.rewire_edges(np.delete(edges.ids, 500), dst=bad[1:])),
        (UsageError, "more than once", lambda: g.remove_nodes([*nodes, nodes[5]])),
        (UsageError, "differ in number", lambda: g.rewire_edges(edges[:3], dst=nodes[:2])),
        (UsageError, "no such column", lambda: g.add_edges(src, dst, nothing=1)),
        (UsageError, "not an array of handles", lambda: g.remove_edges(np.array([0.5]))),
        (UsageError, "differ in length", lambda: g.add_edges(src, dst[:5])),
    ]
    for error, text, edit in cases:
        with pytest.raises(error, match=text):
            edit()
        assert (g.hash(positions=True), g.version) == (state, version)


def test_filtering_and_deleting_a_million_rows_is_one_call():
    g = Graph({}, {"logit": "f4"})
    nodes = g.add_nodes(1000)
    rng = np.random.default_rng(1)
    logits = rng.standard_normal(1_000_000).astype(np.float32)
    g.add_edges(nodes[rng.integers(0, 1000, 1_000_000)], nodes[rng.integers(0, 1000, 1_000_000)], logit=logits)
    record = g.remove_edges(g.edges["logit"] < 0.25)
    assert len(record) == np.count_nonzero(logits < 0.25)
    assert g.edge_count == np.count_nonzero(logits >= 0.25)
    np.testing.assert_array_equal(g.edges["logit"], logits[logits >= 0.25])
    assert sum(g.in_degree(n) for n in nodes) == g.edge_count


def test_bulk_edits_accept_empty_batches_and_one_handle_for_all_rows():
    g = new_graph()
    hub = g.add_node()
    state = g.hash(positions=True)
    assert g.add_nodes(0) == NodeArray([])
    assert g.add_edges([], []) == EdgeArray([])
    assert len(g.remove_edges([])) == len(g.remove_nodes([])) == len(g.rewire_edges([], src=hub)) == 0
    g.restore_edges(g.remove_edges(EdgeArray([])))
    assert g.hash(positions=True) == state
    leaves = g.add_nodes(3)
    fan = g.add_edges(hub, leaves, weight=2)
    assert [g.endpoints(e) for e in fan] == [(hub, leaf) for leaf in leaves]
    g.rewire_edges(fan, src=leaves, dst=hub)
    assert g.predecessors(hub) == tuple(leaves)
    assert [type(e).__name__ for e in g.add_edges(hub, hub)] == ["EdgeId"]
    with pytest.raises(UsageError, match="negative"):
        g.add_nodes(-1)
