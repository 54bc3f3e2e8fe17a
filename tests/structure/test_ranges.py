"""Settings that cannot be are refused where they are given, and say what may be."""

from __future__ import annotations

from collections.abc import Callable
from math import inf, nan
from typing import Any

import numpy as np
import pytest

import graphwright as gw
from graphwright import structure as st
from graphwright.errors import UsageError


def gated() -> gw.Program:
    """A sum of two gated messages; outputs `loss` and `y`."""
    b = gw.Builder("small")
    x = b.input("x", ("B", 3))
    made = [b.linear(x, b.param(f"w{i}", np.full((2, 3), 0.1 * i + 0.1, "f4")), name=f"m{i}") for i in range(2)]
    y = b.junction(*made, name="y")
    b.output(b.mean(b.mul(y, y), axes=(0, 1)), "loss")
    b.output(y, "y")
    p = b.build()
    with p.edit("gates") as e:
        e.gate(p.in_edges("y"), "hard_concrete")
    return p


P = gated()
VIEW = st.DifferentiableGraph(P)
PENALTIES: list[Callable[[], Any]] = [
    lambda: st.sparsity(-0.1),
    lambda: st.sparsity(inf),
    lambda: st.density(1.5),
    lambda: st.density(0.5, weight=-1),
    lambda: st.budget(0.5, of="foo"),
    lambda: st.budget(0.5, steps=-1),
    lambda: st.budget(0.5, rate=-1),
    lambda: st.cost(of="foo"),
    lambda: st.cost(-1.0),
    lambda: st.smoothness(-1.0),
    lambda: st.gate_entropy(nan),
    lambda: st.edge_entropy(inf),
    lambda: st.attention_entropy(()),
    lambda: st.reachability(-1.0),
    lambda: st.distill(P, tau=0.0),
    lambda: st.distill(P, hidden=1.0),
    lambda: st.distill(P, output="nope"),
    lambda: st.TopPolicy(0.5, of="foo"),
    lambda: st.Policy(remove_below=1.5),
    lambda: st.Policy(patience=0),
    lambda: st.Policy(max_fraction=0),
    lambda: st.DifferentiableGraph(P, seed=-1),
    lambda: VIEW.propose(add_gain=0.1),
    lambda: VIEW.gradients("nope", {"x": np.zeros((1, 3), "f4")}),
    lambda: st.skips(["x", "y", "x"]),
]


@pytest.mark.parametrize("make", PENALTIES)
def test_invalid_arguments_are_refused_at_construction(make: Callable[[], Any]):
    with pytest.raises(UsageError):
        make()


@pytest.mark.parametrize(
    "settings",
    [
        {"warmup": -1},
        {"steps": -1},
        {"prune_every": -1},
        {"clip": 0.0},
        {"logit_limit": 0.0},
        {"turns": (0, 0)},
        {"gates": nan},
        {"gates": {"edges": -0.1}},
        {"params": -1.0},
    ],
)
def test_invalid_optimizer_arguments_are_refused_at_construction(settings: dict[str, Any]):
    with pytest.raises(UsageError, match=r"expected|range"):
        st.JointOptimizer(VIEW, "loss", **settings)


def test_a_batch_must_map_names_to_arrays():
    opt: Any = st.JointOptimizer(st.DifferentiableGraph(gated()), "loss", mode="bilevel")
    for batch, valid in ((None, {}), ([1], {}), ({"x": np.ones((2, 3), "f4")}, [1])):
        with pytest.raises(UsageError, match="arrays by name"):
            opt.step(batch, valid)
    assert opt.steps == 0
