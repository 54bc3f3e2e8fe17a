"""Losses and norms of `nn.functional` against torch's: values and gradients under every reduction, 16 bits, edges."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from graphwright.array import float32, float64
from graphwright.autograd import grad, tensor
from graphwright.errors import IndexOutOfRange, ShapeError, UsageError
from graphwright.nn import functional as ours
from graphwright.testing.gradcheck import gradcheck, gradgradcheck
from graphwright.testing.oracle import assert_close

pytestmark = pytest.mark.filterwarnings("ignore:reduction")  # torch, of the mean of kl_div
RNG = np.random.default_rng(5)
X, Y = RNG.normal(size=(4, 3)) * 2, RNG.normal(size=(4, 3))
P, Q = RNG.uniform(0.05, 0.95, (4, 3)), RNG.uniform(0, 1, (4, 3)) * (RNG.random((4, 3)) < 0.7)
LOGP = np.log(P / P.sum(1, keepdims=True))
LOSSES: dict[str, tuple[np.ndarray, np.ndarray, dict[str, Any]]] = {
    "mse_loss": (X, Y, {}),
    "l1_loss": (X, Y, {}),
    "huber_loss": (X, Y, {"delta": 0.7}),
    "smooth_l1_loss": (X, Y, {"beta": 0.5}),
    "binary_cross_entropy": (P, Q, {}),
    "binary_cross_entropy_with_logits": (X, Q, {}),
    "kl_div": (LOGP, Q, {}),
}


def both(name: str, x: np.ndarray, y: np.ndarray, options: dict[str, Any]) -> None:
    """Value, and gradients of both operands, under an upstream gradient that is not 1."""
    a, b = (tensor(v, requires_grad=True) for v in (x, y))
    s, t = (torch.from_numpy(v.copy()).requires_grad_() for v in (x, y))
    mine, theirs = getattr(ours, name)(a, b, **options), getattr(F, name)(s, t, **options)
    assert_close(mine, theirs.detach(), rtol=1e-12, atol=1e-14)
    up = RNG.normal(size=mine.shape)
    found = grad(mine, [a, b], [tensor(up)])
    for g, h in zip(found, torch.autograd.grad(theirs, [s, t], torch.from_numpy(np.asarray(up))), strict=True):
        assert_close(g, h, rtol=1e-11, atol=1e-13)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("name", LOSSES)
def test_losses_match_torch(name: str, reduction: str) -> None:
    x, y, options = LOSSES[name]
    y = np.where(y == 0, 0.01, y) if name == "kl_div" else y  # at a target of 0 torch's gradient to it is infinite
    both(name, x, y, {**options, "reduction": reduction})


@pytest.mark.parametrize("name", LOSSES)
def test_losses_have_second_derivatives(name: str) -> None:
    x, y, options = LOSSES[name]
    gradcheck(lambda a: getattr(ours, name)(a, y, **options), [x])
    gradgradcheck(lambda a: getattr(ours, name)(a, y, **options), [x])


@pytest.mark.parametrize("name", LOSSES)
def test_losses_of_low_precision_are_float32(name: str) -> None:
    x, y, options = LOSSES[name]
    a, b = (tensor(v).to("bfloat16") for v in (x, y))
    a.requires_grad = True
    loss = getattr(ours, name)(a, b, **options)
    assert loss.dtype is float32
    exact = getattr(F, name)(*(torch.from_numpy(t.numpy("float64")) for t in (a, b)), **options)
    assert_close(loss, exact.float(), rtol=1e-5)
    assert grad(loss, a)[0].dtype.name == "bfloat16"


def test_kl_div_matches_torch_in_all_variants() -> None:
    for options in ({"reduction": "batchmean"}, {"log_target": True, "reduction": "sum"}):
        y = np.log(Q + 0.1) if "log_target" in options else Q + 0.1
        both("kl_div", LOGP, y, options)
    assert ours.kl_div(tensor(LOGP), tensor(Q), reduction="none").numpy()[Q == 0].tolist() == [0.0] * int(
        (Q == 0).sum()
    )
    with pytest.raises(UsageError, match="reduction"):
        ours.kl_div(tensor(LOGP), tensor(Q), reduction="average")


def test_pos_weight_scales_positive_terms() -> None:
    w = RNG.uniform(0.5, 3, 3)
    x = tensor(X, requires_grad=True)
    s = torch.from_numpy(X.copy()).requires_grad_()
    mine = ours.binary_cross_entropy_with_logits(x, tensor(Q), pos_weight=tensor(w))
    theirs = F.binary_cross_entropy_with_logits(s, torch.from_numpy(Q), pos_weight=torch.from_numpy(w))
    assert_close(mine, theirs.detach(), rtol=1e-13)
    assert_close(grad(mine, x)[0], torch.autograd.grad(theirs, s)[0], rtol=1e-12)


def test_binary_cross_entropy_at_0_and_1() -> None:
    p, y = np.meshgrid([0.0, 1.0, 1e-30, 0.5], [0.0, 1.0, 0.3])
    a, b = tensor(p, requires_grad=True), tensor(y, requires_grad=True)
    s = torch.from_numpy(p.copy()).requires_grad_()
    mine = ours.binary_cross_entropy(a, b, reduction="none")
    theirs = F.binary_cross_entropy(s, torch.from_numpy(y), reduction="none")
    assert_close(mine, theirs.detach(), rtol=1e-14)
    da, db = grad(mine.sum(), [a, b])
    assert_close(da, torch.autograd.grad(theirs.sum(), s)[0], rtol=1e-7)  # torch's least divisor is a float32 10⁻¹²
    logs = [torch.log(t).clamp(min=-100) for t in (1 - s.detach(), s.detach())]
    assert_close(db, logs[0] - logs[1], rtol=1e-13)
    x = np.array([0.0, -0.0, 50, -50, 800, -800, 1e4, -1e4])
    for target in (0.0, 1.0, 0.3):
        both("binary_cross_entropy_with_logits", x, np.full(8, target), {"reduction": "none"})
    exact = ours.binary_cross_entropy_with_logits(tensor([40.0]), tensor([1.0])).item()
    assert exact == pytest.approx(np.exp(-40.0), rel=1e-5)  # the digits that x - x·y has lost


def test_losses_warn_of_shapes_that_broadcast_as_torch_does() -> None:
    for loss, theirs in ((ours.mse_loss, F.mse_loss), (ours.l1_loss, F.l1_loss), (ours.huber_loss, F.huber_loss)):
        with pytest.warns(UserWarning, match="another shape"):
            mine = loss(tensor(X), tensor(X[:1]))
        with pytest.warns(UserWarning, match="size"):
            assert_close(mine, theirs(torch.tensor(X), torch.tensor(X[:1])).numpy(), rtol=1e-6)
        with pytest.warns(UserWarning, match="another shape"), pytest.raises(ShapeError):
            loss(tensor(X), tensor(X[:3]))
    with pytest.raises(UsageError, match="reduction"):
        ours.mse_loss(tensor(X), tensor(Y), reduction="median")


# -- classes -----------------------------------------------------------------------------------------------------------
SCORES, WEIGHT = RNG.normal(size=(6, 5)) * 3, RNG.uniform(0.3, 2, 5)
TARGETS = np.array([0, 4, -100, 2, 2, 1])


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("smoothing", [0.0, 0.2, 1.0])
@pytest.mark.parametrize("kind", [float64, float32])
def test_cross_entropy_matches_torch(reduction: str, weighted: bool, smoothing: float, kind) -> None:
    x = tensor(SCORES, kind, requires_grad=True)
    s = torch.from_numpy(x.numpy().copy()).requires_grad_()
    weight = (tensor(WEIGHT, kind), torch.from_numpy(WEIGHT.astype(kind.numpy))) if weighted else (None, None)
    options: dict[str, Any] = {"label_smoothing": smoothing, "reduction": reduction}
    mine = ours.cross_entropy(x, tensor(TARGETS), weight=weight[0], **options)
    theirs = F.cross_entropy(s, torch.from_numpy(TARGETS), weight[1], **options)
    assert_close(mine, theirs.detach(), rtol=1e-12 if kind is float64 else 2e-6, atol=1e-6 if kind is float32 else 0)
    up = RNG.normal(size=mine.shape)
    g = grad(mine, x, [tensor(up, kind)])[0]
    (h,) = torch.autograd.grad(theirs, s, torch.from_numpy(np.asarray(up, kind.numpy)))
    assert_close(g, h, rtol=1e-11 if kind is float64 else 1e-5, atol=1e-14 if kind is float64 else 1e-6)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("weighted", [False, True])
def test_nll_matches_torch_and_cross_entropy(reduction: str, weighted: bool) -> None:
    x = tensor(SCORES, requires_grad=True)
    weight = tensor(WEIGHT) if weighted else None
    options: dict[str, Any] = {"weight": weight, "reduction": reduction}
    mine = ours.nll_loss(ours.log_softmax(x), tensor(TARGETS), **options)
    logp = torch.log_softmax(torch.from_numpy(SCORES), 1)
    w = torch.from_numpy(WEIGHT) if weighted else None
    assert_close(mine, F.nll_loss(logp, torch.from_numpy(TARGETS), w, reduction=reduction), rtol=1e-12)
    both = [
        grad(loss, x, [tensor(np.ones(loss.shape))])[0].numpy()
        for loss in (mine, ours.cross_entropy(x, tensor(TARGETS), **options))
    ]
    assert_close(both[0], both[1], rtol=1e-11, atol=1e-14)


def test_ignoring_all_rows_gives_nan_mean_and_zero_sum() -> None:
    x, none = tensor(SCORES), tensor(np.full(6, -100))
    for loss in (ours.cross_entropy, ours.nll_loss):
        for weight in (None, tensor(WEIGHT)):
            assert np.isnan(loss(x, none, weight=weight).item())
            assert loss(x, none, weight=weight, reduction="sum").item() == 0.0


def test_a_class_id_out_of_range_is_refused() -> None:
    for loss in (ours.cross_entropy, ours.nll_loss):
        with pytest.raises(IndexOutOfRange):
            loss(tensor(SCORES), tensor(np.full(6, 5)))
    with pytest.raises(ShapeError, match="weight"):
        ours.cross_entropy(tensor(SCORES), tensor(TARGETS), weight=tensor(WEIGHT[:3]))
    with pytest.raises(ShapeError, match="target"):
        ours.nll_loss(tensor(SCORES), tensor(TARGETS[:3]))


# -- activations and norms ---------------------------------------------------------------------------------------------
PLAIN: list[str] = ["relu", "silu", "sigmoid", "tanh", "softplus", "logsigmoid", "leaky_relu", "elu", "gelu"]


@pytest.mark.parametrize("name", PLAIN)
def test_activations_match_torch(name: str) -> None:
    theirs: Callable = getattr(F, name, None) or getattr(torch, name)
    assert_close(getattr(ours, name)(tensor(X)), theirs(torch.from_numpy(X)), rtol=1e-9, atol=1e-12)


def test_activation_options_match_torch() -> None:
    x, s = tensor(X), torch.from_numpy(X)
    assert_close(ours.gelu(x, "tanh"), F.gelu(s, approximate="tanh"), rtol=1e-12)
    assert_close(ours.elu(x, 0.3), F.elu(s, 0.3), rtol=1e-12)
    assert_close(ours.leaky_relu(x, negative_slope=0.3), F.leaky_relu(s, 0.3), rtol=1e-12)
    assert_close(ours.swiglu(x, tensor(Y)), F.silu(s) * torch.from_numpy(Y), rtol=1e-12)
    assert_close(ours.sech(x), 1 / torch.cosh(s), rtol=1e-12)
    assert_close(ours.softmax(x, 0), s.softmax(0), rtol=1e-12)


@pytest.mark.parametrize("scale", [0, 1, 2])
def test_norms_match_torch(scale: int) -> None:
    x = RNG.normal(size=(3, 4, 2, 5)) * 2 + 1
    t, s = tensor(x), torch.from_numpy(x)

    def parts(*shape: int) -> tuple[Any, Any]:
        values = [RNG.normal(size=shape) for _ in range(scale)]
        return [tensor(v) for v in values], [torch.from_numpy(v) for v in values]

    mine, theirs = parts(2, 5)
    assert_close(ours.layer_norm(t, (2, 5), *mine), F.layer_norm(s, (2, 5), *theirs), rtol=1e-11, atol=1e-13)
    mine, theirs = parts(4)
    weight, bias = (*mine, None, None)[:2]
    assert_close(ours.group_norm(t, 2, *mine), F.group_norm(s, 2, *theirs), rtol=1e-11, atol=1e-13)
    padded: list[Any] = [*theirs, None, None][:2]
    wanted = F.instance_norm(s, None, None, *padded)
    assert_close(ours.instance_norm(t, None, None, *mine), wanted, rtol=1e-11, atol=1e-13)
    mean, var = RNG.normal(size=4), RNG.uniform(0.5, 2, 4)
    running: list[Any] = [torch.from_numpy(v.copy()) for v in (mean, var)]
    evaluated = F.batch_norm(s, *running, *padded)
    assert_close(ours.batch_norm(t, tensor(mean), tensor(var), weight, bias), evaluated, rtol=1e-11, atol=1e-13)
    moved = tensor(mean), tensor(var)
    found = ours.batch_norm(t, *moved, weight, bias, training=True, momentum=0.3)
    trained = F.batch_norm(s, *running, *padded, training=True, momentum=0.3)
    for a, b in zip((found, *moved), (trained, *running), strict=True):
        assert_close(a, b, rtol=1e-11, atol=1e-13)


def test_norms_refuse_mismatched_operands() -> None:
    x, one = tensor(X), tensor(np.ones(3))
    with pytest.raises(ShapeError, match="last axes"):
        ours.layer_norm(x, 4)
    with pytest.raises(ShapeError, match="groups"):
        ours.group_norm(x, 2)
    with pytest.raises(ShapeError, match="more than one value"):
        ours.batch_norm(x[:1], one, one, training=True)
    with pytest.raises(ShapeError, match="channel"):
        ours.batch_norm(x, tensor(np.ones(2)), one)


def test_running_statistics_keep_float32_with_16_bit_activations() -> None:
    x = tensor(RNG.normal(size=(8, 3)) * 100 + 2000).to("bfloat16")
    mean, var = tensor(np.zeros(3, np.float32)), tensor(np.ones(3, np.float32))
    y = ours.batch_norm(x, mean, var, training=True)
    assert (y.dtype.name, mean.dtype, var.dtype) == ("bfloat16", float32, float32)
    wide = torch.from_numpy(x.numpy("float64"))
    assert_close(mean, (wide.mean(0) * 0.1).float(), rtol=1e-6)
    assert_close(var, (0.9 + wide.var(0) * 0.1).float(), rtol=1e-5)


def test_rms_norm_casts_before_or_after_scaling() -> None:
    x, w = (tensor(RNG.normal(size=s)).to("bfloat16") for s in ((5, 64), (64,)))
    wide, scale = (torch.from_numpy(t.numpy("float32")) for t in (x, w))
    unit = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
    gemma = (unit * (1 + scale)).to(torch.bfloat16)
    llama = scale.to(torch.bfloat16) * unit.to(torch.bfloat16)
    assert_close(ours.rms_norm(x, 64, w, 1e-6, unit_offset=True, cast_before_scale=False), gemma.float(), rtol=2**-8)
    assert_close(ours.rms_norm(x, 64, w, 1e-6), llama.float(), rtol=2**-8)
    assert (gemma != llama).any()
