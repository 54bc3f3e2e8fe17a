"""Weights below a step or a sign: found as networkx finds them, warned once, and learnt by the delta rule instead."""

from __future__ import annotations

import warnings
from typing import Any

import networkx as nx
import numpy as np
import pytest

import graphwright as gw
from graphwright import evolve as ev
from graphwright.evolve.gradient_paths import FLAT, blocked_links, blocked_params
from graphwright.evolve.neurons.genomes import columns_of, take
from graphwright.evolve.neurons.program import founder


def wild(output) -> list[ev.Genome]:
    task = ev.Task(np.zeros((4, 3)), np.eye(4)[:, :2], split="same", target=2.0)
    settings = ev.NEAT(population=30, split_link=0.3, add_link=0.4, toggle_link=0.2, delays=0.2, output=output,
                       activation=("tanh", "step", "sign"))  # fmt: skip
    run: Any = ev.Evolution(task, None, settings, seed=3)
    run.run(15)
    return [run.individual(ev.IndividualKey(14, g)).genome for g in range(30)]


def blocked_by_networkx(g: ev.Genome) -> set[int]:
    """Open links from which an output is reached, but not over nodes with a slope alone."""
    flat = {n.id for n in g.nodes if n.activation in FLAT}
    ends = range(g.inputs + 1, g.inputs + 1 + g.outputs)

    def leads(link: ev.LinkGene, without: set[int]) -> bool:
        net = nx.DiGraph([(e.src, e.dst) for e in g.links if e.open])
        net.add_nodes_from(ends)
        net.remove_nodes_from(without)
        return link.dst in net and any(nx.has_path(net, link.dst, end) for end in ends if end in net)

    return {e.id for e in g.links if e.open and leads(e, set()) and not leads(e, flat)}


@pytest.mark.parametrize("output", ["tanh", "sign"])
def test_blocked_links_match_networkx_in_columns_and_programs(output):
    genomes = wild(output)
    genes = columns_of(genomes)
    blocked = blocked_links(genes, 3, 2)
    owner = np.searchsorted(genes.link_off, blocked, "right") - 1
    seen = 0
    for g, one in enumerate(genomes):
        expected = blocked_by_networkx(one)
        assert set(genes.link_id[blocked[owner == g]].tolist()) == expected
        if g % 5 == 0:
            assert {int(key.split(".")[1][1:]) for key in blocked_params(founder(one))} == expected
        seen += 0 < len(expected) < len(one.links)
    assert seen > 5
    assert not len(blocked_links(take(genes, np.zeros(0, np.int64)), 3, 2))


@pytest.mark.parametrize("changes", [{"output": "sign"}, {"activation": "step"}, {"activation": ("sign", "tanh")}])
def test_training_below_a_flat_activation_warns_once(changes):
    run: Any = ev.Evolution(ev.tasks.xor(), None, ev.Hybrid(**changes, population=8), seed=0)
    with pytest.warns(ev.NoGradientPath, match=r"xor, generation \d: gradients of weights below .*link \d") as warned:
        run.run(6, target=2.0)
    assert [w.category for w in warned] == [ev.NoGradientPath]
    assert warned[0].filename == __file__


def test_reachable_weights_do_not_warn():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ev.Evolution(ev.tasks.xor(), None, ev.Hybrid(population=4), seed=0).run(2, target=2.0)
        ev.Evolution(ev.tasks.xor(), None, ev.NEAT(activation="step"), seed=0).run(2, target=2.0)  # nothing is trained


def test_layers_below_a_sign_warn():
    b = gw.Builder()
    h = b.sign(b.linear(b.input("x", ("B", 2)), b.param("in.weight", np.ones((3, 2), np.float32))))
    b.output(b.linear(h, b.param("out.weight", np.zeros((1, 3), np.float32)), name="out"), "y")
    p = b.build()
    assert blocked_params(p) == ["in.weight"]
    run = ev.Evolution(ev.tasks.two_moons(60), ev.blocks(p), ev.Layers(population=2, steps=1), seed=0)
    with pytest.warns(ev.NoGradientPath, match=r"candidate 0: gradients of weights .*: in\.weight") as warned:
        run.run(max_evaluations=3, target=2.0)
    assert len(warned) == 1
    assert warned[0].filename == __file__


def test_adaline_with_a_sign_node_learns_by_the_delta_rule():
    """Widrow and Hoff 1960: the error is taken before the sign, w += η (t - w·x) x, on inputs as they are."""
    rng = np.random.default_rng(4)
    x = rng.uniform(-3, 5, (400, 2)).astype(np.float32)
    distance = x @ np.array([1.0, -2.0]) - 0.5
    apart = np.abs(distance) > 0.4
    x, t = x[apart][:200], np.sign(distance[apart][:200]).astype(np.float32)[:, None]
    assert len(x) == 200
    links = tuple(ev.LinkGene(4 + i, i, 3, 0, True, 0.0) for i in range(3))
    p = founder(ev.Genome(2, 1, (ev.NodeGene(3, "sign"),), links))
    assert len(blocked_params(p)) == 3
    with p.edit("take the error before the sign") as e:
        e.set_outputs(y="n3.out", net="n3.sum")
    assert not blocked_params(p)
    weights, rate = np.zeros(3), 0.01
    opt = gw.optim.SGD(p.parameters(), lr=rate / 2)  # the slope of (t - w·x)² is -2 (t - w·x) x

    @gw.compile
    def step(case, target):
        opt.zero_grad()
        loss = ((target - p(x=case)["net"]) ** 2).sum()
        loss.backward()
        opt.step()
        return loss

    for _ in range(3):
        for case, target in zip(x, t, strict=True):
            step(case[None], target[None])
            with_bias = np.append(case, 1.0)
            weights += rate * (target[0] - weights @ with_bias) * with_bias
    ours = [float(p.weights.array(f"n3.l{4 + i}.weight").to_numpy()) for i in range(3)]
    np.testing.assert_allclose(ours, weights, rtol=1e-4, atol=1e-5)
    assert (p.run(x=x)["y"].to_numpy() == t).all()
