"""Hooks: run once on the full gradient, may replace it, can be removed, and are recorded in a trace."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import graphwright as gw
from graphwright.autograd import Parameter, Tensor, grad, tensor
from graphwright.errors import ShapeError, UsageError
from values import array_of, grad_of


def leaf(*values: float) -> Tensor:
    return tensor(np.array(values), requires_grad=True)


def test_a_hook_runs_once_in_a_diamond_on_the_summed_gradient() -> None:
    x, seen = leaf(2.0), []
    h = x * 3.0
    h.register_hook(lambda g: seen.append(("h", g.tolist())))
    x.register_hook(lambda g: seen.append(("x", g.tolist())))
    (h * h + h).sum().backward()
    assert seen == [("h", [13.0]), ("x", [39.0])]
    assert grad_of(x).tolist() == [39.0]


def test_hooks_run_in_order_and_may_replace_the_gradient() -> None:
    x = leaf(1.0, 2.0)
    h = x * 1.0
    h.register_hook(lambda g: g * 2.0)
    h.register_hook(lambda g: g + 1.0)
    x.register_hook(lambda g: g * 10.0)
    h.sum().backward()
    assert grad_of(x).tolist() == [30.0, 30.0]
    assert grad((x * 1.0).sum(), x)[0].tolist() == [10.0, 10.0]  # `grad` calls them as well


def test_a_removed_hook_is_not_called() -> None:
    x = leaf(1.0)
    h = x * 1.0
    first, second = h.register_hook(lambda g: g * 5.0), x.register_hook(lambda g: g * 7.0)
    for hook in (first, second, first):
        hook.remove()
    h.sum().backward()
    assert grad_of(x).tolist() == [1.0]


def test_each_backward_calls_a_hook_once() -> None:
    x, seen = leaf(1.0), []
    x.register_hook(lambda g: seen.append(g.tolist()))
    for _ in range(3):
        (x * 2.0).sum().backward()
    assert seen == [[2.0]] * 3


def test_a_hook_outlives_its_tensor() -> None:
    x, seen = leaf(1.0), []

    def build() -> Tensor:
        h = x * 2.0
        h.register_hook(lambda g: seen.append(1))
        return h.exp()

    build().sum().backward()
    assert seen == [1]


def test_invalid_hooks_are_refused() -> None:
    x = leaf(1.0, 2.0)
    wrongs: list[tuple[Any, type[Exception]]] = [
        (lambda g: g.sum(), ShapeError),
        (lambda g: g.float(), ShapeError),
        (lambda g: 3, UsageError),
    ]
    for wrong, error in wrongs:
        h = x * 1.0
        h.register_hook(wrong)
        with pytest.raises(error, match="hook"):
            h.sum().backward()
        assert x.grad is None
    with pytest.raises(UsageError):
        tensor([1.0]).register_hook(lambda g: g)
    with pytest.raises(UsageError):
        tensor([1.0]).retain_grad()


def test_retain_grad_keeps_an_inner_gradient() -> None:
    x = leaf(2.0)
    h = x * 3.0
    g = h * 1.0
    h.retain_grad()
    h.retain_grad()
    x.retain_grad()
    h.register_hook(lambda g: g * 2.0)
    (g * g).sum().backward(retain_graph=True)
    assert (grad_of(h).tolist(), g.grad, grad_of(x).tolist()) == ([24.0], None, [72.0])
    memory = grad_of(h).data
    (g * g).sum().backward()
    assert grad_of(h).data is memory
    assert grad_of(h).tolist() == [48.0]


def test_hooks_become_nodes_of_a_trace() -> None:
    w = Parameter(array_of(tensor(np.array([1.0, -2.0], "f4"))), name="w")
    hook = w.register_hook(lambda g: g.tanh())

    def step(x: Tensor) -> Tensor:
        w.grad = None
        h = (x * w).exp()
        h.register_hook(lambda g: g * 0.5)
        (h * h).sum().backward()
        return grad_of(w)

    x = tensor(np.array([0.3, 0.4], "f4"))
    eager = step(x).numpy().copy()
    program = gw.trace(step, x)
    assert [program.op(n) for n in program.order()].count("tanh") == 1
    assert np.array_equal(program.run(x=x)["out"].to_numpy(), eager)
    assert np.array_equal(gw.compile(step, executor="aten")(x).numpy(), eager)
    assert np.allclose(eager, np.tanh(x.numpy() * np.exp(2 * x.numpy() * w.numpy())))
    hook.remove()
    assert not np.allclose(step(x).numpy(), eager)
