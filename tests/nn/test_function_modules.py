"""Modules of one function: arguments, subclasses, random slopes; values are in `test_torch_modules`."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import graphwright as gw
from graphwright.autograd import tensor
from graphwright.testing.oracle import assert_close


def test_arguments_are_attributes_and_unknown_ones_are_refused() -> None:
    loss: Any = gw.nn.HuberLoss("sum", 2.0)
    assert (loss.reduction, loss.delta) == ("sum", 2.0)
    with pytest.raises(TypeError, match="gamma"):
        gw.nn.HuberLoss(gamma=1.0)


def test_rrelu_has_the_mean_slope_in_evaluation_and_random_slopes_in_training() -> None:
    layer, x = gw.nn.RReLU(0.1, 0.3), tensor(-np.ones(100))
    slopes = -layer(x).numpy()
    assert slopes.min() >= 0.1
    assert slopes.max() <= 0.3
    assert len(set(slopes)) > 50
    assert_close(layer.eval()(x), -0.2 * np.ones(100), rtol=1e-6)


def test_a_module_of_a_function_has_subclasses_and_names_its_inputs() -> None:
    class Leaky(gw.nn.LeakyReLU):
        """A user's activation."""

        def __init__(self) -> None:
            super().__init__(0.25)

    x = tensor([-4.0, 2.0])
    assert_close(Leaky()(x), [-1.0, 2.0], rtol=0)
    assert gw.trace(Leaky(), x).input_names() == ("x",)
    assert gw.trace(gw.nn.MSELoss(), x, x).input_names() == ("input", "target")
    assert_close(gw.nn.MSELoss()(input=x, target=x), 0.0, rtol=0)
