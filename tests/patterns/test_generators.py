"""Generators against predicates of single pairs of tokens, with counts by formula and the kinds of edges."""

from __future__ import annotations

from math import ceil

import numpy as np
import pytest

from graphwright import patterns as pt
from graphwright.errors import ShapeError, UsageError
from graphwright.patterns.rules import Frame, RandomBlocks
from graphwright.patterns.table import FULL, MASKED, RULE

from .reader import dense

LENGTHS = (1, 17, 63, 64, 65, 129, 257)
BLOCKS = (1, 16, 64)


def grid(tokens):
    queries, keys = (tokens, tokens) if isinstance(tokens, int) else tokens
    return keys - queries + np.arange(queries)[:, None], np.arange(keys)[None]


def drawn(i, j, block, n, seed):
    """Whether block j // block is among the n earlier blocks that row i // block draws."""
    rule = RandomBlocks(n, seed)
    size = int(i.max()) + 1
    frame = Frame(size, size, block, 0)
    chosen = {row: set(rule.drawn(frame, row)) for row in range(frame.rows)}
    return np.array([[b // block in chosen[a // block] for b in j[0]] for a in i[:, 0]])


CASES = {
    "causal": (lambda T, B: pt.causal_full(T, B), lambda i, j, B: j <= i),
    "full": (lambda T, B: pt.full(T, B), lambda i, j, B: (j >= 0) & (i >= 0)),
    "window": (lambda T, B: pt.sliding_window(T, 21, B), lambda i, j, B: (j <= i) & (i - j < 21)),
    "window 1": (lambda T, B: pt.sliding_window(T, 1, B), lambda i, j, B: j == i),
    "symmetric": (lambda T, B: pt.sliding_window(T, 21, B, symmetric=True), lambda i, j, B: abs(i - j) < 21),
    "local": (
        lambda T, B: pt.block_local(T, 2, B),
        lambda i, j, B: (j <= i) & (i // B - j // B <= 2),
    ),
    "local, not causal": (
        lambda T, B: pt.block_local(T, 1, B, causal=False),
        lambda i, j, B: (i // B - j // B <= 1) & (i // B >= j // B),
    ),
    "star": (lambda T, B: pt.star(T, 5, 9, B), lambda i, j, B: (j <= i) & ((j < 5) | (i < 5) | (i - j < 9))),
    "star, not causal": (
        lambda T, B: pt.star(T, 5, 9, B, causal=False),
        lambda i, j, B: (j < 5) | (i < 5) | (abs(i - j) < 9),
    ),
    "dilated": (
        lambda T, B: pt.dilated(T, 7, 4, 3, B),
        lambda i, j, B: (j <= i) & (((i - j) % 7 == 0) & (i - j < 28) | (i - j < 3)),
    ),
    "dilated, not causal": (
        lambda T, B: pt.dilated(T, 7, 4, block=B, causal=False),
        lambda i, j, B: (abs(i - j) % 7 == 0) & (abs(i - j) < 28),
    ),
    "random": (lambda T, B: pt.random_blocks(T, 2, 3, B), lambda i, j, B: drawn(i, j, B, 2, 3)),
    "document": (
        lambda T, B: pt.document(T, np.arange(T) // 13, B),
        lambda i, j, B: (j <= i) & (i // 13 == j // 13),
    ),
    "documents in any order": (
        lambda T, B: pt.document(T, np.arange(T) // 5 % 3, B, causal=False),
        lambda i, j, B: i // 5 % 3 == j // 5 % 3,
    ),
}


@pytest.mark.parametrize("block", BLOCKS)
@pytest.mark.parametrize("name", CASES)
def test_generators_match_a_predicate_of_token_pairs(name, block):
    make, predicate = CASES[name]
    for tokens in LENGTHS:
        i, j = grid(tokens)
        wanted = predicate(i, j, block)
        pattern = make(tokens, block)
        assert np.array_equal(pattern.to_dense()[0], wanted), tokens
        check_kinds(pattern, wanted)
        assert pattern.summary().pairs == wanted.sum()


def check_kinds(pattern, wanted):
    """An edge exists iff its block has a pair; FULL iff all, RULE iff the base rule's, MASKED otherwise."""
    block, base = pattern.block, pattern.base
    i, j = pattern.q_start + np.arange(wanted.shape[0])[:, None], np.arange(wanted.shape[1])[None]
    ruled = base.allowed(pattern.frame, i, j)
    kinds = {(q, k): kind for (_, q, k), kind in zip(pattern.pairs().tolist(), pattern.edges["kind"], strict=True)}
    for q in range(pattern.blocks[0]):
        for k in range(pattern.blocks[1]):
            part = np.s_[q * block : (q + 1) * block, k * block : (k + 1) * block]
            if not wanted[part].any():
                assert (q, k) not in kinds
            elif wanted[part].all():
                assert kinds[q, k] == FULL
            else:
                assert kinds[q, k] == (RULE if np.array_equal(wanted[part], ruled[part]) else MASKED)


@pytest.mark.parametrize("name", ["causal", "window", "star", "dilated", "local"])
@pytest.mark.parametrize("block", BLOCKS)
def test_fewer_queries_than_keys_are_the_last_rows(name, block):
    make, predicate = CASES[name]
    i, j = grid((70, 150))
    assert np.array_equal(make((70, 150), block).to_dense()[0], predicate(i, j, block))


@pytest.mark.parametrize("name", ["causal", "window", "star", "dilated", "document"])
def test_kernels_table_gives_the_same_mask_from_rows_and_from_columns(name):
    make, predicate = CASES[name]
    i, j = grid(129)
    assert np.array_equal(dense(make(129, 16).table)[0], predicate(i, j, 16))


@pytest.mark.parametrize(("tokens", "window"), [(1, 1), (65, 64), (129, 17), (257, 1), (63, 100)])
def test_window_has_as_many_pairs_as_the_formula(tokens, window):
    formula = tokens * window - window * (window - 1) // 2 if tokens >= window else tokens * (tokens + 1) // 2
    assert pt.sliding_window(tokens, window).summary().pairs == formula


@pytest.mark.parametrize(("tokens", "g", "window"), [(257, 5, 9), (129, 0, 4), (65, 65, 1)])
def test_star_has_as_many_pairs_as_the_formula(tokens, g, window):
    beyond = [min(i + 1, max(g, 0) + window if i - window + 1 >= g else i + 1) for i in range(tokens)]
    rows = [i + 1 if i < g else n for i, n in enumerate(beyond)]
    assert pt.star(tokens, g, window).summary().pairs == sum(rows)


def test_star_by_ratio_rounds_up_and_other_numbers_of_arguments_are_refused():
    assert np.array_equal(
        pt.star(129, window=3, global_ratio=0.1).to_dense(), pt.star(129, ceil(12.9), window=3).to_dense()
    )
    with pytest.raises(UsageError, match="global"):
        pt.star(10)
    with pytest.raises(UsageError, match="global"):
        pt.star(10, 3, global_ratio=0.5)
    with pytest.raises(UsageError, match="global_ratio"):
        pt.star(10, global_ratio=1.5)


def test_random_rows_have_n_distinct_earlier_blocks_that_depend_on_seed_and_row_only():
    pattern, longer = pt.random_blocks(640, 3, 7, 16), pt.random_blocks(1280, 3, 7, 16)
    rows = pattern.to_dense()[0, ::16, ::16]
    assert rows.sum(1).tolist() == [min(row, 3) for row in range(40)]
    assert np.array_equal(longer.to_dense()[:, :640, :640], pattern.to_dense())
    assert not np.array_equal(pt.random_blocks(640, 3, 8, 16).to_dense(), pattern.to_dense())
    others = pt.random_blocks(640, 3, 7, 16, causal=False).to_dense()[0, ::16, ::16]
    assert (others.sum(1) == 3).all()
    assert not others.diagonal().any()
    assert np.triu(others).any()
    counts = pt.random_blocks(64 * 16, 8, 1, 16).to_dense()[0, 512::16, ::16].sum(0)
    assert counts[:16].min() >= 1  # no earlier block is left out by the draw


@pytest.mark.parametrize("block", BLOCKS)
@pytest.mark.parametrize("causal", [True, False])
def test_topk_keeps_the_blocks_of_the_best_pooled_scores(block, causal):
    rng = np.random.default_rng(0)
    q, k = rng.normal(size=(2, 129, 8)), rng.normal(size=(2, 129, 8))
    n = 3
    pattern = pt.topk(q, k, n, causal, block=block)
    rows = -(-129 // block)
    for plane in range(2):
        pooled = [np.array([x[plane, b * block : (b + 1) * block].mean(0) for b in range(rows)]) for x in (q, k)]
        scores = pooled[0] @ pooled[1].T
        for row in range(rows):
            allowed = range(row + 1) if causal else range(rows)
            best = sorted((b for b in allowed if b != row), key=lambda b: (-scores[row, b], b))[: n - 1]
            assert {b for b in range(rows) if pattern.has(row, b, plane)} == {row, *best}
    everything = pt.causal_full(129, block) if causal else pt.full(129, block)
    assert np.array_equal(pt.topk(q[0], k[0], rows, causal, block=block).to_dense(), everything.to_dense())


def test_topk_without_the_own_block_gives_ties_to_the_lower_block():
    pattern = pt.topk(np.ones((64, 4)), np.ones((64, 4)), 2, causal=False, keep_own=False, block=16)
    assert [pattern.has(3, k) for k in range(4)] == [True, True, False, False]
    with pytest.raises(ShapeError):
        pt.topk(np.ones((64, 4)), np.ones((64, 5)), 2)


@pytest.mark.parametrize(
    "make",
    [
        lambda: pt.sliding_window(10, 0),
        lambda: pt.dilated(10, 0, 3),
        lambda: pt.causal_full(0),
        lambda: pt.causal_full(10, block=0),
        lambda: pt.causal_full(10, planes=0),
        lambda: pt.block_local(10, -1),
        lambda: pt.random_blocks(10, -1),
        lambda: pt.star(10, 2, window=0),
        lambda: pt.topk(np.ones((4, 2)), np.ones((4, 2)), 0),
        lambda: pt.causal_full((20, 10)),
        lambda: pt.document(10, np.zeros(9, int)),
    ],
)
def test_sizes_out_of_range_are_refused(make):
    with pytest.raises(ValueError, match=r"range|negative|fit"):
        make()


def test_all_planes_get_the_edges():
    pattern = pt.sliding_window(65, 20, 16, planes=3)
    assert np.array_equal(pattern.to_dense(), np.repeat(pt.sliding_window(65, 20, 16).to_dense(), 3, 0))
    assert np.array_equal(dense(pattern.table), pattern.to_dense())
