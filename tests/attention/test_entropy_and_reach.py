"""Row entropy as a loss, penalties over gates of edges, and which tokens influence which."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from dense_attention import dense, pattern_of
from hypothesis import given
from hypothesis import strategies as st

import graphwright as gw
from graphwright import attention as at
from graphwright import structure
from graphwright.autograd import ModifiedSinceForward
from graphwright.patterns import Pattern, PatternShape, block_local, causal_full, full, sliding_window
from values import grad_of


def dense_entropy(q: torch.Tensor, k: torch.Tensor, mask: np.ndarray, **attrs: Any) -> torch.Tensor:
    _, a = dense(q, k, k, mask, **attrs)
    return -torch.where(a > 0, a * torch.where(a > 0, a, 1.0).log(), 0.0).sum(-1)


@given(st.integers(0, 10_000), st.sampled_from([None, 1.2]))
def test_entropy_and_its_gradient_equal_dense_ones(seed: int, softcap: Any) -> None:
    rng = np.random.default_rng(seed)
    pattern = pattern_of(rng, (14, 17), 4, 2)
    ins = [rng.normal(size=shape) for shape in ((2, 4, 14, 3), (2, 2, 17, 3))]
    ours, theirs = [gw.tensor(x, requires_grad=True) for x in ins], [torch.tensor(x, requires_grad=True) for x in ins]
    found, ref = (
        at.entropy(*ours, pattern=pattern, softcap=softcap),
        dense_entropy(*theirs, mask=pattern.to_dense(), softcap=softcap),
    )
    np.testing.assert_allclose(found.numpy(), ref.detach().numpy(), atol=1e-10)
    g = rng.normal(size=ref.shape)
    (found * gw.tensor(g)).sum().backward()
    ref.backward(torch.tensor(g))
    for a, b in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(grad_of(a).numpy(), grad_of(b).numpy(), atol=1e-6)


def test_a_uniform_row_has_ln_n_and_rows_of_one_key_or_none_have_zero() -> None:
    pattern = Pattern(6, block=1)
    for key in range(5):
        pattern.connect(4, key)
    pattern.connect(3, 0)
    zero = gw.tensor(np.zeros((1, 1, 6, 2)), requires_grad=True)
    found = at.entropy(zero, zero, pattern)
    np.testing.assert_allclose(found.numpy()[0, 0], [0, 0, 0, 0, np.log(5), 0], atol=1e-12)
    pattern.connect(5, 5)
    with pytest.raises(ModifiedSinceForward):
        found.sum().backward()


def test_penalties_of_structure_read_gates_of_edges_and_entropies_of_attentions() -> None:
    rng = np.random.default_rng(0)
    pattern = causal_full(12, block=4)
    q, k, v = (rng.normal(size=(1, 2, 12, 4)) for _ in range(3))
    p = gw.trace(lambda q, k, v: at.attend(q, k, v, pattern), *(gw.tensor(x) for x in (q, k, v)))
    z = rng.normal(size=6)
    pattern.gate("sigmoid", init=z)
    dg, open_, cost = structure.DifferentiableGraph(p), 1 / (1 + np.exp(-z)), np.array([10, 16, 10, 16, 16, 10])
    assert sorted(next(iter(p.gates().values())).cost) == sorted(cost)
    cost = next(iter(p.gates().values())).cost
    share = (cost * open_).sum() / cost.sum()
    assert dg.penalty(structure.density(0.25, weight=1.0)).item() == pytest.approx((open_.mean() - 0.25) ** 2)
    assert dg.penalty(structure.budget(0.3, of="table")).item() == pytest.approx(10 * (share - 0.3) ** 2)
    (node,) = (p.path(n) for n in p.nodes() if p.op(n) == "block_sdpa")

    def task(outputs: Any, batch: Any) -> Any:
        return next(iter(outputs.values())).sum()

    _, (found,), _ = dg.evaluate(dict(zip(p.input_names(), (q, k, v), strict=True)), task,
                                 [structure.attention_entropy((node,))])  # fmt: skip
    each = np.ones((1, 3, 3))
    for (_, i, j), slot in zip(pattern.pairs(), np.asarray(pattern.edges["gate"]), strict=True):
        each[0, i, j] = open_[slot]
    ref = dense_entropy(torch.tensor(q), torch.tensor(k), pattern.to_dense(),
                        gates=torch.from_numpy(each.repeat(4, 1).repeat(4, 2)))  # fmt: skip
    assert found.item() == pytest.approx(ref.mean().item())


@given(st.integers(0, 10_000), st.integers(1, 4), st.sampled_from([1, 2]))
def test_reach_is_a_power_of_the_mask(seed: int, layers: int, planes: int) -> None:
    pattern = pattern_of(np.random.default_rng(seed), (13, 13), 3, planes, density=0.3)
    one = pattern.to_dense().any(0) | np.eye(13, dtype=bool)
    wanted = np.linalg.matrix_power(one.astype(np.int64), layers) > 0
    found = pattern.reach(layers=layers)
    assert np.array_equal(found.matrix, wanted)
    absent = {(i, j) for i in range(13) for j in range(i + 1)} - {(i, j) for i, j in np.argwhere(wanted).tolist()}
    assert {(i, j) for i, j in found.unreachable.tolist()} == absent
    assert found.missing == len(absent)


def test_the_receptive_field_of_windows() -> None:
    for window, layers in ((1, 3), (5, 1), (5, 4)):
        found = sliding_window(64, window=window, block=8).reach(layers)
        assert found.widest == layers * (window - 1) + 1
    two = at.reach([sliding_window(64, window=4, block=8), sliding_window(64, window=9, block=8)])
    assert (two.widest, two.layers) == (3 + 8 + 1, 2)
    assert full(20, block=4).reach().missing == 0
    assert block_local(32, previous=0, block=8).reach(3).widest == 8
    with pytest.raises(PatternShape, match="same tokens"):
        Pattern((4, 8), block=2).reach()
