"""Stacked experts as separate ones: equal results, undo to the bit, and edits of experts afterwards."""

from __future__ import annotations

import numpy as np
import pytest

import graphwright as gw
from graphwright import experts as ex
from graphwright import nn
from graphwright.autograd import Tensor
from graphwright.errors import UsageError
from graphwright.ops import call

X = np.random.default_rng(0).normal(size=(9, 6))
OFFSETS = np.array([0, 4, 4, 8])


class Stacked(nn.Module):
    """Three experts in stacks [E, in, out]; the last row of the tokens has none."""

    def __init__(self, form: str) -> None:
        rng = np.random.default_rng(1)
        self.form = form
        self.gate, self.up = (nn.Parameter(gw.array.from_numpy(rng.normal(size=(3, 6, 4)))) for _ in range(2))
        self.down = nn.Parameter(gw.array.from_numpy(rng.normal(size=(3, 4, 6))))

    def forward(self, x: Tensor, offsets: Tensor) -> Tensor:
        a, v = (call("grouped_matmul", x, w, offsets) for w in (self.gate, self.up))
        inner = {"swiglu": lambda: call("swiglu", a, v), "mul": lambda: v * call("gelu", a, approximate="tanh"),
                 "mlp": lambda: call("relu", v)}[self.form]()  # fmt: skip
        return call("grouped_matmul", inner, self.down, offsets)


@pytest.mark.parametrize("form", ["swiglu", "mul", "mlp"])
def test_unstacked_experts_give_equal_results(form):
    p = gw.trace(Stacked(form), X, OFFSETS)
    feeds = {"x": X, "offsets": OFFSETS}
    before, digest = p.run(feeds, keep="outputs")["out"].to_numpy(), p.hash()
    path = p.path(p.outputs()[0])
    with p.edit("separate experts") as e:
        node = ex.unstack(e, path)
    assert p.path(node) == path
    np.testing.assert_allclose(p.run(feeds, keep="outputs")["out"].to_numpy(), before, rtol=1e-12, atol=1e-13)
    assert {k.split(".")[0] for k in p.weights} <= {"experts", "gate"}
    assert len([k for k in p.weights if k.startswith("experts.1.")]) == (2 if form == "mlp" else 3)
    p.undo()
    assert p.hash() == digest


def test_other_nodes_are_refused_and_nothing_changes():
    p = gw.trace(Stacked("mlp"), X, OFFSETS)
    digest = p.hash()
    for wrong in p.nodes():
        if p.path(wrong) != p.path(p.outputs()[0]):
            with pytest.raises(UsageError), p.edit("separate") as e:
                ex.unstack(e, wrong)
    assert p.hash() == digest
