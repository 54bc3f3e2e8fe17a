"""Losses that train routers: against formulas in NumPy, difference quotients, and autograd per pair."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import graphwright as gw
from graphwright import experts as ex
from graphwright import nn, optim
from graphwright.array import float64
from graphwright.autograd import Tensor, no_grad
from graphwright.errors import UsageError
from graphwright.experts.observed import ThresholdLayer
from graphwright.nn import ThresholdRouter
from graphwright.testing.gradcheck import gradcheck
from values import grad_of

E, C, N, I = 6, 8, 40, 4  # noqa: E741  # the names of the formulas


def normal(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape)


def layer(**options) -> nn.MoE:
    """A mixture in float64, most of whose tokens have one to three experts."""
    m = nn.MoE(C, I, E, kind="mlp", act="gelu", router=ThresholdRouter(C, E, 2), name="m.", seed=0, **options)
    with no_grad():
        ex.calibrate(m.to(float64), gw.tensor(normal(N, C)), 2)
    return m


def step(m: nn.Module, x: np.ndarray, seed: int = 3) -> list[Any]:
    """Run and differentiate Σ u·y for random u."""
    with ex.observe(m) as layers:
        y = m(gw.tensor(x))
        (y * gw.tensor(normal(*y.shape, seed=seed))).sum().backward()
    return layers


def routing(r: ex.ThresholdLayer) -> tuple[np.ndarray, ...]:
    """(ℓ, mask) of a layer."""
    return r.logits.numpy(), r.mask.numpy()


def sigmoid(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-x))


def moved(r: ex.ThresholdLayer, p: Tensor, t: Tensor, eta: Tensor) -> ex.ThresholdLayer:
    return replace(r, prototypes=[p[e] for e in range(E)], thresholds=[t[e] for e in range(E)], eta=eta)


def values_of(m: nn.MoE) -> list[np.ndarray]:
    """Prototypes [E, C], thresholds [E] and η of a layer."""
    p, t = ([getattr(e, name).numpy() for e in m.experts] for name in ("prototype", "threshold"))
    return [np.stack(p), np.stack(t), m.router.eta.numpy()]


# -- observing ---------------------------------------------------------------------------------------------------------
def test_an_observed_layer_has_the_choice_the_tokens_and_the_gradient_at_its_output():
    m, x = layer(), normal(N, C)
    (r,) = step(m, x)
    found = m.route(gw.tensor(x))
    np.testing.assert_array_equal(r.mask.numpy(), found.choice.numpy())
    np.testing.assert_allclose(r.logits.numpy(), found.logits.numpy(), rtol=1e-12)
    assert r.tokens is not None
    assert r.gradient is not None
    assert r.result is not None
    np.testing.assert_array_equal(r.tokens.numpy(), x)
    np.testing.assert_array_equal(r.gradient.numpy(), normal(N, C, seed=3))
    np.testing.assert_array_equal(r.result.numpy(), m(gw.tensor(x)).numpy())


TERMS = [ex.sdl(), ex.ghost(r=2), ex.surprise_min(w_kl=0.5)]


@pytest.mark.parametrize("term", TERMS, ids=lambda t: type(t).__name__)
def test_gradients_reach_parameters_of_the_router_alone_and_are_difference_quotients(term):
    m = layer()
    (r,) = step(m, normal(N, C))
    for p in m.parameters():
        p.grad = None
    key = term.variables()["key"].numpy().copy() if term.variables() else None

    def loss(*given: Tensor) -> Tensor:
        if key is not None:
            term.variables()["key"].assign(gw.tensor(key))
        return term.loss([moved(r, *given)])

    term.loss([r]).backward()
    trained = {name for name, p in m.named_parameters() if p.grad is not None}
    assert trained == {name for name, _ in m.named_parameters() if name.endswith(("prototype", "threshold", "eta"))}
    gradcheck(loss, values_of(m), rtol=1e-5)


def test_a_layer_without_a_gradient_at_its_output_is_refused():
    m = layer()
    with ex.observe(m) as layers:
        m(gw.tensor(normal(N, C)))
    with pytest.raises(UsageError, match="backward"):
        ex.ghost().loss(layers)


# -- sdl ---------------------------------------------------------------------------------------------------------------
def test_sdl_is_its_formula_over_the_experts_alive():
    m, alive = layer(), np.array([True, True, False, True, True, False])
    m.router.alive.assign(gw.tensor(alive))
    (r,) = step(m, normal(N, C))
    term = ex.sdl(target=1.5, diversity=0.3, count=0.7)
    p = values_of(m)[0][alive]
    unit = p / np.linalg.norm(p, axis=1, keepdims=True)
    off = unit @ unit.T - np.eye(4)
    soft = sigmoid(routing(r)[0])[:, alive].sum(1).mean()
    wanted = 0.3 * np.linalg.norm(off) / np.sqrt(12) + 0.7 * ((soft - 1.5) / 1.5) ** 2
    assert term.loss([r]).item() == pytest.approx(wanted, rel=1e-10)
    assert term.figures["router.soft_count"].item() == pytest.approx(soft, rel=1e-10)
    assert term.figures["router.k"].item() == pytest.approx(routing(r)[1].sum(1).mean())
    assert abs(soft - routing(r)[1].sum(1).mean()) > 0.05  # it is not reported as k
    m.router.alive.assign(gw.tensor(np.arange(E) == 3))
    assert ex.sdl().loss(step(m, normal(N, C))).item() == 0


def test_sdl_parts_prototypes_and_brings_the_soft_count_to_its_target():
    m, x = layer(), normal(N, C)
    for e in m.experts:
        e.prototype.assign(e.prototype + 0.5)
    term, opt = ex.sdl(target=2, diversity=0.1, count=1.0), optim.Adam(m.parameters(), lr=0.02)
    cosines = []
    for _ in range(150):
        with ex.observe(m) as layers, no_grad():
            m(gw.tensor(x))
        opt.zero_grad()
        term.loss(layers).backward()
        opt.step()
        (seen,) = layers
        assert isinstance(seen, ThresholdLayer)
        unit = seen.unit_prototypes.numpy()
        cosines.append(abs(unit @ unit.T - np.eye(E)).sum() / (E * (E - 1)))
    assert cosines[-1] < 0.6 * cosines[0]
    assert term.figures["router.soft_count"].item() == pytest.approx(2, rel=0.1)


# -- surprise ----------------------------------------------------------------------------------------------------------
def test_surprise_is_the_norm_of_the_gradient_of_a_pair_at_weight_1_for_evaluated_pairs_alone():
    m, x = layer(bias=True), normal(N, C)
    (r,) = step(m, x)
    term = ex.surprise(r=2)
    assert term.loss([r]).item() == 0
    s, u, seen = (term.figures[f"router.{name}"].numpy() for name in ("surprise", "gain", "evaluated"))
    assert (seen & routing(r)[1] == routing(r)[1]).all()
    np.testing.assert_array_equal(seen.sum(1), np.minimum(routing(r)[1].sum(1) + 2, E))
    assert not s[~seen].any()
    assert not u[~seen].any()
    g = normal(N, C, seed=3)
    for n, e in list(zip(*np.nonzero(seen), strict=True))[:20]:
        expert = m.experts[e]
        f = expert.down(nn.functional.gelu(expert.up(gw.tensor(x[n : n + 1]))))
        for p in expert.parameters():
            p.grad = None
        given = (f * gw.tensor(g[n : n + 1])).sum()
        given.backward()
        norm = np.sqrt(sum((grad_of(p).numpy() ** 2).sum() for p in expert.operands()))
        assert s[n, e] == pytest.approx(norm, rel=1e-6)
        assert u[n, e] == pytest.approx(-given.item(), rel=1e-6)


def test_the_gradient_at_the_output_of_an_expert_is_its_weight_times_g_and_knows_nothing_of_the_expert():
    m, x = layer(), normal(N, C)
    routed: Any = m.route(gw.tensor(x))
    weights = gw.tensor(routed.weights.numpy())
    outputs = [e.down(nn.functional.gelu(e.up(gw.tensor(x)))).detach() for e in m.experts]
    for t in outputs:
        t.requires_grad = True
    g = normal(N, C, seed=3)
    y = sum((weights[:, e : e + 1] * t for e, t in enumerate(outputs[1:], 1)), weights[:, :1] * outputs[0])
    (y * gw.tensor(g)).sum().backward()
    for e, t in enumerate(outputs):
        np.testing.assert_allclose(grad_of(t).numpy(), weights.numpy()[:, e : e + 1] * g, rtol=0, atol=1e-6)


def test_surprise_is_no_function_of_the_weight():
    m, x = layer(), normal(400, C)
    opt, target = optim.Adam(m.parameters(), lr=1e-2), gw.tensor(normal(400, C, seed=9))
    for _ in range(40):
        opt.zero_grad()
        with ex.observe(m):
            (m(gw.tensor(x)) - target).square().sum().backward()
        opt.step()
    layers = step(m, x)
    term = ex.surprise()
    term.loss(layers)
    s, mask = term.figures["router.surprise"].numpy(), layers[0].mask.numpy()
    w = m.route(gw.tensor(x)).weights.numpy()
    both = mask & (mask.sum(1, keepdims=True) > 1)
    ranks = [np.argsort(np.argsort(v[both])) for v in (s, w)]
    assert abs(np.corrcoef(np.stack(ranks)).min()) < 0.9  # Spearman's


def test_an_expert_that_does_nothing_is_reported():
    m = layer()
    for p in m.experts[2].operands():
        p.assign(gw.tensor(np.zeros(p.shape)))
    with pytest.warns(ex.InertExpert, match="router: expert 2 gives 0"):
        ex.surprise().loss(step(m, normal(N, C)))


# -- ghosts ------------------------------------------------------------------------------------------------------------
def test_the_gain_of_a_ghost_is_the_one_sided_derivative_of_its_score():
    """dy/dδ = (f_e(x) - y) / D, where δ is added to the score of an expert that was not chosen."""
    m, x = layer(), normal(N, C)
    (r,) = step(m, x)
    logits, mask = routing(r)
    s = np.where(mask, np.log1p(np.exp(logits)), 0.0)
    g, y = normal(N, C, seed=3), m(gw.tensor(x)).numpy()
    _, gain = r.probe(gw.tensor(np.ones((N, E), bool)))
    advantage = gain.numpy() + (g * y).sum(1, keepdims=True)
    outputs = np.stack([e.down(nn.functional.gelu(e.up(gw.tensor(x)))).numpy() for e in m.experts], 1)
    delta = 1e-7
    for e in range(E):
        more = s.copy()
        more[:, e] += delta
        changed = np.einsum("ne,nec->nc", more / more.sum(1, keepdims=True), outputs)
        slope = (g * (changed - y)).sum(1) / delta
        free = ~mask[:, e]
        np.testing.assert_allclose(-advantage[free, e] / s.sum(1)[free], slope[free], rtol=1e-5, atol=1e-5)


def test_the_ghost_loss_is_its_formula():
    m, x, term = layer(), normal(N, C), ex.ghost(weight=0.3, r=2, seed=5)
    (r,) = step(m, x)
    ghosts = term.ghosts(r).numpy()
    logits, mask = routing(r)
    np.testing.assert_array_equal(ghosts.sum(1), np.minimum(2, E - mask.sum(1)))
    assert not (ghosts & mask).any()
    _, gain = r.probe(gw.tensor(ghosts | mask))
    a = gain.numpy() + (normal(N, C, seed=3) * m(gw.tensor(x)).numpy()).sum(1, keepdims=True)
    scaled = np.clip(a / np.sqrt((a[mask] ** 2).mean()), -3, 3)
    assert (abs(scaled[ghosts]) == 3).any()
    wanted = -0.3 * (scaled * sigmoid(logits) * ghosts).sum() / N
    assert term.loss([r]).item() == pytest.approx(wanted, rel=1e-8)


def test_ghosts_are_keyed_by_seed_step_and_layer_and_are_alive():
    m = layer()
    m.router.alive.assign(gw.tensor(np.arange(E) != 1))
    (r,) = step(m, normal(N, C))
    term, same, other = ex.ghost(r=1), ex.ghost(r=1), ex.ghost(r=1, seed=1)
    first = term.ghosts(r).numpy()
    assert not first[:, 1].any()
    np.testing.assert_array_equal(first, same.ghosts(r).numpy())
    assert (first != other.ghosts(r).numpy()).any()
    assert (first != term.ghosts(replace(r, index=1)).numpy()).any()
    term.loss([r])
    assert (first != term.ghosts(r).numpy()).any()
    same.loss([r])
    np.testing.assert_array_equal(term.ghosts(r).numpy(), same.ghosts(r).numpy())
    assert set(first.sum(0)[[0, 2, 3, 4, 5]] > 0) == {True}


@pytest.mark.parametrize("kind", ["threshold", "topk"])
def test_padding_has_no_ghosts_and_does_not_count(kind):
    m, x, valid = layer() if kind == "threshold" else topk(), normal(N, C), np.arange(N) % 4 > 0
    for term in (ex.sdl(), ex.ghost(r=0), ex.surprise_min(r=0)):
        losses = []
        for given in ((x, valid), (x[valid], None)):
            with ex.observe(m) as layers:
                y = m(gw.tensor(given[0]), None if given[1] is None else gw.tensor(given[1]))
                (y * y).sum().backward()
            losses.append(term.loss(layers).item())
            assert not ex.ghost(r=2).ghosts(layers[0]).numpy()[~layers[0].mask.numpy().any(1)].any()
        assert losses[0] == pytest.approx(losses[1], rel=1e-10, abs=1e-15)


def test_without_ghosts_the_ghost_loss_is_0():
    assert ex.ghost(r=0).loss(step(layer(), normal(N, C))).item() == 0


# -- surprise_min and long_surprise ------------------------------------------------------------------------------------
def test_surprise_min_is_its_formula_with_statistics_of_the_batch():
    m, x = layer(), normal(N, C)
    (r,) = step(m, x)
    term = ex.surprise_min(w_ce=0.7, w_kl=0.4, beta=0.5, weight=0.2, r=1, seed=2)
    seen = term.ghosts(r).numpy() | routing(r)[1]
    s, u = (t.numpy() for t in r.probe(gw.tensor(seen)))
    total, ties = 0.0, 0
    scaled = []
    for v in (s, u):
        centred = [v[n, seen[n]] - v[n, seen[n]].mean() for n in range(N)]
        rms = np.sqrt(np.mean(np.concatenate(centred) ** 2))
        scaled.append([c / rms for c in centred])
    for n in range(N):
        q = scaled[0][n] - 0.5 * scaled[1][n]
        ties += len(set(q.tolist())) < len(q)
        logits = routing(r)[0][n, seen[n]]
        log_share = logits - np.log(np.exp(logits).sum())
        wanted = np.exp(-q) / np.exp(-q).sum()
        total += -0.7 * log_share[np.argmin(q)] + 0.4 * (wanted * (np.log(wanted) - log_share)).sum()
    assert ties == 0  # per token, two candidates would tie in half of all cases
    assert term.loss([r]).item() == pytest.approx(0.2 * total / N, rel=1e-8)


def test_long_surprise_is_recomputed_from_the_state_of_adam():
    m, x = layer(), normal(N, C)
    opt = optim.Adam(m.parameters(), lr=1e-3)
    layers = step(m, x)
    opt.step()
    term = ex.long_surprise(optimizer=opt, weight=0.5)
    found = term.loss(layers).item()
    roots = [[np.sqrt(opt.state_of(p).moments["v"].numpy()) for p in e.operands()] for e in m.experts]
    cost = np.array([np.concatenate([v.reshape(-1) for v in r]).mean() for r in roots])
    cost /= cost.mean()
    np.testing.assert_allclose(term.figures["router.cost"].numpy(), cost, rtol=1e-6)
    wanted = 0.5 * ((cost - 1) * sigmoid(routing(layers[0])[0])).sum(1).mean()
    assert found == pytest.approx(wanted, rel=1e-5)


# -- arguments ---------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("make", [
    lambda: ex.ghost(r=-1), lambda: ex.ghost(weight=-0.1), lambda: ex.sdl(target=0), lambda: ex.sdl(count=-1.0),
    lambda: ex.surprise_min(beta=-1.0), lambda: ex.surprise(r=0.5),  # pyright: ignore[reportArgumentType]
])  # fmt: skip
def test_invalid_settings_are_refused(make):
    with pytest.raises(UsageError, match="out of range"):
        make()


def test_as_many_ghosts_as_experts_are_refused():
    with pytest.raises(UsageError, match="ghosts"):
        ex.ghost(r=E).loss(step(layer(), normal(N, C)))


def test_a_pattern_chooses_layers():
    m = nn.Sequential(layer(), layer())
    layers = step(m, normal(N, C))
    assert [r.path for r in layers] == ["0.router", "1.router"]
    alone = [ex.sdl(layers=f"{i}.*").loss(layers).item() for i in range(2)]
    assert ex.sdl().loss(layers).item() == pytest.approx(sum(alone))


# -- routers that take the k best experts ------------------------------------------------------------------------------
TOPK = [{}, {"normalize": False}, {"score": "sigmoid"}]


def topk(**options) -> nn.MoE:
    gw.manual_seed(0)
    return nn.MoE(C, I, E, 2, kind="mlp", act="gelu", name="m.", seed=0, **options).to(float64)


def scores_of(m: nn.MoE, x: np.ndarray) -> np.ndarray:
    z = x @ m.router.weight.numpy().T
    return sigmoid(z) if m.router.score == "sigmoid" else np.exp(z) / np.exp(z).sum(-1, keepdims=True)


@pytest.mark.parametrize("options", TOPK, ids=str)
def test_the_gain_of_a_ghost_of_a_topk_router_is_the_one_sided_derivative_of_its_score(options):
    m, x = topk(**options), normal(N, C)
    (r,) = step(m, x)
    s, mask = scores_of(m, x), r.mask.numpy()
    np.testing.assert_array_equal(mask.sum(1), 2)
    np.testing.assert_allclose(r.scores.numpy(), s, rtol=1e-12)
    g, y = normal(N, C, seed=3), m(gw.tensor(x)).numpy()
    _, gain = r.probe(gw.tensor(np.ones((N, E), bool)))
    outputs = np.stack([e.down(nn.functional.gelu(e.up(gw.tensor(x)))).numpy() for e in m.experts], 1)
    assert r.normalized == m.router.normalize
    total = (s * mask).sum(1) if r.normalized else np.ones(N)
    advantage = gain.numpy() + ((g * y).sum(1, keepdims=True) if r.normalized else 0)
    delta = 1e-7
    for e in range(E):
        more = s * mask
        more[:, e] += delta
        share = more / (more.sum(1, keepdims=True) if r.normalized else 1)
        slope = (g * (np.einsum("ne,nec->nc", share, outputs) - y)).sum(1) / delta
        free = ~mask[:, e]
        np.testing.assert_allclose((-advantage[:, e] / total)[free], slope[free], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("options", TOPK, ids=str)
def test_the_ghost_loss_of_a_topk_router_is_its_formula_and_reaches_the_router_alone(options):
    m, x, term = topk(**options), normal(N, C), ex.ghost(weight=0.3, r=2, seed=5)
    (r,) = step(m, x)
    ghosts, mask = term.ghosts(r).numpy(), r.mask.numpy()
    np.testing.assert_array_equal(ghosts.sum(1), 2)
    assert not (ghosts & mask).any()
    _, gain = r.probe(gw.tensor(ghosts | mask))
    a = gain.numpy()
    if m.router.normalize:
        a = a + (normal(N, C, seed=3) * m(gw.tensor(x)).numpy()).sum(1, keepdims=True)
    scaled = np.clip(a / np.sqrt((a[mask] ** 2).mean()), -3, 3) * ghosts
    for p in m.parameters():
        p.grad = None
    loss = term.loss([r])
    assert loss.item() == pytest.approx(-0.3 * (scaled * scores_of(m, x)).sum() / N, rel=1e-8)
    loss.backward()
    assert {name for name, p in m.named_parameters() if p.grad is not None} == {"router.weight"}
    w = m.router.weight.numpy().copy()

    def value(at: np.ndarray) -> float:
        m.router.weight.assign(gw.tensor(at))
        return -0.3 * (scaled * scores_of(m, x)).sum() / N

    slopes = np.zeros_like(w)
    for i in np.ndindex(*w.shape):
        up, down = w.copy(), w.copy()
        up[i], down[i] = up[i] + 1e-6, down[i] - 1e-6
        slopes[i] = (value(up) - value(down)) / 2e-6
    np.testing.assert_allclose(grad_of(m.router.weight).numpy(), slopes, rtol=1e-5, atol=1e-9)


def test_terms_of_thresholds_pass_over_layers_of_other_routers():
    m = nn.Sequential(layer(), topk())
    layers = step(m, normal(N, C))
    assert [type(r) for r in layers] == [ex.ThresholdLayer, ex.TopKLayer]
    assert ex.sdl().loss(layers).item() == ex.sdl().loss(layers[:1]).item()
    assert ex.ghost().loss(layers[1:]).item() != 0
    measured = ex.surprise()
    measured.loss(layers)
    assert {"0.router.surprise", "1.router.surprise"} <= measured.figures.keys()
