"""Threshold routers against their formulas in NumPy, difference quotients, and programs without an expert."""

from __future__ import annotations

from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import graphwright as gw
from graphwright import nn
from graphwright.array import float64
from graphwright.autograd import Tensor, no_grad
from graphwright.errors import UsageError
from graphwright.nn import AllDead, ThresholdRouter, Uncalibrated
from graphwright.testing.gradcheck import gradcheck
from seeds import some
from values import grad_of

E, C, N = 5, 6, 40
OFF = {"null": False}
BOTH = [OFF, {"null": True}]


def normal(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape)


def parts(prototypes: np.ndarray | Tensor, thresholds: np.ndarray | Tensor) -> list[SimpleNamespace]:
    """What a router needs of its experts."""
    p, t = (x if isinstance(x, Tensor) else gw.tensor(x) for x in (prototypes, thresholds))
    return [SimpleNamespace(prototype=p[e], threshold=t[e]) for e in range(p.shape[0])]


def router(**options) -> ThresholdRouter:
    m = ThresholdRouter(C, E, 2, **options).to(float64)
    m.eta.assign(gw.tensor(np.log(10.0)))
    return m


def layer(seed: int = 0, dtype: str = "float64", **options) -> nn.MoE:
    """A mixture whose thresholds are not the initial ones, which would warn."""
    m = nn.MoE(C, 4, E, kind="mlp", act="gelu", router=ThresholdRouter(C, E, 2, **options), name="m", seed=seed)
    for e, expert in enumerate(m.experts):
        expert.threshold.assign(gw.tensor(np.float32(0.15 + 0.02 * e)))
    return m.to(dtype)


def unit(v):
    return v / max(np.linalg.norm(v), 1e-6)


def formula(x, p, t, eta, alive=None, null=False):
    """docs/routers.md, token by token: (z, unrouted, mask, weights)."""
    rows = []
    for token in x:
        z = np.array([unit(token) @ unit(p[e]) - np.tanh(t[e]) for e in range(len(p))])
        if alive is not None:
            z[~alive] = -np.inf
        mask = z > 0
        none = not mask.any()
        if none:
            mask[np.argmax(z)] = True
        s = np.where(mask, np.log1p(np.exp(np.exp(eta) * z)), 0.0)
        rows.append((z, none, mask, s / (s.sum() + (np.log(2) if null else 0.0))))
    return [np.array(column) for column in zip(*rows, strict=True)]


# -- the formula and its gradient --------------------------------------------------------------------------------------
@pytest.mark.parametrize("options", BOTH, ids=str)
def test_choice_and_weights_are_those_of_the_formula(options):
    x, p, t = normal(N, C), normal(E, C, seed=1), np.linspace(0.1, 0.6, E)
    r = router(**options)(gw.tensor(x), experts=parts(p, t))
    z, unrouted, mask, weights = formula(x, p, t, np.log(10), **options)
    assert 0 < unrouted.sum() < N / 2
    assert len(set(mask.sum(1))) >= 3
    np.testing.assert_allclose(r.margin.numpy(), z, rtol=0, atol=1e-12)
    np.testing.assert_array_equal(r.unrouted.numpy(), unrouted)
    np.testing.assert_array_equal(r.choice.numpy(), mask)
    np.testing.assert_array_equal(r.hits.numpy(), mask & ~unrouted[:, None])
    np.testing.assert_allclose(r.weights.numpy(), weights, rtol=1e-10, atol=1e-14)
    np.testing.assert_allclose(r.logits.numpy(), 10 * z, rtol=1e-10)


@pytest.mark.parametrize("options", some(BOTH, 2), ids=str)
def test_gradients_of_prototypes_thresholds_slope_and_tokens_are_difference_quotients(options):
    m = router(**options)
    x, p, t = normal(N, C), normal(E, C, seed=1), np.linspace(0.1, 0.6, E)
    z = formula(x, p, t, np.log(10))[0]
    far = (abs(z) > 1e-4).all(1) & (np.diff(np.sort(z, 1)[:, -2:], axis=1)[:, 0] > 1e-4)

    def weights(x, p, t, eta):
        m.eta = eta
        return m(x, experts=parts(p, t)).weights

    gradcheck(weights, [x[far], p, t, np.float64(np.log(10))], eps=1e-6, rtol=1e-6)


