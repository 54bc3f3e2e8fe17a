"""Runs by workers: the bits of one process for any number of workers, and workers that die or hang."""

from __future__ import annotations

import pickle
import re
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import worker_tasks as fitness
from test_saved_runs import files

import graphwright as gw
from graphwright import evolve as ev
from graphwright.errors import UsageError
from graphwright.evolve.errors import EvaluationFailed
from graphwright.evolve.neurons import engine, lineage
from graphwright.workers import Failed, WorkerError
from in_process_pool import Shuffled
from seeds import deep

WILD: dict[str, Any] = {"split_link": 0.3, "add_link": 0.4, "delays": 0.4}


@pytest.fixture(autouse=True)
def always_sent(monkeypatch):
    """Workers get every generation, however fast it is."""
    monkeypatch.setattr(engine, "MIN_SECONDS", 0.0)
    monkeypatch.setattr(lineage, "_EVERY", 5)  # generations between two sweeps


@cache
def net() -> Any:
    """A network with dropout and running statistics; made once, as its journal says when."""
    gw.manual_seed(0)
    n = gw.nn
    layers = n.Sequential(n.Linear(2, 4), n.Dropout(0.5), n.BatchNorm1d(4), n.Tanh(), n.Linear(4, 1))
    return gw.trace(layers, gw.zeros(16, 2))


KINDS: dict[str, Callable[..., Any]] = {
    "neurons": lambda **o: ev.Evolution(ev.tasks.xor(), ev.scalar(), ev.NEAT(population=21, **WILD), seed=4, **o),
    "trained": lambda **o: ev.Evolution(
        ev.tasks.two_moons(60), ev.scalar(), ev.Hybrid(population=7, train=ev.Train(steps=5)), seed=4, **o
    ),
    "baldwin": lambda **o: ev.Evolution(
        ev.tasks.two_moons(60), ev.scalar(), ev.Hybrid(population=7, train=ev.Train(steps=5), inherit="baldwin"),
        seed=4, **o
    ),
    "carts": lambda **o: ev.Evolution(ev.tasks.cartpole(2, 60), ev.scalar(), ev.NEAT(population=9), seed=4, **o),
    "function": lambda **o: ev.Evolution(
        ev.Task(fitness.X, [0, 1, 1, 0], fitness=fitness.small, split="same"), ev.scalar(),
        ev.NEAT(population=9, **WILD), seed=4, **o
    ),
    "layers": lambda **o: ev.Evolution(
        ev.tasks.two_moons(60), ev.blocks(net()), ev.Layers(population=2, steps=3, inherit="baldwin", crossover=0.5),
        seed=4, **o
    ),
    "islands": lambda **o: ev.Evolution(
        ev.tasks.xor(), ev.scalar(), ev.NEAT(population=12, **WILD), seed=4,
        islands=ev.Islands(3, every=3, migrants=2), **o
    ),
}  # fmt: skip
AIM = 1e9  # of no run


def finish(run: Any, kind: str, folder: Path | None = None, callback: Any = None) -> None:
    run.run(
        {"layers": 4, "function": 3, "islands": 13}.get(kind, 8),
        target=AIM,
        save=folder,
        save_every=2,
        callback=callback,
    )


@pytest.fixture(scope="module")
def alone(tmp_path_factory) -> Callable[[str], dict[str, bytes]]:
    """The files of a run of this process alone, by kind of run."""
    made: dict[str, dict[str, bytes]] = {}

    def run(kind: str) -> dict[str, bytes]:
        if kind not in made:
            folder = tmp_path_factory.mktemp("alone")
            finish(KINDS[kind](), kind, folder / "run")
            made[kind] = files(folder / "run")
        return made[kind]

    return run


@pytest.mark.parametrize("kind", KINDS)
def test_any_number_of_workers_gives_the_bits_of_one_process(alone, tmp_path, kind):
    for size in deep((1, 2, 4), (3,)):
        shuffled = Shuffled(size)
        run = KINDS[kind](workers=shuffled)
        finish(run, kind, tmp_path / str(size))
        assert shuffled.calls > 2
        assert files(tmp_path / str(size)) == alone(kind)


@pytest.mark.parametrize("kind", ["trained", "layers", "islands"])
def test_real_processes_give_the_bits_of_one_process(alone, pool, tmp_path, kind):
    run = KINDS[kind](workers=pool)
    finish(run, kind, tmp_path / "run")
    assert files(tmp_path / "run") == alone(kind)
    assert len(pool.pids) == 2


