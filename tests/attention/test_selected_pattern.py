"""Blocks that are read often become edges: the counted lists, and the measured change of the output."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import pytest
import selected_reference as reference
import torch

import graphwright as gw
from graphwright.attention import NativeSparse, to_pattern
from graphwright.errors import UsageError

DIM, TIME, SIZE = 12, 61, 8


def module(**options: Any) -> NativeSparse:
    small = {"head_dim": 4, "summary": 8, "stride": 4, "block": SIZE, "window": 10, "qk_gain": 3.0}
    return NativeSparse(DIM, 4, 2, **{**small, **options}, name="nsa.", seed=0).to("float64")


@cache
def counted(options: tuple) -> np.ndarray:
    """How many queries of a tile choose each block, per key head: by the slow reference."""
    m, x = module(**dict(options)), np.random.default_rng(0).normal(size=(2, TIME, DIM))
    counts = np.zeros((2, 8, 8))
    for (_, g, t), blocks in reference.attend(m, reference.weights(m), torch.from_numpy(x)).blocks.items():
        counts[g, t // SIZE, sorted(blocks)] += 1
    return counts


@pytest.mark.parametrize("options", [{}, {"granularity": "tile"}, {"shared_kv": False, "compressor": "mlp"}])
@pytest.mark.parametrize("min_freq", [0.0, 0.5, 1.0])
def test_pattern_holds_the_counted_blocks(options: dict, min_freq: float) -> None:
    m, x = module(**options), np.random.default_rng(0).normal(size=(2, TIME, DIM))
    found = to_pattern(m, gw.tensor(x), min_freq)
    counts = counted(tuple(sorted(options.items())))
    shares = counts / (2 * np.array([SIZE] * 7 + [TIME - 7 * SIZE]))[:, None]
    assert np.allclose(found.frequency, shares)
    wanted = {(g, q, k) for g, q, k in np.argwhere((shares >= min_freq - 1e-12) & (shares > 0)).tolist()}
    assert {(g, q, k) for g in range(2) for q in range(8) for k in range(8) if found.pattern.has(q, k, g)} == wanted
    assert found.edges == len(wanted)
    assert len(found.pattern.journal) == 1


@pytest.mark.parametrize("min_freq", [0.0, 0.5])
def test_drift_is_that_of_dense_attention_with_the_pattern_as_mask(min_freq: float) -> None:
    m, x = module(), gw.tensor(np.random.default_rng(0).normal(size=(2, TIME, DIM)))
    found = to_pattern(m, x, min_freq)
    made = m.eval().attend(x)
    q, k, v = (t.numpy() for t in m._selected_operands(x))
    selected = np.zeros(made.selected.shape)
    for h in range(4):
        pairs = np.array([[found.pattern.has(i // SIZE, j // SIZE, h // 2) and j <= i for j in range(TIME)]
                          for i in range(TIME)])  # fmt: skip
        scores = np.where(pairs, q[:, h] @ k[:, h // 2].transpose(0, 2, 1) / 2, -np.inf)
        weights = np.exp(scores - scores.max(2, keepdims=True))
        selected[:, h] = weights / weights.sum(2, keepdims=True) @ v[:, h // 2]
    mixed = m._mixed(x, (made.compressed, gw.tensor(selected), made.sliding), made.choice).out
    moved = np.abs(mixed.numpy() - made.out.numpy())
    assert found.drift == pytest.approx(moved.max(), abs=1e-10)
    assert found.mean_drift == pytest.approx(moved.mean(), abs=1e-10)
    assert found.drift > 0
    assert "edges" in str(found)


def test_a_share_out_of_range_is_refused() -> None:
    with pytest.raises(UsageError, match="min_freq"):
        to_pattern(module(), gw.tensor(np.zeros((1, 4, DIM))), 1.5)
