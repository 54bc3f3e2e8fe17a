"""The counters of a run count every case that ran, for any purpose, and nothing else."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import numpy as np

from graphwright import evolve as ev
from graphwright.array.population import runner
from graphwright.evolve.layers import train
from graphwright.evolve.mutations import MUTATIONS

X = np.array([[0, 0], [0, 1], [1, 0], [1, 1]], np.float32)


def noisy(answers):
    fitness = -np.abs(answers[..., 0] - [0, 1, 1, 0]).sum(1)
    fitness[1::3] = np.nan  # of the one that is asked again there is only the first
    return fitness


def test_neuron_passes_count_failed_genomes_too():
    task = ev.Task(X, [0, 1, 1, 0], fitness_batch=noisy, split="same")
    settings = ev.Hybrid(population=6, train=ev.Train(steps=7))
    run: Any = ev.Evolution(task, None, settings, seed=0)
    run.run(3, target=2.0)
    c = run.counters
    assert (c.evaluations, c.failed) == (3 * 6, 3 * 2)
    assert c.backward == 3 * 6 * 7 * 4  # generations x genomes x steps x cases
    assert c.forward == 3 * 6 * 4 + 4  # and the best of the first once more, whether its fitness is the same


def test_environment_steps_of_all_purposes_are_counted(monkeypatch):
    task, made = ev.tasks.cartpole(), []
    play = task.play

    def counted(population, episodes, purpose, limit=None):
        returns, steps, seconds = play(population, episodes, purpose, limit)
        assert returns.sum() == steps  # a reward of 1 a step
        made.append((len(population), episodes, steps))
        return returns, steps, seconds

    monkeypatch.setattr(task, "play", counted)
    run: Any = ev.Evolution(task, None, ev.NEAT(population=30), seed=0)
    run.run(8, target=30.0)
    assert run.counters.evaluations == sum(count for count, episodes, _ in made if episodes == 5)
    tried = [steps for count, episodes, steps in made if (count, episodes) == (1, 100)]
    assert tried  # who reached the target was tried on 100 starts more
    assert run.counters.forward == sum(steps for *_, steps in made)


def start() -> Any:
    import graphwright as gw

    b = gw.Builder()
    b.output(b.linear(b.input("x", ("B", 2)), b.param("w", np.zeros((1, 2), np.float32)), name="out"), "y")
    return b.build()


def test_layer_passes_count_all_candidates(monkeypatch):
    task = ev.tasks.two_moons(100)
    rates = {name: 0.0 for name in MUTATIONS}
    run: Any = ev.Evolution(task, ev.blocks(start()), ev.Layers(population=3, steps=5, batch=16, rates=rates), seed=0)
    native, calls = train.measure, []

    def failing(*args):
        calls.append(1)
        if len(calls) % 3 == 0:
            raise FloatingPointError("planted")
        return native(*args)

    monkeypatch.setattr(train, "measure", failing)
    run.run(max_evaluations=7, target=2.0)
    c = run.counters
    assert (c.evaluations, c.failed, len(calls)) == (7, 2, 7)
    assert c.backward == 7 * 5 * 16  # candidates x steps x batch
    assert c.forward == 7 * len(task.valid.x)


def test_training_is_one_call_that_allocates_nothing(monkeypatch):
    run: Any = ev.Evolution(ev.tasks.xor(), None, ev.NEAT(population=20, split_link=0.4, add_link=0.4), seed=0)
    run.run(5, target=2.0)
    native, calls = runner.train, []
    monkeypatch.setattr(runner, "train", lambda *a: calls.append(1) or native(*a))

    runtime: Any = import_module("numba.core.runtime")  # its counter has no types

    def fit(steps: int) -> int:
        before = runtime.rtsys.get_allocation_stats()
        runner.fit(run.table, run.genes, run.task.lesson(), np.full(20, steps), np.full(20, 0.01))
        return runtime.rtsys.get_allocation_stats().alloc - before.alloc

    runtime._nrt_python.memsys_enable_stats()
    try:
        assert fit(1) == fit(50) == 0
    finally:
        runtime._nrt_python.memsys_disable_stats()
    assert len(calls) == 2  # whatever the number of steps and genomes