def test_every_prototype_and_threshold_has_a_gradient_at_the_first_step():
    m = layer()
    m(gw.tensor(normal(N, C))).square().sum().backward()
    for expert in m.experts:
        assert grad_of(expert.prototype).numpy().any()
        assert grad_of(expert.threshold).numpy().any()
    assert grad_of(m.router.eta).numpy() != 0


def test_raising_all_thresholds_lowers_the_number_of_experts_monotonically():
    x, p = normal(N, C), normal(E, C, seed=1)
    hits = [router()(gw.tensor(x), experts=parts(p, np.full(E, t))).hits.numpy() for t in np.linspace(-2, 2, 9)]
    counts = [h.sum() for h in hits]
    assert counts == sorted(counts, reverse=True)
    assert counts[0] > counts[4] > counts[-1] == 0
    assert all((late <= early).all() for early, late in pairwise(hits))


def test_very_negative_margins_keep_finite_weights_and_gradients():
    """s underflows in float32 where κz < -104."""
    m = ThresholdRouter(C, E, 2, kappa=200.0)
    x, p = Tensor(gw.tensor(normal(N, C).astype("f4")).data, requires_grad=True), normal(E, C, seed=1).astype("f4")
    r = m(x, experts=parts(p, np.full(E, 2.0, "f4")))
    assert r.unrouted.numpy().all()
    np.testing.assert_array_equal(r.weights.numpy().sum(1), 1.0)
    best = np.argmax(r.margin.numpy(), 1)
    np.testing.assert_array_equal(r.choice.numpy().argmax(1), best)
    r.weights.sum().backward()
    assert np.isfinite(grad_of(x).numpy()).all()


# -- unrouted tokens and the null share --------------------------------------------------------------------------------
def test_unrouted_is_measured_before_the_fallback():
    m = layer()
    for expert in m.experts:
        expert.threshold.assign(gw.tensor(np.float64(3.0)))
    x = gw.tensor(normal(N, C))
    r: Any = m.route(x)
    assert not r.hits.numpy().any()
    assert r.unrouted.numpy().all()
    assert (r.choice.numpy().sum(1) == 1).all()
    assert r.counts.numpy().sum() == N
    assert np.isfinite(m(x).numpy()).all()


def test_the_fallback_of_equal_margins_is_the_lowest_id_alive():
    m = router()
    x = gw.tensor(normal(4, C))
    p = np.tile(normal(1, C, seed=3), (E, 1))
    assert m(x, experts=parts(p, np.full(E, 3.0))).choice.numpy().argmax(1).tolist() == [0] * 4
    m.alive.assign(gw.tensor(np.array([False, False, True, True, True])))
    assert m(x, experts=parts(p, np.full(E, 3.0))).choice.numpy().argmax(1).tolist() == [2] * 4


def lone(r) -> np.ndarray:
    return r.choice.numpy().sum(1) == 1


@pytest.mark.parametrize("options", BOTH, ids=str)
def test_a_lone_expert_teaches_the_router_only_with_the_null_share(options):
    """Also where the fallback chose it: without the null share its weight is 1 whatever its score."""
    m, x, p, t = router(**options), normal(N, C), normal(E, C, seed=1), np.linspace(0.1, 0.6, E)
    r = m(gw.tensor(x), experts=parts(p, t))
    alone, unrouted = lone(r), r.unrouted.numpy()
    assert (alone & unrouted).any()
    assert (alone & ~unrouted).any()
    for tokens in (alone & unrouted, alone & ~unrouted):
        given, u = gw.tensor(p), gw.tensor(normal(int(tokens.sum()), E, seed=5))
        given.requires_grad = True
        again = m(gw.tensor(x[tokens]), experts=parts(given, t))
        (again.weights * u).sum().backward()
        assert grad_of(given).numpy().any() == options["null"]


