"""Single and bulk edits of the container beside rustworkx and networkx."""

from __future__ import annotations

from statistics import median
from time import perf_counter

import networkx as nx
import numpy as np
import rustworkx as rx

from benchmarks.harness import Figure, interval
from graphwright.graph import Graph
from graphwright.graph.graph import warmup


def _bulk(n_nodes: int, n_edges: int, seed: int) -> dict[str, dict[str, float]]:
    """Seconds to insert and to delete the same edges in random order, each library in its best bulk call."""
    rng = np.random.default_rng(seed)
    src, dst = rng.integers(0, n_nodes, n_edges), rng.integers(0, n_nodes, n_edges)
    order = rng.permutation(n_edges)
    out: dict[str, dict[str, float]] = {}

    g = Graph()
    nodes = np.asarray(g.add_nodes(n_nodes))
    t0 = perf_counter()
    edges = g.add_edges(nodes[src], nodes[dst])
    t1 = perf_counter()
    g.remove_edges(np.asarray(edges)[order])
    out["graphwright"] = {"insert": t1 - t0, "delete": perf_counter() - t1}
    assert g.edge_count == 0

    r = rx.PyDiGraph(multigraph=True)
    r.add_nodes_from(range(n_nodes))
    pairs = list(zip(src.tolist(), dst.tolist(), strict=True))
    t0 = perf_counter()
    indices = r.add_edges_from_no_data(pairs)
    t1 = perf_counter()
    for i in order:
        r.remove_edge_from_index(indices[i])
    out["rustworkx"] = {"insert": t1 - t0, "delete": perf_counter() - t1}
    assert r.num_edges() == 0

    m = nx.MultiDiGraph()
    m.add_nodes_from(range(n_nodes))
    t0 = perf_counter()
    keys = m.add_edges_from(pairs)
    t1 = perf_counter()
    m.remove_edges_from([(*pairs[i], keys[i]) for i in order])
    out["networkx"] = {"insert": t1 - t0, "delete": perf_counter() - t1}
    assert m.number_of_edges() == 0
    return out


def bulk_figure(n_edges: int) -> Figure:
    figure = Figure(
        f"Bulk edits, {n_edges:,} edges",
        "uniform random ends, mean degree 10, deletion by handle in random order, 7 rounds",
    )
    taken = [_bulk(n_edges // 10, n_edges, seed) for seed in range(7)]
    best: dict[str, float] = {}
    for what in ("insert", "delete"):
        for who in taken[0]:
            samples = [t[who][what] / n_edges * 1e9 for t in taken]
            low, high = interval(samples)
            figure.add(f"{what}: {who}", median(samples), "ns per edge", low=low, high=high)
            best[f"{what} {who}"] = median(samples)
    for what in ("insert", "delete"):
        ratio = min(best[f"{what} rustworkx"], best[f"{what} networkx"]) / best[f"{what} graphwright"]
        figure.notes.append(f"{what}: {ratio:.1f}x the best peer")
    return figure


def hub_figure() -> Figure:
    figure = Figure(
        "Deletion by handle at a hub", "one node with all edges, 2 000 deletions in random order, single calls"
    )
    points = []
    for degree in (100, 1_000, 10_000, 100_000, 1_000_000):
        g = Graph()
        hub = g.add_node()
        nodes = np.asarray(g.add_nodes(degree))
        edges = g.add_edges(np.full(degree, int(hub)), nodes)
        chosen = [edges[int(i)] for i in np.random.default_rng(0).permutation(degree)[: min(2000, degree)]]
        started = perf_counter()
        for e in chosen:
            g.remove_edge(e)
        each = (perf_counter() - started) / len(chosen) * 1e6
        points.append((np.log(degree), np.log(each)))
        figure.add(f"degree {degree:,}", each, "us per deletion")
    x, y = np.asarray(points).T
    figure.notes.append(f"slope of log time on log degree: {np.polyfit(x, y, 1)[0]:+.3f} (flat is 0, linear is 1)")
    return figure


def single_figure() -> Figure:
    figure = Figure(
        "Single edits from Python", "10 000 nodes, 20 000 edges, one call an edit, 5 rounds; no lead is claimed here"
    )
    rng = np.random.default_rng(0)
    pairs = [(int(a), int(b)) for a, b in rng.integers(0, 10_000, (20_000, 2))]
    samples: dict[str, list[float]] = {}
    for _ in range(5):
        g = Graph()
        nodes = [g.add_node() for _ in range(10_000)]
        t0 = perf_counter()
        made = [g.add_edge(nodes[a], nodes[b]) for a, b in pairs]
        t1 = perf_counter()
        for e in made:
            g.remove_edge(e)
        samples.setdefault("add: graphwright", []).append(t1 - t0)
        samples.setdefault("remove: graphwright", []).append(perf_counter() - t1)
        r = rx.PyDiGraph(multigraph=True)
        r.add_nodes_from(range(10_000))
        t0 = perf_counter()
        ids = [r.add_edge(a, b, None) for a, b in pairs]
        t1 = perf_counter()
        for i in ids:
            r.remove_edge_from_index(i)
        samples.setdefault("add: rustworkx", []).append(t1 - t0)
        samples.setdefault("remove: rustworkx", []).append(perf_counter() - t1)
        m = nx.MultiDiGraph()
        m.add_nodes_from(range(10_000))
        t0 = perf_counter()
        keys = [m.add_edge(a, b) for a, b in pairs]
        t1 = perf_counter()
        for (a, b), k in zip(pairs, keys, strict=True):
            m.remove_edge(a, b, k)
        samples.setdefault("add: networkx", []).append(t1 - t0)
        samples.setdefault("remove: networkx", []).append(perf_counter() - t1)
    for who, times in sorted(samples.items()):
        figure.add(who, median(times) / len(pairs) * 1e6, "us per edge")
    return figure


def run() -> list[Figure]:
    warmup()
    return [bulk_figure(100_000), bulk_figure(1_000_000), hub_figure(), single_figure()]