@pytest.mark.deep
@pytest.mark.parametrize("count", [1, 4])
@pytest.mark.parametrize("kind", KINDS)
def test_one_and_four_real_processes_give_the_bits_of_one_process(alone, tmp_path, kind, count):
    run = KINDS[kind](workers=count)
    finish(run, kind, tmp_path / "run")
    assert files(tmp_path / "run") == alone(kind)
    assert run.pool.pids == []  # its own pool ends with the run


@pytest.mark.parametrize("kind", ["baldwin", "layers", "islands"])
def test_a_run_is_resumed_with_another_number_of_workers(alone, tmp_path, kind):
    run = KINDS[kind](workers=Shuffled(3))
    finish(run, kind, tmp_path / "run", lambda run: len(run.log) >= 2)
    again = ev.resume(tmp_path / "run", run.task, workers=Shuffled(2))
    finish(again, kind, tmp_path / "run", lambda run: len(run.log) >= 3)
    finish(ev.resume(tmp_path / "run", run.task), kind, tmp_path / "run")
    assert files(tmp_path / "run") == alone(kind)


# -- lost workers ------------------------------------------------------------------------------------------------------
def own(function: Any) -> Any:
    return ev.Task(fitness.X, [0, 1, 1, 0], fitness=function, split="same", name="own")


def test_genomes_of_lost_slices_are_scored_one_by_one(alone, tmp_path):
    run = KINDS["trained"](workers=Shuffled(4, lost=3))
    finish(run, "trained", tmp_path / "run")
    assert run.counters.failed == 0
    assert files(tmp_path / "run") == alone("trained")


def test_only_genomes_that_end_their_worker_fail(pool):
    """Which genomes these are follows from the weights of the first generation."""
    settings = ev.NEAT(population=14)
    safe = ev.Evolution(own(fitness.small), ev.scalar(), settings, seed=4)
    deadly = np.array([fitness.weights(safe.program(safe.genes, g))[0] > 3.5 for g in range(14)])
    assert deadly.sum() == 1
    safe.run(1, target=AIM)
    run = ev.Evolution(own(fitness.deadly), ev.scalar(), settings, seed=4, workers=pool)
    run.run(1, target=AIM)
    assert safe.fitness is not None
    assert run.fitness is not None
    np.testing.assert_array_equal(run.fitness, np.where(deadly, -np.inf, safe.fitness))
    assert run.counters.failed == run.log[0].failed == deadly.sum()
    for g, text in zip(np.flatnonzero(deadly), run.failures, strict=True):
        assert text == f"generation 0, genome {g} (founder): the worker was killed by SIGKILL"
    assert len(pool.map(round, [1, 2], 1)) == 2


def test_a_generation_without_workers_raises_evaluation_failed():
    for kind in ("function", "layers"):
        run = KINDS[kind](workers=Shuffled(2, lost=1000))
        with pytest.raises(EvaluationFailed, match="lost"):
            run.run(1, target=AIM)


def test_a_lost_island_is_continued_by_slices(alone, tmp_path):
    run = KINDS["islands"](workers=Shuffled(2, lost=1))
    finish(run, "islands", tmp_path / "run")
    assert files(tmp_path / "run") == alone("islands")


# -- what is sent ------------------------------------------------------------------------------------------------------
def test_tasks_that_workers_cannot_import_are_refused_before_the_run():
    run = ev.Evolution(own(lambda program: 0.0), ev.scalar(), ev.NEAT(population=4), workers=2)
    with pytest.raises(UsageError, match="cannot be sent to a worker process") as caught:
        run.run(1)
    assert "lambda" in str(caught.value.got)
    assert "top level of a module" in str(caught.value.fix)
    assert not run.log


def test_built_in_tasks_can_be_sent():
    for make in ev.tasks.TASKS.values():
        task = make()
        again = pickle.loads(pickle.dumps(task))
        assert again.hash() == task.hash()
        assert again.foreign is False
    assert pickle.loads(pickle.dumps(ev.tasks.gym("CartPole-v1"))).foreign is True


def test_fast_generations_stay_in_this_process(monkeypatch):
    monkeypatch.setattr(engine, "MIN_SECONDS", 1e6)
    fast = Shuffled(2)
    KINDS["neurons"](workers=fast).run(3, target=AIM)
    assert fast.calls == 0
    foreign = Shuffled(2)
    KINDS["function"](workers=foreign).run(3, target=AIM)
    assert foreign.calls == 4  # the first one sends the task


