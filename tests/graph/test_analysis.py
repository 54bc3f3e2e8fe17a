"""Orders, components and paths against networkx, on graphs with holes, parallel edges and self-loops."""

import random

import networkx as nx
import pytest

from graphwright.errors import CycleError, UsageError
from graphwright.graph import Graph, StaleHandle, analysis
from seeds import deep, seeds


def random_graph(seed, acyclic=False, nodes=None, density=1.4):
    """A graph of which 30 % of the nodes and some edges were deleted, and the same for networkx."""
    rng = random.Random(seed)
    g = Graph(block=4)
    ids = list(g.add_nodes(nodes or rng.randint(2, 30)))
    rng.shuffle(ids)
    for _ in range(int(len(ids) * density)):
        i, j = rng.randrange(len(ids)), rng.randrange(len(ids))
        if acyclic and i >= j:
            continue
        for _ in range(rng.choice([1, 1, 1, 2])):
            g.add_edge(ids[i], ids[j])
    if not acyclic:
        g.add_edge(ids[0], ids[0])
    for n in rng.sample(ids, int(len(ids) * 0.3)):
        g.remove_node(n)
    for e in list(g.edges())[::9]:
        g.remove_edge(e)
    return rng, g, to_networkx(g)


def to_networkx(g):
    oracle = nx.MultiDiGraph()
    oracle.add_nodes_from(g.nodes())
    oracle.add_edges_from(g.endpoints(e) for e in g.edges())
    return oracle


def as_sets(components):
    return {frozenset(c) for c in components}


@seeds(250)
def test_components_reachability_and_traversals_match_networkx(seed):
    rng, g, oracle = random_graph(seed)
    strong = analysis.strongly_connected_components(g)
    assert sum(map(len, strong)) == g.node_count
    assert as_sets(strong) == as_sets(nx.strongly_connected_components(oracle))
    assert as_sets(analysis.connected_components(g)) == as_sets(nx.weakly_connected_components(oracle))
    rank = {n: i for i, c in enumerate(strong) for n in c}
    assert all(rank[v] <= rank[u] for u, v in oracle.edges())  # a component comes after those it leads to
    start = rng.choice(list(g.nodes()))
    some = rng.sample(list(g.nodes()), min(3, g.node_count))
    assert analysis.reachable(g, start) == nx.descendants(oracle, start) | {start}
    assert analysis.reaching(g, start) == nx.ancestors(oracle, start) | {start}
    assert analysis.reachable(g, some) == set().union(*(nx.descendants(oracle, n) | {n} for n in some))
    assert analysis.bfs_order(g, start) == [start, *(v for _, v in nx.bfs_edges(oracle, start))]
    assert analysis.dfs_order(g, start) == list(nx.dfs_preorder_nodes(oracle, start))


@seeds(150)
def test_orders_and_levels_agree_with_networkx(seed):
    rng, g, oracle = random_graph(seed, acyclic=True, density=2)
    created = {n: rng.random() for n in g.nodes()}
    assert analysis.topological_sort(g, key=created.get) == list(
        nx.lexicographical_topological_sort(oracle, key=created.get)
    )
    assert analysis.topological_sort(g) == list(nx.lexicographical_topological_sort(oracle, key=lambda n: n.index))
    assert analysis.levels(g) == {n: i for i, layer in enumerate(nx.topological_generations(oracle)) for n in layer}


@seeds(60)
def test_a_cycle_error_names_a_cycle_of_the_graph(seed):
    _, g, oracle = random_graph(seed, density=2.5)
    if nx.is_directed_acyclic_graph(oracle):
        assert len(analysis.topological_sort(g)) == g.node_count
        return
    with pytest.raises(CycleError) as caught:
        analysis.topological_sort(g)
    path = caught.value.path
    assert len(set(path)) == len(path) > 0
    assert all(g.has_edge(u, v) for u, v in zip(path, (*path[1:], path[0]), strict=True))


@seeds(60)
def test_all_paths_agree_with_networkx(seed):
    rng, g, oracle = random_graph(seed, nodes=9, density=2)
    a, b = rng.choice(list(g.nodes())), rng.choice(list(g.nodes()))
    found = analysis.all_paths(g, a, b)
    assert len(found) == len(set(found))
    assert set(found) == set(map(tuple, nx.all_simple_paths(nx.DiGraph(oracle), a, b))) | ({(a,)} if a == b else set())
    if len(found) > 1:
        assert analysis.all_paths(g, a, b, limit=1) == found[:1]


def test_the_path_limit_stops_an_exponential_search():
    g = Graph()
    nodes = list(g.add_nodes(121))
    for i in range(0, 120, 3):  # 2^40 paths
        for u, v in ((0, 1), (0, 2), (1, 3), (2, 3)):
            g.add_edge(nodes[i + u], nodes[i + v])
    assert len(analysis.all_paths(g, nodes[0], nodes[-1], limit=50)) == 50
    start, end = g.add_nodes(2)
    g.add_edge(start, nodes[0])  # 2^40 ways that end elsewhere are not walked
    g.add_edge(start, end)
    assert analysis.all_paths(g, start, end) == [(start, end)]
    g.remove_node(nodes[3])
    assert analysis.all_paths(g, nodes[0], nodes[-1]) == []
    with pytest.raises(UsageError):
        analysis.all_paths(g, nodes[0], nodes[1], limit=0)


def test_connected_components_ignore_edge_direction():
    g = Graph()
    a, b, c, d = g.add_nodes(4)
    g.add_edge(a, b)
    g.add_edge(c, b)
    assert analysis.connected_components(g) == [(a, b, c), (d,)]


def test_long_chains_do_not_overflow_the_stack():
    g, count = Graph(), deep(100_000, 5_000)
    nodes = g.add_nodes(count)
    g.add_edges(nodes[:-1], nodes[1:])
    first, last = nodes[0], nodes[-1]
    assert analysis.topological_sort(g) == list(nodes)
    assert analysis.levels(g)[last] == count - 1
    assert len(analysis.strongly_connected_components(g)) == count
    assert len(analysis.connected_components(g)) == 1
    assert analysis.dfs_order(g, first) == list(nodes)
    assert len(analysis.all_paths(g, first, last)[0]) == count
    g.add_edge(last, first)
    assert len(analysis.strongly_connected_components(g)) == 1
    with pytest.raises(CycleError) as caught:
        analysis.topological_sort(g)
    assert len(caught.value.path) == count


def test_stale_handles_are_refused_and_empty_graphs_accepted():
    g = Graph()
    n, other = g.add_nodes(2)
    g.remove_node(n)
    for walk in (analysis.bfs_order, analysis.dfs_order, analysis.reachable, analysis.reaching):
        with pytest.raises(StaleHandle):
            walk(g, n)
    with pytest.raises(StaleHandle):
        analysis.all_paths(g, other, n)
    g.remove_node(other)
    assert analysis.topological_sort(g) == analysis.connected_components(g) == []
    assert analysis.levels(g) == {}
