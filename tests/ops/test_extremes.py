"""Values at the edge of the range, against float64 or the limit: no overflow inside, NaN only where it belongs."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch_ops import TORCH

from graphwright.array import float16, float32, from_numpy
from graphwright.autograd import grad, tensor
from graphwright.ops import OPS, call, compute
from graphwright.testing.oracle import assert_bits, assert_close

EXTREME = np.array(
    [0.0, -0.0, 1.0, -1.0, 50.0, -50.0, 800.0, -800.0, 1e4, -1e4, np.inf, -np.inf, np.nan, 1e-40, -1e-40], np.float32
)
UNARY = [n for n, row in OPS.items() if row.arity == 1 and row.traits.elementwise and not row.attrs and n != "copy"]
BINARY = [n for n, row in OPS.items() if row.arity == 2 and row.traits.elementwise]


@pytest.mark.parametrize("name", UNARY)
def test_unary_ops_at_the_edges(name: str) -> None:
    ours = call(name, from_numpy(EXTREME))
    with np.errstate(all="ignore"):
        wide = TORCH[name]([torch.from_numpy(EXTREME.astype(np.float64))], {}).numpy().astype(np.float32)
    assert_close(ours, wide, rtol=3e-6, atol=1e-30, what=name)
    assert np.array_equal(np.signbit(ours.to_numpy()[:2]), np.signbit(wide[:2]))


@pytest.mark.parametrize("approximate", ["none", "tanh"])
def test_gelu_at_the_edges(approximate: str) -> None:
    finite = EXTREME[np.isfinite(EXTREME)]
    ours = call("gelu", from_numpy(finite), approximate=approximate)
    wide = torch.nn.functional.gelu(torch.from_numpy(finite.astype(np.float64)), approximate=approximate)
    assert_close(ours, wide.numpy().astype(np.float32), rtol=3e-6, atol=1e-30)


@pytest.mark.parametrize("name", BINARY)
def test_binary_ops_on_every_pair(name: str) -> None:
    a, b = (np.ascontiguousarray(x.ravel()) for x in np.meshgrid(EXTREME, EXTREME))
    theirs = TORCH[name]([torch.from_numpy(a), torch.from_numpy(b)], {}).numpy()
    assert_bits(call(name, from_numpy(a), from_numpy(b)), theirs, what=name)


ROWS = {
    "large": [800.0, -800.0, 799.0],
    "equal": [800.0, 800.0, 800.0],
    "one": [1e4, -1e4, -1e4],
    "small": [-1e4, -1e4, -1e4],
    "masked": [-np.inf, 1.0, -np.inf],
    "dead": [-np.inf, -np.inf, -np.inf],
    "infinite": [np.inf, 0.0, 1.0],
}


@pytest.mark.parametrize("row", ROWS)
def test_softmax_at_the_edges(row: str) -> None:
    x = np.array([ROWS[row]], np.float32)
    wide = torch.softmax(torch.from_numpy(x).double(), -1).numpy().astype(np.float32)
    assert_close(call("softmax", from_numpy(x)), wide, rtol=1e-6)


@pytest.mark.parametrize("row", ["large", "equal", "one", "small", "masked"])
@pytest.mark.parametrize("target", [0, 1, 2])
def test_cross_entropy_at_the_edges(row: str, target: int) -> None:
    x, t = np.array([ROWS[row]], np.float32), np.array([target])
    loss, lse = call("cross_entropy", from_numpy(x), from_numpy(t))
    wide = TORCH["cross_entropy"]([torch.from_numpy(x).double(), torch.from_numpy(t)], {"ignore_index": -100})
    assert_close(loss, wide[0].numpy().astype(np.float32), rtol=1e-6)
    assert_close(lse, wide[1].numpy().astype(np.float32), rtol=1e-6)
    scores = tensor(x, requires_grad=True)
    g = grad(call("cross_entropy", scores, tensor(t))[0].sum(), scores)[0]
    p = np.exp(x.astype(np.float64) - wide[1].numpy()[:, None])
    assert_close(g, (p - np.eye(3)[t]).astype(np.float32), rtol=1e-6, atol=1e-7 * max(1.0, abs(lse.item())))


def test_ignored_rows_give_nothing_in_any_order_of_derivative() -> None:
    scores, t = tensor(np.random.default_rng(0).normal(size=(3, 4)), requires_grad=True), tensor([1, -100, 3])
    loss, _ = call("cross_entropy", scores, t)
    assert loss.numpy()[1] == 0
    g = grad(loss.sum(), scores, create_graph=True)[0]
    assert not g.numpy()[1].any()
    gg = grad((g * tensor(np.arange(12.0).reshape(3, 4))).sum(), scores)[0]
    assert not gg.numpy()[1].any()
    assert gg.numpy()[0].any()


def test_rms_norm_of_large_low_precision_rows() -> None:
    x = compute(OPS["cast"], [from_numpy(np.full((2, 64), 3000.0))], {"dtype": float16})[0]
    w = compute(OPS["cast"], [from_numpy(np.ones(64))], {"dtype": float16})[0]
    assert np.array_equal(call("rms_norm", x, w).to_numpy(), np.ones((2, 64), np.float16))
    zeros = call("rms_norm", from_numpy(np.zeros((1, 8), np.float32)), from_numpy(np.ones(8, np.float32)), eps=1e-6)
    assert not zeros.to_numpy().any()


@pytest.mark.parametrize("name", ["sigmoid", "silu", "tanh", "softmax", "gelu"])
def test_gradients_stay_finite_at_the_edges(name: str) -> None:
    x = tensor(np.array([[-1e4, -800.0, -50.0, 0.0, 50.0, 800.0, 1e4]], np.float32), requires_grad=True)
    g = grad(call(name, x).sum(), x)[0]
    assert np.isfinite(g.numpy()).all()


def test_minus_zero_is_a_zero_of_its_own() -> None:
    x = from_numpy(np.array([-0.0, 0.0], np.float32))
    zero = from_numpy(np.zeros(2, np.float32))
    assert np.signbit(call("add", x, zero).to_numpy()).tolist() == [False, False]
    assert np.signbit(call("mul", x, from_numpy(np.ones(2, np.float32))).to_numpy()).tolist() == [True, False]
    assert call("sum", x, axes=(0,)).dtype is float32
