"""The container by examples and counts: slots and handles, restoring, queries, columns, threads, limits, memory."""

import random
import subprocess
import sys
import threading
from itertools import pairwise

import pytest

from graphwright.errors import DTypeError, UsageError
from graphwright.graph import CapacityError, EdgeId, EditBusy, Graph, NotUndoable, StaleHandle, buckets
from seeds import deep

from .model import Session, new_graph, random_edit, random_session


@pytest.mark.parametrize("block", [4, 16])
def test_random_edits_match_the_model_and_undo_restores_the_start(block):
    session = Session(new_graph(block=block))
    start = session.graph.hash(positions=True)
    rng = random.Random(block)
    for step in range(deep(1500, 500)):
        random_edit(session, rng)
        if step % 100 == 0:
            session.check()
    end = session.graph.hash(positions=True)
    while session.past:
        session.undo()
    assert session.graph.hash(positions=True) == start
    session.check()
    while session.future:
        session.redo()
    assert session.graph.hash(positions=True) == end
    session.check()


def test_deleting_one_of_two_parallel_edges_keeps_the_other():
    for keep in (0, 1):
        g = Graph()
        u, v = g.add_node(), g.add_node()
        pair = g.add_edge(u, v), g.add_edge(u, v)
        g.remove_edge(pair[1 - keep])
        assert g.out_edges(u) == g.in_edges(v) == (pair[keep],)
        assert (g.out_degree(u), g.in_degree(v)) == (1, 1)
        assert g.has_edge(u, v)
        assert g.successors(u) == (v,)


def test_deleting_a_node_lowers_the_degrees_of_its_neighbours():
    g = Graph(block=4)
    hub, other, third = g.add_node(), g.add_node(), g.add_node()
    for _ in range(500):
        g.add_edge(hub, other)
        g.add_edge(other, hub)
    for _ in range(3):
        g.add_edge(hub, hub)
    kept = g.add_edge(other, third)
    before = g.hash(positions=True)
    record = g.remove_node(hub)
    assert len(record.edges) == len({r.edge for r in record.edges}) == 1003
    assert (g.out_edges(other), g.in_edges(other), g.edge_count) == ((kept,), (), 1)
    assert g.restore_node(record) == hub
    assert g.hash(positions=True) == before
    assert g.out_degree(hub) == 503


def test_a_restored_slot_never_issues_a_handle_again():
    g = Graph()
    n = g.add_node()
    first = g.add_edge(n, n)
    removed = g.remove_edge(first)
    second = g.add_edge(n, n)  # same slot, next generation
    assert (second.index, second.generation) == (first.index, first.generation + 1)
    g.remove_edge(second)  # undo of the insertion
    g.restore_edge(removed)  # undo of the removal
    g.remove_edge(first)
    third = g.add_edge(n, n)  # another edit: rolling `high` back would issue `second` again
    assert third not in (first, second)
    for dead in (first, second):
        with pytest.raises(StaleHandle):
            g.endpoints(dead)


def test_a_slot_is_retired_before_its_generation_wraps():
    g = Graph(max_generation=3)
    n = g.add_node()
    issued = []
    for _ in range(7):
        issued.append(g.add_edge(n, n))
        g.remove_edge(issued[-1])
    assert len(set(issued)) == 7
    assert [e.index for e in issued] == [0, 0, 1, 1, 2, 2, 3]
    assert max(e.generation for e in issued) == 2


def test_restores_out_of_order_are_refused_and_change_nothing():
    g = Graph(block=4)
    u, v = g.add_node(), g.add_node()
    edges = [g.add_edge(u, v) for _ in range(6)]
    first, second = g.remove_edge(edges[0]), g.remove_edge(edges[3])
    state = g.hash(positions=True)
    with pytest.raises(NotUndoable):
        g.restore_edge(first)
    assert g.hash(positions=True) == state
    g.restore_edge(second)
    moved = g.rewire_edge(edges[5], src=v)
    g.rewire_edge(edges[4], src=v)
    g.rewire_edge(edges[4], src=u)
    g.rewire_edge(edges[5], src=u)
    state = g.hash(positions=True)
    with pytest.raises(NotUndoable):
        g.restore_rewire(moved)
    with pytest.raises(NotUndoable):
        g.restore_edge(second)  # alive
    assert g.hash(positions=True) == state


