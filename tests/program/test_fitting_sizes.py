"""Sizes at which a program can run, found near given ones."""

from __future__ import annotations

import numpy as np
import pytest

import graphwright as gw
from graphwright import nn
from graphwright.ops import call
from graphwright.program.cost import size
from graphwright.program.fitting_sizes import fitting_sizes


def strided(x):
    """A convolution of kernel 7 and stride 3 after one of kernel 5 and stride 2."""
    return second(first(x))


first, second = nn.Conv1d(2, 3, 5, stride=2), nn.Conv1d(3, 3, 7, stride=3)


def test_sizes_that_fit_are_kept_and_others_are_raised_to_the_next_that_runs():
    p = gw.trace(strided, np.zeros((2, 2, 40), "f4"), sizes={"x": ("B", 2, "L")})
    assert fitting_sizes(p, {"B": 3, "L": 50}) == {"B": 3, "L": 50}
    found = fitting_sizes(p, {"B": 1, "L": 1})
    p.run(x=np.zeros((found["B"], 2, found["L"]), "f4"))
    with pytest.raises(gw.GraphwrightError):
        p.run(x=np.zeros((1, 2, found["L"] - 1), "f4"))
    assert size(p).flops > 0


@pytest.mark.parametrize(("relation", "right", "given", "wanted"), [
    (">=", 70, 5, 80), ("==", 12, 5, 12), ("!=", 5, 5, 6), ("==", 3, 5, 3), (">=", 4, 5, 5),
])  # fmt: skip
def test_conditions_on_sizes_hold(relation, right, given, wanted):
    def forward(x):
        return call("assert_sizes", x, left="T", right=right, relation=relation, text="a condition")

    p = gw.trace(forward, np.zeros((1, 100 if relation == ">=" else right + (relation == "!=")), "f4"),
                 sizes={"x": ("B", "T")})  # fmt: skip
    assert fitting_sizes(p, {"B": 2, "T": given}) == {"B": 2, "T": wanted}
