"""Arguments of compiled functions: nested tensors, constants, names, methods, each as in a plain call."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import pytest

import graphwright as gw
from graphwright import nn
from graphwright.errors import UsageError

X = np.arange(6, dtype=np.float32).reshape(2, 3)


class Pair(NamedTuple):
    left: Any
    right: Any


def same(fn, *args: Any, **named: Any) -> None:
    """Check that a compiled function returns the same on the first call and on the next, which takes another path."""
    run, expected = gw.compile(fn, deterministic=True), fn(*args, **named).numpy()
    for _ in range(3):
        np.testing.assert_array_equal(run(*args, **named).numpy(), expected)
    assert run.traces == 1


def test_states_of_an_lstm_are_a_tuple() -> None:
    gw.manual_seed(0)
    lstm = nn.LSTM(3, 4)
    x, h, c = gw.randn(5, 2, 3), gw.randn(1, 2, 4), gw.randn(1, 2, 4)
    same(lambda x, state: lstm(x, state)[1][1], x, (h, c))
    run = gw.compile(lstm, deterministic=True)
    out, (h2, c2) = run(x, (h, c))
    for given, expected in zip((out, h2, c2), (lambda o, s: (o, *s))(*lstm(x, (h, c))), strict=True):
        np.testing.assert_array_equal(given.numpy(), expected.numpy())
    out, (h2, c2) = run(x, (h2, c2))  # other tensors, the same trace
    assert run.traces == 1


@pytest.mark.parametrize(
    "given",
    [{"a": X, "b": [X, 2.0]}, [X, {"k": (X, None)}], Pair(X, Pair(X, "mean")), (X, True), (X, [1.0, 2.0, 3.0])],
)
def test_nested_arguments_are_those_of_a_plain_call(given: Any) -> None:
    def total(nested: Any) -> Any:
        if isinstance(nested, Pair):
            return total(nested.left) + (total(nested.right) if nested.right != "mean" else 0.5)
        if isinstance(nested, dict):
            return sum(map(total, nested.values()), gw.zeros(2, 3))
        if isinstance(nested, tuple | list) and not all(isinstance(n, float) for n in nested):
            return sum(map(total, nested), gw.zeros(2, 3))
        return 0.25 if nested is None else 0.125 if nested is True else gw.as_tensor(nested)

    same(lambda nested: total(nested) * 1.0, given)


def test_each_value_of_a_constant_has_a_trace() -> None:
    run = gw.compile(lambda x, how, flip=False: (x.sum() if how == "sum" else x.mean()) * (-1.0 if flip else 1.0))
    calls = [("sum",), ("mean",), ("sum", True), ("sum", False), ("mean",), ("sum",)]
    results = [run(X, *c).item() for c in calls]
    assert results == [15.0, 2.5, -15.0, 15.0, 2.5, 15.0]
    assert run.traces == 4
    assert run(X, "sum", flip=True).item() == -15.0


def test_a_bool_is_no_number() -> None:
    run = gw.compile(lambda x, k: x * 2.0 if k is True else x * k)
    assert [run(X, k).numpy()[0, 1] for k in (True, 3, True, 1)] == [2, 3, 2, 1]


def test_arguments_by_name() -> None:
    run = gw.compile(lambda x, *, scale, shift=None: x * scale if shift is None else x * scale + shift["by"])
    np.testing.assert_array_equal(run(X, scale=2.0).numpy(), 2 * X)
    np.testing.assert_array_equal(run(x=X, scale=3.0, shift={"by": X}).numpy(), 4 * X)
    np.testing.assert_array_equal(run(X, scale=4.0).numpy(), 4 * X)
    assert run.plan(X, scale=2.0).inputs.keys() == {"x", "scale"}
    assert gw.trace(lambda x, scale: x * scale, X, scale=X).input_names() == ("x", "scale")
    with pytest.raises(TypeError, match="unexpected keyword"):
        run(X, scale=2.0, other=1.0)


def test_a_model_and_an_optimizer_are_constants() -> None:
    from graphwright import optim

    @gw.compile
    def step(net: Any, opt: Any, x: Any, y: Any) -> Any:
        opt.zero_grad()
        loss = ((net(x) - y) ** 2).mean()
        loss.backward()
        opt.step()
        return loss

    nets = [nn.Linear(3, 1), nn.Linear(3, 1)]
    opts = [optim.SGD(net.parameters(), lr=0.01) for net in nets]
    losses = [[step(net, opt, X, X[:, :1]).item() for _ in range(5)] for net, opt in zip(nets, opts, strict=True)]
    assert all(a[0] > a[-1] for a in losses)
    assert losses[0] != losses[1]
    assert step.traces == 2


def test_a_method_has_its_object_as_first_argument() -> None:
    class Scaled:
        def __init__(self, factor: float) -> None:
            self.factor = factor

        @gw.compile
        def run(self, x: Any) -> Any:
            return x * self.factor

    assert [Scaled(k).run(X).numpy()[0, 1] for k in (2.0, 3.0)] == [2, 3]


def test_other_structures_get_other_traces() -> None:
    run = gw.compile(lambda given: given[0] + given[-1])
    for given in ((X, X), [X, X], (X, X, X), (X, X)):
        np.testing.assert_array_equal(run(given).numpy(), 2 * X)
    assert run.traces == 3


def test_named_sizes_of_nested_arguments_hold_for_all_batches() -> None:
    run = gw.compile(lambda pair, how: pair["x"].sum(0) * (2.0 if how == "twice" else 1.0), sizes={"pair.x": ("B", 3)})
    for rows in (2, 5, 7):
        np.testing.assert_allclose(run({"x": np.ones((rows, 3), "f4")}, "twice").numpy(), [2.0 * rows] * 3)
    np.testing.assert_allclose(run({"x": np.ones((4, 3), "f4")}, "once").numpy(), [4.0] * 3)
    assert run.traces == 2


def test_an_unhashable_object_is_refused() -> None:
    with pytest.raises(UsageError, match="not an array of numbers"):
        gw.compile(lambda x: x)({1, 2})
