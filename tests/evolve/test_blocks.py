"""Mutations of layers on a user's own program, and their evolution."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest

import graphwright as gw
from graphwright import evolve as ev
from graphwright.evolve import mutations as m
from graphwright.evolve.errors import EvaluationFailed, TaskError

rng = np.random.default_rng(0)
X = rng.normal(size=(40, 6)).astype(np.float32)


def mlp(widths=(6, 8, 7, 3), seed=0):
    gw.manual_seed(seed)
    layers = []
    for a, b in pairwise(widths):
        layers += [gw.nn.Linear(a, b), gw.nn.Tanh()]
    return gw.trace(gw.nn.Sequential(*layers[:-1]), gw.tensor(X[:, : widths[0]]))


def answers(p):
    return p.run({p.input_names()[0]: X}, keep="outputs")[p.output_names()[0]].to_numpy()


def gradients(p) -> dict[str, Any]:
    for q in p.parameters():
        q.grad = None
    (p(**{p.input_names()[0]: gw.tensor(X)}) ** 2).sum().backward()
    return {key: None if v.grad is None else v.grad.numpy() for key, v in p.variables().items()}


@pytest.mark.parametrize("name", list(m.MUTATIONS))
def test_each_mutation_keeps_its_promise_and_is_undone(name):
    p = mlp()
    with p.edit("a branch to remove") as e:
        m.insert_layer(e, m.linears(p)[1], np.random.default_rng(5))
    for v in p.parameters():
        v.assign(gw.tensor(v.numpy() + 0.1 * np.random.default_rng(1).normal(size=v.shape).astype("f4")))
    kind, before, y = m.MUTATIONS[name], p.hash(), answers(p)
    for k, site in enumerate(kind.sites(p)):
        with p.edit(name, author="evolution") as e:
            kind.apply(e, site, np.random.default_rng(k))
        assert p.validate().ok
        if name in ("widen", "insert_layer", "add_skip"):
            assert np.abs(answers(p) - y).max() <= 1e-6 * np.abs(y).max()
        assert all(key in {p.key(n) for n in p.params()} for key in p.weights)
        p.undo()
        assert p.hash() == before
    assert kind.sites(p)


def test_what_grew_has_gradients_at_once():
    p = mlp()
    with p.edit("widen") as e:
        m.widen(e, m.hidden(p)[0], rng, 4)
    first, second = (p.key(p.operands(n)[1].node) for n in m.linears(p)[:2])
    found = gradients(p)
    assert np.abs(found[second][:, 8:]).min() > 0  # zeros out of the new units
    assert (found[first][8:] == 0).all()  # nothing comes back through zeros, until they moved
    with p.edit("branch") as e:
        m.insert_layer(e, m.linears(p)[1], rng, 5, "tanh")
    assert np.abs(gradients(p)["b1.to.weight"]).max() > 0


def test_a_mutated_program_is_the_same_object_and_its_handles_resolve():
    p = mlp()
    node = m.hidden(p)[0]
    names = [p.path(n) for n in p.nodes()]
    step = np.random.default_rng(3)
    for _ in range(60):
        kind = list(m.MUTATIONS.values())[int(step.integers(len(m.MUTATIONS)))]
        if sites := kind.sites(p):
            with p.edit(kind.name) as e:
                kind.apply(e, sites[int(step.integers(len(sites)))], step)
            assert np.isfinite(answers(p)).all()
    assert p.path(node) == "0.linear"
    assert p.validate().ok
    p.undo(len(p.journal))
    assert [p.path(n) for n in p.nodes()] == names


def test_removing_a_part_leaves_no_orphan():
    p = mlp()
    weights = set(p.weights)
    with p.edit("in") as e:
        m.insert_layer(e, m.linears(p)[0], rng)
    with p.edit("inside") as e:
        m.insert_layer(e, p.node("b1.from"), rng)
    with p.edit("out") as e:
        m.remove_layer(e, p.node("b1.to"), rng)
    assert set(p.weights) == weights
    assert not [n for n in p.nodes() if p.path(n).startswith("b")]


def test_narrow_takes_the_units_that_count_least():
    p = mlp()
    node = m.hidden(p)[0]
    w = p.operands(node)[1].node
    old = p.weights.array(p.key(w)).to_numpy().copy()
    old[3] = 0
    with p.edit("weak") as e:
        e.set_weight(w, old)
        e.set_weight(p.operands(node)[2].node, np.zeros(8, np.float32))
    y = answers(p)
    with p.edit("narrow") as e:
        m.narrow(e, node, rng, 1)
    np.testing.assert_allclose(answers(p), y, atol=1e-6)  # the silent unit went
    with pytest.raises(gw.errors.UsageError), p.edit("too much") as e:
        m.narrow(e, node, rng, 7)


def start(inputs, outputs):
    b = gw.Builder()
    x = b.input("x", ("B", inputs))
    w = b.param("out.weight", np.zeros((outputs, inputs), np.float32))
    b.output(b.linear(x, w, b.param("out.bias", np.zeros(outputs, np.float32)), name="out"), "y")
    return b.build()


def test_layers_evolve_until_the_moons_are_apart():
    task, p = ev.tasks.two_moons(300), start(2, 1)
    before = p.hash()
    result: Any = ev.BlockEvolution(task, p, ev.BlockSettings(population=4, pareto=True), seed=0).run(20)
    assert p.hash() == before  # children share weights until they are written
    best: Any = result.best
    assert best.metric >= 0.95
    assert result.test() >= 0.9
    assert task.test_reads == 1
    values = np.array([a.objectives for a in result.archive])
    assert (ev.pareto.fronts(values) == 0).all()
    small = result.smallest_meeting_target()
    assert small is None or small.params == min(a.params for a in result.archive if a.metric >= 0.97)
    for member in result.archive:
        again = ev.blocks.measure(task, member.program, task.valid)
        assert again == (member.metric, member.loss)
        assert member.program.journal[-1].author == "evolution"
    same = ev.BlockEvolution(ev.tasks.two_moons(300), start(2, 1), ev.BlockSettings(population=4, pareto=True), seed=0)
    again = same.run(20)
    assert [(b.what, b.metric) for b in again.born] == [(b.what, b.metric) for b in result.born]


def test_what_does_not_fit_is_refused():
    with pytest.raises(TaskError, match="do not fit"):
        ev.BlockEvolution(ev.tasks.two_moons(), start(3, 1))
    with pytest.raises(TaskError, match="one step a case"):
        ev.BlockEvolution(ev.tasks.parity(), start(1, 1))
    p = start(2, 1)
    with p.edit("spoil") as e:
        e.set_weight("out.weight", np.full((1, 2), np.nan, np.float32))
    with pytest.raises(EvaluationFailed, match="loss is nan"):
        ev.BlockEvolution(ev.tasks.two_moons(), p).run(4)


def test_a_user_s_mutation_is_drawn_like_the_others(monkeypatch):
    monkeypatch.setattr(m, "MUTATIONS", dict(m.MUTATIONS))
    monkeypatch.setattr(ev.blocks, "MUTATIONS", m.MUTATIONS)

    @m.mutation("halve", sites=m.linears, weight=1e9)
    def halve(e, site, rng):
        e.set_weight(e.program.operands(site)[1].node, lambda w: w / 2)

    result = ev.BlockEvolution(ev.tasks.two_moons(), start(2, 1), ev.BlockSettings(2, steps=5, rate_change=0)).run(4)
    assert [b.what for b in result.born[1:]] == ["halve at out"] * 3
