"""Masses of edges against block sums of dense weights, their moving average, and pruning by normalised weight."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from dense_attention import block_sums, dense, pattern_of
from hypothesis import given
from hypothesis import strategies as st

import graphwright as gw
from graphwright import attention as at
from graphwright.errors import BudgetUnreachable, UsageError
from graphwright.graph import StaleHandle
from graphwright.patterns import Pattern, causal_full, sliding_window


def operands(rng: np.random.Generator, pattern: Pattern, batch: int = 2, heads: int = 4, groups: int = 2) -> list[Any]:
    queries, keys = pattern.tokens
    shapes = (batch, heads, queries, 4), (batch, groups, keys, 4), (batch, groups, keys, 3)
    return [gw.tensor(rng.normal(size=shape)) for shape in shapes]


def scores(pattern: Pattern) -> np.ndarray:
    return np.asarray(pattern.edges["score"]).astype(np.float64)


def rows(pattern: Pattern) -> np.ndarray:
    plane, query, _ = pattern.pairs().T
    return plane * pattern.blocks[0] + query


@given(st.integers(0, 10_000), st.sampled_from([1, 2, 4]), st.sampled_from([1, 4, 7]))
def test_masses_are_block_sums_of_the_dense_weights(seed: int, planes: int, block: int) -> None:
    rng = np.random.default_rng(seed)
    pattern = pattern_of(rng, (17, 20), block, planes)
    q, k, v = operands(rng, pattern)
    at.attend(q, k, v, pattern, collect="mass")
    weights = dense(q.numpy(), k.numpy(), v.numpy(), pattern.to_dense())[1].numpy()
    np.testing.assert_allclose(scores(pattern), block_sums(weights, pattern), atol=1e-6)
    sums = np.bincount(rows(pattern), scores(pattern))
    np.testing.assert_allclose(sums[sums > 0], 1.0, atol=1e-6)


def test_the_largest_mass_can_be_collected() -> None:
    rng = np.random.default_rng(0)
    pattern = causal_full(12, block=4)
    q, k, v = operands(rng, pattern)
    at.attend(q, k, v, pattern, collect="max")
    weights = dense(q.numpy(), k.numpy(), v.numpy(), pattern.to_dense())[1].numpy()
    wanted = [weights[:, :, 4 * i : 4 * i + 4, 4 * j : 4 * j + 4].sum(-1).max() for _, i, j in pattern.pairs()]
    np.testing.assert_allclose(scores(pattern), wanted, atol=1e-6)


def test_scores_are_moving_averages_that_begin_with_the_first_mass() -> None:
    rng = np.random.default_rng(0)
    pattern = sliding_window(16, window=9, block=4)
    found = []

    def collect() -> None:
        q, k, v = operands(rng, pattern)
        at.attend(q, k, v, pattern, collect="mass")
        found.append(block_sums(dense(q.numpy(), k.numpy(), v.numpy(), pattern.to_dense())[1].numpy(), pattern))

    collect()
    collect()
    late = pattern.connect(3, 0)
    collect()
    version, entries = pattern.version, len(pattern.journal)
    n = len(found[0])
    earlier = 0.9 * found[0] + 0.1 * found[1]
    np.testing.assert_allclose(scores(pattern)[:n], 0.9 * earlier + 0.1 * found[2][:n], atol=1e-6)
    assert pattern.edges["score"][late] == pytest.approx(found[2][n], abs=1e-6)
    collect()
    assert (pattern.version, len(pattern.journal)) == (version, entries), "scores are no edits"


@given(
    st.integers(0, 10_000), st.sampled_from([0.02, 0.3, 0.6]), st.sampled_from(["row", "none"]), st.sampled_from([1, 2])
)
def test_pruning_cuts_light_edges_and_equals_dense_attention_without_them(
    seed: int, mass: float, relative: Any, keep_min: int
) -> None:
    rng = np.random.default_rng(seed)
    pattern = pattern_of(rng, (24, 24), 4, 2, density=0.8)
    q, k, v = operands(rng, pattern)
    at.attend(q, k, v, pattern, collect="mass")
    if len(pattern) > 3:
        pattern.edges["pinned"][pattern.edges()[2]] = 1
    before, score, row, pinned = pattern.pairs(), scores(pattern), rows(pattern), np.asarray(pattern.edges["pinned"])
    done = at.prune(pattern, mass, relative=relative, keep_min=keep_min)
    gone = np.array([tuple(pair) in {tuple(x) for x in done.pairs} for pair in before])
    for i, (_, query, key) in enumerate(before):
        mine = np.flatnonzero(row == row[i])
        weight, most = score[i] / score[mine].sum(), score[mine].max() / score[mine].sum()
        light = weight < mass * (most if relative == "row" else 1.0)
        heavier = (score[mine] > score[i]).sum() + ((score[mine] == score[i]) & (before[mine, 2] < key)).sum()
        assert gone[i] == (light and query != key and not pinned[i] and heavier >= keep_min)
    assert pattern.journal[-1].author == "pass" if done.pairs.size else True
    ref, _ = dense(q.numpy(), k.numpy(), v.numpy(), pattern.to_dense())
    np.testing.assert_allclose(at.attend(q, k, v, pattern).numpy(), ref.numpy(), atol=1e-10)
    assert done.edges == len(pattern)
    assert done.density == pytest.approx(pattern.summary().block_density)


def test_pruning_by_raw_score_would_cut_other_edges() -> None:
    """The raw score of a row with large queries is large everywhere, so a threshold on it spares light edges there."""
    pattern = causal_full(8, block=1)
    rng = np.random.default_rng(3)
    q, k, v = (rng.normal(size=(1, 1, 8, 4)) for _ in range(3))
    q[:, :, 4:] *= 10
    at.attend(*(gw.tensor(x) for x in (q, k, v)), pattern=pattern, collect="mass")
    raw = (q @ np.swapaxes(k, 2, 3))[0, 0]
    _, query, key = pattern.pairs().T
    by_raw = set(zip(query[raw[query, key] < 0.1], key[raw[query, key] < 0.1], strict=True))
    cut = {(i, j) for _, i, j in at.prune(pattern, 0.1).pairs.tolist()}
    assert cut - by_raw
    assert by_raw - cut


def test_a_target_density_is_met_and_an_impossible_one_refused() -> None:
    rng = np.random.default_rng(0)
    for relative in ("row", "none"):
        pattern = causal_full(64, block=4)
        q, k, v = operands(rng, pattern)
        at.attend(q, k, v, pattern, collect="mass")
        done = at.prune(pattern, target_density=0.2, relative=relative)
        assert abs(done.density - 0.2) * 16 <= 1
        assert (pattern.empty_rows().size, pattern.has(5, 5)) == (0, True)
        with pytest.raises(BudgetUnreachable, match="density"):
            at.prune(pattern, target_density=0.01)
        assert len(pattern) == done.edges


def test_pruning_needs_masses_and_one_threshold() -> None:
    pattern = causal_full(16, block=4)
    with pytest.raises(UsageError, match="collect"):
        at.prune(pattern, 0.1)
    wrong: list[dict[str, Any]] = [{}, {"mass": 0.1, "target_density": 0.1}, {"mass": 1.5}, {"mass": float("nan")}]
    for given_ in wrong:
        with pytest.raises(UsageError):
            at.prune(pattern, **given_)
    assert (pattern.version, len(pattern.journal)) == (0, 0)


@given(st.integers(0, 10_000), st.sampled_from([None, "exp", "weight"]))
def test_the_drift_of_a_cut_is_known_before_it(seed: int, where: Any) -> None:
    rng = np.random.default_rng(seed)
    pattern = pattern_of(rng, (20, 20), 2, 2, density=0.9)
    gates = None
    if where is not None:
        with pattern.edit("gates") as e:
            e.set(pattern.edges(), gate=np.arange(len(pattern)) % 3 - 1)
        pattern.gates = 2
        gates = np.array([0.3, -1.7 if where == "weight" else 1.7])
    named = {} if where is None else {"gates": gates, "where": where}
    q, k, v = operands(rng, pattern)
    chosen = [edge for edge in pattern.edges() if rng.random() < 0.3]
    gone = pattern.edges()[0]
    chosen = [*{gone, *chosen}]
    found = at.drift(q, k, v, pattern, chosen, **named)
    before = at.attend(q, k, v, pattern, **named).numpy()
    pattern.cut(chosen)
    after = at.attend(q, k, v, pattern, **named).numpy()
    moved = np.sqrt(((after - before) ** 2).sum(-1))
    np.testing.assert_allclose(found.moved, moved, atol=1e-12)
    assert (moved <= found.bound + 1e-12).all()
    assert found.largest_move == pytest.approx(moved.max(initial=0.0))
    with pytest.raises(StaleHandle):
        at.drift(q, k, v, pattern, [*chosen, gone], **named)
