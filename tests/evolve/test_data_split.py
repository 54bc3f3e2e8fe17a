"""Which cases each phase of a run reads: training, choosing and testing have their own; and what prints say of it."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest

import graphwright as gw
from graphwright import evolve as ev
from graphwright.array.population import runner
from graphwright.evolve.layers import train

rng = np.random.default_rng(0)
N = 60


def task() -> ev.Task:
    """The first input of a case is its number."""
    x = np.c_[np.arange(N), rng.normal(size=N)]
    return ev.Task(x, x[:, 1] > 0, target=2.0, name="numbered")


def rows(x: Any) -> set[int]:
    return {int(v) for v in np.asarray(x).reshape(-1, 2)[:, 0]}


def parts(made: ev.Task) -> list[set[int]]:
    found = [rows(part.x) for part in (made.train, made.valid, made._test)]
    assert [len(part) for part in found] == [36, 12, 12]
    assert set.union(*found) == set(range(N))
    return found


def test_each_phase_of_neurons_reads_its_own_cases(monkeypatch):
    made, read = task(), {"train": set(), "score": set()}
    learnt, taken = parts(made)[0], runner.Cases.of

    def cases(x: Any, **options: Any) -> Any:
        read["train" if "tile" in options else "score"] |= rows(x)  # lessons are one tile
        return taken(x, **options)

    monkeypatch.setattr(runner.Cases, "of", cases)
    result: Any = ev.Evolution(made, None, ev.Hybrid(population=4, train=ev.Train(steps=3)), seed=0).run(4)
    assert read == {"train": learnt, "score": parts(made)[1]}
    read["score"].clear()
    result.test()
    assert read == {"train": learnt, "score": parts(made)[2]}


def test_each_phase_of_layers_reads_its_own_cases(monkeypatch):
    made, read = task(), {"train": set(), "score": set()}
    b = gw.Builder()
    b.output(b.linear(b.input("x", ("B", 2)), b.param("w", np.zeros((1, 2), np.float32)), name="out"), "y")
    scored, compiled = train.answers, train.compile

    def answers(program: Any, x: Any) -> Any:
        read["score"] |= rows(x)
        return scored(program, x)

    def compile(step: Any) -> Any:
        plan = compiled(step)
        return lambda x, *more: read["train"].update(rows(x)) or plan(x, *more)

    monkeypatch.setattr(train, "answers", answers)
    monkeypatch.setattr(train, "compile", compile)
    settings = ev.Layers(population=2, steps=20, batch=16)
    result: Any = ev.Evolution(made, ev.blocks(b.build()), settings, seed=0).run(max_evaluations=4)
    assert read == {"train": parts(made)[0], "score": parts(made)[1]}
    read["score"].clear()
    result.test()
    assert read["score"] == parts(made)[2]


def test_repeated_test_reads_are_counted_and_printed():
    made = task()
    result: Any = ev.Evolution(made, None, ev.NEAT(population=4), seed=0).run(1)
    assert result.to_json()["test_reads"] == 0
    result.test()
    assert "test cases" not in str(result)
    result.test()
    assert result.to_json()["test_reads"] == 2
    assert str(result).endswith("\n  the test cases were read 2 times")


GOLDEN = """\
MaxGenerations after 2 generations, 20 evaluations, S s
  accuracy 0.75, fitness F (the same cases for training, validation and test)
  champion of generation G: H hidden, L links
  K species; 84 passes forward, 0 with gradients"""


def test_reports_mention_tasks_without_a_split():
    xor = ev.tasks.xor()
    assert xor.split == "same"
    settings = ev.NEAT(population=10, add_link=0.0)
    result: Any = ev.Evolution(xor, None, settings, seed=0).run(2)
    text = re.sub(r"[\d.]+ s\n", "S s\n", str(result))
    for name, number in {"fitness": "F", "generation": "G"}.items():
        text = re.sub(rf"{name} [\d.]+", f"{name} {number}", text)
    for name, number in {"hidden": "H", "links": "L", "species": "K"}.items():
        text = re.sub(rf"\d+ {name}", f"{number} {name}", text)
    assert text == GOLDEN
    assert result.to_json()["split"] == "same"
    seeds = ev.over_seeds(xor, None, settings, seeds=2, max_generations=1)
    assert str(seeds).splitlines()[0].endswith("(the same cases for training, validation and test)")
    with pytest.raises(ev.TaskError, match='split="same"'):  # which a split of four cases asks for
        ev.Task(np.eye(4), [0, 1, 1, 0])
