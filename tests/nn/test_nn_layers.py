"""Layers against torch: forward, and gradients of input and weights, with and without each."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import graphwright as gw
from graphwright import nn
from graphwright.array import from_numpy
from graphwright.autograd import Tensor
from graphwright.errors import UsageError
from values import grad_of

X = np.random.default_rng(0).normal(size=(2, 3, 5)).astype(np.float32)
LAYERS = {
    "linear": (lambda: nn.Linear(5, 4), lambda: torch.nn.Linear(5, 4)),
    "linear-no-bias": (lambda: nn.Linear(5, 4, bias=False), lambda: torch.nn.Linear(5, 4, bias=False)),
    "rms": (lambda: nn.RMSNorm(5, 1e-3), lambda: torch.nn.RMSNorm(5, 1e-3)),
    "relu": (nn.ReLU, torch.nn.ReLU),
    "silu": (nn.SiLU, torch.nn.SiLU),
    "tanh": (nn.Tanh, torch.nn.Tanh),
    "sequential": (
        lambda: nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 2)),
        lambda: torch.nn.Sequential(torch.nn.Linear(5, 6), torch.nn.Tanh(), torch.nn.Linear(6, 2)),
    ),
}


@pytest.mark.parametrize("input_grad", [True, False])
@pytest.mark.parametrize("name", LAYERS)
def test_equals_torch(name, input_grad):
    mine, theirs = (make() for make in LAYERS[name])
    with torch.no_grad():
        for (own, p), q in zip(mine.named_parameters(), theirs.parameters(), strict=True):
            assert p.shape == tuple(q.shape), own
            q.copy_(torch.from_numpy(p.data.to_numpy().copy()))
            if "rms" in name:
                q.mul_(torch.arange(1.0, 6.0))
                p.assign(Tensor(from_numpy(q.numpy().copy())))
    x = Tensor(from_numpy(X.copy()), requires_grad=input_grad)
    y = torch.from_numpy(X.copy()).requires_grad_(input_grad)
    a, b = mine(x), theirs(y)
    np.testing.assert_allclose(a.numpy(), b.detach().numpy(), rtol=1e-5, atol=1e-6)
    if not b.requires_grad:
        return
    (a * a * a).sum().backward()
    (b**3).sum().backward()
    assert (x.grad is None) == (not input_grad)
    if input_grad:
        np.testing.assert_allclose(grad_of(x).numpy(), grad_of(y).numpy(), rtol=2e-4, atol=1e-5)
    for p, q in zip(mine.parameters(), theirs.parameters(), strict=True):
        np.testing.assert_allclose(grad_of(p).numpy(), grad_of(q).numpy(), rtol=2e-4, atol=1e-5)


def test_embedding_equals_torch():
    mine, theirs = nn.Embedding(7, 4), torch.nn.Embedding(7, 4)
    with torch.no_grad():
        theirs.weight.copy_(torch.from_numpy(mine.weight.data.to_numpy().copy()))
    ids = np.array([[1, 1, 6], [0, 1, 3]])
    a, b = mine(Tensor(from_numpy(ids))), theirs(torch.from_numpy(ids))
    np.testing.assert_array_equal(a.numpy(), b.detach().numpy())
    (a * a).sum().backward()
    (b * b).sum().backward()
    np.testing.assert_allclose(grad_of(mine.weight).numpy(), grad_of(theirs.weight).numpy(), rtol=1e-6)


# -- loss --------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("ignore", [-100, 2])
@pytest.mark.parametrize("shape", [(6, 4), (2, 3, 4)])
def test_cross_entropy_equals_torch(reduction, ignore, shape):
    rng = np.random.default_rng(1)
    scores = (rng.normal(size=shape) * 5).astype(np.float32)
    scores.reshape(-1)[:3] = [1000.0, -1000.0, 0.0]
    targets = rng.integers(0, 4, shape[:-1])
    targets.reshape(-1)[1:3] = ignore
    x, y = Tensor(from_numpy(scores.copy()), requires_grad=True), torch.from_numpy(scores.copy()).requires_grad_()
    a = nn.functional.cross_entropy(x, Tensor(from_numpy(targets)), ignore_index=ignore, reduction=reduction)
    flat = torch.nn.functional.cross_entropy(
        y.reshape(-1, 4), torch.from_numpy(targets).reshape(-1), ignore_index=ignore, reduction=reduction
    )
    b = flat.reshape(targets.shape) if reduction == "none" else flat
    np.testing.assert_allclose(a.numpy(), b.detach().numpy(), rtol=1e-5, atol=1e-6)
    (a * 7.0).sum().backward()
    (b * 7.0).sum().backward()
    np.testing.assert_allclose(grad_of(x).numpy(), grad_of(y).numpy(), rtol=1e-4, atol=1e-6)


def test_cross_entropy_of_nothing_is_nan_as_in_torch():
    targets = Tensor(from_numpy(np.full(3, -100)))
    assert np.isnan(nn.functional.cross_entropy(Tensor(from_numpy(np.ones((3, 4), np.float32))), targets).item())


def test_unknown_reduction():
    with pytest.raises(UsageError, match="mean, sum or none"):
        nn.functional.cross_entropy(Tensor(from_numpy(X[0])), Tensor(from_numpy(np.zeros(3, int))), reduction="max")


# -- first values ------------------------------------------------------------------------------------------------------
def test_first_values():
    linear = nn.Linear(400, 300, name="a.")
    bound = 1 / 20
    w = linear.weight.data.to_numpy()
    assert np.abs(w).max() <= bound
    assert w.std() == pytest.approx(bound / 3**0.5, rel=0.02)
    assert nn.Embedding(400, 300).weight.data.to_numpy().std() == pytest.approx(1.0, rel=0.02)
    np.testing.assert_array_equal(w, nn.Linear(400, 300, name="a.").weight.data.to_numpy())
    assert not np.array_equal(w, nn.Linear(400, 300, name="b.").weight.data.to_numpy())
    assert not np.array_equal(w, nn.Linear(400, 300, name="a.", seed=1).weight.data.to_numpy())
    assert (nn.RMSNorm(3).weight.data.to_numpy() == 1).all()


def test_xor_is_learned():
    from graphwright.optim import AdamW

    net = nn.Sequential(nn.Linear(2, 8, name="1."), nn.Tanh(), nn.Linear(8, 2, name="2."))
    x = np.array([[0, 0], [0, 1], [1, 0], [1, 1]], np.float32)
    y = np.array([0, 1, 1, 0])
    opt = AdamW(net, 0.05, weight_decay=0.0)

    @gw.compile
    def step(x, y):
        opt.zero_grad()
        loss = nn.functional.cross_entropy(net(x), y)
        loss.backward()
        opt.step()
        return loss

    losses = [step(x, y).item() for _ in range(150)]
    assert step.traces == 1
    assert losses[-1] < 0.05 < losses[0]
