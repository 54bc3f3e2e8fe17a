"""Absent edges: their gradients against differences of the loss, and a planted offset that must be found."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from dense_attention import dense, pattern_of
from hypothesis import given
from hypothesis import strategies as st

from block_edges import edges_of
from graphwright import attention as at
from graphwright.errors import ShapeError, UsageError
from graphwright.patterns import BlockRange, EdgeExists, Pattern, causal_full, sliding_window


def loss_with(ins: list[np.ndarray], pattern: Pattern, extra: np.ndarray, g: np.ndarray, gate: float,
              softcap: float | None) -> float:  # fmt: skip
    """Σ g·out, if the pairs of `extra` [planes, Tq, Tk] are there with a gate."""
    import torch

    mask = pattern.to_dense()
    factor = torch.from_numpy(np.where(extra & ~mask, gate, 1.0))
    out, _ = dense(*ins, mask=mask | extra, gates=factor, softcap=softcap)
    return float((out.numpy() * g).sum())


@given(st.integers(0, 10_000), st.sampled_from([1, 2]), st.sampled_from([None, 6]), st.sampled_from([None, 1.3]))
def test_gradients_are_those_of_a_gate_at_zero(seed: int, planes: int, window: Any, softcap: Any) -> None:
    rng = np.random.default_rng(seed)
    pattern = pattern_of(rng, (15, 18), 4, planes, window=window)
    ins = [rng.normal(size=shape) for shape in ((2, 2, 15, 4), (2, 2, 18, 4), (2, 2, 18, 3))]
    g = rng.normal(size=(2, 2, 15, 3))
    found = at.propose(pattern, *ins, grad_out=g, n=1000, softcap=softcap)
    assert len(found) == found.considered
    assert (np.diff(found.gradients) >= 0).all()
    known = {tuple(pair) for pair in pattern.pairs().tolist()}
    assert not known & {tuple(pair) for pair in found.pairs.tolist()}
    for (plane, query, key), slope in list(zip(found.pairs.tolist(), found.gradients, strict=True))[::3]:
        twin = pattern.copy()
        twin.connect(query, key, plane)
        extra = twin.to_dense() & ~pattern.to_dense()
        # a row without any key has no weights that a gate could change: its result jumps, for any gate > 0
        extra &= pattern.to_dense().any(-1, keepdims=True)
        step = 1e-7  # an absent edge may have a weight of 1e4 times those of its row, and so a strong curvature
        zero, one, two = (loss_with(ins, pattern, extra, g, n * step, softcap) for n in (0, 1, 2))
        assert slope == pytest.approx((4 * one - two - 3 * zero) / (2 * step), rel=1e-5, abs=1e-5)


def planted(rng: np.random.Generator, offset: int, batch: int = 128, tokens: int = 64) -> tuple[list[Any], Any]:
    """Operands, and a function from the result to its gradient; the target is the value `offset` tokens before."""
    q, k, v = (rng.normal(size=(batch, 1, tokens, 16)).astype("f4") for _ in range(3))
    wanted = np.zeros_like(v)
    wanted[:, :, offset:] = v[:, :, :-offset]
    seen = (np.arange(tokens) >= offset)[:, None]
    return [q, k, v], lambda out: np.where(seen, 2 * (out - wanted), 0).astype("f4")


def test_a_planted_offset_outside_the_window_is_found() -> None:
    ins, slope = planted(np.random.default_rng(0), 11)
    pattern = sliding_window(64, window=4, block=1)
    out = at.attend(*ins, pattern=pattern).numpy()
    found = at.propose(pattern, *ins, grad_out=slope(out), n=10_000)
    first: dict[int, int] = {}
    for _, query, key in found.pairs.tolist():
        first.setdefault(query, key)
    assert np.mean([first[i] == i - 11 for i in range(11, 64)]) >= 0.95
    assert len(pattern) == 64 * 4 - 6, "nothing is inserted"
    best = at.propose(pattern, *ins, grad_out=slope(out), n=20)
    edges = pattern.apply(best)
    assert len(edges) == 20
    assert [tuple(pattern.ends(edge)) for edge in edges] == [tuple(pair) for pair in best.pairs.tolist()]
    assert pattern.journal[-1].author == "gate"
    with pytest.raises(EdgeExists):
        pattern.apply(best)
    pattern.undo()
    assert len(pattern) == 64 * 4 - 6


def test_candidates_can_be_chosen() -> None:
    rng = np.random.default_rng(0)
    pattern = sliding_window(32, window=9, block=4)
    pattern.cut(*edges_of(pattern, (5, 4)))
    ins: list[Any] = [rng.normal(size=(1, 1, 32, 4)) for _ in range(4)]
    assert at.propose(pattern, *ins, candidates="window").pairs.tolist() == [[0, 5, 4]]
    everything = {(i, j) for i in range(8) for j in range(i + 1)} - {(i, j) for _, i, j in pattern.pairs().tolist()}
    assert {(i, j) for _, i, j in at.propose(pattern, *ins).pairs.tolist()} == everything
    two = at.propose(pattern, *ins, candidates=np.array([[0, 7, 0], [0, 6, 1], [0, 7, 7]]))
    assert sorted(two.pairs.tolist()) == [[0, 6, 1], [0, 7, 0]]
    full = causal_full(32, block=4)
    assert (len(at.propose(full, *ins)), str(at.propose(full, *ins))) == (0, "no edge proposed, 0 considered")
    with pytest.raises(BlockRange):
        at.propose(pattern, *ins, candidates=np.array([[0, 8, 0]]))
    with pytest.raises(ShapeError, match="pairs"):
        at.propose(pattern, *ins, candidates=np.array([[8, 0]]))
    with pytest.raises(UsageError, match="candidates"):
        at.propose(pattern, *ins, candidates="near")
    with pytest.raises(ShapeError, match="grad_out"):
        at.propose(pattern, *ins[:3], grad_out=ins[3][:, :, :5])
    with pytest.raises(UsageError, match="n"):
        at.propose(pattern, *ins, n=0)
