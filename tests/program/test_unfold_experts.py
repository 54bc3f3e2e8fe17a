"""A mixture of experts as one node per expert: equal results, cut and replaced experts, and back."""

from __future__ import annotations

import numpy as np
import pytest

import graphwright as gw
from graphwright import nn
from graphwright.errors import UsageError
from graphwright.ops import call
from graphwright.program.program import Program

X = np.random.default_rng(0).normal(size=(7, 6))


class Masked(nn.Module):
    """A mixture whose router gives a mask, as one that decides how many experts a token uses."""

    def __init__(self) -> None:
        self.moe = nn.MoE(6, 4, 3, 1)

    def forward(self, x):
        scores = call("sigmoid", call("linear", x, self.moe.router.weight))
        mask = call("gt", scores, 0.5)
        runs = call("dispatch", mask, experts=3)
        operands = [t for e in self.moe.experts for t in e.operands()]
        return call("expert_mlp", x, *runs, scores, *operands)


def traced(module: nn.Module) -> Program:
    gw.manual_seed(0)
    return gw.trace(module.to("float64"), X)


MODULES = {"ids": lambda: nn.MoE(6, 4, 4, 2), "mask": Masked}


def run(p: Program) -> np.ndarray:
    return p.run(dict.fromkeys(p.input_names(), X), keep="outputs")["out"].to_numpy()


@pytest.mark.parametrize("kind", MODULES)
def test_unfolded_experts_sum_to_the_mixture_and_fold_back(kind):
    p = traced(MODULES[kind]())
    before, digest = run(p), p.structure_hash()
    (mixture,) = p.of_traits(mixture=True)
    path = p.path(mixture)
    with p.edit("unfold") as e:
        total = e.unfold(path, "experts")
    assert p.path(total) == path
    count = len(p.operands(total))
    assert count == (4 if kind == "ids" else 3)
    np.testing.assert_allclose(run(p), before, rtol=1e-12, atol=1e-14)
    with p.edit("fold") as e:
        e.fold(path)
    np.testing.assert_array_equal(run(p), before)
    assert p.structure_hash() == digest


def test_a_cut_edge_leaves_out_one_term_and_a_replaced_expert_runs():
    p = traced(nn.MoE(6, 4, 4, 2))
    (mixture,) = p.of_traits(mixture=True)
    path = p.path(mixture)
    with p.edit("unfold") as e:
        e.unfold(path, "experts")
    before, part = run(p), p.run({n: X for n in p.input_names()}).value(f"{path}.1").to_numpy()
    assert part.any()
    with p.edit("cut") as e:
        e.cut(f"{path}.1 -> {path}")
    np.testing.assert_allclose(run(p), before - part, rtol=1e-12, atol=1e-14)
    p.undo()
    with p.edit("another expert") as e:
        x = p.operands(p.node(f"{path}.1"))[0]
        wide = e.param("wide", np.full((6, 6), 0.1))
        (edge,) = [x for x in p.in_edges(p.node(path)) if p.path(p.edge_value(x)) == f"{path}.1"]
        e.rewire(edge, e.add("tanh", e.add("linear", x, wide, name="other")))
    np.testing.assert_allclose(run(p), before - part + np.tanh(X @ np.full((6, 6), 0.1)), rtol=1e-12, atol=1e-14)
    with pytest.raises(UsageError, match="cannot fold"), p.edit("fold") as e:
        e.fold(path)


def test_gradients_of_an_expert_that_another_subprogram_replaced_are_difference_quotients():
    """Three matrices; the other experts keep their weights, and the router its scores."""
    p = traced(nn.MoE(6, 4, 4, 2))
    (mixture,) = p.of_traits(mixture=True)
    path, rng = p.path(mixture), np.random.default_rng(3)
    with p.edit("another expert of three matrices, and a loss") as e:
        total = e.unfold(path, "experts")
        x = p.operands(p.node(f"{path}.1"))[0]
        own = {n: e.param(n, rng.normal(size=(6, 6)) * 0.4) for n in ("first", "second", "third")}
        inner = e.add("mul", e.add("linear", x, own["first"]), e.add("sigmoid", e.add("linear", x, own["second"])))
        (edge,) = [x for x in p.in_edges(total) if p.path(p.edge_value(x)) == f"{path}.1"]
        e.rewire(edge, e.add("linear", inner, own["third"]))
        out = p.outputs()[0]
        e.set_outputs(loss=e.add("mean", e.add("mul", out, out), axes=(0, 1)))
    keys = [*own, "router.weight", "experts.2.up.weight"]
    feeds = {n: X for n in p.input_names()}
    found = p.grad("loss", keys).run(feeds, keep="outputs")
    for key in keys:
        start = p.weights[key].numpy().copy()
        for at in [(0, 1), (2, 3), (3, 5)]:
            values = []
            for step in (1e-6, -1e-6):
                moved = start.copy()
                moved[at] += step
                q = p.fork()
                with q.edit("moved") as e:
                    e.set_weight(key, moved)
                values.append(q.run(feeds, keep="outputs")["loss"].item())
            slope = (values[0] - values[1]) / 2e-6
            np.testing.assert_allclose(found[f"grad.{key}"].to_numpy()[at], slope, rtol=1e-6, atol=1e-9)


def test_gradients_of_unfolded_experts_equal_those_of_the_mixture():
    p = traced(nn.MoE(6, 4, 4, 2))
    (mixture,) = p.of_traits(mixture=True)
    path, keys = p.path(mixture), [p.path(n) for n in p.params()]
    with p.edit("loss") as e:
        out = p.outputs()[0]
        e.set_outputs(loss=e.add("mean", e.add("mul", out, out), axes=(0, 1)))
    feeds = {n: X for n in p.input_names()}

    def gradients() -> dict[str, np.ndarray]:
        found = p.grad("loss", keys).run(feeds, keep="outputs")
        return {key: found[f"grad.{key}"].to_numpy() for key in keys}

    folded = gradients()
    with p.edit("unfold") as e:
        e.unfold(path, "experts")
    unfolded = gradients()
    for key in keys:
        np.testing.assert_allclose(unfolded[key], folded[key], rtol=1e-9, atol=1e-12)
