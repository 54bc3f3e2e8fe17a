"""Compressed rows and columns against scipy."""

import numpy as np
import pytest
from scipy import sparse

from .test_analysis import random_graph


@pytest.mark.parametrize("seed", range(60))
def test_csr_and_csc_agree_with_scipy_on_graphs_with_holes(seed):
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
