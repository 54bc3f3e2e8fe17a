"""Each kind of gate against its formula, its statistics and its start; temperatures."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from scipy.special import expit

from graphwright import structure as st
from graphwright.array import from_numpy
from graphwright.array.formulas.gates import GATE_KINDS, KINDS, MODES, open_probability
from graphwright.autograd import Tensor, grad
from graphwright.errors import UsageError
from graphwright.ops import call
from graphwright.program import DeadGate

PLAIN = [k for k in KINDS if k != "choice"]


def draw(kind: str, z: float, t: float, mode: str, n: int = 1, **key: int) -> np.ndarray:
    """Values of n gates of one kind with the same logit."""
    return drawn(kind, z, t, mode, n, **key)[0]


def drawn(
    kind: str, z: float, t: float, mode: str, n: int = 1, seed: int = 0, step: int = 0
) -> tuple[np.ndarray, np.ndarray]:
    """Values, and d(sum)/dz."""
    rows = np.tile(np.array([KINDS.index(kind), 0, 0, 0, 1, 0, 1]), (n, 1))
    rows[:, 5] = np.arange(n)
    logits = Tensor(from_numpy(np.full(n, z)), True)
    run = from_numpy(np.array([seed, step, MODES.index(mode)]))
    out = call("gate", logits, Tensor(from_numpy(rows)), Tensor(from_numpy(np.array([t]))), Tensor(run), sizes=(n,))
    (slope,) = grad(out.sum(), [logits], allow_unused=True)
    assert slope is not None
    return out.numpy(), slope.numpy()


def soft(kind: str, z: float, t: float) -> float:
    if kind == "scale":
        return z
    if kind in ("sigmoid", "ste", "bernoulli"):
        return float(expit(z / t))
    return float(np.clip(1.2 * expit(z) - 0.1, 0, 1)) if kind == "hard_concrete" else float(expit(z))


@pytest.mark.parametrize("z", [-10.0, -0.4, 0.0, 0.7, 2.5, 10.0])
@pytest.mark.parametrize("t", [0.05, 1.0, 5.0])
@pytest.mark.parametrize("kind", PLAIN)
def test_values_and_slopes_without_noise_match_their_formulas(kind: str, t: float, z: float) -> None:
    value, slope = drawn(kind, z, t, "eval")
    hard = kind in ("ste", "bernoulli", "concrete_st")
    assert value == pytest.approx(float(z > 0) if hard else soft(kind, z, t), abs=1e-12)
    assert draw(kind, z, t, "soft") == pytest.approx(soft(kind, z, t), abs=1e-12)
    assert draw(kind, z, t, "hard") == (z if kind == "scale" else float(z > 0))
    assert draw(kind, z, t, "open") == 1.0
    heat = t if kind in ("sigmoid", "ste", "bernoulli") else 1.0
    p = expit(z / heat)
    wanted = 1.0 if kind == "scale" else p * (1 - p) / heat
    if kind == "hard_concrete":
        wanted = 1.2 * wanted if 0 < 1.2 * p - 0.1 < 1 else 0.0
    assert slope == pytest.approx(wanted, rel=1e-9, abs=1e-12)
    assert np.isfinite([*draw(kind, z, t, "train", 100), *drawn(kind, z, t, "train", 100)[1]]).all()


def test_a_gate_with_logit_2_5_is_exactly_open() -> None:
    assert draw("hard_concrete", 2.5, 2 / 3, "eval") == 1.0
    assert draw("hard_concrete", np.log(11) + 1e-9, 2 / 3, "eval") == 1.0
    assert draw("hard_concrete", np.log(11) - 1e-6, 2 / 3, "eval") < 1.0


def near(share: Any, p: float, n: int) -> bool:
    """Within three standard errors."""
    return abs(share - p) <= 3 * np.sqrt(p * (1 - p) / n) + 1e-12


@pytest.mark.parametrize("t", [0.1, 0.5, 2.0])
def test_a_concrete_gate_is_open_with_the_probability_of_its_logit(t: float) -> None:
    n, z = 100_000, 0.6
    y = draw("concrete", z, t, "train", n)
    assert near((y > 0.5).mean(), expit(z), n)
    np.testing.assert_array_equal(draw("concrete_st", z, t, "train", n), y > 0.5)
    assert y.var() > 0
    assert near(draw("bernoulli", z, t, "train", n).mean(), expit(z / t), n)


@pytest.mark.parametrize("z", [-2.0, 0.0, 1.0, 2.5])
def test_a_hard_concrete_gate_is_exactly_0_and_1_with_the_stated_probabilities(z: float) -> None:
    n, t = 300_000, 2 / 3
    g = draw("hard_concrete", z, t, "train", n)
    assert near((g == 0).mean(), 1 - expit(z + t * np.log(11)), n)
    assert near((g == 1).mean(), expit(z - t * np.log(11)), n)
    assert open_probability(z, t, heated=False, stretched=True) == pytest.approx(expit(z + t * np.log(11)))


def test_a_choice_is_sampled_from_its_softmax() -> None:
    z, n = np.array([0.5, -1.0, 0.2]), 4000
    rows = np.array([[KINDS.index("choice"), 0, 0, s, 1, i, 1] for s in range(n) for i in range(3)])
    run = from_numpy(np.array([0, 0, MODES.index("train")]))
    operands = [from_numpy(np.tile(z, n)), from_numpy(rows), from_numpy(np.array([0.5])), run]
    drawn = np.stack([y.to_numpy() for y in call("gate", *operands, sizes=(3,) * n)])
    np.testing.assert_allclose(drawn.sum(1), 1)
    share = np.bincount(drawn.argmax(1), minlength=3) / n
    assert all(near(a, p, n) for a, p in zip(share, np.exp(z) / np.exp(z).sum(), strict=True))


def test_noise_is_determined_by_its_key() -> None:
    base = draw("concrete", 0.3, 1.0, "train", 50, seed=7, step=3)
    np.testing.assert_array_equal(draw("concrete", 0.3, 1.0, "train", 50, seed=7, step=3), base)
    for other in ({"seed": 8, "step": 3}, {"seed": 7, "step": 4}):
        assert not np.isin(draw("concrete", 0.3, 1.0, "train", 50, **other), base).any()
    np.testing.assert_array_equal(draw("concrete", 0.3, 1.0, "train", 20, seed=7, step=3), base[:20])


@pytest.mark.parametrize("t", [0.5, 1.0, 5.0])
@pytest.mark.parametrize("p0", [0.1, 0.5, 0.9])
@pytest.mark.parametrize("kind", PLAIN)
def test_init_for_gives_the_requested_probability(kind: str, p0: float, t: float) -> None:
    z, facts = st.init_for(p0, kind, t), GATE_KINDS[kind]
    found = z if facts.linear else open_probability(z, t, facts.heated, facts.stretched)
    assert found == pytest.approx(p0, abs=1e-12)


def test_initial_values_without_a_gradient_are_refused() -> None:
    for p0 in (0.0, 1.0):
        with pytest.raises(DeadGate, match=r"0\.99"):
            st.init_for(p0, "sigmoid")
    with pytest.warns(st.ClippedStart):
        assert expit(st.init_for(0.9999, "sigmoid")) == pytest.approx(0.99)
    for wrong in ((1.2, "sigmoid", 1.0), (0.5, "sigmoid", 0.0), (0.5, "soft", 1.0)):
        with pytest.raises(ValueError, match="expected"):
            st.init_for(*wrong)


@pytest.mark.parametrize("form", ["exponential", "linear", "cosine"])
def test_temperatures_fall_from_start_to_end(form: Any) -> None:
    s = st.TemperatureSchedule(5.0, 0.1, 40, form)
    values = [s.at(t) for t in range(60)]
    assert values[0] == 5.0
    assert values[40] == pytest.approx(0.1)
    assert all(v == values[40] for v in values[40:])
    assert all(a >= b for a, b in pairwise(values))
    middle = {"exponential": np.sqrt(0.5), "linear": 2.55, "cosine": 2.55}[form]
    assert s.at(20) == pytest.approx(middle)
    assert [st.TemperatureSchedule(5.0, 0.1, 0, form).at(t) for t in (0, 100)] == [5.0, 5.0]


@pytest.mark.parametrize("wrong", [(0.1, 1.0), (1.0, 0.0), (1.0, 0.5, -1), (1.0, 0.5, 3, "steps")])
def test_invalid_schedules_are_refused(wrong: tuple) -> None:
    with pytest.raises(UsageError, match="expected"):
        st.TemperatureSchedule(*wrong)
