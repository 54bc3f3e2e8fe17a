"""Initial values against torch: the same bounds, moments and exact parts, in place and without a gradient."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats

import graphwright as gw
from graphwright import nn
from graphwright.errors import GraphwrightError, ShapeError, UsageError

SHAPES = [(60, 40), (40, 60), (32, 8, 3), (16, 6, 3, 3), (8, 4, 3, 3, 3)]
RANDOM: dict[str, list[dict[str, Any]]] = {
    "uniform_": [{}, {"a": -3.0, "b": -1.0}],
    "normal_": [{}, {"mean": 2.0, "std": 0.3}],
    "trunc_normal_": [
        {},
        {"mean": 0.5, "std": 0.2, "a": 0.0, "b": 0.6},
        {"mean": 0.0, "std": 1.0, "a": -0.1, "b": 0.2},
    ],
    "xavier_uniform_": [{}, {"gain": 2.0}],
    "xavier_normal_": [{}, {"gain": 2.0}],
    "kaiming_uniform_": [{}, {"a": 1.0}, {"mode": "fan_out", "nonlinearity": "relu"}, {"nonlinearity": "tanh"}],
    "kaiming_normal_": [{}, {"a": 1.0}, {"mode": "fan_out", "nonlinearity": "relu"}, {"nonlinearity": "selu"}],
}
CASES = [(name, options) for name, cases in RANDOM.items() for options in cases]


def theirs(name: str, shape: tuple[int, ...], **options: Any) -> torch.Tensor:
    made = torch.empty(shape, dtype=torch.float64, requires_grad=True)
    torch.manual_seed(0)
    return getattr(torch.nn.init, name)(made, **options).detach()


def ours(name: str, shape: tuple[int, ...], dtype: str = "float64", seed: int = 1, **options: Any) -> gw.Tensor:
    """The filled tensor; it was filled in place, outside the graph, from the generator alone."""
    p = gw.Parameter(gw.full(shape, np.nan, dtype=dtype))
    before = gw.rng.state_dict()
    fill: Callable[..., gw.Tensor] = getattr(nn.init, name)
    if name not in ("constant_", "ones_", "zeros_", "eye_", "dirac_"):
        options["generator"] = gw.Generator(seed)
    assert fill(p, **options) is p
    assert p.is_leaf
    assert gw.rng.state_dict() == before
    return p


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize(("name", "options"), CASES, ids=str)
def test_samples_have_the_distribution_of_torch(name: str, options: dict[str, Any], shape: tuple[int, ...]) -> None:
    mine, reference = ours(name, shape, **options).numpy().ravel(), theirs(name, shape, **options).numpy().ravel()
    found: Any = stats.ks_2samp(mine, reference)
    assert found.pvalue > 1e-4
    if name in ("uniform_", "xavier_uniform_", "kaiming_uniform_"):
        ends = [mine.min(), mine.max()], [reference.min(), reference.max()]
        np.testing.assert_allclose(*ends, atol=0.03 * np.ptp(reference))


@pytest.mark.parametrize(("name", "options"), CASES, ids=str)
def test_samples_come_from_the_generator_in_each_dtype(name: str, options: dict[str, Any]) -> None:
    wide, low = (ours(name, (9, 7), kind, **options).to("float64").numpy() for kind in ("float32", "bfloat16"))
    if name != "trunc_normal_":  # which rejects other values after rounding
        np.testing.assert_allclose(wide, low, rtol=0.01, atol=0.02)
    assert not np.array_equal(wide, ours(name, (9, 7), "float32", 2, **options).numpy())
    with gw.fork_rng(5):
        default = getattr(nn.init, name)(gw.empty(9, 7), **options)
    np.testing.assert_array_equal(default.numpy(), ours(name, (9, 7), "float32", 5, **options).numpy())


@pytest.mark.parametrize(
    ("mean", "std", "a", "b"), [(0.0, 1.0, -2.0, 2.0), (0.0, 1.0, 3.0, 9.0), (1.0, 0.1, 0.95, 1.2)]
)
def test_truncated_normal_values_have_the_density_of_scipy(mean: float, std: float, a: float, b: float) -> None:
    values = ours("trunc_normal_", (400, 50), mean=mean, std=std, a=a, b=b).numpy().ravel()
    assert a <= values.min()
    assert values.max() <= b
    exact = stats.truncnorm((a - mean) / std, (b - mean) / std, loc=mean, scale=std)
    assert stats.kstest(values, exact.cdf).pvalue > 1e-4


@pytest.mark.parametrize(
    ("name", "shape", "options"),
    [
        ("constant_", (3, 2), {"val": 0.3}),
        ("ones_", (4,), {}),
        ("zeros_", (2, 1, 3), {}),
        ("eye_", (3, 5), {}),
        ("eye_", (5, 3), {}),
        ("dirac_", (3, 16, 5), {}),
        ("dirac_", (6, 4, 5, 4), {}),
        ("dirac_", (6, 2, 4, 3, 3), {"groups": 3}),
        ("dirac_", (6, 4, 1), {"groups": 2}),
        ("dirac_", (0, 4, 1), {"groups": 2}),
    ],
    ids=str,
)
def test_exact_values_match_torch(name: str, shape: tuple[int, ...], options: dict[str, Any]) -> None:
    np.testing.assert_array_equal(ours(name, shape, **options).numpy(), theirs(name, shape, **options).numpy())


@pytest.mark.parametrize("shape", [(30, 20), (20, 30), (4, 3, 2), (1, 1), (0, 3)], ids=str)
def test_orthogonal_matrices(shape: tuple[int, ...]) -> None:
    q = ours("orthogonal_", shape, gain=3.0).numpy().reshape(shape[0], np.prod(shape[1:], dtype=int))
    small = q @ q.T if q.shape[0] <= q.shape[1] else q.T @ q
    np.testing.assert_allclose(small, 9 * np.eye(len(small)), atol=1e-12)


def test_orthogonal_matrices_turn_as_often_as_they_reflect() -> None:
    signs = [np.linalg.det(ours("orthogonal_", (3, 3), seed=i).numpy()) for i in range(200)]
    assert abs(np.mean(signs)) < 0.3


@pytest.mark.parametrize("sparsity", [0.0, 0.1, 0.35, 1.0])
def test_sparse_columns_have_as_many_zeros_as_in_torch(sparsity: float) -> None:
    mine, reference = (
        ours("sparse_", (30, 40), sparsity=sparsity).numpy(),
        theirs("sparse_", (30, 40), sparsity=sparsity),
    )
    np.testing.assert_array_equal((mine == 0).sum(0), (reference == 0).sum(0))
    if 0 < sparsity < 1:
        assert len(np.unique(mine == 0, axis=1).T) > 35  # other rows in each column
        assert mine[mine != 0].std() == pytest.approx(0.01, rel=0.1)


@pytest.mark.parametrize(
    ("name", "param"),
    [*((n, None) for n in nn.init._GAINS), ("leaky_relu", 0.2), ("leaky_relu", 0), ("relu", 3.0)],
)
def test_gains_match_torch(name: Any, param: Any) -> None:
    assert nn.init.calculate_gain(name, param) == torch.nn.init.calculate_gain(name, param)


def test_a_part_of_a_parameter_can_be_filled() -> None:
    """As the bias of an LSTM's forget gate is."""
    p = gw.Parameter(gw.zeros(6))
    with gw.no_grad():
        nn.init.ones_(p[2:4])
    np.testing.assert_array_equal(p.numpy(), [0, 0, 1, 1, 0, 0])


