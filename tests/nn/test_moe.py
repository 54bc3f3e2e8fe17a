"""Mixture of experts against a loop over tokens in torch; balance and z losses by their formulas."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
import torch
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

import graphwright as gw
from graphwright import nn
from graphwright.array import float32, from_numpy
from graphwright.autograd import Tensor
from graphwright.errors import UsageError
from graphwright.nn import balance_loss, z_loss
from values import grad_of

rng = np.random.default_rng(0)
X = rng.normal(size=(2, 5, 6))
ACTS = {"silu": torch.nn.functional.silu, "gelu": torch.nn.functional.gelu}


def layer(**options) -> nn.MoE:
    m = nn.MoE(6, 4, 5, 2, **options).to("float64")
    for k, p in enumerate(m.parameters()):
        p.assign(Tensor(from_numpy(np.random.default_rng(k).normal(size=p.shape))))
    return m


def reference(m: nn.MoE, w: dict[str, torch.Tensor], x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Token by token, expert by expert."""
    linear = torch.nn.functional.linear
    logits = x.reshape(-1, 6) @ w["router.weight"].T
    scores = torch.softmax(logits, -1) if m.router.score == "softmax" else torch.sigmoid(logits)
    rows = []
    for token, score in zip(x.reshape(-1, 6), scores, strict=True):
        chosen = torch.argsort(score, descending=True, stable=True)[: m.router.k]
        weights = score[chosen]
        if m.router.normalize:
            weights = weights / weights.sum()
        total = torch.zeros_like(token)
        for p, e in zip(weights, chosen, strict=True):
            part = {n: (w[f"experts.{e}.{n}.weight"], w.get(f"experts.{e}.{n}.bias")) for n in ("gate", "up", "down")
                    if f"experts.{e}.{n}.weight" in w}  # fmt: skip
            inner = ACTS[m.act](linear(token, *part.get("gate", part["up"])))
            inner = inner * linear(token, *part["up"]) if "gate" in part else inner
            total = total + p * linear(inner, *part["down"])
        rows.append(total)
    return torch.stack(rows).reshape(x.shape), logits, scores


