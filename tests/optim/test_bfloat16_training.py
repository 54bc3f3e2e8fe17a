"""Training in bfloat16 with float32 masters or stochastic rounding, against float32 and plain rounding."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import graphwright as gw
from graphwright import nn, optim
from graphwright.array import from_numpy, random
from graphwright.autograd import Parameter, Tensor, stochastic_round
from graphwright.errors import DTypeError, UsageError
from values import array_of

rng = np.random.default_rng(0)
X = rng.normal(size=(256, 12)).astype("f4")
TARGETS = (np.tanh(X @ rng.normal(size=(12, 4))) + rng.normal(size=(256, 4))).argmax(1)  # noisy: no loss of 0


def trained(kind: str, low: str = "master", *, lr: float = 3e-3, steps: int = 200) -> Any:
    """(loss at the end, weights in float32) of a small classifier after Adam steps in one dtype."""
    with gw.fork_rng(3):
        net = nn.Sequential(nn.Linear(12, 32, seed=1), nn.Tanh(), nn.Linear(32, 4, seed=2)).to(kind)
        opt = optim.AdamW(net.parameters(), lr, low=low)

        def step(x: Tensor, t: Tensor) -> Tensor:
            opt.zero_grad()
            loss = nn.functional.cross_entropy(net(x), t)
            loss.backward()
            opt.step()
            gw.rng.next_step()
            return loss

        x, t = gw.tensor(X).to(kind), gw.tensor(TARGETS)
        losses = [step(x, t) for _ in range(steps)]
        weights = [p.numpy("float32").copy() for p in net.parameters()]
        return losses[-1].float().item(), weights, opt


@pytest.fixture(scope="module")
def full() -> float:
    return trained("float32")[0]


@pytest.mark.parametrize("low", ["master", "stochastic"])
def test_bfloat16_training_reaches_the_float32_loss(low: str, full: float) -> None:
    assert trained("bfloat16", low)[0] == pytest.approx(full, rel=0.01)


def test_small_updates_survive_with_masters_only() -> None:
    """At lr 1e-5 an update is far below half a unit in the last place of bfloat16 for nearly every weight."""
    start = trained("bfloat16", lr=0.0, steps=1)[1]
    moved = {low: trained("bfloat16", low, lr=1e-5)[1] for low in optim.LOW}
    share = {
        low: np.mean(np.concatenate([(a != b).ravel() for a, b in zip(start, after, strict=True)]))
        for low, after in moved.items()
    }
    assert share["nearest"] < 0.1  # those near 0, with small enough units
    assert share["master"] > 0.5
    assert share["stochastic"] > 0.5
    truth = trained("float32", lr=1e-5)[1]
    far = {
        low: np.abs(np.concatenate([(a - b).ravel() for a, b in zip(truth, after, strict=True)]).mean())
        for low, after in moved.items()
    }
    assert far["stochastic"] < 0.5 * max(far["nearest"], 1e-5)  # on average the digits are there


def test_state_of_16_bit_parameters() -> None:
    for low in optim.LOW:
        opt = trained("bfloat16", low, steps=1)[2]
        assert all((s.master is not None) == (low == "master") for s in opt.state.values())
    with pytest.raises(UsageError, match="stochastic"):
        optim.SGD([Parameter(from_numpy(np.zeros(1)))], low="up")


@pytest.mark.parametrize("make", [lambda p, low: optim.SGD(p, 0.01, 0.9, low=low), optim.NAdam])
@pytest.mark.parametrize("low", optim.LOW)
def test_a_compiled_step_rounds_like_the_eager_one(low: str, make: Any) -> None:
    ends = []
    for compiled in (False, True):
        with gw.fork_rng(3):
            p = Parameter(gw.tensor(X[0]).to("bfloat16"))
            opt = make([p], low=low)

            def step(c: Tensor, p: Parameter = p, opt: optim.Optimizer = opt) -> None:
                opt.zero_grad()
                (p.float() * c).sum().backward()
                opt.step()
                gw.rng.next_step()

            run: Any = gw.compile(step) if compiled else step
            for k in range(5):
                run(gw.tensor(X[k]))
            ends.append(p.numpy("float32"))
    np.testing.assert_array_equal(*ends)


def test_float32_parameters_are_not_rounded() -> None:
    gw.manual_seed(0)
    wide, low = (Parameter(from_numpy(np.ones(4, "f4"))) for _ in range(2))
    low = Parameter(gw.ones(4, dtype="bfloat16"))
    twin = Parameter(from_numpy(np.ones(4, "f4")))
    a, b = optim.SGD([wide, low], 0.1, 0.9, low="stochastic"), optim.SGD([twin], 0.1, 0.9)
    for _ in range(3):
        for opt in (a, b):
            opt.zero_grad()
            sum(((p.float() * p.float()).sum() for p in opt.parameters()), gw.tensor(0.0)).backward()
            opt.step()
    np.testing.assert_array_equal(wide.numpy(), twin.numpy())
    np.testing.assert_allclose(low.numpy("float32"), twin.numpy(), rtol=0.05)  # a step rounds by 2^-7 at most


# -- rounding at random ------------------------------------------------------------------------------------------------
def test_stochastic_round_keeps_bfloat16_values() -> None:
    bits = np.arange(2**16, dtype=np.uint16)
    x = gw.Tensor(from_numpy((bits.astype(np.uint32) << 16).view(np.float32)))
    rounded = array_of(stochastic_round(x)).to_numpy(bits=True)
    nan = np.isnan(x.numpy())
    assert np.array_equal(rounded[~nan], bits[~nan])
    assert np.isnan(stochastic_round(x).numpy("float32")[nan]).all()


def test_stochastic_round_has_the_right_mean_and_neighbours() -> None:
    n = 40000
    for value in (1.0 + 2**-9, -3.3, 1e-40, 2.0**-130 * 1.3, 65504.123):
        x = np.full(n, value, "f4")
        found = stochastic_round(gw.tensor(x)).numpy("float32").astype(np.float64)
        ulp = 2.0 ** (max(np.floor(np.log2(abs(value))), -126) - 7)
        assert np.abs(found - float(x[0])).max() < ulp
        p = abs(float(x[0])) / ulp % 1
        assert abs(found.mean() - float(x[0])) < 5 * ulp * np.sqrt(p * (1 - p) / n) + 2e-5 * ulp


def test_stochastic_round_follows_the_stream() -> None:
    with gw.fork_rng(7):
        found = stochastic_round(gw.tensor(np.full(1000, 1 + 2**-9, "f4"))).numpy("float32")
    assert np.array_equal(found > 1, random.bits(1000, seed=7) >> np.uint32(16) >= 2**16 * 3 // 4)
    with pytest.raises(DTypeError):
        stochastic_round(gw.tensor(np.zeros(3)))
