"""Findings about attention over patterns, and what other tools make of such attention."""

from __future__ import annotations

import numpy as np
import pytest
from networks import SIZES, random_decoder

from graphwright import attention as at
from graphwright.program.errors import FrozenAxis
from graphwright.surgery import diagnose

TOKENS, HEADS, GROUPS = 64, SIZES["num_attention_heads"], SIZES["num_key_value_heads"]


def sparse(pattern: at.Pattern, layers: str = "layers.*.attn"):
    p = random_decoder("llama")
    at.sparsify(p, layers, pattern)
    return p


def cut_plane(pattern: at.Pattern, plane: int) -> None:
    where = pattern.pairs()
    pattern.cut(pattern.edges()[where[:, 0] == plane])


def run(p, ids):
    return p.run({"ids": ids, "positions": np.broadcast_to(np.arange(ids.shape[1]), ids.shape)})["logits"]


def test_a_plane_without_edges_is_a_dead_head():
    pattern = at.causal_full(TOKENS, block=8, planes=HEADS)
    p = sparse(pattern, "layers.1.attn")
    assert not diagnose(p)
    cut_plane(pattern, 2)
    (found,) = diagnose(p)
    assert (found.kind, found.witness["dead"], found.where) == ("dead_head", [2], "layers.1.attn.sdpa, plane 2")
    assert pattern.has(1, 0, plane=1)
    diagnose(p).fix_all(only=None)
    assert not diagnose(p)
    assert sorted(map(tuple, pattern.pairs()[pattern.pairs()[:, 0] == 2].tolist())) == [(2, b, b) for b in range(8)]
    p.undo()
    assert [f.kind for f in diagnose(p)] == ["dead_head"]


def test_a_shared_plane_without_edges_kills_all_heads_of_all_its_readers():
    pattern = at.causal_full(TOKENS, block=8)
    p = sparse(pattern)
    cut_plane(pattern, 0)
    found = diagnose(p, kinds=["dead_head"])
    assert found.found[0].witness["dead"] == list(range(HEADS))
    assert pattern.edge_count == 0  # the diagnosis works on a copy


def test_query_blocks_without_edges_are_reported_with_their_rows():
    pattern = at.sliding_window(TOKENS, 16, block=8, planes=3)
    p = sparse(pattern, "layers.0.attn")
    pattern.cut(pattern.edges()[(pattern.pairs()[:, 0] == 1) & np.isin(pattern.pairs()[:, 1], [3, 5])])
    (found,) = diagnose(p, kinds=["blind_queries"])
    assert (found.witness["plane"], found.witness["blocks"]) == (1, [3, 5])
    assert found.got == "query blocks 3, 5 have none"
    diagnose(p, kinds=["blind_queries"]).fix_all(only=None)
    assert pattern.has(3, 3, plane=1)
    assert not diagnose(p, kinds=["blind_queries"])


@pytest.mark.parametrize(("window", "block"), [(5, 8), (9, 8), (12, 4)])
def test_unreachable_pairs_have_no_path_in_the_network(window, block):
    pattern = at.sliding_window(TOKENS, window, block=block)
    p = sparse(pattern)
    (found,) = diagnose(p, kinds=["unreachable_pairs"])
    layers = len(p.of_traits(attention=True))
    query, key = found.witness["query"], found.witness["key"]
    assert query == TOKENS // block - 1
    # the reach of single tokens, L(w - 1), ends before the reported block
    first = query * block
    assert (key + 1) * block - 1 < first - layers * (window - 1)
    ids = np.random.default_rng(0).integers(0, 50, (1, TOKENS))
    changed = ids.copy()
    changed[0, key * block : (key + 1) * block] = (ids[0, key * block : (key + 1) * block] + 1) % 50
    a, b = (np.asarray(run(p, x))[0] for x in (ids, changed))
    np.testing.assert_array_equal(a[first:], b[first:])
    assert np.abs(a[key * block] - b[key * block]).max() > 0
    pattern.connect(query, key)
    after = diagnose(p, kinds=["unreachable_pairs"])
    assert not after or (after[0].witness["query"], after[0].witness["key"]) != (query, key)
    assert np.abs(np.asarray(run(p, ids))[0, first:] - np.asarray(run(p, changed))[0, first:]).max() > 0


def test_a_dense_attention_reaches_everything():
    assert not diagnose(sparse(at.sliding_window(TOKENS, 8, block=8), "layers.0.attn"), kinds=["unreachable_pairs"])
    assert not diagnose(sparse(at.causal_full(TOKENS, block=8)), kinds=["unreachable_pairs"])
    # a causal star passes on what its first tokens see, and those see nothing later
    assert diagnose(sparse(at.star(TOKENS, global_tokens=1, window=8, block=8)), kinds=["unreachable_pairs"])


def test_heads_with_planes_are_not_cut():
    for planes in (GROUPS, HEADS):
        p = sparse(at.sliding_window(TOKENS, 16, block=8, planes=planes), "layers.0.attn")
        digest = p.hash()
        with pytest.raises(FrozenAxis, match="the pattern has a plane for each head"):
            p.select("layers.0.attn").heads[[0]].prune(ragged=True)
        with pytest.raises(FrozenAxis, match="the pattern has a plane for each head"):
            p.select("layers.0.attn").kv_groups[[0]].prune()
        assert p.hash() == digest


def test_heads_with_one_plane_are_cut_as_dense_ones():
    ids = np.random.default_rng(1).integers(0, 50, (2, 40))
    for ragged in (False, True):
        dense, p = random_decoder("llama"), sparse(at.causal_full(TOKENS, block=8))
        for q in (dense, p):
            if ragged:
                q.select("layers.0.attn").heads[[0]].prune(ragged=True)
            else:
                q.select("layers.0.attn").kv_groups[[1]].prune()
        np.testing.assert_allclose(np.asarray(run(p, ids)), np.asarray(run(dense, ids)), atol=2e-5)
