"""Where gradients end in traced code, they end in the program too: detach and no_grad."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

import graphwright as gw
from graphwright import nn

W = gw.nn.Parameter(gw.tensor([0.5, -1.5, 2.0]))


def detached(x: gw.Tensor) -> gw.Tensor:
    return (x * x).detach() * x


def straight_through(x: gw.Tensor) -> gw.Tensor:
    return x + (x.round() - x).detach()


def block(x: gw.Tensor) -> gw.Tensor:
    with gw.no_grad():
        scale = (x * x).sum() + 1
        scale = scale.sqrt()
    return x.sin() / scale


def block_in_block(x: gw.Tensor) -> gw.Tensor:
    with gw.no_grad():
        top = x.exp()
        with gw.enable_grad():
            inner = top * x
    return inner * 2 + top


def weight(x: gw.Tensor) -> gw.Tensor:
    return x * W.detach() + W


@pytest.mark.parametrize("fn", [detached, straight_through, block, block_in_block, weight])
def test_gradients_of_the_program_equal_those_of_the_code(fn: Callable[[gw.Tensor], gw.Tensor]) -> None:
    start = np.array([0.3, -1.2, 2.6], np.float32)
    program = gw.trace(fn, gw.tensor(start))
    found = []
    for call in (fn, lambda x: program(x=x)["out"]):
        W.grad, x = None, gw.tensor(start, requires_grad=True)
        y = call(x)
        y.sum().backward()
        assert x.grad is not None
        found.append((np.asarray(y.detach()), np.asarray(x.grad)))
    np.testing.assert_allclose(found[1], found[0], rtol=1e-6)


def test_a_result_of_no_grad_has_no_gradient() -> None:
    def fn(x: gw.Tensor) -> tuple[gw.Tensor, gw.Tensor]:
        with gw.no_grad():
            y = x.exp()
        return y, x.sin()

    x = gw.tensor([0.3], requires_grad=True)
    made = gw.trace(fn, gw.tensor([0.3]))(x=x)
    (made["out"] + made["out_1"]).sum().backward()
    assert x.grad is not None
    assert x.grad.item() == pytest.approx(np.cos(0.3), rel=1e-6)


def test_running_statistics_need_no_stop() -> None:
    program = gw.trace(nn.BatchNorm1d(3), gw.rand(4, 3))
    assert not any(program.op(n) == "stop_gradient" for n in program.nodes())
