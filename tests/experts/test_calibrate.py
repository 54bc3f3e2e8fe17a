"""Calibration of threshold routers: counts of experts against the binomial distribution, edits, layers in order."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import graphwright as gw
from graphwright import experts as ex
from graphwright import nn
from graphwright.errors import UsageError
from graphwright.nn import ThresholdRouter

C, N = 256, 4096


def normal(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape).astype("f4")


def layer(experts: int = 32, dim: int = C, name: str = "m", **options) -> nn.MoE:
    router = ThresholdRouter(dim, experts, 3, **options)
    return nn.MoE(dim, 4, experts, kind="mlp", router=router, name=name, seed=0)


def stacked() -> nn.Sequential:
    return nn.Sequential(nn.Residual(layer(8, 16, "a")), nn.Residual(layer(8, 16, "b")))


def hits(m: Any, x: np.ndarray) -> np.ndarray:
    return m.route(gw.tensor(x)).hits.numpy()


@pytest.mark.parametrize(("k0", "unrouted"), [(2, 0.13), (3, 0.04), (4, 0.01)])
def test_tokens_use_k0_experts_on_average_and_different_numbers(k0, unrouted):
    """Independent cosines: k ~ Binomial(E, k0/E)."""
    m, x = layer(), normal(N, C)
    found = ex.calibrate(m, gw.tensor(x), k0)
    counts = hits(m, x).sum(1)
    assert counts.mean() == pytest.approx(k0, rel=0.05)
    routed = counts[counts > 0]
    assert routed.std() >= 0.5
    assert len(set(routed.tolist())) >= 3
    assert (counts == 0).mean() == pytest.approx((1 - k0 / 32) ** 32, abs=0.03)
    assert (counts == 0).mean() == pytest.approx(unrouted, abs=0.02)
    (row,) = found.layers
    assert (row.tokens, row.experts) == (N, 32)
    assert (row.mean, row.std, row.unrouted) == pytest.approx(
        (routed.mean(), routed.std(), (counts == 0).mean()), abs=2e-3
    )
    assert f"{row.unrouted:.3f}" in str(found)


def test_threshold_one_half_on_the_raw_cosine_routes_no_token():
    """Red twin: the "dynamic" number of experts is then the constant of the fallback."""
    m, x = layer(), normal(N, C)
    for expert in m.experts:
        expert.threshold.assign(gw.tensor(np.float32(np.arctanh(0.5))))
    r: Any = m.route(gw.tensor(x))
    assert not r.hits.numpy().any()
    assert r.unrouted.numpy().all()
    assert set(r.choice.numpy().sum(1).tolist()) == {1}


def test_initial_thresholds_are_those_of_independent_gaussian_tokens():
    with pytest.warns(ex.Uncalibrated):
        counts = hits(layer(), normal(N, C)).sum(1)
    assert counts.mean() == pytest.approx(3, rel=0.15)


def thresholds(m: nn.Module) -> dict[str, float]:
    return {name: float(p.numpy()) for name, p in m.named_parameters() if name.endswith(".threshold")}


def test_later_layers_see_the_tokens_of_calibrated_ones_in_modules_and_in_programs():
    m, x = stacked(), normal(512, 16)
    start = thresholds(m)
    ex.calibrate(m, gw.tensor(x), 2)
    with gw.no_grad():
        blocks: list[Any] = list(m.children())
        second = blocks[0](gw.tensor(x)).numpy()
    for block, given in zip(blocks, (x, second), strict=True):
        router, experts = block.inner.router, block.inner.experts
        cosines = router.cosines(gw.tensor(given), experts).numpy().astype("f8")
        wanted = np.quantile(cosines, 1 - 2 / 8, axis=0)
        np.testing.assert_allclose(np.tanh([float(e.threshold.numpy()) for e in experts]), wanted, atol=1e-6)
    by_module = thresholds(m)
    for name, p in m.named_parameters():
        if name in start:
            p.assign(gw.tensor(np.float32(start[name])))
    p = gw.trace(m, gw.tensor(x))
    before = p.hash()
    found = ex.calibrate(p, {"x": x}, 2)
    assert thresholds(m) == pytest.approx(by_module, abs=1e-6)
    assert [row.router for row in found.layers] == ["0.inner.router", "1.inner.router"]
    assert p.journal[-1].author == "pass"
    assert len(p.journal) == 1
    p.undo()
    assert p.hash() == before
    assert thresholds(m) == start


def test_dead_experts_keep_their_thresholds_and_do_not_count():
    m, x = layer(), normal(N, C)
    alive = np.arange(32) % 4 > 0
    m.router.alive.assign(gw.tensor(alive))
    old = [float(e.threshold.numpy()) for e in m.experts]
    (row,) = ex.calibrate(m, gw.tensor(x), 3).layers
    new = [float(e.threshold.numpy()) for e in m.experts]
    assert [a == b for a, b in zip(old, new, strict=True)] == (~alive).tolist()
    assert row.experts == 24
    assert hits(m, x).sum(1).mean() == pytest.approx(3, rel=0.05)


def test_padding_and_tokens_that_are_not_numbers_do_not_count():
    m, x = layer(8, 16), normal(512, 16)
    x[::2] = np.nan
    ex.calibrate(m, gw.tensor(x), 2)
    once = thresholds(m)
    x[::2] = 7.0
    ex.calibrate(m, (gw.tensor(x), gw.tensor(np.arange(512) % 2 > 0)), 2)
    assert thresholds(m) == once


def test_invalid_targets_are_refused_before_anything_changes():
    m, x = layer(8, 16), gw.tensor(normal(64, 16))
    start = thresholds(m)
    for k0 in (0, 8.5, float("nan")):
        with pytest.raises(UsageError, match="mean number"):
            ex.calibrate(m, x, k0)
    with pytest.raises(ex.NotAMixture, match="no threshold router"):
        ex.calibrate(nn.MoE(16, 4, 4), x)
    with pytest.raises(ex.NotAMixture, match="no threshold router"):
        ex.calibrate(gw.trace(nn.MoE(16, 4, 4), x), {"x": x})
    assert thresholds(m) == start


def test_no_threshold_is_the_cosine_of_a_token_where_tokens_repeat():
    """Else each of these tokens would use the expert or not as its cosine is rounded."""
    m, x = layer(8, 16), np.repeat(normal(12, 16), 20, axis=0)
    ex.calibrate(m, gw.tensor(x), 3)
    margin = m.route(gw.tensor(x)).margin
    assert margin is not None
    assert np.abs(margin.numpy()).min() > 1e-4
    assert hits(m, x).sum(1).mean() == pytest.approx(3, abs=0.4)
