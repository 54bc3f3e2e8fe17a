"""Programs planned together answer as each does alone, to the bit."""

from __future__ import annotations

import numpy as np
import pytest

import graphwright as gw
from graphwright import evolve as ev
from graphwright.array.population import runner
from graphwright.evolve.mutations import links

X = np.random.default_rng(0).normal(size=(37, 3)).astype(np.float32)


@pytest.fixture(scope="module")
def programs():
    task = ev.Task(X, (X[:, :2] > 0).astype(float), split="same")
    settings = ev.NEAT(population=6, split_link=0.4, add_link=0.5, toggle_link=0.1, activation=("tanh", "relu"))
    run = ev.Evolution(task, None, settings, seed=4)
    run.run(15, target=2.0)
    return [run.program(run.genes, g) for g in range(6)]


def test_population_plan_matches_single_programs(programs, monkeypatch):
    calls = []
    native = runner.answer
    monkeypatch.setattr(runner, "answer", lambda *a: calls.append(1) or native(*a))
    together = ev.PopulationPlan(programs)(X)
    assert len(calls) == 1
    for p, ours in zip(programs, together, strict=True):
        assert gw.compile(p, executor="vm")(x=X)["y"].numpy().tobytes() == ours.tobytes()
    assert ev.PopulationPlan(programs, threads=2)(X).tobytes() == together.tobytes()


def test_a_new_population_plan_contains_later_edits(programs):
    p = programs[0].fork("edited")
    link = links.open_links(p)[0]
    with p.edit("close") as e:
        ev.mutations.toggle_link(e, link, np.random.default_rng(0))
    before, after = ev.PopulationPlan([programs[0], p])(X)
    assert (before != after).any()
    np.testing.assert_allclose(after, p.run(x=X)["y"].to_numpy(), rtol=1e-5, atol=1e-6)


def test_invalid_arguments_are_refused(programs):
    xor = ev.Evolution(ev.tasks.xor(), None, ev.NEAT(population=2), seed=0)
    with pytest.raises(ev.TaskError, match="are not those of the first one"):
        ev.PopulationPlan([programs[0], xor.program(xor.genes, 0)])
    with pytest.raises(ev.TaskError, match="no programs were given"):
        ev.PopulationPlan([])
    with pytest.raises(ev.TaskError, match="wrong shape"):
        ev.PopulationPlan(programs)(X[:, :2])
