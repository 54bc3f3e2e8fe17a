"""Whole training steps as one native call: layer norm, dropout, a clipped gradient and each optimizer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import graphwright as gw
from graphwright import nn, optim
from graphwright.plan.compiled import CompiledFunction


class Net(nn.Module):
    """Two layers with all that a small step has beside products."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm, self.drop, self.down = nn.Linear(6, 17), nn.LayerNorm(17), nn.Dropout(0.3), nn.Linear(17, 3)

    def forward(self, x: gw.Tensor) -> gw.Tensor:
        return self.down(self.drop(self.norm(self.up(x)).tanh()))


def _muon(net: Net) -> list[Any]:
    parameters = list(net.parameters())
    matrices = [p for p in parameters if p.ndim == 2]
    return [optim.Muon(matrices, lr=0.02), optim.AdamW([p for p in parameters if p.ndim != 2], lr=0.01)]


OPTIMIZERS: dict[str, Callable[[Net], list[Any]]] = {
    "Adam": lambda net: [optim.Adam(net.parameters(), lr=0.01, weight_decay=0.1)],
    "Adam amsgrad": lambda net: [optim.Adam(net.parameters(), lr=0.01, amsgrad=True)],
    "AdamW": lambda net: [optim.AdamW(net.parameters(), lr=0.01)],
    "AdamW lazy": lambda net: [optim.AdamW(net.parameters(), lr=0.01, lazy=True)],
    "SGD": lambda net: [optim.SGD(net.parameters(), lr=0.1, momentum=0.9, nesterov=True)],
    "RMSprop": lambda net: [optim.RMSprop(net.parameters(), lr=0.01, momentum=0.5, centered=True, eps=1e-3)],
    "Lion": lambda net: [optim.Lion(net.parameters(), lr=0.003)],
    "Muon beside AdamW": _muon,
}


def compiled(name: str, executor: str) -> CompiledFunction:
    gw.manual_seed(3)
    net = Net()
    rng = np.random.default_rng(0)
    for p in net.parameters():
        p.assign(gw.tensor((0.3 * rng.normal(size=p.shape)).astype("f4")))
    optimizers = OPTIMIZERS[name](net)

    def step(x: gw.Tensor, y: gw.Tensor) -> gw.Tensor:
        for opt in optimizers:
            opt.zero_grad()
        error = net(x) - y
        loss = (error * error).mean()
        loss.backward()
        optim.clip_grad_norm_(net.parameters(), 1.0)
        for opt in optimizers:
            opt.step()
        return loss

    return gw.compile(step, executor=executor)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_step_is_one_native_call_with_the_losses_of_aten(name: str) -> None:
    rng = np.random.default_rng(1)
    x, y = (gw.tensor(rng.normal(size=(5, n)).astype("f4")) for n in (6, 3))
    losses = {}
    for executor in ("vm", "aten"):
        step = compiled(name, executor)
        losses[executor] = [step(x, y).item() for _ in range(12)]
        if executor == "vm":
            assert step.plan(x, y).schedule.dispatches == 1
    np.testing.assert_allclose(losses["vm"], losses["aten"], rtol=2e-4)
    assert len(set(losses["vm"])) == 12  # another mask in every step, and a step that moves
