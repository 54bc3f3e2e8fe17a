"""Mixture of experts against a loop over tokens in torch; balance and z losses by their formulas."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import graphwright as gw
from graphwright import nn
from graphwright.array import from_numpy
from graphwright.autograd import Tensor
from graphwright.errors import UsageError
from graphwright.nn.transformer import balance_loss, z_loss
from values import grad_of

rng = np.random.default_rng(0)
X = rng.normal(size=(2, 5, 6))


def layer(**options) -> nn.MoE:
    m = nn.MoE(6, 4, 5, 2, **options).to("float64")
    for k, p in enumerate(m.parameters()):
        p.assign(Tensor(from_numpy(np.random.default_rng(k).normal(size=p.shape))))
    return m


def reference(m: nn.MoE, w: dict[str, torch.Tensor], x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Token by token, expert by expert."""
    logits = x.reshape(-1, 6) @ w["router.weight"].T
    scores = torch.softmax(logits, -1) if m.score == "softmax" else torch.sigmoid(logits)
    rows = []
    for token, score in zip(x.reshape(-1, 6), scores, strict=True):
        chosen = torch.argsort(score, descending=True, stable=True)[: m.k]
        weights = score[chosen]
        if m.normalize:
            weights = weights / weights.sum()
        parts = [
            p * ((torch.nn.functional.silu(token @ w["gate"][e]) * (token @ w["up"][e])) @ w["down"][e])
            for p, e in zip(weights, chosen, strict=True)
        ]
        rows.append(torch.stack(parts).sum(0))
    return torch.stack(rows).reshape(x.shape), logits, scores


@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
@pytest.mark.parametrize("normalize", [True, False])
def test_moe_matches_a_loop_over_tokens(score, normalize):
    m = layer(score=score, normalize=normalize)
    w = {n: torch.from_numpy(p.numpy().copy()).requires_grad_() for n, p in m.named_parameters()}
    x, y = Tensor(from_numpy(X.copy()), requires_grad=True), torch.from_numpy(X.copy()).requires_grad_()
    routing = m.route(x.reshape(-1, 6))
    mine = m.mix(x, routing)
    theirs, logits, scores = reference(m, w, y)
    np.testing.assert_allclose(mine.numpy(), theirs.detach().numpy(), rtol=1e-10)
    np.testing.assert_array_equal(mine.numpy(), m(x).numpy())
    share = torch.bincount(torch.from_numpy(routing.ids.numpy().reshape(-1).copy()), minlength=5).double() / 20
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
    assert routing.ids.tolist() == [[0, 1]] * 10
    assert routing.counts.tolist() == [10, 10, 0, 0, 0]
    m(Tensor(from_numpy(X))).sum().backward()
    for p in (m.gate, m.up, m.down):
        assert grad_of(p).numpy()[:2].any(axis=(1, 2)).all()
        assert not grad_of(p).numpy()[2:].any()


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