# -- alive, gates, padding ---------------------------------------------------------------------------------------------
@pytest.mark.parametrize("options", BOTH, ids=str)
def test_dead_and_closed_experts_equal_experts_that_were_cut(options):
    m, x = layer(dtype="float32", **options), normal(N, C).astype("f4")
    p = gw.trace(m, gw.tensor(x))

    def run():
        return np.asarray(p.run({"x": x})["out"])

    before, experts = run(), p.axes()["router.experts"]
    plan = p.compile(x=(N, C))
    m.router.alive.assign(gw.tensor(np.array([True, True, False, True, True])))
    dead = run()
    assert p.compile(x=(N, C)) is plan
    np.testing.assert_allclose(np.asarray(plan({"x": x})["out"]), dead, rtol=0, atol=1e-6)
    assert not m.route(gw.tensor(x)).counts.numpy()[2]
    m.router.alive.assign(gw.tensor(np.ones(E, bool)))
    with p.edit("gate the experts") as e:
        e.gate(experts.units(range(E)), "scale", init=1.0)
    np.testing.assert_allclose(run(), before, rtol=0, atol=1e-5)
    with p.edit("close one") as e:
        e.set_weight("gates.logits", np.array([1, 1, 0, 1, 1.0]))
    closed = run()
    p.undo()
    p.undo()
    with p.edit("cut it") as e:
        e.cut_units(p.axes()["router.experts"].units([2]))
    cut = run()
    assert abs(cut - before).max() > 1e-2
    np.testing.assert_allclose(dead, cut, rtol=0, atol=1e-6)
    np.testing.assert_allclose(closed, cut, rtol=0, atol=1e-5)
    assert {key.split(".")[1] for key in p.weights if key.startswith("experts.")} == {"0", "1", "3", "4"}
    assert p.weights["router.alive"].shape == (4,)
    p.undo()
    np.testing.assert_array_equal(run(), before)


@pytest.mark.parametrize("options", BOTH, ids=str)
def test_a_gate_multiplies_the_score_before_the_sum(options):
    m, x, g = layer(**options), normal(N, C), np.array([0.3, 1.0, 2.0, 0.7, 1.0])
    p = gw.trace(m, gw.tensor(x))
    with p.edit("gate the experts") as e:
        e.gate(p.axes()["router.experts"].units(range(E)), "scale", init=g)
    found = p.run({"x": x})
    mask, logits = (np.asarray(found.value(f"router.{name}")) for name in ("mask", "logits"))
    s = g * np.log1p(np.exp(logits)) * mask
    total = s.sum(1, keepdims=True) + (np.log(2) if options["null"] else 0.0)
    np.testing.assert_allclose(np.asarray(found.value("router.weights")), s / total, rtol=1e-6, atol=1e-12)


def test_experts_that_are_all_dead_are_refused():
    m = layer()
    m.router.alive.assign(gw.tensor(np.zeros(E, bool)))
    with pytest.raises(AllDead, match="alive"):
        m(gw.tensor(normal(3, C)))


def test_padding_has_no_experts_and_changes_no_other_row():
    m, x, valid = layer(), normal(N, C), np.arange(N) % 3 > 0
    alone: Any = m.route(gw.tensor(x[valid]))
    r: Any = m.route(gw.tensor(x), gw.tensor(valid))
    assert r.counts.tolist() == alone.counts.tolist()
    assert not r.choice.numpy()[~valid].any()
    assert not r.unrouted.numpy()[~valid].any()
    np.testing.assert_allclose(r.weights.numpy()[valid], alone.weights.numpy(), rtol=0, atol=1e-14)
    made = m(gw.tensor(x), gw.tensor(valid)).numpy()
    np.testing.assert_allclose(made[valid], m(gw.tensor(x)).numpy()[valid], rtol=0, atol=1e-14)
    assert not made[~valid].any()


def test_a_token_that_is_not_a_number_goes_to_the_fallback_and_spoils_no_other():
    m, x = layer(), normal(N, C)
    m.router.alive.assign(gw.tensor(np.array([False, True, True, True, True])))
    clean = m(gw.tensor(x)).numpy()
    x[3] = np.nan
    r: Any = m.route(gw.tensor(x))
    assert r.unrouted.numpy()[3]
    assert r.choice.numpy()[3].sum() == 1
    assert not r.choice.numpy()[3, 0]
    made = m(gw.tensor(x)).numpy()
    np.testing.assert_array_equal(np.delete(made, 3, 0), np.delete(clean, 3, 0))


