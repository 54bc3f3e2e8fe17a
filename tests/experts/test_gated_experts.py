"""Experts with a gate at 0: results as before, the gate's gradient against differences, and how it opens."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from moe import EXPERTS, ids, logits, program

import graphwright as gw
from graphwright import experts as ex
from graphwright import nn, optim
from graphwright.nn import ThresholdRouter
from graphwright.program.program import Program

LAYER, KEY = "layers.0.mlp", "gates.logits"
E, C, N = 5, 6, 60
OPTIONS = [{"null": False}, {"null": True}, {"null": False, "ste": True}]


def normal(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape)


def mixture(dtype: str = "float64", *, padded: bool = False, **options) -> Program:
    m = nn.MoE(C, 4, E, kind="mlp", act="gelu", router=ThresholdRouter(C, E, 2, **options), name="m", seed=0)
    for i, expert in enumerate(m.experts):
        expert.threshold.assign(gw.tensor(np.float32(0.05 + 0.02 * i)))
    given = (normal(N, C).astype(dtype), *([valid()] if padded else []))
    return gw.trace(m.to(dtype), *given)


def valid() -> np.ndarray:
    return np.arange(N) % 5 > 0


def feeds(p: Program) -> dict[str, Any]:
    kind = p.spec("x").dtype.name
    return {"x": normal(N, C).astype(kind), **({"valid": valid()} if "valid" in p.input_names() else {})}


def seen(p: Program, *names: str) -> list[np.ndarray]:
    run = p.run(feeds(p))
    return [run.value(name).to_numpy() for name in names]


def out(p: Program) -> np.ndarray:
    return p.run(feeds(p))["out"].to_numpy()


def add(p: Program, **options) -> None:
    (name,) = ex.routed_layers(p)
    with p.edit("one more") as e:
        assert ex.add(e, name, birth="gate", **options) == E


def with_gate(p: Program, value: float) -> Program:
    """A copy whose last gate has this value."""
    other = p.fork()
    with other.edit("set the gate") as e:
        e.set_weight(KEY, np.append(p.weights[KEY].numpy()[:-1], value))
    return other


def gradient(
    p: Program, output: str, u: np.ndarray, given: dict[str, Any], sizes: dict[str, int] | None = None
) -> np.ndarray:
    """The gradient of Σ u·output with respect to the gates."""
    other = p.fork()
    with other.edit("a loss") as e:
        made = e.add("mul", other.output(output), e.const("u", u))
        e.set_outputs(loss=e.add("sum", made, axes=tuple(range(len(other.spec(made).shape))), keepdims=False))
    return other.grad("loss", [KEY], sizes).run(given, keep="outputs")[f"grad.{KEY}"].to_numpy()


def slope(f, h: float = 1e-5) -> float:
    """f'(0) from the right, by three values."""
    return (-3 * f(0.0) + 4 * f(h) - f(2 * h)) / (2 * h)


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("like", [None, 1])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_a_gate_at_0_changes_nothing_and_its_gradient_is_the_one_sided_difference(options, like, padded):
    p = mixture(padded=padded, **options)
    before = out(p)
    add(p, like=like)
    np.testing.assert_allclose(out(p), before, rtol=0, atol=1e-12)
    mask, hits, unrouted = seen(p, "router.mask", "router.hits", "router.unrouted")
    assert mask[:, E].sum() > 10
    assert not hits[:, E].any()
    assert not mask[~valid()].any() or not padded
    u = normal(N, C, seed=9)
    u[unrouted] = 0  # where the new expert alone is above its threshold, the choice jumps
    difference = slope(lambda z: float((out(with_gate(p, z)) * u).sum()))
    found = gradient(p, "out", u, feeds(p))
    assert abs(difference) > 1e-2
    np.testing.assert_allclose(found[E], difference, rtol=1e-6)


def expert(p: Program, i: int, x: np.ndarray) -> np.ndarray:
    """Results of one expert of `mixture`, by torch."""
    up, down = (torch.tensor(p.weights[f"experts.{i}.{name}.weight"].numpy()) for name in ("up", "down"))
    return (torch.nn.functional.gelu(torch.tensor(x) @ up.T) @ down.T).numpy()


@pytest.mark.parametrize("null", [False, True])
def test_the_gradient_of_a_gate_at_0_equals_the_formula(null):
    """d/dg of Σ w·f with w = g·s/S is s/S·(f - y), S = Σs of the other experts; with the null share S has ln 2 more."""
    p, u = mixture(null=null), normal(N, C, seed=9)
    add(p, seed=3)
    x, y, (mask, logits) = feeds(p)["x"], out(p), seen(p, "router.mask", "router.logits")
    s = np.log1p(np.exp(logits))
    total = (s * mask)[:, :E].sum(1) + np.log(2) * null
    slopes = (s[:, E] / total)[:, None] * (expert(p, E, x) - y)
    np.testing.assert_allclose(gradient(p, "out", u, feeds(p))[E], (slopes * u)[mask[:, E]].sum(), rtol=1e-10)
    narrow = mixture("float32", null=null)
    add(narrow, seed=3)
    small = gradient(narrow, "out", 1e-6 * u.astype("f4"), feeds(narrow))[E]
    np.testing.assert_allclose(small, 1e-6 * (slopes * u)[mask[:, E]].sum(), rtol=1e-3)


