"""How a trace names its inputs."""

from __future__ import annotations

import numpy as np
import pytest

import graphwright as gw
from graphwright.program import BadName, NameTaken

X = np.ones((2, 3), "f4")


class Residual(gw.nn.Module):
    def __init__(self) -> None:
        self.fc = gw.nn.Linear(3, 3)

    def forward(self, hidden, scale):
        return hidden + self.fc(hidden) * scale


def names(p: gw.Program) -> list[str]:
    return [p.path(n) for n in p.inputs()]


def test_a_module_gives_the_names_of_its_forward():
    p = gw.trace(Residual(), X, X)
    assert (p.name, names(p)) == ("Residual", ["hidden", "scale"])
    assert p.path(p.params()[0]).startswith("fc.")


def test_a_function_gives_its_own_and_numbers_the_rest():
    assert names(gw.trace(lambda a, *rest: a + rest[0] + rest[1], X, X, X)) == ["a", "x0", "x1"]
    assert names(gw.trace(lambda x0, *rest: x0 + rest[0] + rest[1], X, X, X)) == ["x0", "x1", "x2"]
    assert names(gw.trace(lambda x: -x, X, names=("given",))) == ["given"]


def test_two_inputs_of_one_name_are_refused():
    with pytest.raises(NameTaken):
        gw.trace(lambda a, b: a + b, X, X, names=("a", "a"))
    with pytest.raises(BadName):
        gw.trace(lambda a: -a, X, names=("a..b",))
