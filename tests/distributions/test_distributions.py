"""Distributions beside torch.distributions in float64: values, gradients, divergences; samples beside scipy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import scipy.stats
import torch
import torch.distributions as td

import graphwright as gw
from graphwright import distributions as d
from graphwright.errors import ShapeError, UsageError

RNG = np.random.default_rng(0)
LOC, WIDTH = RNG.normal(size=(3, 4)), RNG.uniform(0.2, 2, 4)
LOGITS, SHARES = RNG.normal(size=(3, 5)), RNG.dirichlet(np.ones(5), 3)


def squashed(loc: torch.Tensor, scale: torch.Tensor, low: float = -1.0, high: float = 1.0) -> td.Distribution:
    half = (high - low) / 2
    steps: list[Any] = [td.TanhTransform(cache_size=1), td.AffineTransform(low + half, half, cache_size=1)]
    return td.TransformedDistribution(td.Normal(loc, scale), steps)


CASES: dict[str, tuple[Callable[..., Any], Callable[..., Any], list[np.ndarray], list[np.ndarray], np.ndarray]] = {
    "normal": (d.Normal, td.Normal, [LOC, WIDTH], [LOC + 0.3, 2 * WIDTH], RNG.normal(size=(6, 3, 4))),
    "tanh": (d.TanhNormal, squashed, [LOC, WIDTH], [LOC + 0.3, 2 * WIDTH], np.tanh(RNG.normal(size=(6, 3, 4)))),
    "tanh to -2..3": (lambda a, b: d.TanhNormal(a, b, -2.0, 3.0), lambda a, b: squashed(a, b, -2.0, 3.0),
                      [LOC, WIDTH], [LOC + 0.3, 2 * WIDTH], RNG.uniform(-1.9, 2.9, (6, 3, 4))),
    "uniform": (d.Uniform, lambda a, b: td.Uniform(a, b, validate_args=False), [LOC, LOC + WIDTH],
                [LOC - 0.1, LOC + WIDTH * 2], RNG.normal(size=(6, 3, 4))),
    "categorical": (d.Categorical, lambda x: td.Categorical(logits=x), [LOGITS], [RNG.normal(size=(3, 5))],
                    RNG.integers(0, 5, (6, 3))),
    "categorical of probs": (lambda p: d.Categorical(probs=p), lambda p: td.Categorical(probs=p), [3 * SHARES],
                             [RNG.dirichlet(np.ones(5), 3)], RNG.integers(0, 5, (6, 3))),
    "bernoulli": (d.Bernoulli, lambda x: td.Bernoulli(logits=x), [10 * LOGITS], [RNG.normal(size=(3, 5))],
                  RNG.integers(0, 2, (6, 3, 5)).astype("f8")),
    "bernoulli of probs": (lambda p: d.Bernoulli(probs=p), lambda p: td.Bernoulli(probs=p), [SHARES],
                           [RNG.dirichlet(np.ones(5), 3)], RNG.integers(0, 2, (6, 3, 5)).astype("f8")),
}  # fmt: skip


def ours_and_torchs(values: list[np.ndarray]) -> tuple[list[gw.Tensor], list[torch.Tensor]]:
    """The parameters as leaves that require gradients."""
    return [gw.tensor(v, requires_grad=True) for v in values], [torch.tensor(v, requires_grad=True) for v in values]


def assert_equal_with_gradients(
    ours: gw.Tensor, theirs: torch.Tensor, leaves: list[gw.Tensor], torch_leaves: list[torch.Tensor]
) -> None:
    np.testing.assert_allclose(np.asarray(ours), theirs.detach().numpy(), rtol=1e-9, atol=1e-12)
    finite = np.isfinite(np.asarray(ours))
    gw.where(gw.tensor(finite), ours, 0.0).sum().backward()
    torch.where(torch.tensor(finite), theirs, 0.0).sum().backward()
    for mine, other in zip(leaves, torch_leaves, strict=True):
        truth = torch.zeros_like(other) if other.grad is None else other.grad
        found = np.zeros(mine.shape) if mine.grad is None else np.asarray(mine.grad)
        np.testing.assert_allclose(found, truth.numpy(), rtol=1e-8, atol=1e-10)
        mine.grad = other.grad = None


@pytest.mark.parametrize("name", CASES)
def test_values_and_gradients_match_torch(name: str) -> None:
    make, truth, first, second, x = CASES[name]
    leaves, torch_leaves = ours_and_torchs(first)
    p, q = make(*leaves), truth(*torch_leaves)
    assert p.shape == tuple(q.batch_shape)
    assert_equal_with_gradients(p.log_prob(x), q.log_prob(torch.tensor(x)), leaves, torch_leaves)
    if "tanh" not in name:
        assert_equal_with_gradients(make(*leaves).entropy(), truth(*torch_leaves).entropy(), leaves, torch_leaves)
    others, torch_others = ours_and_torchs(second)
    divergence = d.kl_divergence(make(*leaves), make(*others))
    base = (lambda t: t.base_dist) if "tanh" in name else (lambda t: t)
    wanted = td.kl_divergence(base(truth(*torch_leaves)), base(truth(*torch_others)))
    assert_equal_with_gradients(divergence, wanted, [*leaves, *others], [*torch_leaves, *torch_others])


def test_moments_match_torch() -> None:
    moments = "mean variance stddev"
    facts = {"normal": moments, "uniform": moments, "bernoulli": f"{moments} probs"}
    for name, known in {**facts, "categorical": "probs mode"}.items():
        make, truth, values, _, _ = CASES[name]
        p, q = make(*map(gw.tensor, values)), truth(*map(torch.tensor, values))
        for fact in known.split():
            np.testing.assert_allclose(np.asarray(getattr(p, fact)), getattr(q, fact).numpy(), rtol=1e-12)
    squash = d.TanhNormal(gw.tensor(LOC), 1.0, 0.0, 2.0)
    np.testing.assert_allclose(np.asarray(squash.median), 1 + np.tanh(LOC))


@pytest.mark.parametrize("name", ["normal", "tanh", "tanh to -2..3", "uniform"])
def test_gradients_of_samples_match_torch_on_the_same_noise(name: str) -> None:
    make, truth, values, _, _ = CASES[name]
    leaves, torch_leaves = ours_and_torchs(values)
    kind = gw.rand if name == "uniform" else gw.randn
    noise = torch.tensor(np.asarray(kind(6, 3, 4, dtype="float64", generator=gw.Generator(5))))
    p, (a, b) = make(*leaves), torch_leaves
    sample, log_prob = p.rsample_and_log_prob((6,), generator=gw.Generator(5))
    theirs = a + (b - a if name == "uniform" else b) * noise
    q = truth(*torch_leaves)
    for step in getattr(q, "transforms", []):
        theirs = step(theirs)
    assert_equal_with_gradients(sample + log_prob, theirs + q.log_prob(theirs), leaves, torch_leaves)
    assert not p.sample((2,)).requires_grad


def test_log_probs_of_samples_at_the_ends_of_the_interval_are_exact() -> None:
    p = d.TanhNormal(gw.tensor([12.0]), gw.tensor([0.5]))  # tanh rounds to 1 in float32
    x, log_prob = p.rsample_and_log_prob((50,), generator=gw.Generator(0))
    u = p.base.rsample((50,), generator=gw.Generator(0))
    assert (np.asarray(x) == 1).any()
    exact = squashed(torch.tensor([12.0]).double(), torch.tensor([0.5]).double())
    wide = torch.tensor(np.asarray(u)).double()
    slope = 2 * (np.log(2) - wide - torch.nn.functional.softplus(-2 * wide))
    wanted = exact.base_dist.log_prob(wide) - slope  # pyright: ignore[reportAttributeAccessIssue]
    np.testing.assert_allclose(np.asarray(log_prob), wanted.numpy(), rtol=1e-5)
    assert np.isfinite(np.asarray(p.log_prob(np.ones(1, "f4")))).all()


@pytest.mark.parametrize(
    ("p", "truth"),
    [
        (d.Normal(1.0, 2.0), scipy.stats.norm(1, 2).cdf),
        (d.Uniform(-1.0, 3.0), scipy.stats.uniform(-1, 4).cdf),
        (d.TanhNormal(0.5, 0.8), lambda x: scipy.stats.norm(0.5, 0.8).cdf(np.arctanh(x))),
    ],
)
def test_samples_have_the_distribution(p: d.Distribution, truth: Callable[[np.ndarray], np.ndarray]) -> None:
    found = np.asarray(p.sample((4000,), generator=gw.Generator(1)))
    assert found.dtype == np.float32
    assert scipy.stats.kstest(found, truth).pvalue > 1e-3


def test_samples_of_discrete_distributions_have_the_frequencies() -> None:
    p = d.Categorical(gw.tensor(LOGITS))
    found = np.asarray(p.sample((4000,), generator=gw.Generator(1)))
    assert found.shape == (4000, 3)
    assert found.dtype == np.int64
    for row in range(3):
        counts = np.bincount(found[:, row], minlength=5)
        assert scipy.stats.chisquare(counts, 4000 * np.asarray(p.probs)[row]).pvalue > 1e-3
    coin = np.asarray(d.Bernoulli(probs=[0.1, 0.8]).sample((4000,), generator=gw.Generator(1)))
    np.testing.assert_allclose(coin.mean(0), [0.1, 0.8], atol=0.03)
    assert set(np.unique(coin)) == {0, 1}


def test_excluded_classes_are_never_drawn_and_give_no_nan() -> None:
    logits = gw.tensor([0.3, -np.inf, 1.0], requires_grad=True)
    p = d.Categorical(logits)
    assert 1 not in np.asarray(p.sample((500,)))
    entropy = p.entropy()
    kept = torch.tensor([0.3, 1.0], requires_grad=True)
    wanted = td.Categorical(logits=kept).entropy()
    assert entropy.item() == pytest.approx(wanted.item())
    entropy.backward()
    wanted.backward()
    assert kept.grad is not None
    np.testing.assert_allclose(np.asarray(logits.grad)[[0, 2]], kept.grad.numpy(), rtol=1e-5)
    assert np.asarray(logits.grad)[1] == 0
    wide = d.Categorical(gw.tensor([0.0, 0.0, 0.0]))
    assert np.isfinite(d.kl_divergence(p, wide).item())
    assert d.kl_divergence(wide, p).item() == np.inf


def test_a_compiled_step_draws_the_samples_of_the_eager_one() -> None:
    leaf = gw.Parameter(gw.tensor(LOC.astype("f4")))

    def step(x: gw.Tensor) -> tuple[gw.Tensor, ...]:
        p = d.TanhNormal(leaf + x, 0.5)
        action, log_prob = p.rsample_and_log_prob()
        leaf.grad = None
        log_prob.sum().backward()
        chosen = d.Categorical(leaf).sample()
        assert leaf.grad is not None
        return action, log_prob, chosen, leaf.grad

    x = gw.tensor(np.ones((3, 4), "f4"))
    with gw.fork_rng(3):
        eager = []
        for _ in range(3):
            eager.append([np.array(t) for t in step(x)])
            gw.rng.next_step()
    compiled = gw.compile(step)
    with gw.fork_rng(3):
        planned = [[np.array(t) for t in compiled(x)] for _ in range(3)]
    for one, other in zip(eager, planned, strict=True):
        for a, b in zip(one, other, strict=True):
            np.testing.assert_allclose(a, b, rtol=2e-4, atol=1e-5)
    assert not np.array_equal(planned[0][0], planned[1][0])


def test_parameters_broadcast_and_promote() -> None:
    p = d.Normal(gw.tensor(LOC), 1.0)
    assert p.shape == (3, 4)
    assert p.sample().dtype is gw.float64
    assert d.Normal(0, 1).sample((2,)).dtype is gw.float32
    assert d.Normal(gw.tensor([1.0]).to("bfloat16"), 1.0).rsample().dtype is gw.bfloat16
    assert d.Categorical(gw.tensor(LOGITS)).log_prob(2).shape == (3,)


@pytest.mark.parametrize(
    ("error", "make"),
    [
        (UsageError, lambda: d.Normal(0.0, [1.0, 0.0])),
        (UsageError, lambda: d.Normal(0.0, [1.0, float("nan")])),
        (UsageError, lambda: d.Uniform(1.0, 1.0)),
        (UsageError, lambda: d.TanhNormal(0.0, 1.0, 2.0, 1.0)),
        (UsageError, lambda: d.TanhNormal(0.0, 1.0).entropy()),
        (UsageError, lambda: d.TanhNormal(0.0, 1.0).kl(d.TanhNormal(0.0, 1.0, -2.0, 2.0))),
        (UsageError, lambda: d.Categorical()),
        (UsageError, lambda: d.Categorical(LOGITS, probs=SHARES)),
        (UsageError, lambda: d.Categorical(probs=[0.5, -0.5])),
        (UsageError, lambda: d.Categorical(probs=[0.0, 0.0])),
        (ShapeError, lambda: d.Categorical(0.5)),
        (UsageError, lambda: d.Categorical(LOGITS).rsample()),
        (UsageError, lambda: d.Bernoulli(probs=1.5)),
        (UsageError, lambda: d.kl_divergence(d.Normal(0.0, 1.0), d.Uniform(0.0, 1.0))),
        (ShapeError, lambda: d.Normal(np.zeros(3), np.ones(2))),
    ],
)
def test_invalid_parameters_are_refused(error: type[Exception], make: Callable[[], object]) -> None:
    with pytest.raises(error):
        make()


def test_class_ids_broadcast_with_the_parameters() -> None:
    logits = np.random.default_rng(0).normal(size=(3, 4))
    for ids in (np.array([[0], [3]]), np.array([1, 2, 0]), np.array(2), np.zeros((5, 1, 3), int)):
        found = d.Categorical(gw.tensor(logits)).log_prob(gw.tensor(ids))
        truth = td.Categorical(logits=torch.tensor(logits)).log_prob(torch.tensor(ids))
        np.testing.assert_allclose(found.numpy(), truth.numpy(), rtol=1e-12)