def test_usage_leaves_out_the_tokens_of_a_closed_expert():
    p = mixture(padded=True)
    before = ex.usage(p, feeds(p))
    add(p)
    assert seen(p, "router.mask")[0][:, E].any()
    (was,), (now,) = before.layers.values(), ex.usage(p, feeds(p)).layers.values()
    np.testing.assert_array_equal(now.count, [*was.count, 0])
    np.testing.assert_array_equal(now.per_token, [*was.per_token, 0])
    np.testing.assert_array_equal(now.together[:E, :E], was.together)
    np.testing.assert_allclose(now.weight, [*was.weight, 0], rtol=1e-12)
    assert (now.unrouted, now.mean_k, now.dead) == (was.unrouted, was.mean_k, [*was.dead, E])


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_a_closed_expert_takes_no_token_that_is_far_below_all_thresholds(dtype):
    p = mixture(dtype)
    with p.edit("open experts far away") as e:
        for i in range(E):
            e.set_weight(f"experts.{i}.threshold", np.array(3.0))
            e.set_weight(f"experts.{i}.prototype", p.weights["experts.0.prototype"].numpy())
    before = out(p)
    assert seen(p, "router.logits")[0].max(1).min() < -18
    add(p)
    with p.edit("above the threshold of every token") as e:
        e.set_weight(f"experts.{E}.threshold", np.array(-3.0))
    assert not seen(p, "router.mask")[0][:, E].any()
    np.testing.assert_array_equal(out(p), before)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_a_token_above_the_threshold_of_a_closed_expert_alone_takes_the_fallback(options):
    p = mixture(**options)
    before = out(p)
    unrouted, mask = seen(p, "router.unrouted", "router.mask")
    assert unrouted.any()
    add(p)
    with p.edit("above the threshold of every token") as e:
        e.set_weight("experts.5.threshold", np.array(-3.0))
    np.testing.assert_allclose(out(p), before, rtol=0, atol=1e-12)
    now, wider = seen(p, "router.unrouted", "router.mask")
    np.testing.assert_array_equal(now, unrouted)
    np.testing.assert_array_equal(wider[:, :E], mask)
    np.testing.assert_array_equal(wider[:, E], ~unrouted)


def trained(p: Program, target: np.ndarray, steps: int) -> list[float]:
    """Losses of steps that train the gates alone."""
    opt = optim.Adam([p.weights[KEY]], lr=0.05)
    step = gw.compile_step(p, lambda out, target: (out - target).square().mean(), opt, {**feeds(p), "target": target})
    return [step(**feeds(p), target=target).item() for _ in range(steps)]


@pytest.mark.parametrize("options", OPTIONS[:2], ids=str)
def test_training_opens_the_gate_of_a_useful_expert_and_keeps_that_of_another_near_0(options):
    p = mixture("float32", **options)
    narrow = out(p)
    add(p)
    wide = out(with_gate(p, 1.0))
    assert np.abs(wide - narrow).max() > 1e-2
    for target, low, high in ((wide, 0.5, 2.0), (2 * narrow - wide, -10.0, 0.05)):
        q = p.fork()
        losses = trained(q, target, 50)
        assert low < q.weights[KEY].numpy()[E] < high
        assert losses[-1] < losses[0] or target is not wide


def test_a_gate_below_0_is_closed_and_returns():
    p = mixture("float32")
    before = out(p)
    add(p)
    target, q = out(with_gate(p, 1.0)), with_gate(p, -0.2)
    np.testing.assert_allclose(out(q), before, rtol=0, atol=1e-6)
    trained(q, target, 50)
    assert q.weights[KEY].numpy()[E] > 0.1


@pytest.mark.parametrize("normalize", [True, False])
def test_the_gradient_of_a_gate_at_0_equals_the_difference_with_a_top_k_router(normalize):
    """The expert is not among the k best, so that only the sum of all scores depends on its gate."""
    p, given = program(layers=1, normalize=normalize), {"ids": ids()}
    before = logits(p)
    with p.edit("one more") as e:
        ex.add(e, LAYER, birth="gate")
    np.testing.assert_allclose(logits(p), before, rtol=0, atol=1e-12)
    assert EXPERTS not in p.run(given).value(ex.routed_layer(p, LAYER).choice).to_numpy()
    u = normal(before.shape[-1], seed=9)
    difference = slope(lambda z: float((logits(with_gate(p, z)) * u).sum()))
    found = gradient(p, "logits", u, given, dict(zip("BT", before.shape, strict=False)))[EXPERTS]
    assert normalize == (abs(difference) < 1e-8)
    np.testing.assert_allclose(found, difference, rtol=1e-6, atol=1e-8)