@pytest.mark.parametrize(
    ("call", "error"),
    [
        (lambda i, x: i.eye_(x[0]), ShapeError),
        (lambda i, x: i.sparse_(x[0], 0.1), ShapeError),
        (lambda i, x: i.sparse_(x, 1.5), UsageError),
        (lambda i, x: i.dirac_(x), ShapeError),
        (lambda i, x: i.dirac_(gw.zeros(3, 2, 2), 2), UsageError),
        (lambda i, x: i.dirac_(gw.zeros(3, 2, 2), 0), UsageError),
        (lambda i, x: i.orthogonal_(x[0]), ShapeError),
        (lambda i, x: i.xavier_normal_(x[0]), UsageError),
        (lambda i, x: i.kaiming_uniform_(x, mode="fan"), UsageError),
        (lambda i, x: i.kaiming_normal_(x, nonlinearity="gelu"), UsageError),
        (lambda i, x: i.trunc_normal_(x, a=1.0, b=0.0), UsageError),
        (lambda i, x: i.trunc_normal_(x, std=0.0), UsageError),
        (lambda i, x: i.normal_(x, std=-1.0), UsageError),
        (lambda i, x: i.uniform_(x, 1.0, 0.0), UsageError),
    ],
)
def test_invalid_input_is_refused_and_changes_nothing(call: Any, error: type[GraphwrightError]) -> None:
    x = gw.full((2, 3), 7.0)
    with pytest.raises(error):
        call(nn.init, x)
    assert (x.numpy() == 7.0).all()
