"""Clipping against torch, eager and inside a plan."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import graphwright as gw
from graphwright.array import from_numpy
from graphwright.autograd import Parameter, Tensor, TraceError
from graphwright.errors import UsageError
from graphwright.nn.utils import clip_grad_norm_, clip_grad_value_, get_total_norm
from graphwright.optim import NonFiniteGradient
from values import grad_of

SHAPES = [(4, 3), (5,), ()]


def pair(scale: float):
    rng = np.random.default_rng(0)
    grads = [np.asarray(rng.normal(size=s) * scale, np.float32) for s in SHAPES]
    mine = [Parameter(from_numpy(np.zeros(s, np.float32))) for s in (*SHAPES, (2,))]
    theirs = [torch.zeros(s, requires_grad=True) for s in (*SHAPES, (2,))]
    for p, q, g in zip(mine, theirs, grads, strict=False):
        p.grad, q.grad = Tensor(from_numpy(g.copy())), torch.from_numpy(g.copy())
    return mine, theirs


def same(mine, theirs):
    for p, q in zip(mine, theirs, strict=True):
        assert (p.grad is None) == (q.grad is None)
        if p.grad is not None:
            np.testing.assert_allclose(grad_of(p).numpy(), grad_of(q).numpy(), rtol=1e-6)


@pytest.mark.parametrize("norm", [1.0, 2.0, 3.0, 0.5, float("inf")])
@pytest.mark.parametrize("scale", [0.01, 1.0, 1e4, 0.0])
def test_clip_grad_norm_matches_torch(norm, scale):
    mine, theirs = pair(scale)
    a, b = clip_grad_norm_(mine, 1.5, norm), torch.nn.utils.clip_grad_norm_(theirs, 1.5, norm)
    assert a.shape == ()
    assert a.item() == pytest.approx(b.item(), rel=1e-6)
    same(mine, theirs)


def test_clip_grad_norm_uses_the_eps_of_torch():
    mine, theirs = pair(1e-7)
    clip_grad_norm_(mine, 1e-8)
    torch.nn.utils.clip_grad_norm_(theirs, 1e-8)
    for p, q in zip(mine[:3], theirs[:3], strict=True):
        np.testing.assert_allclose(grad_of(p).numpy(), grad_of(q).numpy(), rtol=1e-5)


@pytest.mark.parametrize("norm", [1.0, 2.0, 3.0, float("inf")])
def test_norms_of_float64_have_its_accuracy(norm):
    """Beside a float32 gradient and an empty one; a single parameter needs no list."""
    rng = np.random.default_rng(0)
    grads = [rng.normal(size=(4, 3)), rng.normal(size=5).astype("f4"), np.zeros((0, 2))]
    mine = [Parameter(from_numpy(np.zeros_like(g))) for g in grads]
    theirs = [torch.zeros(g.shape, dtype=torch.from_numpy(g).dtype, requires_grad=True) for g in grads]
    for p, q, g in zip(mine, theirs, grads, strict=True):
        p.grad, q.grad = Tensor(from_numpy(g.copy())), torch.from_numpy(g.copy())
    exact = np.linalg.norm(np.concatenate([g.astype("f8").ravel() for g in grads]), norm)
    total = get_total_norm([grad_of(p) for p in mine], norm)
    assert (total.item(), total.dtype.name) == (pytest.approx(exact, rel=1e-14), "float64")
    for some in (mine[0], mine):
        clip_grad_norm_(some, 0.7, norm)
    torch.nn.utils.clip_grad_norm_(theirs[0], 0.7, norm)
    torch.nn.utils.clip_grad_norm_(theirs[:2], 0.7, norm)  # it refuses the infinity norm of an empty tensor
    np.testing.assert_allclose(grad_of(mine[0]).numpy(), grad_of(theirs[0]).numpy(), rtol=1e-7)
    one = get_total_norm(grad_of(mine[0]), norm).item()
    assert one == pytest.approx(np.linalg.norm(grad_of(mine[0]).numpy().ravel(), norm), rel=1e-14)
    assert get_total_norm([]).item() == 0


def test_clip_grad_value_matches_torch():
    mine, theirs = pair(3.0)
    clip_grad_value_(mine, 0.7)
    torch.nn.utils.clip_grad_value_(theirs, 0.7)
    same(mine, theirs)


@pytest.mark.parametrize("clip", [lambda p: clip_grad_norm_(p, 1.0), lambda p: clip_grad_value_(p, 1.0)])
def test_clipping_without_gradients_is_refused(clip):
    with pytest.raises(UsageError, match="backward"):
        clip([Parameter(from_numpy(np.zeros(2, np.float32)))])


@pytest.mark.parametrize("norm", [0.0, -1.0, float("nan")])
def test_norms_that_are_not_positive_are_refused(norm):
    mine, theirs = pair(1.0)
    with pytest.raises(UsageError, match="norm_type"):
        clip_grad_norm_(mine, 1.0, norm)
    same(mine, theirs)


def test_clipping_in_a_plan_equals_eager():
    results = []
    for compiled in (False, True):
        p = Parameter(from_numpy(np.arange(6, dtype=np.float32).reshape(2, 3)), name="p")

        def fn(x, p=p):
            p.grad = None
            (p * p * x).sum().backward()
            norm = clip_grad_norm_([p], 2.0)
            return norm, grad_of(p)

        run = gw.compile(fn) if compiled else fn
        results.append([t.numpy() for t in run(Tensor(from_numpy(np.ones((2, 3), np.float32))))])
    for a, b in zip(*results, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6)


@pytest.mark.parametrize("norm", [1.0, 2.0, float("inf")])
@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
def test_error_if_nonfinite_raises_and_clips_nothing(norm, bad):
    mine, _ = pair(1.0)
    mine[1].name = "layer.bias"
    grad_of(mine[1]).numpy()[0] = bad
    before = grad_of(mine[0]).numpy().copy()
    with pytest.raises(NonFiniteGradient, match=r"layer\.bias"):
        clip_grad_norm_(mine, 1.0, norm, error_if_nonfinite=True)
    with pytest.raises(NonFiniteGradient, match="tensor 1"):
        get_total_norm([grad_of(p) for p in mine[:3]], norm, error_if_nonfinite=True)
    np.testing.assert_array_equal(grad_of(mine[0]).numpy(), before)
    assert not np.isfinite(clip_grad_norm_(mine, 1.0, norm).item())


def test_error_if_nonfinite_is_refused_in_a_trace():
    p = Parameter(from_numpy(np.ones(2, np.float32)), name="p")

    def fn(x):
        p.grad = None
        (p * x).sum().backward()
        return clip_grad_norm_([p], 1.0, error_if_nonfinite=True)

    with pytest.raises(TraceError):
        gw.trace(fn, np.ones(2, np.float32))
