"""Lion and Muon against their definitions in numpy, and Muon against torch's, which iterates in bfloat16."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import graphwright as gw
from graphwright.array import from_numpy
from graphwright.autograd import Parameter, Tensor
from graphwright.errors import ShapeError, UsageError
from graphwright.optim import AdamW, Lion, Muon

SHAPES = [(5, 3), (2, 7), (4, 4)]
STEPS = 60
Host = np.ndarray


def lion(p: Host, g: Host, m: Host, lr: float, betas=(0.9, 0.99), weight_decay=0.0, maximize=False) -> Any:
    """Chen et al. 2023, "Symbolic Discovery of Optimization Algorithms", algorithm 2."""
    g = -g if maximize else g
    update = np.sign(betas[0] * m + (1 - betas[0]) * g)
    return p - lr * (update + weight_decay * p), betas[1] * m + (1 - betas[1]) * g


def zeropower(g: Host, steps: int) -> Host:
    """`zeropower_via_newtonschulz5` of Jordan et al. 2024, in the dtype of g."""
    a, b, c = 3.4445, -4.7750, 2.0315
    x = g.T if g.shape[0] > g.shape[1] else g
    x = x / max(np.linalg.norm(x), 1e-7)
    for _ in range(steps):
        s = x @ x.T
        x = a * x + (b * s + c * s @ s) @ x
    return x.T if g.shape[0] > g.shape[1] else x


def muon(
    p: Host,
    g: Host,
    b: Host,
    lr: float,
    weight_decay=0.1,
    momentum=0.95,
    nesterov=True,
    iterations=5,
    adjust="original",
    maximize=False,
) -> tuple[Host, Host]:
    """Jordan et al. 2024, `muon_update`, with the decay and adjustment of Liu et al. 2025, equation 4."""
    g = -g if maximize else g
    b = momentum * b + (1 - momentum) * g
    update = zeropower(momentum * b + (1 - momentum) * g if nesterov else b, iterations)
    r, c = p.shape
    scale = max(1, r / c) ** 0.5 if adjust == "original" else 0.2 * max(r, c) ** 0.5
    return p * (1 - lr * weight_decay) - lr * scale * update, b


RULES: dict[str, tuple[Any, Any]] = {"Lion": (Lion, lion), "Muon": (Muon, muon)}
OPTIONS: list[tuple[str, dict[str, Any]]] = [
    ("Lion", {"lr": 1e-4}),
    ("Lion", {"lr": 0.01, "betas": (0.5, 0.8), "weight_decay": 0.3}),
    ("Lion", {"lr": 0.01, "betas": (0.0, 0.0), "maximize": True}),
    ("Muon", {"lr": 1e-3}),
    ("Muon", {"lr": 0.02, "nesterov": False, "momentum": 0.5, "weight_decay": 0.0}),
    ("Muon", {"lr": 0.02, "adjust": "match_rms_adamw", "iterations": 3, "maximize": True}),
]


def values(seed: int, kind: str) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    return [rng.normal(size=s).astype(kind) for s in SHAPES]


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("kind", ["float32", "float64"])
@pytest.mark.parametrize(("name", "options"), OPTIONS, ids=str)
def test_lion_and_muon_match_their_definitions(name: str, options: dict[str, Any], kind: str, compiled: bool) -> None:
    make, rule = RULES[name]
    mine = [Parameter(from_numpy(v), name=f"p{i}") for i, v in enumerate(values(0, kind))]
    opt = make(mine, **options)

    def step(*grads: Tensor) -> None:
        opt.zero_grad()
        sum(((p * g).sum() for p, g in zip(mine, grads, strict=True)), gw.tensor(0.0)).backward()
        opt.step()

    run = gw.compile(step) if compiled else step
    reference = [(v.astype("f8"), np.zeros(v.shape)) for v in values(0, kind)]
    for k in range(STEPS):
        grads = values(k + 1, kind)
        run(*(gw.tensor(g) for g in grads))
        reference = [rule(p, g.astype("f8"), m, **options) for (p, m), g in zip(reference, grads, strict=True)]
    rtol = 3e-5 if kind == "float32" else 1e-11
    for p, (truth, moment) in zip(mine, reference, strict=True):
        np.testing.assert_allclose(p.numpy(), truth, rtol=rtol, atol=rtol)
        (own,) = opt.state_of(p).moments.values()
        np.testing.assert_allclose(own.numpy(), moment, rtol=rtol, atol=rtol)
        assert opt.state_of(p).steps.item() == STEPS


@pytest.mark.parametrize("adjust", ["original", "match_rms_adamw"])
def test_muon_stays_close_to_torch(adjust: str) -> None:
    mine = [Parameter(from_numpy(v)) for v in values(0, "float32")]
    theirs = [torch.tensor(v, requires_grad=True) for v in values(0, "float32")]
    a, b = Muon(mine, adjust=adjust), torch.optim.Muon(theirs, adjust_lr_fn=adjust)
    for name in ("lr", "weight_decay", "momentum", "nesterov", "eps"):
        assert a.param_groups[0].options[name] == b.param_groups[0][name]
    for k in range(20):
        for p, q, g in zip(mine, theirs, values(k + 1, "float32"), strict=True):
            p.grad, q.grad = Tensor(from_numpy(g)), torch.from_numpy(g.copy())
        a.step()
        b.step()
    for p, q, start in zip(mine, theirs, values(0, "float32"), strict=True):
        ours, other = (t - start for t in (p.numpy(), q.detach().numpy()))
        assert np.linalg.norm(ours - other) < 0.03 * np.linalg.norm(other)


def test_muon_updates_have_singular_values_near_1() -> None:
    p = Parameter(from_numpy(np.zeros((16, 24))))
    p.grad = Tensor(from_numpy(np.random.default_rng(0).normal(size=(16, 24))))
    Muon([p], 1.0).step()
    assert np.abs(np.linalg.svd(p.numpy(), compute_uv=False) - 1).max() < 0.4


def test_a_zero_gradient_only_decays() -> None:
    for make in (Lion, Muon):
        p = Parameter(from_numpy(np.ones((2, 3))))
        p.grad = gw.zeros(2, 3, dtype="float64")
        make([p], 0.1, weight_decay=0.5).step()
        np.testing.assert_allclose(p.numpy(), 0.95)


def test_invalid_options_and_parameters_are_refused() -> None:
    vector = Parameter(from_numpy(np.zeros(3)), name="norm.bias")
    with pytest.raises(ShapeError, match=r"norm\.bias"):
        Muon([vector])
    refused: list[dict[str, Any]] = [{"momentum": 1.0}, {"adjust": "up"}, {"lr": -1.0}]
    for bad in refused:
        with pytest.raises(UsageError, match="out of range"):
            Muon([Parameter(from_numpy(np.zeros((1, 1))))], **bad)
    with pytest.raises(UsageError, match="out of range"):
        Lion([vector], betas=(0.9, 1.0))


def test_training_with_muon_and_adamw() -> None:
    with gw.fork_rng(0):
        net = gw.nn.Sequential(gw.nn.Linear(8, 16), gw.nn.Tanh(), gw.nn.Linear(16, 3))
    inner = [p for p in net.parameters() if p.ndim == 2]
    opts = [Muon(inner, 0.02), AdamW([p for p in net.parameters() if p.ndim != 2], 0.01)]
    rng = np.random.default_rng(0)
    x = rng.normal(size=(64, 8)).astype("f4")
    t = (x @ rng.normal(size=(8, 3))).argmax(1)
    losses = []
    for _ in range(60):
        for opt in opts:
            opt.zero_grad()
        loss = gw.nn.functional.cross_entropy(net(gw.tensor(x)), gw.tensor(t))
        loss.backward()
        for opt in opts:
            opt.step()
        losses.append(loss.item())
    assert losses[-1] < 0.3 * losses[0]
