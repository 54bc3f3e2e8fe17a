"""Values at the edge of the range, against float64 or the limit: no overflow inside, NaN only where it belongs."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch_ops import TORCH

from graphwright import Builder
from graphwright.array import float16, float32, from_numpy
from graphwright.autograd import grad, tensor
from graphwright.errors import NonFinite
from graphwright.ops import OPS, call, compute
from graphwright.testing.oracle import assert_bits, assert_close
from values import grad_of

EXTREME = np.array(
    [0.0, -0.0, 1.0, -1.0, 50.0, -50.0, 800.0, -800.0, 1e4, -1e4, np.inf, -np.inf, np.nan, 1e-40, -1e-40], np.float32
)
UNARY = [
    n
    for n, row in OPS.items()
    if row.arity == 1 and row.traits.elementwise and not row.attrs and n not in ("copy", "assert_finite")
]
BITS = "bitwise_"  # of integers
BINARY = [n for n, row in OPS.items() if row.arity == 2 and row.traits.elementwise and not n.startswith(("bce", BITS))]


@pytest.mark.parametrize("name", UNARY)
def test_unary_ops_match_torch_at_extreme_values(name: str) -> None:
    ours = call(name, from_numpy(EXTREME))
    with np.errstate(all="ignore"):
        wide = TORCH[name]([torch.from_numpy(EXTREME.astype(np.float64))], {}).numpy()
    if wide.dtype == bool:
        assert_bits(ours, wide, what=name)
        return
    with np.errstate(over="ignore"):
        wide = wide.astype(np.float32)
    assert_close(ours, wide, rtol=3e-6, atol=1e-30, what=name)
    assert np.array_equal(np.signbit(ours.to_numpy()[:2]), np.signbit(wide[:2]))


@pytest.mark.parametrize("approximate", ["none", "tanh"])
def test_gelu_at_extreme_values(approximate: str) -> None:
    finite = EXTREME[np.isfinite(EXTREME)]
    ours = call("gelu", from_numpy(finite), approximate=approximate)
    wide = torch.nn.functional.gelu(torch.from_numpy(finite.astype(np.float64)), approximate=approximate)
    assert_close(ours, wide.numpy().astype(np.float32), rtol=3e-6, atol=1e-30)


@pytest.mark.parametrize("name", BINARY)
def test_binary_ops_match_torch_on_pairs_of_extreme_values(name: str) -> None:
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
def test_softmax_of_extreme_values(row: str) -> None:
    x = np.array([ROWS[row]], np.float32)
    wide = torch.softmax(torch.from_numpy(x).double(), -1).numpy().astype(np.float32)
    assert_close(call("softmax", from_numpy(x)), wide, rtol=1e-6)


@pytest.mark.parametrize("row", ["large", "equal", "one", "small", "masked"])
@pytest.mark.parametrize("target", [0, 1, 2])
def test_cross_entropy_of_extreme_values(row: str, target: int) -> None:
    x, t = np.array([ROWS[row]], np.float32), np.array([target])
    loss, lse = call("cross_entropy", from_numpy(x), from_numpy(t))
    wide = TORCH["cross_entropy"](
        [torch.from_numpy(x).double(), torch.from_numpy(t)], OPS["cross_entropy"].complete({})
    )
    assert_close(loss, wide[0].numpy().astype(np.float32), rtol=1e-6)
    assert_close(lse, wide[1].numpy().astype(np.float32), rtol=1e-6)
    scores = tensor(x, requires_grad=True)
    g = grad(call("cross_entropy", scores, tensor(t))[0].sum(), scores)[0]
    p = np.exp(x.astype(np.float64) - wide[1].numpy()[:, None])
    assert_close(g, (p - np.eye(3)[t]).astype(np.float32), rtol=1e-6, atol=1e-7 * max(1.0, abs(lse.item())))


def test_ignored_rows_have_zero_loss_and_derivatives() -> None:
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
def test_gradients_are_finite_at_extreme_values(name: str) -> None:
    x = tensor(np.array([[-1e4, -800.0, -50.0, 0.0, 50.0, 800.0, 1e4]], np.float32), requires_grad=True)
    g = grad(call(name, x).sum(), x)[0]
    assert np.isfinite(g.numpy()).all()


def test_ops_keep_the_sign_of_zero() -> None:
    x = from_numpy(np.array([-0.0, 0.0], np.float32))
    zero = from_numpy(np.zeros(2, np.float32))
    assert np.signbit(call("add", x, zero).to_numpy()).tolist() == [False, False]
    assert np.signbit(call("mul", x, from_numpy(np.ones(2, np.float32))).to_numpy()).tolist() == [True, False]
    assert call("sum", x, axes=(0,)).dtype is float32


def test_logsumexp_of_extreme_values() -> None:
    x = np.array(list(ROWS.values()), np.float32)
    wide = torch.logsumexp(torch.from_numpy(x).double(), 1).numpy().astype(np.float32)
    assert_close(call("logsumexp", from_numpy(x), axes=(1,)), wide, rtol=1e-6)
    mine, theirs = tensor(x, requires_grad=True), torch.from_numpy(x).requires_grad_()
    torch.logsumexp(theirs, 1).sum().backward()
    g = grad(call("logsumexp", mine, axes=(1,)).sum(), mine)[0].numpy()
    dead = list(ROWS).index("dead")
    assert_close(np.delete(g, dead, 0), np.delete(grad_of(theirs).numpy(), dead, 0), rtol=1e-6)
    assert g[dead].tolist() == [0.0, 0.0, 0.0]  # NaN in torch


@pytest.mark.parametrize("row", ROWS)
def test_log_softmax_of_extreme_values(row: str) -> None:
    x = np.array([ROWS[row]], np.float32)
    wide = torch.log_softmax(torch.from_numpy(x).double(), -1).numpy().astype(np.float32)
    assert_close(call("log_softmax", from_numpy(x)), wide, rtol=1e-6)


@pytest.mark.parametrize("kind", ["float32", "bfloat16"])
def test_a_masked_row_is_zero_with_zero_gradient(kind: str) -> None:
    x = tensor([[800.0, -800.0, 799.0], [1.0, 2.0, 3.0], [np.inf, 0.0, np.nan]]).to(kind)
    mask = tensor([[True, True, True], [False, False, False], [False, True, False]])
    x.requires_grad = True
    y = call("softmax", x, mask)
    assert y.to("float32").tolist()[1:] == [[0, 0, 0], [0, 1, 0]]
    wide = torch.softmax(torch.tensor(x.numpy("float64")[0]), -1)
    assert_close(y.to("float64")[0], wide, rtol=1e-6 if kind == "float32" else 2**-8)
    (g,) = grad((y * tensor([[1.0, 2.0, 3.0]]).to(kind)).sum(), x)
    assert not g.numpy("float32")[1:].any()
    assert np.isfinite(g.numpy("float32")).all()


def test_powers_of_zero_and_negative_bases() -> None:
    table = [
        *((-2.0, 3.0), (-2.0, 2.0), (0.0, 0.0), (0.0, 2.0), (0.0, 1.0)),
        *((3.0, 0.0), (-3.0, 0.0), (0.0, 0.5), (2.0, -1.0)),
    ]
    x, p = (tensor(np.array(v), requires_grad=True) for v in zip(*table, strict=True))
    y = x**p
    assert y.tolist() == [a**b for a, b in table]
    dx, dp = grad(y.sum(), [x, p])
    assert dx.tolist() == [12, -4, 0, 0, 1, 0, 0, np.inf, -0.25]
    assert np.isnan(dp.numpy()).tolist() == [a < 0 for a, _ in table]
    assert dp.numpy()[2:5].tolist() == [0, 0, 0]
    assert dp.numpy()[5] == np.log(3.0)
    assert (tensor([-3]) ** 5).tolist() == [-243]
    assert (tensor([-3.0]) ** 5).tolist() == [-243]


def test_products_with_zeros_have_exact_gradients_of_any_order() -> None:
    for values in ([2.0, 0.0, 3.0, 5.0, 7.0], [0.0, 2.0, 0.0], [0.0, 0.0, 0.0], [4.0], []):
        mine = tensor(np.array(values), requires_grad=True)
        theirs = torch.tensor(values, dtype=torch.float64, requires_grad=True)
        g = grad(mine.prod(), mine, create_graph=True)[0]
        (h,) = torch.autograd.grad(theirs.prod(), theirs, create_graph=True)
        assert g.tolist() == h.tolist()
        if len(values) > 1:
            second = grad((g * g).sum(), mine)[0]
            assert second.tolist() == torch.autograd.grad((h * h).sum(), theirs)[0].tolist()


@pytest.mark.parametrize(
    "name", ["sigmoid", "silu", "tanh", "gelu", "relu", "leaky_relu", "elu", "softplus", "logsigmoid", "sech"]
)
@pytest.mark.parametrize("inner", ["softplus", "logsigmoid", "sech", "elu"])
def test_gradients_of_chains_are_finite(name: str, inner: str) -> None:
    """An activation that is not the last node, of operands whose exponential overflows."""
    x = tensor(np.array([-800.0, -50.0, 0.5, 50.0, 800.0], np.float32), requires_grad=True)
    y = call(name, call(inner, x))
    assert np.isfinite(y.numpy()).all()
    assert np.isfinite(grad(call("softplus", y).sum(), x)[0].numpy()).all()


def test_assert_finite_reports_index_and_count() -> None:
    x = np.array([[1.0, 2.0], [np.nan, np.inf]])
    assert call("assert_finite", from_numpy(x[:1])).to_numpy().tolist() == [[1, 2]]
    with pytest.raises(NonFinite, match=r"assert_finite: 2 of 4 .* the first at \[1, 0\]"):
        call("assert_finite", from_numpy(x))
    b = Builder()
    b.output(b.assert_finite(b.exp(b.input("x", (3,))), name="watch"), "y")
    plan = b.build().compile(x=(3,))
    assert plan({"x": np.zeros(3, np.float32)})["y"].to_numpy().tolist() == [1, 1, 1]
    with pytest.raises(NonFinite, match=r"watch \(assert_finite\): 1 of 3 .* the first at \[2\]"):
        plan({"x": np.array([0, 1, 800], np.float32)})


def test_clamp_passes_the_gradient_at_its_bounds() -> None:
    x = tensor([-2.0, -1.0, 0.0, 1.0, 2.0], requires_grad=True)
    assert grad(x.clamp(-1.0, 1.0).sum(), x)[0].tolist() == [0, 1, 1, 1, 0]
    assert grad(x.clamp(min=0.0).sum(), x)[0].tolist() == [0, 0, 1, 1, 1]


def test_stop_gradient_and_scale_gradient_scale_gradients_only() -> None:
    x = tensor([1.0, 2.0], requires_grad=True)
    assert grad((x * call("stop_gradient", x)).sum(), x)[0].tolist() == [1, 2]
    for scale in (0.0, -1.0, 0.5):
        y = call("scale_gradient", x, scale=scale)
        assert y.tolist() == [1, 2]
        assert grad((y * y).sum(), x)[0].tolist() == [2 * scale, 4 * scale]


def test_second_derivatives_of_lgamma_and_gradients_of_acosh_at_the_ends() -> None:
    x = tensor([0.5, 1.0, 2.0, -0.5], dtype="float64", requires_grad=True)
    exact = np.pi**2 / np.array([2, 6, 6, 2]) + np.array([0, 0, -1, 4])
    np.testing.assert_allclose(grad(call("digamma", x).sum(), x)[0].numpy(), exact, rtol=1e-14)
    y = tensor([-2.0, 1e30], requires_grad=True)
    np.testing.assert_allclose(grad(call("acosh", y).sum(), y)[0].numpy(), [np.nan, 1e-30], rtol=1e-6)
