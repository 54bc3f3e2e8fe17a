"""Functions of layers against those of torch, with the same names and argument orders."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import graphwright as gw
from graphwright.errors import GraphwrightError, ShapeError
from values import grad_of

F, T = gw.nn.functional, torch.nn.functional
rng = np.random.default_rng(0)
LINE, PLANE = (2, 4, 9), (2, 4, 7, 8)
CASES: list[tuple[str, list[tuple[int, ...]], tuple[Any, ...], dict[str, Any]]] = [
    ("linear", [(2, 3, 4), (5, 4)], (), {}),
    ("linear", [(4,), (5, 4), (5,)], (), {}),
    ("conv1d", [LINE, (6, 4, 3), (6,)], (2, 1), {"dilation": 2}),
    ("conv1d", [LINE, (6, 2, 3)], (), {"groups": 2}),
    ("conv2d", [PLANE, (6, 4, 3, 2), (6,)], (), {}),
    ("conv2d", [PLANE, (4, 1, 3, 3)], (), {"stride": (2, 1), "padding": (1, 2), "groups": 4}),
    ("conv_transpose1d", [LINE, (4, 3, 3), (3,)], (2, 1, 1), {}),
    ("conv_transpose2d", [PLANE, (4, 3, 3, 2), (6,)], (2, 1, (1, 0), 2), {"dilation": 1}),
    ("max_pool1d", [LINE], (3,), {"stride": 2, "padding": 1}),
    ("max_pool2d", [PLANE], ((2, 3), 2, 1), {"dilation": (1, 2)}),
    ("avg_pool1d", [LINE], (3, 2, 1), {"count_include_pad": False}),
    ("avg_pool2d", [PLANE], ((3, 2),), {"padding": 1}),
    ("adaptive_avg_pool1d", [LINE], (4,), {}),
    ("adaptive_avg_pool2d", [PLANE], ((3, 2),), {}),
    ("interpolate", [LINE], (5,), {}),
    ("interpolate", [PLANE], ((9, 3),), {"mode": "nearest"}),
    ("interpolate", [LINE], (13,), {"mode": "linear", "align_corners": True}),
    ("interpolate", [PLANE], ((9, 3),), {"mode": "bilinear", "align_corners": False}),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_layer_functions_match_torch(case: Any) -> None:
    name, shapes, args, options = case
    hosts = [rng.normal(size=s) for s in shapes]
    ours, theirs = ([make(h, requires_grad=True) for h in hosts] for make in (gw.tensor, torch.tensor))
    bias = (None,) if name.startswith("conv") and len(shapes) == 2 else ()
    found = getattr(F, name)(*ours, *bias, *args, **options)
    size = {"size": args[0]} if name == "interpolate" else {}
    truth = getattr(T, name)(*theirs, *bias, *(() if size else args), **size, **options)
    np.testing.assert_allclose(found.numpy(), truth.detach().numpy(), rtol=1e-9, atol=1e-12)
    weights = rng.normal(size=truth.shape)
    (found * gw.tensor(weights)).sum().backward()
    (truth * torch.tensor(weights)).sum().backward()
    for a, b in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(grad_of(a).numpy(), grad_of(b).numpy(), rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("mode", ["linear", "bilinear", "trilinear", "bicubic", "nearest", "nearest-exact"])
@pytest.mark.parametrize("factor", [1.2, 2.3, 0.7])
def test_resampling_by_a_factor_that_is_not_the_ratio_of_the_sizes(mode: str, factor: float) -> None:
    rank = {"linear": 1, "bilinear": 2, "bicubic": 2}.get(mode, 3)
    for n in (3, 5):  # 1.2 keeps small axes; sources near integers are decided by rounding
        host = rng.normal(size=(1, 2, *(n + k for k in range(rank))))
        found = F.interpolate(gw.tensor(host), scale_factor=factor, mode=mode)
        truth = T.interpolate(torch.tensor(host), scale_factor=factor, mode=mode)
        np.testing.assert_allclose(found.numpy(), truth.numpy(), rtol=1e-9)


@pytest.mark.parametrize("pool", ["max_pool2d", "avg_pool2d", "lp_pool2d"])
@pytest.mark.parametrize("stride", [1, 2, 3])
def test_a_ceiled_pool_of_an_input_smaller_than_the_window(pool: str, stride: int) -> None:
    options = {"stride": stride, "ceil_mode": True}
    for n in (1, 2, 3, 4):  # windows of 4, of which the last may be incomplete
        host = rng.uniform(1.0, 2.0, (1, 4, n))
        args = (2.0, (1, 4)) if pool == "lp_pool2d" else ((1, 4),)
        try:
            truth = getattr(T, pool)(torch.tensor(host), *args, **options).numpy()
        except RuntimeError:
            with pytest.raises(ShapeError):
                getattr(F, pool)(gw.tensor(host), *args, **options)
        else:
            np.testing.assert_allclose(getattr(F, pool)(gw.tensor(host), *args, **options).numpy(), truth)


def test_rows_scaled_by_frequency_are_those_of_the_table() -> None:
    host = rng.normal(size=(3, 50))
    ids = np.array([0, 1, 1, 2, 2, 2])
    assert np.array_equal(F.embedding(ids, gw.tensor(host), scale_grad_by_freq=True).numpy(), host[ids])


@pytest.mark.parametrize("padding", [None, 2, -1])
def test_embedding_matches_torch_and_ignores_the_padding_row(padding: int | None) -> None:
    host, ids = rng.normal(size=(5, 3)), np.array([[0, 2, 4], [2, 2, 1]])
    mine, other = gw.tensor(host, requires_grad=True), torch.tensor(host, requires_grad=True)
    found, truth = F.embedding(gw.tensor(ids), mine, padding), T.embedding(torch.tensor(ids), other, padding)
    np.testing.assert_array_equal(found.numpy(), truth.detach().numpy())
    (found * found).sum().backward()
    (truth * truth).sum().backward()
    np.testing.assert_allclose(grad_of(mine).numpy(), grad_of(other).numpy(), rtol=1e-12)


def test_dropout_is_active_in_training_only() -> None:
    x = gw.ones(2000)
    assert F.dropout(x, 0.5, False) is x
    assert F.dropout(x, 0.0) is x
    with gw.mode("eval"):
        assert F.dropout(x, 0.5) is x
    with gw.fork_rng(0):
        found = F.dropout(x, 0.25).numpy()
    assert set(np.unique(found)) == {np.float32(0), np.float32(1) / np.float32(0.75)}
    assert abs((found == 0).mean() - 0.25) < 0.05


def test_mismatched_operands_are_refused() -> None:
    x = gw.ones(2, 4, 9)
    for call in (
        lambda: F.conv2d(x, gw.ones(6, 4, 3)),
        lambda: F.conv1d(x, gw.ones(6, 3, 3)),
        lambda: F.interpolate(x, 3, "bilinear"),
        lambda: F.interpolate(x, 3, "cubic"),
        lambda: F.linear(x, gw.ones(3, 4)),
        lambda: F.max_pool1d(x, 20),
    ):
        with pytest.raises(GraphwrightError):
            call()
