"""Further distributions beside torch.distributions in float64: values, moments, gradients, divergences, samples."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.distributions as td
from tests.distributions.test_distributions import assert_equal_with_gradients, ours_and_torchs

import graphwright as gw
from graphwright import distributions as d
from graphwright.autograd import TraceError
from graphwright.errors import ShapeError, UsageError

RNG = np.random.default_rng(1)
LOC, WIDTH, RATE = RNG.normal(size=(3, 4)), RNG.uniform(0.3, 2, 4), RNG.uniform(0.3, 3, (3, 4))
REALS, SIZES, PARTS = RNG.normal(size=(6, 3, 4)), RNG.uniform(0.1, 4, (6, 3, 4)), RNG.dirichlet(np.ones(4), (6, 3))
COUNTS, SHARES = RNG.integers(0, 5, (6, 3, 4)).astype("f8"), RNG.uniform(0.1, 0.9, (3, 4))
FACTOR = np.tril(RNG.uniform(0.3, 1.2, (3, 4, 4)))
COVARIANCE = FACTOR @ FACTOR.swapaxes(-1, -2)
COUNT = 5

CASES: dict[str, tuple[Any, Any, list[np.ndarray], list[np.ndarray] | None, np.ndarray]] = {
    "Laplace": (d.Laplace, td.Laplace, [LOC, WIDTH], [LOC + 0.3, 2 * WIDTH], REALS),
    "Cauchy": (d.Cauchy, td.Cauchy, [LOC, WIDTH], [LOC + 0.3, 2 * WIDTH], REALS),
    "Gumbel": (d.Gumbel, td.Gumbel, [LOC, WIDTH], [LOC + 0.3, 2 * WIDTH], REALS),
    "Exponential": (d.Exponential, td.Exponential, [RATE], [RATE + 0.4], SIZES),
    "LogNormal": (d.LogNormal, td.LogNormal, [LOC, WIDTH], [LOC + 0.3, 2 * WIDTH], SIZES),
    "HalfNormal": (d.HalfNormal, td.HalfNormal, [WIDTH], [2 * WIDTH], SIZES[:, 0]),
    "Gamma": (d.Gamma, td.Gamma, [RATE, WIDTH], [RATE + 0.3, 2 * WIDTH], SIZES),
    "Chi2": (d.Chi2, td.Chi2, [RATE], [RATE + 0.6], SIZES),
    "Beta": (d.Beta, td.Beta, [RATE, WIDTH], [RATE + 0.3, 2 * WIDTH], PARTS),
    "Dirichlet": (d.Dirichlet, td.Dirichlet, [RATE + 1], [RATE + 1.3], PARTS),
    "StudentT": (d.StudentT, td.StudentT, [RATE + 2, LOC, WIDTH], None, REALS),
    "Poisson": (d.Poisson, td.Poisson, [RATE], [RATE + 0.4], COUNTS),
    "Geometric": (d.Geometric, td.Geometric, [SHARES], [0.9 * SHARES], COUNTS),
    "Geometric of logits": (lambda x: d.Geometric(logits=x), lambda x: td.Geometric(logits=x), [LOC], [LOC + 0.3],
                            COUNTS),
    "Binomial": (lambda p: d.Binomial(COUNT, p), lambda p: td.Binomial(COUNT, p), [SHARES], [0.9 * SHARES], COUNTS),
    "OneHotCategorical": (lambda x: d.OneHotCategorical(logits=x), lambda x: td.OneHotCategorical(logits=x), [LOC],
                          [RNG.normal(size=(3, 4))], np.eye(4)[RNG.integers(0, 4, (6, 3))]),
    "Independent": (lambda a, b: d.Independent(d.Normal(a, b), 1), lambda a, b: td.Independent(td.Normal(a, b), 1),
                    [LOC, WIDTH], [LOC + 0.3, 2 * WIDTH], REALS),
    "MultivariateNormal": (d.MultivariateNormal, td.MultivariateNormal, [LOC, COVARIANCE], [LOC + 0.3, 2 * COVARIANCE],
                           REALS),
    "of precision": (lambda m, p: d.MultivariateNormal(m, precision_matrix=p),
                     lambda m, p: td.MultivariateNormal(m, precision_matrix=p), [LOC, COVARIANCE + np.eye(4)],
                     [LOC + 0.3, COVARIANCE + 2 * np.eye(4)], REALS),
    "of scale_tril": (lambda m, s: d.MultivariateNormal(m, scale_tril=s),
                      lambda m, s: td.MultivariateNormal(m, scale_tril=s), [LOC[0], FACTOR], [LOC + 0.3, 2 * FACTOR],
                      REALS),
}  # fmt: skip
NO_ENTROPY = {"Poisson"}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", CASES)
def test_values_and_gradients_match_torch(name: str) -> None:
    make, truth, first, second, x = CASES[name]
    leaves, theirs = ours_and_torchs(first)
    p, q = make(*leaves), truth(*theirs)
    assert p.shape == p.batch_shape == tuple(q.batch_shape)
    assert p.event_shape == tuple(q.event_shape)
    assert_equal_with_gradients(p.log_prob(gw.tensor(x)), q.log_prob(torch.tensor(x)), leaves, theirs)
    moments = [] if name == "Cauchy" else ["mean", "variance"]
    for what in moments:
        assert_equal_with_gradients(getattr(make(*leaves), what), getattr(truth(*theirs), what), leaves, theirs)
    if name not in NO_ENTROPY:
        assert_equal_with_gradients(make(*leaves).entropy(), truth(*theirs).entropy(), leaves, theirs)
    try:
        wanted = truth(*theirs).cdf(torch.tensor(x))
    except NotImplementedError:
        wanted = None
    if wanted is not None and not name.startswith(("Gamma", "Chi2")):
        assert_equal_with_gradients(make(*leaves).cdf(gw.tensor(x)), wanted, leaves, theirs)
    if second is not None:
        others, torch_others = ours_and_torchs(second)
        divergence = d.kl_divergence(make(*leaves), make(*others))
        wanted = td.kl_divergence(truth(*theirs), truth(*torch_others))
        assert_equal_with_gradients(divergence, wanted, [*leaves, *others], [*theirs, *torch_others])


@pytest.mark.parametrize("name", CASES)
def test_samples_have_the_moments(name: str) -> None:
    make, _, first, _, _ = CASES[name]
    p = make(*(gw.tensor(v) for v in first))
    gw.manual_seed(3)
    drawn = np.asarray(p.sample([40000]))
    gw.manual_seed(3)
    assert np.array_equal(drawn, np.asarray(p.sample([40000])))
    assert not np.array_equal(drawn, np.asarray(p.sample([40000])))
    assert drawn.shape == (40000, *p.shape, *p.event_shape)
    if name == "Cauchy":
        np.testing.assert_allclose(np.median(drawn, 0), np.asarray(p.loc), atol=0.05)
        return
    np.testing.assert_allclose(drawn.mean(0), np.asarray(p.mean), rtol=0.05, atol=0.06)
    if name not in ("LogNormal", "StudentT"):  # fourth moments are large
        np.testing.assert_allclose(drawn.var(0), np.asarray(p.variance), rtol=0.1, atol=0.03)


@pytest.mark.parametrize(
    "name", ["Laplace", "Cauchy", "Gumbel", "Exponential", "LogNormal", "HalfNormal", "MultivariateNormal"]
)
def test_gradients_of_samples_match_finite_differences(name: str) -> None:
    make, _, first, _, _ = CASES[name]

    def loss(values: list[Any]) -> gw.Tensor:
        gw.manual_seed(0)
        return (make(*values).rsample() * gw.arange(4).double()).sum()

    leaves = [gw.tensor(v, requires_grad=True) for v in first]
    loss(leaves).backward()
    for i, leaf in enumerate(leaves):
        assert leaf.grad is not None
        move = RNG.normal(size=leaf.shape)
        move = move + move.swapaxes(-1, -2) if name == "MultivariateNormal" and i else move
        moved = [[gw.tensor(v + s * move if j == i else v) for j, v in enumerate(first)] for s in (1e-6, -1e-6)]
        ends = [float(loss(values)) for values in moved]
        np.testing.assert_allclose((np.asarray(leaf.grad) * move).sum(), (ends[0] - ends[1]) / 2e-6, rtol=1e-5)


def test_samples_on_the_host_have_no_gradient_and_no_trace() -> None:
    for p in (d.Gamma(2.0, 1.0), d.Beta(1.0, 2.0), d.Dirichlet(gw.ones(3)), d.Poisson(2.0), d.Binomial(3, 0.5)):
        with pytest.raises(UsageError, match="log_prob"):
            p.rsample()
    with pytest.raises(TraceError):
        gw.trace(lambda x: d.Gamma(x, 1.0).sample(), gw.ones(2))


def test_log_prob_and_normal_samples_run_in_traces() -> None:
    p = gw.trace(lambda x: {"y": d.Laplace(x, 1.0).log_prob(0.3) + d.Beta(x, 2.0).entropy()}, gw.ones(3))
    x = np.array([0.5, 1.0, 2.0], "f4")
    value = p.run({"x": x})["y"]
    wanted = d.Laplace(x, 1.0).log_prob(0.3) + d.Beta(x, 2.0).entropy()
    np.testing.assert_allclose(np.asarray(value), np.asarray(wanted), rtol=1e-6)


def test_invalid_parameters_are_refused() -> None:
    for make in (
        lambda: d.Laplace(0.0, 0.0), lambda: d.Exponential(-1.0), lambda: d.Gamma(0.0, 1.0), lambda: d.Poisson(-1.0),
        lambda: d.Geometric(0.0), lambda: d.Binomial(-1, 0.5), lambda: d.MultivariateNormal(gw.zeros(2)),
        lambda: d.Independent(d.Normal(0.0, 1.0), 1), lambda: d.Geometric(), lambda: d.Poisson(1.0).entropy(),
        lambda: d.kl_divergence(d.Binomial(2, 0.5), d.Binomial(3, 0.5)),
        lambda: d.kl_divergence(d.Gamma(1.0, 1.0), d.Chi2(2.0)),
    ):  # fmt: skip
        with pytest.raises(UsageError):
            make()
    for make in (lambda: d.Dirichlet(1.0), lambda: d.MultivariateNormal(gw.zeros(2), gw.eye(3))):
        with pytest.raises(ShapeError):
            make()