def test_reports_over_seeds_are_those_of_one_process():
    def reports(**options: Any) -> list[dict[str, Any]]:
        many = ev.over_seeds(ev.tasks.two_moons(60), None, ev.Hybrid(population=4, train=ev.Train(steps=3)), seeds=4,
                             test=True, max_generations=2, **options)  # fmt: skip
        return [{k: v for k, v in report.items() if k != "seconds"} for report in many.reports]

    assert reports(workers=Shuffled(3)) == reports()
    with pytest.raises(WorkerError, match="seed"):
        reports(workers=LosesAll(2))


class LosesAll(Shuffled):
    def map(self, function: Any, items: Any, common: Any = None, *, retries: int = 1, each: Any = None) -> list[Any]:
        for i in range(len(items)):
            each(i, Failed("killed"))
        return []


# -- islands -----------------------------------------------------------------------------------------------------------
def test_migrants_are_the_fittest_and_replace_the_least_fit_of_the_next_island(monkeypatch):
    run = ev.Evolution(ev.tasks.xor(), ev.scalar(), ev.NEAT(population=12, **WILD), seed=4,
                       islands=ev.Islands(3, every=3, migrants=2))  # fmt: skip
    before: list[np.ndarray] = []
    native = engine.NeuronEvolution.emigrants
    monkeypatch.setattr(
        engine.NeuronEvolution, "emigrants", lambda self, n: before.append(self.fitness.copy()) or native(self, n)
    )
    run.run(3, target=AIM)
    for island, one in enumerate(run.runs):
        source = (island - 1) % 3
        best = np.sort(before[source])[::-1][:2]
        edits = one.lineage.past[-1].edits
        assert [e.author for e in edits] == ["migration"] * 2
        assert [e.index for e in edits] == np.argsort(before[island], kind="stable")[:2].tolist()
        np.testing.assert_allclose([e.fitness for e in edits], best, rtol=1e-5)  # sums in another order
        for e in edits:
            key = one.alive(e.index)
            birth, program = one.lineage.birth(key), one.lineage.replay(key)
            assert re.fullmatch(rf"generation 2: immigrant from island {source}, generation 2, index \d+", str(birth))
            assert one.lineage.path(key) == [birth]  # its ancestors are in the lineage of the other island
            assert ev.program.read(program) == one.lineage.genome(key)
            assert one.individual(key).rescore() == e.fitness
    assert run.counters.evaluations == 3 * (3 * 12 + 2)


def test_islands_without_migrants_are_runs_of_their_own():
    run = ev.Evolution(ev.tasks.xor(), ev.scalar(), ev.NEAT(population=12, **WILD), seed=4,
                       islands=ev.Islands(2, every=2, migrants=0))  # fmt: skip
    result = run.run(5, target=AIM)
    for one in run.runs:
        single = ev.Evolution(ev.tasks.xor(), ev.scalar(), ev.NEAT(population=12, **WILD), seed=one.seed)
        single.run(5, target=AIM)
        assert single.log == one.log
        assert single.genes.weight.tobytes() == one.genes.weight.tobytes()
    assert len({one.seed for one in run.runs}) == 2
    best = max(one.log[-1].best for one in run.runs)
    assert result.best.fitness == best == run.log[-1].best
    assert result.to_json()["champion"]["island"] == [one.log[-1].best for one in run.runs].index(best)


def test_islands_end_at_limits_and_targets():
    def new() -> Any:
        return ev.Evolution(ev.tasks.xor(), ev.scalar(), ev.NEAT(population=50), seed=1, islands=ev.Islands(2, every=4))

    assert len(new().run(6).evolution.log) == 6
    run = new()
    assert run.run(max_evaluations=350).status == "MaxEvaluations"
    assert run.counters.evaluations == 4 * 2 * 50 + 2
    found = new().run(200)
    assert found.solved
    assert (found.predict(fitness.X)[:, 0] > 0.5).tolist() == [False, True, True, False]
    assert found.lineage.path(found.best.key)[-1].metric == 1.0
    with pytest.raises(UsageError, match="more than half"):
        ev.Evolution(ev.tasks.xor(), None, ev.NEAT(population=5), islands=ev.Islands(2, migrants=3))
    with pytest.raises(UsageError, match="on layers"):
        ev.Evolution(ev.tasks.two_moons(60), ev.blocks(net()), islands=ev.Islands(2))  # pyright: ignore[reportCallIssue, reportArgumentType]


@pytest.mark.ray
@pytest.mark.parametrize("kind", ["trained", "function", "layers", "islands"])
def test_ray_gives_the_bits_of_one_process(alone, tmp_path, kind):
    run = KINDS[kind](workers="ray")
    finish(run, kind, tmp_path / "run")
    assert files(tmp_path / "run") == alone(kind)
