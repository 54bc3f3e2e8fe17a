"""backward computes only the gradients that are needed."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from graphwright.array import float32
from graphwright.autograd import (
    Parameter,
    Tensor,
    grad,
    tensor,
)
from graphwright.errors import UsageError
from graphwright.ops import call
from values import array_of, grad_of


def leaf(*values: float) -> Tensor:
    return tensor(np.array(values), requires_grad=True)


def counted(monkeypatch: pytest.MonkeyPatch, name: str) -> list[str]:
    """A list that grows by one whenever an op runs, by name."""
    from graphwright.autograd import apply as module

    seen: list[str] = []
    run = module.compute
    monkeypatch.setattr(module, "compute", lambda row, *rest: (seen.append(row.name), run(row, *rest))[1])
    return seen


def _mlp() -> tuple[Tensor, list[Tensor], Tensor]:
    rng = np.random.default_rng(0)
    x = tensor(rng.normal(size=(5, 4)))
    weights = [tensor(rng.normal(size=s), requires_grad=True) for s in ((6, 4), (6, 6), (3, 6))]
    h = x
    for w in weights:
        h = call("linear", h, w).tanh()
    return x, weights, h.sum()


def test_frozen_weights_and_data_need_no_product(monkeypatch: pytest.MonkeyPatch) -> None:
    _, _, loss = _mlp()
    seen = counted(monkeypatch, "matmul")
    loss.backward()
    assert seen.count("matmul") == 5  # three dW, and dx of the upper two: the data wants none
    seen.clear()
    _, weights, _ = _mlp()
    for w in weights[:2]:
        w.requires_grad = False
    h = call("linear", tensor(np.ones((5, 4))), weights[0]).tanh()
    loss = call("linear", call("linear", h, weights[1]).tanh(), weights[2]).tanh().sum()
    seen.clear()
    loss.backward()
    assert seen.count("matmul") == 1
    assert [w.grad is None for w in weights] == [True, True, False]


def test_a_gradient_for_one_tensor_computes_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    _, weights, loss = _mlp()
    whole = grad(loss, weights, retain_graph=True)
    seen = counted(monkeypatch, "matmul")
    top = grad(loss, weights[2], retain_graph=True)[0]
    assert seen.count("matmul") == 1
    seen.clear()
    bottom = grad(loss, weights[0])[0]
    assert seen.count("matmul") == 3  # its dW, and the way down to it
    assert np.array_equal(top.numpy(), whole[2].numpy())
    assert np.array_equal(bottom.numpy(), whole[0].numpy())


def test_backward_into_given_tensors_fills_no_other() -> None:
    a, b = leaf(2.0), leaf(3.0)
    h = a * b
    loss = (h * h).sum()
    loss.backward(inputs=[a, h], retain_graph=True)
    assert (grad_of(a).tolist(), grad_of(h).tolist(), b.grad) == ([36.0], [12.0], None)
    loss.backward(inputs=[a], retain_graph=True)
    assert grad_of(a).tolist() == [72.0]
    with pytest.raises(UsageError):
        loss.backward(inputs=[])
    loss.backward()
    assert (grad_of(a).tolist(), grad_of(b).tolist()) == ([108.0], [24.0])
    w = Parameter(array_of(tensor(np.ones(2)).to("bfloat16")))
    w.sum().backward(inputs=[w])
    assert grad_of(w).dtype is float32


def test_one_of_several_results_may_be_unused() -> None:
    rng = np.random.default_rng(1)
    z = tensor(rng.normal(size=(3, 4)), requires_grad=True)
    t = torch.tensor(z.numpy(), requires_grad=True)
    _, lse = call("cross_entropy", z, tensor(np.array([0, 1, 3])))
    (lse * lse).sum().backward()
    (t.logsumexp(1) ** 2).sum().backward()
    np.testing.assert_allclose(grad_of(z).numpy(), grad_of(t).numpy(), rtol=1e-12)
    x = tensor(rng.normal(size=(2, 6)), requires_grad=True)
    parts = [x[:, i : i + 2] for i in (0, 2, 4)]
    (parts[0] * parts[2]).sum().backward()
    expected = np.zeros((2, 6))
    expected[:, :2], expected[:, 4:] = x.numpy()[:, 4:], x.numpy()[:, :2]
    assert np.array_equal(grad_of(x).numpy(), expected)


def test_backward_of_one_head_gives_the_other_no_gradient() -> None:
    trunk, left, right = leaf(1.0), leaf(2.0), leaf(3.0)
    h = trunk.tanh()
    ours, theirs = (h * left).sum(), (h * right).sum()
    ours.backward(retain_graph=True)
    assert (right.grad, grad_of(left) is not None) == (None, True)
    theirs.backward()
    assert np.allclose(grad_of(trunk).numpy(), 5 * (1 - np.tanh(1.0) ** 2))
