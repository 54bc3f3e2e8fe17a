"""Several things to predict: each head has its loss, weight and metric; gradients against differences."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import graphwright as gw
from graphwright import evolve as ev
from graphwright.array.population.runner import fit
from graphwright.array.population.table import tabulate
from graphwright.evolve.errors import TaskError

rng = np.random.default_rng(0)
X = rng.uniform(-1, 1, (240, 3)).astype(np.float32)
SIDE, SIZE = (X[:, 0] + X[:, 1] > 0).astype(int), 0.7 * X[:, 1] - 0.4 * X[:, 2]


def both(**changes: Any) -> ev.Task:
    heads = {"side": ev.Head(SIDE, "cross_entropy"), "size": ev.Head(SIZE, "mse", weight=3.0)}
    return ev.Task(X, heads, target=0.95, name="both", **changes)


def test_a_task_of_two_heads_is_solved_by_neurons():
    run: Any = ev.Evolution(both(), None, ev.Hybrid(train=ev.Train(steps=100)), seed=0)
    result = run.run(max_generations=10)
    assert result.solved
    task, best = run.task, result.best
    wanted = task._test
    answers = best.predict(wanted.x[:, 0])
    final = wanted.final(answers[None, :, None])
    found = {name: float(head.measure(final, wanted.right, True)[0]) for name, head in task.heads.items()}
    assert found["side"] >= 0.9
    assert found["size"] >= 0.9
    assert min(found.values()) == pytest.approx(result.test())
    np.testing.assert_array_equal(best.predict(wanted.x[:, 0], head="size")[:, 0], answers[:, 2])
    assert best.predict(wanted.x[:, 0], "side").shape[1] == 2
    with pytest.raises(TaskError, match="side, size"):
        best.predict(X, head="weight")


def test_a_task_of_two_heads_is_solved_by_layers():
    b = gw.Builder()
    w, bias = b.param("w", np.zeros((3, 3), np.float32)), b.param("b", np.zeros(3, np.float32))
    b.output(b.linear(b.input("x", ("B", 3)), w, bias, name="out"), "y")
    result: Any = ev.Evolution(both(), ev.blocks(b.build()), ev.Layers(population=3), seed=0).run(max_evaluations=9)
    assert result.solved
    assert result.test() >= 0.9


def test_heads_train_on_their_weighted_sum():
    heads = {
        "kind": ev.Head(rng.integers(0, 3, 240), "cross_entropy", 0.5),
        "size": ev.Head(np.c_[SIZE, X[:, 0]], "mse", 2.0),
        "side": ev.Head(SIDE, "bce"),
    }
    task = ev.Task(X, heads, split="same")
    run: Any = ev.Evolution(task, None, ev.Hybrid(population=3, start="random", burst=4), seed=1)
    genes = run.genes

    def loss() -> np.ndarray:
        population = run.population(genes)
        from graphwright.array.population.runner import Cases

        return task._loss(population.answers(Cases.of(task.train.x)), task.train, True)

    before, weight = loss(), genes.weight.copy()
    table = tabulate(genes, task.inputs, task.outputs)
    losses = fit(table, genes, task.lesson(), np.ones(3, np.int64), np.full(3, 1e-9), 0.0)
    np.testing.assert_allclose(losses[:, 0], before, rtol=1e-5)
    slopes = genes.first / 0.1  # the first moment after one step is a tenth of the gradient
    open_ = genes.link_open.astype(bool)
    for e in np.flatnonzero(open_):
        values = []
        for sign in (1, -1):
            genes.weight[:] = weight
            genes.weight[e] += sign * 1e-2
            values.append(loss().sum())
        assert slopes[e] == pytest.approx((values[0] - values[1]) / 2e-2, rel=2e-2, abs=2e-4)


def test_single_named_head_equals_unnamed_task():
    named = ev.Task(X, {"side": ev.Head(SIDE, "bce")}, seed=3)
    plain = ev.Task(X, SIDE, "bce", seed=3)
    for name in ("train", "valid", "_test"):
        np.testing.assert_array_equal(getattr(named, name).x, getattr(plain, name).x)
    a: Any = ev.Evolution(named, None, ev.Hybrid(), seed=0)
    b: Any = ev.Evolution(plain, None, ev.Hybrid(), seed=0)
    a.run(3, target=2.0)
    b.run(3, target=2.0)
    np.testing.assert_array_equal(a.fitness, b.fitness)


@pytest.mark.parametrize(
    ("heads", "message"),
    [
        ({}, "the dict of targets is empty"),
        ({"a": SIDE}, "not Head objects"),
        ({"a": ev.Head(SIDE, "hinge")}, "unknown loss"),  # pyright: ignore[reportArgumentType]
        ({"a": ev.Head(SIDE, weight=0.0)}, "not a positive number"),
        ({"a": ev.Head(SIDE), "b": ev.Head(SIDE[:5])}, "different numbers of cases"),
    ],
)
def test_invalid_heads_are_refused(heads, message):
    with pytest.raises(TaskError, match=message):
        ev.Task(X, heads)