OPTIONS = [
    {"score": "softmax", "normalize": True},
    {"score": "sigmoid", "normalize": False, "bias": True},
    {"kind": "mlp", "act": "gelu"},
    {"kind": "mlp", "bias": True},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_moe_matches_a_loop_over_tokens(options):
    m = layer(**options)
    w = {n: torch.from_numpy(p.numpy().copy()).requires_grad_() for n, p in m.named_parameters()}
    x, y = Tensor(from_numpy(X.copy()), requires_grad=True), torch.from_numpy(X.copy()).requires_grad_()
    routing = m.route(x.reshape(-1, 6))
    mine = m.mix(x, routing)
    theirs, logits, scores = reference(m, w, y)
    np.testing.assert_allclose(mine.numpy(), theirs.detach().numpy(), rtol=1e-10)
    np.testing.assert_array_equal(mine.numpy(), m(x).numpy())
    share = torch.bincount(torch.from_numpy(routing.choice.numpy().reshape(-1).copy()), minlength=5).double() / 20
    aux = 5 * (share * scores.mean(0)).sum() + (torch.logsumexp(logits, -1) ** 2).mean()
    ours = balance_loss(routing) + z_loss(routing)
    assert ours.item() == pytest.approx(aux.item(), rel=1e-12)
    ((mine * mine).sum() + ours).backward()
    ((theirs * theirs).sum() + aux).backward()
    np.testing.assert_allclose(grad_of(x).numpy(), grad_of(y).numpy(), rtol=1e-8, atol=1e-9)
    for n, p in m.named_parameters():
        np.testing.assert_allclose(grad_of(p).numpy(), grad_of(w[n]).numpy(), rtol=1e-8, atol=1e-9)


def test_an_expert_without_tokens_gets_zero_gradient_and_ties_go_to_the_lower_id():
    m = layer()
    m.router.weight.assign(Tensor(from_numpy(np.zeros((5, 6)))))
    routing = m.route(Tensor(from_numpy(X.reshape(-1, 6))))
    assert routing.choice.tolist() == [[0, 1]] * 10
    assert routing.counts.tolist() == [10, 10, 0, 0, 0]
    m(Tensor(from_numpy(X))).sum().backward()
    for number, expert in enumerate(m.experts):
        assert all(grad_of(p).numpy().any() == (number < 2) for p in expert.parameters())


def test_padding_has_no_experts_and_changes_no_other_row_or_figure():
    m, valid = layer(), np.array([[True] * 5, [True, False, True, False, False]])
    x = Tensor(from_numpy(X.copy()))
    alone = m.route(Tensor(from_numpy(X[valid])))
    routing = m.route(x.reshape(-1, 6), gw.tensor(valid).reshape(-1))
    assert routing.counts.tolist() == alone.counts.tolist()
    for loss in (balance_loss, z_loss):
        assert loss(routing).item() == pytest.approx(loss(alone).item(), rel=1e-12)
    made = m(x, gw.tensor(valid)).numpy()
    np.testing.assert_allclose(made[valid], m(x).numpy()[valid], rtol=0, atol=1e-14)  # of products of other sizes
    assert not made[~valid].any()


def test_balance_loss_equals_that_of_transformers_pooled_over_layers():
    layers, tokens = [layer(), layer(score="softmax")], [X.reshape(-1, 6), X[::-1].reshape(-1, 6) * 2]
    found = [m.route(Tensor(from_numpy(x.copy()))) for m, x in zip(layers, tokens, strict=True)]
    logits: Any = tuple(torch.from_numpy(r.logits.numpy().copy()) for r in found)
    theirs = load_balancing_loss_func(logits, 5, 2)
    assert balance_loss(found, like="transformers").item() == pytest.approx(float(theirs), rel=1e-6)
    assert balance_loss(found).item() == pytest.approx(float(theirs) / 2, rel=1e-6)


def test_balance_loss_is_1_for_equal_use_and_e_for_one_expert():
    m = nn.MoE(4, 3, 4, 1).to("float64")
    m.router.weight.assign(Tensor(from_numpy(50 * np.eye(4))))
    even = m.route(Tensor(from_numpy(np.eye(4))))
    assert balance_loss(even).item() == pytest.approx(1.0)
    alone = m.route(Tensor(from_numpy(np.eye(4)[[1, 1, 1]])))
    assert balance_loss(alone).item() == pytest.approx(4.0)


def test_a_compiled_step_equals_the_eager_one_and_a_new_routing_needs_no_new_plan():
    m = nn.MoE(6, 4, 5, 2)
    run = gw.compile(m, executor="aten")
    for k in range(3):
        x = np.random.default_rng(k).normal(size=(2, 5, 6)).astype("f4")
        np.testing.assert_array_equal(run(x).numpy(), m(Tensor(from_numpy(x))).numpy())
    assert run.traces == 1


def test_a_block_takes_moe_as_feed_forward():
    block = nn.TransformerBlock(nn.MultiHeadAttention(6, 2), nn.MoE(6, 4, 3, 2), 6)
    out = block(Tensor(from_numpy(X.astype("f4"))))
    out.sum().backward()
    assert all(p.grad is not None for p in block.parameters())


@pytest.mark.parametrize("wrong", [{"k": 0}, {"k": 6}, {"k": 2, "score": "max"}])
def test_invalid_expert_counts_are_refused(wrong):
    with pytest.raises(UsageError, match="experts"):
        nn.MoE(6, 4, 5, **wrong)


@pytest.mark.parametrize("how", ["weights", "autocast"])
def test_the_choice_in_16_bits_is_that_of_float32_on_the_same_tokens(how):
    m = nn.MoE(16, 4, 8, 2)
    x = gw.tensor(np.random.default_rng(0).normal(size=(10_000, 16))).to("bfloat16")
    m = m.to("bfloat16") if how == "weights" else m
    w = m.router.weight.numpy("float32")
    z = x.numpy("float32") @ w.T
    with gw.amp.autocast("bfloat16") if how == "autocast" else nullcontext():
        routing = m.route(x if how == "weights" else x.to("float32"))
    assert routing.logits.dtype is float32
    ids = np.argsort(-z, axis=1, kind="stable")[:, :2]
    gap = -np.sort(-z, axis=1)
    clear = (np.abs(np.diff(gap[:, :3], axis=1)) > 1e-6).all(axis=1)
    assert clear.mean() > 0.99
    np.testing.assert_array_equal(routing.choice.numpy()[clear], ids[clear])
