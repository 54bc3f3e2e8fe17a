"""Reports: fields that stay, figures that the log gives too; success over seeds as scipy has it."""

from __future__ import annotations

import json
import statistics
from typing import Any

import numpy as np
import pytest
from scipy.stats import binomtest

import graphwright as gw
from graphwright import evolve as ev
from graphwright.errors import UsageError
from graphwright.evolve.seeds import wilson
from graphwright.program.cost import flops

COMMON = {
    "task": "str", "split": "str", "target": "float", "seed": "int", "status": "str", "generations": "int",
    "evaluations": "int", "forward_passes": "int", "backward_passes": "int", "seconds": "float",
    "environment_seconds": "float", "refused": {"*": "int"}, "failed": "int", "failures": ["str"], "test_reads": "int",
    "fitness": {"best": "float", "median": "float"}, "metric": {"name": "str", "valid": "float"},
    "hidden": "int", "parameters": "int", "flops": "int",
}  # fmt: skip
NEURONS = COMMON | {"links": "int", "species": "int", "champion": {"generation": "int", "index": "int"}}
LAYERS = COMMON | {
    "training": {"rate": "int", "lr": "float", "optimizer": "str", "loss": "str"}, "front": "int",
    "champion": {"candidate": "int", "generation": "int", "what": "str"},
}  # fmt: skip
SEEDS = {
    "task": "str", "split": "str", "target": "float", "seeds": ["int"], "solved": ["int"], "statuses": {"*": "int"},
    "success": {"rate": "float", "low": "float", "high": "float"},
    "figures": {"*": {"q1": "float", "median": "float", "q3": "float"}}, "runs": [NEURONS],
}  # fmt: skip


def check(value: Any, schema: Any, where: str = "report") -> None:
    """Whether JSON has just these fields, of these kinds. An empty list is of any kind."""
    if isinstance(schema, str):
        assert type(value).__name__ == schema, where
    elif isinstance(schema, list):
        for k, item in enumerate(value):
            check(item, schema[0], f"{where}[{k}]")
    else:
        names = set(value) if "*" in schema else set(schema)
        assert set(value) == names, where
        for name in names:
            check(value[name], schema.get(name, schema.get("*")), f"{where}.{name}")


def through_json(result):
    return json.loads(json.dumps(result.to_json(), allow_nan=False))


def noisy(answers):
    fitness = -np.abs(answers[..., 0] - [0, 1, 1, 0]).sum(1)
    fitness[::5] = np.nan
    return fitness


def test_the_report_of_a_neuron_run_has_the_documented_fields_and_logged_figures():
    x = np.array([[0, 0], [0, 1], [1, 0], [1, 1]], np.float32)
    task = ev.Task(x, [0, 1, 1, 0], fitness_batch=noisy, split="same", target=9.0, name="noisy")
    result = ev.Evolution(task, None, ev.NEAT(population=20, max_nodes=1, split_link=0.3), seed=1).run(6)
    r, run = through_json(result), result.evolution
    check(r, NEURONS)
    assert (r["generations"], r["evaluations"], r["failed"]) == (6, 120, sum(line.failed for line in run.log))
    assert r["failed"] == 6 * 4
    assert r["forward_passes"] == 120 * 4 + 4
    assert r["fitness"]["best"] == max(line.best for line in run.log)
    assert r["fitness"]["median"] == statistics.median(f for f in run.fitness.tolist() if f > -np.inf)
    assert r["species"] == len(run.log[-1].species)
    assert (r["hidden"], r["links"]) == (result.best.genome.hidden, sum(e.open for e in result.best.genome.links))
    assert r["parameters"] == r["links"]
    assert r["refused"]["split_link"] > 0
    assert r["flops"] == _expected_flops(result.best.program)
    text = str(result)
    for part in ("MaxGenerations after 6 generations, 120 evaluations", "484 passes forward", "mutations refused",
                 "24 candidates failed", "the same cases for training, validation and test"):  # fmt: skip
        assert part in text


def _expected_flops(p):
    """Of one case: a product per open link, their sum, and what the output's 4.9 and sigmoid cost."""
    ops = [p.op(n) for n in p.nodes()]
    junction = next(n for n in p.nodes() if p.is_junction(n))
    read = len(p.in_edges(junction))
    sigmoid = flops(_one("sigmoid"), {"B": 1})
    assert ops.count("sigmoid") == 1
    return read + (read - 1) + 1 + sigmoid


def _one(op):
    b = gw.Builder()
    b.output(getattr(b, op)(b.input("x", ("B", 1))), "y")
    return b.build()