def test_a_refused_restore_of_a_node_changes_nothing():
    g = Graph()
    u, v = g.add_node(), g.add_node()
    g.add_edge(v, u)
    g.add_edge(u, v)
    record = g.remove_node(u)
    late = g.add_edge(v, v)  # takes the slot that the record's last edge would get back
    state = g.hash(positions=True)
    with pytest.raises(NotUndoable):
        g.restore_node(record)
    assert g.hash(positions=True) == state
    assert g.out_edges(v) == (late,)
    with pytest.raises(StaleHandle):
        g.in_degree(u)


def cells_spent(nodes, degree):
    """Cells touched by (removal, restore, insertion, rewire) of the first, middle and last of `degree` edges."""
    g = Graph({}, {"w": "f4"}, debug_counters=True)
    ends = g.add_nodes(nodes)
    hub, other = ends[nodes // 2], ends[nodes - 1]
    edges = g.add_edges(hub, [other] * degree, w=1.0)
    g.reserve(nodes, 2 * degree)
    g.remove_edge(g.add_edge(ends[0], ends[0]))  # a spare block each, so that no measured edit grows a table
    spent = []
    for e in (edges[0], edges[degree // 2], edges[-1]):
        marks = [g.cells_touched]
        record = g.remove_edge(e)
        marks.append(g.cells_touched)
        g.restore_edge(record)
        marks.append(g.cells_touched)
        g.restore_rewire(g.rewire_edge(e, src=ends[0]))
        marks.append(g.cells_touched)
        g.remove_edge(g.add_edge(hub, other))
        marks.append(g.cells_touched)
        spent.append(tuple(b - a for a, b in pairwise(marks)))
    return spent


def test_edits_touch_as_many_cells_at_any_degree_and_size():
    few = cells_spent(nodes=1_000, degree=18)
    for nodes, degree in [
        (1_000, 1_000_002),
        (1_000_000, 18),
        (1_000_000, 1_000_002),
    ]:  # degrees equal modulo the block size
        assert cells_spent(nodes, degree) == few
    assert cells_spent(1_000, 2)[::2] == few[::2]  # of two edges the middle one is the last
    assert max(map(max, few)) <= 120
    assert cells_spent(1_000, 17) == cells_spent(1_000, 1_000_001)  # the tail block closes: the dearest case


def test_editing_while_iterating_never_yields_another_element():
    session = random_session(new_graph(block=4), 120, seed=5)
    g = session.graph
    for n in g.nodes():
        if n not in g:
            with pytest.raises(StaleHandle):
                g.out_edges(n)
            continue
        for e in g.out_edges(n):
            g.remove_edge(e)
            g.add_edge(n, n)  # takes the slot just freed: the copied handles must not notice
        for e in g.in_edges(n):
            if e in g:
                g.remove_node(g.source(e))
    for e in g.edges():
        g.add_edge(*g.endpoints(e))
        g.remove_edge(e)
        with pytest.raises(StaleHandle):
            g.edge(e, "weight")
    for n in g.nodes():
        for m in (*g.successors(n), *g.predecessors(n)):
            if m in g:
                g.remove_node(m)
    assert g.edge_count == 0


def test_queries_match_the_model_on_all_pairs():
    session = random_session(new_graph(block=4), 300, seed=3)
    g, edges = session.graph, session.model.edges
    for u in session.model.nodes:
        for v in session.model.nodes:
            between = {e for e, (s, t, _) in edges.items() if (s, t) == (u, v)}
            assert g.has_edge(u, v) == bool(between)
            assert set(g.edges_between(u, v)) == between
            assert len(g.edges_between(u, v)) == len(between)
        around = {t for s, t, _ in edges.values() if s == u} | {s for s, t, _ in edges.values() if t == u}
        assert set(g.neighbors(u)) == around
        assert len(g.neighbors(u)) == len(around)


def test_in_edges_and_sources_are_sorted_by_a_column():
    rng = random.Random(0)
    g = Graph(edge_columns={"port": "i4", "weight": "f8"}, block=2)
    nodes = [g.add_node() for _ in range(6)]
    for port in rng.sample(range(40), 30):
        g.add_edge(rng.choice(nodes), nodes[0], port=port, weight=port / 2)
    for edge in rng.sample(g.in_edges(nodes[0]), 10):
        g.remove_edge(edge)
    wanted = sorted(g.in_edges(nodes[0]), key=lambda e: g.edge(e, "port"))
    assert list(g.in_edges(nodes[0], "port")) == wanted != list(g.in_edges(nodes[0]))
    expected = [g.source(e) for e in wanted], [g.edge(e, "weight") for e in wanted]
    assert g.sources(nodes[0], "port", "weight") == expected
    assert g.sources(nodes[1], "port", "weight") == ([], [])
    with pytest.raises(UsageError, match="no such column"):
        g.in_edges(nodes[0], "name")
    with pytest.raises(UsageError, match="no such column"):
        g.sources(nodes[1], "port", "name")


def test_has_edge_scans_the_shorter_list():
    g = Graph(debug_counters=True)
    hub = g.add_node()
    leaves = g.add_nodes(20_000)
    g.add_edges(hub, leaves)
    start = g.cells_touched
    assert g.has_edge(hub, leaves[17])
    assert not g.has_edge(leaves[3], hub)
    assert g.cells_touched - start < 40


def test_invalid_column_values_change_no_column():
    g = Graph({"op": object, "n": ("u1", 7), "x": "f4", "ok": "?"}, {"port": "i4"})
    a = g.add_node(op={"k": 1}, x=0.5)
    assert (g.node(a, "op"), g.node(a, "n"), g.node(a, "x"), g.node(a, "ok")) == ({"k": 1}, 7, 0.5, False)
    state = g.hash(positions=True)
    for bad in ({"n": 256}, {"n": -1}, {"x": "text"}, {"n": 1.5}):
        with pytest.raises(DTypeError):
            g.add_node(**bad)
        with pytest.raises(DTypeError):
            g.set_node(a, op="changed", **bad)
    with pytest.raises(UsageError, match="no such column"):
        g.add_node(nothing=1)
    with pytest.raises(UsageError, match="no such column"):
        g.set_node(a, n=1, nothing=1)
    with pytest.raises(UsageError, match="no such column"):
        g.node(a, "nothing")
    with pytest.raises(DTypeError):
        g.add_edge(a, a, port="x")
    assert g.hash(positions=True) == state
    assert g.node_count == 1
    g.set_node(a, op="changed", n=9)
    assert (g.node(a, "op"), g.node(a, "n")) == ("changed", 9)
    assert g.hash() != state


def test_stale_handle_errors_name_the_element_and_the_edit():
    g = Graph()
    n = g.add_node()
    e = g.add_edge(n, n)
    g.describe = lambda handle: (f"the loop {handle!r}", "edit 7")
    g.remove_edge(e)
    with pytest.raises(StaleHandle, match=r"it was the loop EdgeId\(0, 1\), removed by edit 7") as caught:
        g.endpoints(e)
    assert (caught.value.index, caught.value.generation) == (0, 1)
    assert (caught.value.was, caught.value.removed_by) == ("the loop EdgeId(0, 1)", "edit 7")
    for never in (EdgeId(0, 2), EdgeId(5, 1)):
        with pytest.raises(StaleHandle, match="never issued"):
            g.remove_edge(never)
    with pytest.raises(UsageError, match="not a NodeId"):
        g.remove_nodes([e])
    assert e not in g
    assert n in g


def test_clear_makes_every_handle_stale_and_can_be_undone():
    session = random_session(new_graph(block=4), 200, seed=9)
    g = session.graph
    state, handles = g.hash(positions=True), [*g.nodes(), *g.edges()]
    record = g.clear()
    assert (g.node_count, g.edge_count) == (0, 0)
    assert not any(h in g for h in handles)
    g.restore_nodes(record)
    assert g.hash(positions=True) == state
    session.check()


def test_copy_is_independent_and_issues_equal_handles():
    session = random_session(new_graph(block=4), 200, seed=2)
    g = session.graph
    twin = g.copy()
    assert twin.hash(positions=True) == g.hash(positions=True)
    n = next(iter(g.nodes()))
    assert twin.add_edge(n, n) == g.add_edge(n, n)
    assert twin.remove_node(n) == g.remove_node(n)
    state = g.hash(positions=True)
    assert twin.hash(positions=True) == state
    twin.clear()
    assert g.hash(positions=True) == state


def test_the_hash_depends_on_live_data_only():
    def build():
        g = new_graph()
        a, b = g.add_node(name="a"), g.add_node(name="b")
        return g, a, b, g.add_edge(a, b, weight=1.0, tag=("x", 1))

    g, a, b, e = build()
    base, positions = g.hash(), g.hash(positions=True)
    changes = [
        lambda g: g.set_node(a, name="c"),
        lambda g: g.set_edge(e, weight=1.5),
        lambda g: g.set_edge(e, weight=-0.0),
        lambda g: g.set_edge(e, tag=("x", 2)),
        lambda g: g.rewire_edge(e, dst=a),
        lambda g: g.rewire_edge(e, src=b, dst=a),
        lambda g: g.add_node(),
        lambda g: g.nodes.add_column("extra", "i4"),
    ]
    seen = {base}
    for change in changes:
        g, *_ = build()
        change(g)
        seen.add(g.hash())
    assert len(seen) == len(changes) + 1
    g, *_ = build()
    g.remove_node(g.add_node())  # high-water mark, free list and version moved
    assert (g.hash(), g.hash(positions=True)) == (base, positions)
    second = g.add_edge(a, b)
    g.add_edge(a, b)
    one = g.hash(positions=True), g.hash()
    g.restore_edge(g.remove_edge(second))
    assert (g.hash(positions=True), g.hash()) == one
    g.rewire_edge(second, src=b)
    g.rewire_edge(second, src=a)  # same graph, other index
    assert g.hash() == one[1]
    assert g.hash(positions=True) != one[0]


def test_hashing_a_value_without_a_stable_repr_is_refused():
    g = Graph({"op": object})
    g.add_node(op=object())
    with pytest.raises(UsageError, match="no repr of its own"):
        g.hash()


def test_a_second_writer_waits_and_then_gets_edit_busy():
    g = Graph(timeout=0.05)
    n = g.add_node()
    errors = []

    def write():
        for edit in (
            g.add_node,
            lambda: g.add_edge(n, n),
            lambda: g.add_edges([n], [n]),
            g.clear,
            lambda: g.set_node(n),
        ):
            try:
                edit()
            except EditBusy as error:
                errors.append(error)

    with g.locked():
        g.add_node()  # re-entrant
        other = threading.Thread(target=write)
        other.start()
        other.join()
    assert len(errors) == 5
    assert (g.node_count, g.edge_count) == (2, 0)
    g.add_edge(n, n)  # released


def test_edits_of_four_threads_are_serialised():
    g = Graph({"x": "i8", "y": "i8"}, {"owner": "i4"}, block=4, timeout=60)
    shared = [g.add_node(x=0, y=0) for _ in range(3)]
    kept = [[] for _ in range(4)]
    torn = []
    running = True

    def write(me):
        rng = random.Random(me)
        mine = kept[me]
        for i in range(10_000):
            if mine and rng.random() < 0.45:
                g.remove_edge(mine.pop(rng.randrange(len(mine))))
            elif mine and rng.random() < 0.3:
                g.rewire_edge(rng.choice(mine), src=rng.choice(shared))
            else:
                mine.append(g.add_edge(rng.choice(shared), rng.choice(shared), owner=me))
            with g.locked():
                g.set_node(shared[0], x=me * 100_000 + i)
                g.set_node(shared[0], y=me * 100_000 + i)

    def read():
        while running:
            seen = g.snapshot()
            torn.append(seen.node_columns["x"][0] != seen.node_columns["y"][0])
            torn.append(not set(seen.sources.ids.tolist()) <= set(seen.nodes.ids.tolist()))
            torn.append(len(seen.edges) != len(seen.edge_columns["owner"]))

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        writers = [threading.Thread(target=write, args=(me,)) for me in range(4)]
        reader = threading.Thread(target=read)
        for thread in (*writers, reader):
            thread.start()
        for thread in writers:
            thread.join()
        running = False
        reader.join()
    finally:
        sys.setswitchinterval(interval)
    assert torn
    assert not any(torn)
    for me in range(4):
        assert {e for e in g.edges() if g.edge(e, "owner") == me} == set(kept[me])
    assert Graph.from_dict(g.to_dict()).hash(positions=True) == g.hash(positions=True)  # the loader checks every list
    assert sum(g.out_degree(n) for n in shared) == sum(g.in_degree(n) for n in shared) == g.edge_count


def test_full_slot_table_raises_capacity_error(monkeypatch):
    from graphwright.graph import slots

    monkeypatch.setattr(slots, "MAX_SLOTS", 20)
    g = Graph()
    nodes = [g.add_node() for _ in range(20)]
    state = g.hash(positions=True)
    with pytest.raises(CapacityError):
        g.add_node()
    with pytest.raises(CapacityError):
        g.add_nodes(3)
    assert g.hash(positions=True) == state
    g.remove_node(nodes[4])
    assert g.add_node().generation == 2


def test_a_full_bucket_table_leaves_the_graph_unchanged(monkeypatch):
    monkeypatch.setattr(buckets, "MAX_ENTRIES", 64)
    g = Graph(block=16)
    nodes = g.add_nodes(6)
    edges = [g.add_edge(nodes[i], nodes[0]) for i in range(4)]
    state, version = g.hash(positions=True), g.version
    with pytest.raises(CapacityError):
        g.add_edge(nodes[5], nodes[0])
    with pytest.raises(CapacityError):
        g.add_edges(nodes[5], nodes[0])
    with pytest.raises(CapacityError):
        g.rewire_edge(g.add_edge(nodes[0], nodes[0]), src=nodes[5])
    g.remove_edge(g.edges()[-1])
    assert g.hash(positions=True) == state
    assert g.version > version
    g.remove_edge(edges[0])
    g.add_edge(nodes[5], nodes[0])  # the freed block


def test_adding_after_reserve_moves_no_buffer():
    g = Graph({}, {"w": "f4"})
    g.reserve(nodes=100, edges=1000)
    before = [t.data.__array_interface__["data"][0] for t in (g._source, g._edge_table.columns["w"])]
    nodes = g.add_nodes(100)
    for i in range(1000):
        g.add_edge(nodes[i % 100], nodes[i * 7 % 100])
    after = [t.data.__array_interface__["data"][0] for t in (g._source, g._edge_table.columns["w"])]
    assert before == after


def test_buffers_are_aligned_to_cache_lines_and_memory_is_reported():
    g = Graph({"seq": "i8"}, {"w": "f4"})
    nodes = g.add_nodes(1000)
    bare = Graph()
    ends = bare.add_nodes(10_000)
    bare.reserve(edges=100_000)
    bare.add_edges(ends[[i % 10_000 for i in range(100_000)]], ends[[i * 7 % 10_000 for i in range(100_000)]])
    g.add_edges(nodes, nodes[::-1])
    tables = [*g._out.tables(), *g._in.tables(), g._source.data, g._edge_table.columns["w"].data, g._edge_table.ids]
    assert all(t.__array_interface__["data"][0] % 64 == 0 for t in tables)
    assert bare.memory()["per_edge"] <= 64
    assert g.memory()["total"] > 1000 * (8 + 4)


def test_importing_and_single_edits_load_numpy_only():
    code = """
import sys
from graphwright.graph import Graph
g = Graph({"op": object}, {"gate": "i4"})
ids = g.add_nodes(50)
edges = g.add_edges(ids, ids[::-1])
g.remove_edges(g.edges["gate"] == 0); g.remove_nodes(ids[:5]); g.copy().to_dict(); g.hash()
print([m for m in ("numba", "torch", "scipy", "networkx") if m in sys.modules])
"""
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"
