"""Training on a device: bits of the CPU, no synchronisation after the first step, state on its device."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import graphwright as gw
from graphwright import nn, optim
from graphwright.array import CPU, Device
from graphwright.autograd import Tensor, Variable
from graphwright.testing.simulated_device import SimBackend

SIM = Device("sim")


KINDS: dict[str, Any] = {
    "AdamW": lambda p: optim.AdamW(p, 0.01),
    "SGD": lambda p: optim.SGD(p, 0.01, 0.9),
    "RMSprop": lambda p: optim.RMSprop(p, 0.01, momentum=0.5, centered=True),
    "NAdam": lambda p: optim.NAdam(p, 0.01, weight_decay=0.1),
    "Rprop": lambda p: optim.Rprop(p, 0.01),
}
rng = np.random.default_rng(0)
X, TARGETS = rng.normal(size=(6, 5)).astype("f4"), rng.integers(0, 3, 6)


def losses(device: Device, opt_of: Any, norm: float, sim: SimBackend) -> list[Tensor]:
    with gw.fork_rng(3):
        net = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.LayerNorm(8), nn.Linear(8, 3)).to(device)
    opt = opt_of(net.parameters())
    x, t = gw.tensor(X, device=device), gw.tensor(TARGETS, device=device)
    seen: list[Tensor] = []
    before = sim.driver.syncs
    for _ in range(4):
        opt.zero_grad()
        loss = nn.functional.cross_entropy(net(x), t)
        loss.backward()
        seen += [loss, optim.clip_grad_norm_(net.parameters(), 0.1, norm)]
        optim.clip_grad_value_(net.parameters(), 0.05)
        opt.step()
    assert sim.driver.syncs == before
    assert all(v.device == device for s in opt.state.values() for v in s.variables().values())
    return [*seen, *net.parameters()]


@pytest.mark.parametrize("norm", [1.0, 2.0, float("inf")])
@pytest.mark.parametrize("kind", KINDS)
def test_a_step_with_clipping_never_synchronises(kind: str, norm: float, sim: SimBackend) -> None:
    for a, b in zip(*(losses(d, KINDS[kind], norm, sim) for d in (SIM, CPU)), strict=True):
        assert a.numpy().tobytes() == b.numpy().tobytes()


def test_only_reading_the_norm_synchronises(sim: SimBackend) -> None:
    p = gw.Parameter(gw.ones(3))
    p.data = p.data.to(SIM)
    p.grad = gw.ones(3, device="sim")
    norm = optim.clip_grad_norm_([p], 1.0)
    assert sim.driver.syncs == 0
    assert norm.item() == pytest.approx(3**0.5)
    assert sim.driver.syncs == 1
    optim.clip_grad_norm_([p], 1.0, error_if_nonfinite=True)
    assert sim.driver.syncs == 2


def test_a_module_and_its_optimizer_move_during_training(sim: SimBackend) -> None:
    ends = []
    for moves in (False, True):
        with gw.fork_rng(3):
            net = nn.Linear(5, 3)
        opt = optim.AdamW(net.parameters(), 0.1)
        held = list(net.parameters())
        for k in range(4):
            if moves:
                net.to(("sim", "cpu")[k % 2])
            opt.zero_grad()
            net(gw.tensor(X).to(net.weight.device)).abs().sum().backward()
            opt.step()
        assert all(a is b for a, b in zip(held, net.parameters(), strict=True))
        ends.append(net.weight.numpy().copy())
    np.testing.assert_array_equal(*ends)


def test_a_lazy_step_and_a_term_have_the_bits_of_the_cpu(sim: SimBackend) -> None:
    class Mean(optim.StepTerm):
        def __init__(self) -> None:
            self.mean = Variable(np.zeros((), np.float32), name="mean.value")

        def variables(self) -> Any:
            return {"value": self.mean}

        def __call__(self, view: optim.StepView) -> None:
            self.mean.assign(0.5 * self.mean + 0.5 * view.loss)
            view.report("mean", self.mean)

    ends = []
    for device in ("sim", "cpu"):
        with gw.fork_rng(3):
            p = gw.trace(nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3)), X)
        opt = optim.AdamW(p, 0.01, lazy=True)
        score = lambda out, t: nn.functional.cross_entropy(out, t)  # noqa: E731
        options: dict[str, Any] = {"device": device, "deterministic": True, "also": [Mean()]}
        step = gw.compile_step(p, score, opt, {p.input_names()[0]: X, "t": TARGETS}, **options)
        values = [step({p.input_names()[0]: X, "t": TARGETS}) for _ in range(4)]
        ends.append([t.numpy().tobytes() for t in (values[-1], step.reports["mean"], *p.parameters())])
    assert ends[0] == ends[1]