# -- dtypes, straight-through, steps -----------------------------------------------------------------------------------
@pytest.mark.parametrize("autocast", [False, True])
def test_16_bit_tokens_are_routed_in_float32(autocast):
    """A router in bfloat16 would choose others for some of 10 000 tokens."""
    x = gw.tensor(normal(10_000, C).astype("f4")).to("bfloat16")
    p, t = normal(E, C, seed=1).astype("f4"), np.linspace(0.1, 0.6, E).astype("f4")
    m = ThresholdRouter(C, E, 2)
    with gw.autocast("bfloat16") if autocast else no_grad():
        low = m(x, experts=parts(p, t))
    wide = m(x.to("float32"), experts=parts(p, t))
    np.testing.assert_array_equal(low.choice.numpy(), wide.choice.numpy())
    assert low.weights.dtype is wide.weights.dtype


@pytest.mark.parametrize("options", BOTH, ids=str)
def test_straight_through_keeps_the_weights_and_adds_the_slope_of_a_soft_choice(options):
    x, p, t = normal(N, C), normal(E, C, seed=1), np.linspace(0.1, 0.6, E)
    hard, soft = (router(ste=ste, **options) for ste in (False, True))
    u = normal(N, E, seed=7)
    grads = []
    for m in (hard, soft):
        given = gw.tensor(t)
        given.requires_grad = True
        r = m(gw.tensor(x), experts=parts(p, given))
        (r.weights * gw.tensor(u)).sum().backward()
        grads.append((r.weights.numpy(), grad_of(given).numpy()))
    np.testing.assert_array_equal(grads[0][0], grads[1][0])
    z, _, mask, w = formula(x, p, t, np.log(10), **options)
    s = np.log1p(np.exp(10 * z))
    total = (s * mask).sum(1, keepdims=True) + (np.log(2) if options["null"] else 0.0)
    by_mask = s / total * (u - (u * w).sum(1, keepdims=True))  # dL/dm of w = m·s / (s₀ + Σ m·s)
    sigma = 1 / (1 + np.exp(-10 * z))
    extra = (by_mask * sigma * (1 - sigma) * 10 * -(1 - np.tanh(t) ** 2)).sum(0)
    np.testing.assert_allclose(grads[1][1] - grads[0][1], extra, rtol=1e-5, atol=1e-8)


def test_an_expert_without_tokens_gets_gradients_of_exactly_0():
    """Rounding noise would become whole steps of Adam."""
    m = layer(dtype="float32")
    m.experts[2].threshold.assign(gw.tensor(np.float32(3.0)))
    m(gw.tensor(normal(N, C).astype("f4"))).square().sum().backward()
    assert not any(grad_of(p).numpy().any() for p in m.experts[2].parameters())
    assert grad_of(m.experts[1].prototype).numpy().any()


def test_training_with_initial_thresholds_warns_once():
    m = nn.MoE(C, 4, E, router=ThresholdRouter(C, E, 2))
    x = gw.tensor(normal(N, C).astype("f4"))
    with no_grad():
        m(x)
    m.eval()(x)
    gw.trace(m.train(), x)
    with pytest.warns(Uncalibrated, match="calibrate"):
        m.train()(x)
    m(x)


def test_a_compiled_step_equals_the_eager_one_and_a_new_routing_needs_no_new_plan():
    m = layer(dtype="float32")
    run = gw.compile(m, executor="aten")
    for k in range(3):
        x = normal(N, C, seed=k).astype("f4")
        np.testing.assert_array_equal(run(x).numpy(), m(gw.tensor(x)).numpy())
    assert run.traces == 1


NAMES = (
    "prototypes",
    "cosine",
    "thresholds",
    "logits",
    "score",
    "scores",
    "margin",
    "hits",
    "unrouted",
    "mask",
    "weights",
)


def test_the_values_of_a_router_have_names_in_a_program():
    p = gw.trace(layer(), gw.tensor(normal(N, C)))
    assert {f"router.{name}" for name in NAMES} <= {p.path(n) for n in p.nodes()}


@pytest.mark.parametrize("wrong", [{"k0": 0}, {"k0": E + 0.1}, {"k0": 2, "kappa": 0.0}, {"k0": float("nan")}])
def test_invalid_arguments_are_refused(wrong):
    with pytest.raises(UsageError, match=r"<|> 0"):
        ThresholdRouter(C, E, **wrong)


def test_experts_of_another_router_are_refused():
    m = router()
    with pytest.raises(UsageError, match="experts are not the router's"):
        m(gw.tensor(normal(3, C)), experts=parts(normal(E + 1, C), np.zeros(E + 1)))
