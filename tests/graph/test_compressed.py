"""Compressed rows and columns, and matrices, against scipy."""

import numpy as np
import pytest
from scipy import sparse

from graphwright.errors import DTypeError, UsageError
from graphwright.graph import Graph
from seeds import seeds

from .test_analysis import random_graph


@seeds(60)
def test_csr_and_csc_match_scipy_on_graphs_with_deleted_rows(seed):
    _, g, _ = random_graph(seed)
    nodes = list(g.nodes())
    dense = np.zeros((len(nodes), len(nodes)))
    for e in g.edges():
        u, v = g.endpoints(e)
        dense[nodes.index(u), nodes.index(v)] += 1
    for rows, matrix, near in ((g.csr(), dense, g.source), (g.csc(), dense.T, g.target)):
        data = np.ones(len(rows.indices))
        built = sparse.csr_matrix((data, rows.indices, rows.indptr), shape=dense.shape)
        np.testing.assert_array_equal(built.toarray(), matrix)
        assert list(rows.nodes) == nodes
        assert sorted(rows.edges) == sorted(g.edges())
        for i, n in enumerate(nodes):
            row = rows.edges[rows.indptr[i] : rows.indptr[i + 1]]
            assert all(near(e) == n for e in row)
            assert row.index.tolist() == sorted(row.index.tolist())


def as_scipy(made, n):
    return sparse.csr_matrix((made.values, made.indices, made.indptr), shape=(n, n)).toarray()


@seeds(100)
def test_adjacency_matrices_match_scipy_on_graphs_with_deleted_rows(seed):
    rng, g, _ = random_graph(seed, density=2)
    g.edges.add_column("w", "f4", 1.0)
    g.edges.add_column("k", "u1", 3)
    g.edges["w"][:] = [rng.uniform(0.1, 2) for _ in range(g.edge_count)]
    nodes, n = list(g.nodes()), g.node_count
    ends = np.array([[nodes.index(x) for x in g.endpoints(e)] for e in g.edges()], int).reshape(-1, 2)
    given = {None: np.ones(len(ends)), "w": np.asarray(g.edges["w"], float), "k": np.full(len(ends), 3.0)}
    for column, weights in given.items():
        wanted = sparse.coo_matrix((weights, ends.T), shape=(n, n)).toarray()
        made = g.adjacency(column)
        np.testing.assert_allclose(as_scipy(made, n), wanted, rtol=1e-14)
        assert list(made.nodes) == nodes
        assert all((np.diff(made.indices[a:b]) > 0).all() for a, b in zip(made.indptr, made.indptr[1:], strict=False))
        looped = wanted + np.eye(n)
        scale = np.diag(looped.sum(1) ** -0.5)
        np.testing.assert_allclose(as_scipy(g.normalized_adjacency(column), n), scale @ looped @ scale, rtol=1e-13)


@seeds(30)
def test_from_coo_builds_the_graph_of_a_coo_matrix(seed):
    rng = np.random.default_rng(seed)
    n, m = int(rng.integers(1, 20)), int(rng.integers(0, 60))
    rows, columns, w = rng.integers(0, n, m), rng.integers(0, n, m), rng.random(m)
    g = Graph.from_coo(rows, columns, n, edge_columns={"w": "f8"}, w=w)
    assert (g.node_count, g.edge_count) == (n, m)
    np.testing.assert_allclose(as_scipy(g.adjacency("w"), n), sparse.coo_matrix((w, (rows, columns)), (n, n)).toarray())
    assert list(g.edges["w"]) == w.tolist()
    if m:
        assert Graph.from_coo(rows.tolist(), columns.tolist()).node_count == max(rows.max(), columns.max()) + 1


def test_invalid_coo_matrices_and_weights_are_refused():
    wrong = [
        ([0, 1], [0], None),
        ([-1], [0], None),
        ([0], [5], 3),
        ([0.5], [0], None),
        ([[0]], [[0]], None),
        ([np.nan], [0], None),
    ]
    for rows, columns, n in wrong:
        with pytest.raises(UsageError):
            Graph.from_coo(rows, columns, n)
    g = Graph.from_coo([0], [1], edge_columns={"w": "f8", "name": object}, w=-1.0)
    with pytest.raises(UsageError, match="positive") as caught:
        g.normalized_adjacency("w")
    assert caught.value.where == repr(g.nodes()[0])
    with pytest.raises(UsageError, match="no such column"):
        g.adjacency("nothing")
    with pytest.raises(DTypeError):
        g.adjacency("name")
    empty = Graph().adjacency()
    assert (empty.indptr.tolist(), empty.indices.tolist(), empty.values.tolist()) == ([0], [], [])
    assert Graph.from_coo([], []).node_count == 0
