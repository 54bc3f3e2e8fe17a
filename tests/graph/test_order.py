"""The online order against networkx: cycles found with a true path, labels repaired, restored, and local."""

import random
from itertools import pairwise

import networkx as nx
import pytest

from graphwright.errors import CycleError, UsageError
from graphwright.graph import Graph, OnlineOrder


def holds(order, graph):
    for e in graph.edges():
        u, v = graph.endpoints(e)
        assert order.key(u) < order.key(v)
    assert order.sorted(graph.nodes()) == list(order)
    assert len({order.key(n) for n in order}) == len(order) == graph.node_count


@pytest.mark.parametrize("gap", [2, 3, 2**20])
@pytest.mark.parametrize("edge_first", [False, True])
@pytest.mark.parametrize("seed", range(4))
def test_random_insertions_agree_with_networkx_and_undo_restores_every_label(gap, edge_first, seed):
    rng = random.Random(seed)
    graph, order, oracle = Graph(block=4), None, nx.MultiDiGraph()
    order = OnlineOrder(graph, gap=gap)
    history, cycles = [], 0
    for _ in range(300):
        nodes = list(graph.nodes())
        before = order.labels()
        if len(nodes) < 3 or rng.random() < 0.2:
            n = graph.add_node()
            after, ahead = (rng.choice([None, *nodes]) for _ in range(2)) if nodes else (None, None)
            record = order.insert(n, after=after, before=ahead)
            oracle.add_node(n)
            if after and ahead and order.key(after) < order.key(ahead):
                assert order.key(after) < order.key(n) < order.key(ahead)
            elif after:
                assert order.key(after) < order.key(n)
            elif ahead:
                assert order.key(n) < order.key(ahead)
        else:
            u, v = rng.choice(nodes), rng.choice(nodes)
            edge = graph.add_edge(u, v) if edge_first else None
            if u == v or nx.has_path(oracle, v, u):
                with pytest.raises(CycleError) as caught:
                    order.add_edge(u, v)
                path = caught.value.path
                assert (path[0], path[-1]) == (v, u)
                assert all(oracle.has_edge(a, b) for a, b in pairwise(path))
                assert order.labels() == before
                cycles += 1
                if edge:
                    graph.remove_edge(edge)
                continue
            record = order.add_edge(u, v)
            edge = edge or graph.add_edge(u, v)
            oracle.add_edge(u, v)
        history.append((before, record, order.labels()))
        holds(order, graph)
    assert cycles > 10
    redo = []
    for before, record, _ in reversed(history):
        redo.append(order.restore(record))
        assert order.labels() == before
    for (_, _, after), record in zip(history, reversed(redo), strict=True):
        order.restore(record)
        assert order.labels() == after


def test_a_forward_edge_changes_no_label_and_a_backward_one_only_its_window():
    graph = Graph()
    nodes = graph.add_nodes(1000)
    order = OnlineOrder(graph)
    for n in nodes:
        order.insert(n)
    for u, v in pairwise(nodes):
        assert not order.add_edge(u, v)
        graph.add_edge(u, v)
    assert order.visited == 0
    late = graph.add_node()
    order.insert(late)  # at the end, though it must come before nodes[990]
    changed = order.add_edge(late, nodes[990])
    assert order.visited <= 12
    assert {n for n, _, _ in changed.before} <= {late, *nodes[990:]}
    graph.add_edge(late, nodes[990])
    holds(order, graph)


def test_searches_visit_only_nodes_between_the_two_labels():
    graph = Graph()
    before, nodes = graph.add_nodes(200), graph.add_nodes(1000)
    order = OnlineOrder(graph)
    for n in (*before, *nodes):
        order.insert(n)
    for chain in (before, nodes):
        for u, v in pairwise(chain):
            order.add_edge(u, v)
            graph.add_edge(u, v)
    late = graph.add_node()
    order.insert(late, after=nodes[505])
    order.add_edge(before[-1], late)
    graph.add_edge(before[-1], late)
    assert order.visited == 0
    order.add_edge(late, nodes[500])
    assert order.visited == 7  # nodes 500 to 505 ahead, and the late node itself: not 500 nodes on, not 200 back
    graph.add_edge(late, nodes[500])
    holds(order, graph)


def test_inserting_a_node_between_two_needs_no_search():
    graph = Graph()
    nodes = graph.add_nodes(5000)
    order = OnlineOrder(graph)
    for n in nodes:
        order.insert(n)
    for u, v in pairwise(nodes):
        order.add_edge(u, v)
        graph.add_edge(u, v)
    before = nodes[2500]
    for _ in range(15):
        n = graph.add_node()
        assert len(order.insert(n, after=nodes[2499], before=before).before) == 1  # no other label moved
        for u, v in ((nodes[2499], n), (n, before)):
            assert not order.add_edge(u, v)
            graph.add_edge(u, v)
        before = n
    assert order.visited == 0
    holds(order, graph)


def test_equal_labels_are_ordered_by_creation_and_still_repaired():
    graph = Graph()
    a, b, c, d = graph.add_nodes(4)
    order = OnlineOrder.from_labels(graph, {a: (5, 0), b: (5, 1), c: (5, 2), d: (5, 3)})
    assert list(order) == [a, b, c, d]
    assert not order.add_edge(a, b)
    saved = order.labels()
    record = order.add_edge(d, a)
    graph.add_edge(d, a)
    assert order.key(d) < order.key(a)
    holds(order, graph)
    order.restore(record)
    assert order.labels() == saved


def test_saved_labels_that_contradict_the_edges_are_refused():
    graph = Graph()
    a, b = graph.add_nodes(2)
    graph.add_edge(a, b)
    assert list(OnlineOrder.from_labels(graph, {b: (7, 1), a: (-3, 0)})) == [a, b]
    for labels in ({a: (7, 0), b: (3, 1)}, {a: (7, 1), b: (7, 0)}, {a: (2**63, 0), b: (2**64, 1)}):
        with pytest.raises(UsageError):
            OnlineOrder.from_labels(graph, labels)


def test_labels_stay_in_int64_and_nodes_can_be_forgotten():
    graph = Graph()
    first, *rest = graph.add_nodes(50)
    order = OnlineOrder(graph, gap=2**60)
    for n in (first, *rest):
        order.insert(n) if n == first else order.insert(n, before=first)
        assert all(abs(order.label(m)) < 2**63 for m in order)
    assert list(order) == [*rest, first]
    record = order.remove(rest[3])
    assert rest[3] not in order
    order.restore(record)
    assert list(order) == [*rest, first]
    before = order.labels()
    for few in (rest[4:6], rest[::2]):  # one by one, and in one go
        record = order.remove(*few)
        assert list(order) == [n for n in (*rest, first) if n not in few]
        order.restore(record)
        assert order.labels() == before
        assert list(order) == [*rest, first]
    with pytest.raises(KeyError):
        order.remove(rest[0], graph.add_node())
    assert order.labels() == before
    with pytest.raises(UsageError, match="in the order already"):
        order.insert(first)


@pytest.mark.parametrize("gap", [2**10, 2**20])
def test_insertions_into_one_gap_move_few_labels_each(gap):
    graph, n = Graph(), 4000
    order = OnlineOrder(graph, gap=gap)
    low, high, *rest = graph.add_nodes(n + 2)
    for end in (low, high):
        order.insert(end)
    before, records = order.labels(), [order.insert(node, after=low, before=high) for node in rest]
    assert sum(len(record.before) for record in records) < 12 * n  # log2 n
    assert list(order)[:: n + 1] == [low, high]
    holds(order, graph)
    for record in reversed(records):
        order.restore(record)
    assert order.labels() == before
