"""Dominators, articulation nodes, bridges and the critical path against networkx."""

import itertools

import networkx as nx

from graphwright.graph import Graph, analysis
from graphwright.graph import analysis as dominance
from seeds import deep, seeds

from .test_analysis import random_graph


def immediate(oracle, root):
    """networkx 3.4 maps the root to itself, later ones leave it out."""
    return nx.immediate_dominators(nx.DiGraph(oracle), root) | {root: None}


@seeds(200)
def test_dominators_and_post_dominators_match_networkx(seed):
    rng, g, oracle = random_graph(seed, density=2.2)
    n = rng.choice(list(g.nodes()))
    assert dominance.dominators(g, n) == immediate(oracle, n)
    assert dominance.post_dominators(g, n) == immediate(oracle.reverse(), n)


@seeds(60)
def test_several_roots_act_as_one_virtual_root(seed):
    rng, g, oracle = random_graph(seed, density=2.2)
    roots = rng.sample(list(g.nodes()), min(3, g.node_count))
    oracle.add_edges_from(("root", n) for n in roots)
    expected = {n: None if d == "root" else d for n, d in immediate(oracle, "root").items() if n != "root"}
    assert dominance.dominators(g, roots) == expected


@seeds(200)
def test_articulation_nodes_and_bridges_agree_with_networkx(seed):
    _, g, oracle = random_graph(seed, density=1.1)
    flat = nx.Graph(oracle)
    assert set(dominance.articulation_nodes(g)) == set(nx.articulation_points(flat))
    pairs = {frozenset(pair) for pair in nx.bridges(flat)}
    single = [e for e in g.edges() if frozenset(g.endpoints(e)) in pairs and not parallel(g, e)]
    assert dominance.bridges(g) == single


def parallel(g, e):
    u, v = g.endpoints(e)
    return len(g.edges_between(u, v)) + len(g.edges_between(v, u)) > 1


@seeds(140)
def test_the_critical_path_has_the_largest_cost(seed):
    rng, g, oracle = random_graph(seed, acyclic=True, density=2)
    cost = {n: rng.randint(-2, 9) for n in g.nodes()}
    total, path = dominance.critical_path(g, cost.__getitem__)
    assert total == sum(cost[n] for n in path)
    assert all(g.has_edge(u, v) for u, v in itertools.pairwise(path))
    weighted = nx.DiGraph()
    for n in oracle:
        weighted.add_edge("start", (n, "in"), w=0)
        weighted.add_edge((n, "in"), (n, "out"), w=cost[n])
        weighted.add_edge((n, "out"), "end", w=0)
    weighted.add_edges_from(((u, "out"), (v, "in"), {"w": 0}) for u, v in oracle.edges())
    best = {"start": 0}
    for node in nx.topological_sort(weighted):
        for after in weighted[node]:
            best[after] = max(best.get(after, -(10**9)), best[node] + weighted[node][after]["w"])
    assert total == best["end"]


def test_long_chains_do_not_overflow():
    g, count = Graph(), deep(100_000, 5_000)
    nodes = g.add_nodes(count)
    edges = g.add_edges(nodes[:-1], nodes[1:])
    assert dominance.dominators(g, nodes[0])[nodes[-1]] == nodes[-2]
    assert dominance.bridges(g) == list(edges)
    assert len(dominance.articulation_nodes(g)) == count - 2
    assert dominance.critical_path(g, lambda _: 1.0) == (float(count), tuple(nodes))
    assert dominance.critical_path(Graph(), lambda _: 1.0) == (0.0, ())
    assert analysis.levels(Graph()) == {}