def test_the_report_of_a_layer_run_has_the_documented_fields():
    b = gw.Builder()
    h = b.tanh(b.linear(b.input("x", ("B", 2)), b.param("in.weight", np.ones((3, 2), np.float32)), name="in"))
    b.output(b.linear(h, b.param("out.weight", np.zeros((1, 3), np.float32)), name="out"), "y")
    rates = {name: float(name == "learning_rate") for name in ev.mutations.MUTATIONS}
    settings = ev.Layers(population=2, steps=1, rates=rates)
    result = ev.Evolution(ev.tasks.two_moons(60), ev.blocks(b.build()), settings, seed=0).run(2, target=2.0)
    r = through_json(result)
    check(r, LAYERS)
    assert (r["hidden"], r["parameters"], r["evaluations"]) == (3, 9, 3)
    assert r["fitness"]["median"] == statistics.median(m.metric for m in result.evolution.members)
    assert r["backward_passes"] == 3 * len(result.evolution.task.train.x)


def test_environment_time_is_reported_separately():
    result = ev.Evolution(ev.tasks.cartpole(), None, ev.NEAT(population=10), seed=0).run(1, target=1e9)
    r = result.to_json()
    assert 0 < r["environment_seconds"] < r["seconds"]
    assert f"{100 * r['environment_seconds'] / r['seconds']:.0f} % of the time in environments" in str(result)


@pytest.mark.parametrize("trials", [1, 7, 20, 100])
def test_wilson_interval_matches_scipy(trials):
    for k in {0, 1, trials // 2, trials - 1, trials}:
        theirs = binomtest(k, trials).proportion_ci(0.95, "wilson")
        np.testing.assert_allclose(wilson(k, trials), theirs, rtol=1e-12, atol=1e-15)
    for wrong in ((2, 1), (-1, 3), (0, 0)):
        with pytest.raises(UsageError, match="invalid numbers"):
            wilson(*wrong)


def test_runs_from_many_seeds_are_distributions():
    steps = []
    limits: Any = {"max_generations": 25}
    found = ev.over_seeds(ev.tasks.xor(), None, ev.NEAT(population=60), seeds=20, progress=steps.append, **limits)
    alone = [ev.Evolution(ev.tasks.xor(), None, ev.NEAT(population=60), seed=s).run(**limits) for s in range(20)]
    facts = through_json(found)
    check(facts, SEEDS)
    assert facts["solved"] == [s for s, r in enumerate(alone) if r.solved]
    assert 0 < len(facts["solved"]) < 20  # else the rest says little
    share = len(facts["solved"]) / 20
    low, high = binomtest(len(facts["solved"]), 20).proportion_ci(0.95, "wilson")
    assert facts["success"] == pytest.approx({"rate": share, "low": low, "high": high})
    for name, values in {
        "evaluations": [r.evolution.counters.evaluations for r in alone],
        "hidden": [r.best.genome.hidden for r in alone],
        "refused": [sum(r.evolution.counters.refused.values()) for r in alone],
        "fitness": [r.best.fitness for r in alone],
    }.items():
        q1, middle, q3 = statistics.quantiles(values, n=4, method="inclusive")
        assert facts["figures"][name] == pytest.approx({"q1": q1, "median": middle, "q3": q3})
    assert sum(facts["statuses"].values()) == 20
    assert [(p.done, p.total) for p in steps] == [(k, 20) for k in range(1, 21)]
    assert str(found).startswith(f"{len(facts['solved'])} of 20 seeds solved xor (accuracy >= 1)")
    assert f"95 % interval {100 * low:.0f} to {100 * high:.0f} %" in str(found)
    with pytest.raises(UsageError, match="no such statistic"):
        found.quartiles("beauty")


def test_task_per_seed_reads_its_test_cases_once():
    made = []

    def task(seed):
        made.append(ev.tasks.two_moons(60, seed=seed))
        return made[-1]

    hybrid = ev.Hybrid(population=2, train=ev.Train(steps=5))
    found = ev.over_seeds(task, None, hybrid, seeds=(3, 8), test=True, max_generations=1, target=2.0)
    assert [r["seed"] for r in found.reports] == [3, 8]
    assert [t.test_reads for t in made] == [1, 1]
    assert found.quartiles("test")[1] == pytest.approx(np.mean([r["metric"]["test"] for r in found.reports]))
    with pytest.raises(UsageError, match="at least one seed"):
        ev.over_seeds(task, seeds=[], max_generations=1)
