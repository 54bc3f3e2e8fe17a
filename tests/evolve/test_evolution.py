"""Runs: XOR from end to end, stops, ablations, failures, the same bits however often a run is interrupted."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import graphwright as gw
from graphwright import evolve as ev
from graphwright.errors import UsageError
from graphwright.evolve.errors import EvaluationFailed, LimitTooSmall, RegistryConflict, ResumeMismatch, TaskError
from graphwright.evolve.neurons.genomes import genome
from graphwright.evolve.neurons.species import founding

X = np.array([[0, 0], [0, 1], [1, 0], [1, 1]], np.float32)


def run_of(seed=7, generations=20, task=None, **changes) -> Any:
    run = ev.Evolution(task or ev.tasks.xor(), ev.scalar(), ev.NEAT(**changes), seed=seed)
    run.run(generations, target=2.0)
    return run


def test_neat_finds_xor():
    results = [ev.Evolution(ev.tasks.xor(), ev.scalar(), seed=s).run(300) for s in range(20)]
    assert sum(r.solved for r in results) >= 19
    assert np.median([r.evolution.counters.evaluations for r in results]) <= 10_000
    assert np.mean([r.best.genome.hidden for r in results]) <= 5
    best = results[0].best
    assert ((best.predict(X)[:, 0] > 0.5) == [0, 1, 1, 0]).all()
    assert best.rescore() == best.fitness


def test_xor_is_not_solved_without_structural_mutations():
    assert not any(ev.Evolution(ev.tasks.xor(), None, ev.NEAT(growth=False), seed=s).run(40).solved for s in range(3))


def test_random_founders_differ_and_are_valid():
    settings: Any = {"population": 60, "start": "random", "burst": 3}
    run: Any = ev.Evolution(ev.tasks.xor(), None, ev.NEAT(**settings), seed=0)
    found = [genome(run.genes, g, 2, 1) for g in range(60)]
    structures = {(f.nodes, tuple((e.id, e.open) for e in f.links)) for f in found}
    assert len(structures) > 20
    assert {f.hidden for f in found} == {0, 1, 2, 3}
    for g in range(0, 60, 6):
        assert np.isfinite(run.program(run.genes, g).run(x=X)["y"].to_numpy()).all()
    fixed: Any = ev.Evolution(ev.tasks.xor(), None, ev.NEAT(**settings, growth=False), seed=0)
    assert fixed.genes.node_id.tobytes() == run.genes.node_id.tobytes()  # growth is what comes after the start
    most = np.diff(fixed.genes.link_off).max()
    fixed.run(5, target=2.0)
    assert np.diff(fixed.genes.link_off).max() <= most
    s = founding(ev.NEAT())
    assert (s.split_link, s.add_link, s.weights) == (pytest.approx(0.03 / (0.03 + 0.97 * 0.05)), pytest.approx(1), 0)


def test_hybrid_solves_xor_with_few_candidates():
    results = [ev.Evolution(ev.tasks.xor(), None, ev.Hybrid(), seed=s).run(max_evaluations=800) for s in range(10)]
    assert sum(r.solved for r in results) >= 9
    assert np.median([r.evolution.counters.evaluations for r in results]) <= 100
    assert max(r.best.genome.hidden for r in results) <= 6
    c = results[0].evolution.counters
    assert c.backward == c.evaluations * 60 * 4  # candidates x steps x cases
    assert c.forward == c.evaluations * 4 + 4  # and the best founder once more, whether its fitness is the same


def test_results_do_not_depend_on_the_number_of_threads():
    one, two = run_of(), ev.Evolution(ev.tasks.xor(), None, seed=7, threads=2)
    two.run(20, target=2.0)
    for a, b in zip(one.genes, two.genes, strict=True):
        assert a.tobytes() == b.tobytes()


@pytest.mark.parametrize("name", ["cartpole", "double-pole"])
def test_runs_in_environments_resume_in_another_process(tmp_path, name):
    whole, first = (ev.Evolution(ev.tasks.named(name), None, ev.NEAT(population=5), seed=3) for _ in range(2))
    whole.run(4, target=np.inf)
    first.run(2, target=np.inf)
    first.save(tmp_path / "run")
    rest = ev.resume(tmp_path / "run")  # by a task that no episode was played in
    rest.run(4, target=np.inf)
    assert rest.log == whole.log
    assert first.best is not None
    assert ev.load_best(tmp_path / "run").rescore() == first.individual(first.best).fitness


def test_previous_states_are_saved(tmp_path):
    directory = tmp_path / "run"
    run = ev.Evolution(ev.tasks.xor(), None, ev.NEAT(population=10), seed=1)
    run.run(9, target=2.0, save=directory, save_every=2)
    assert {p.name for p in tmp_path.iterdir()} == {"run", "run.1", "run.2"}
    assert [len(ev.resume(tmp_path / n).log) for n in ("run", "run.1", "run.2")] == [9, 8, 6]
    (directory / "run.json").write_text("{")
    with pytest.raises(ResumeMismatch, match=r"previous state in .*run\.1"):
        ev.resume(directory)
    older = ev.resume(tmp_path / "run.1")
    older.run(9, target=2.0, save=directory, keep=1)
    for a, b in zip(ev.resume(directory).genes, run.genes, strict=True):
        assert a.tobytes() == b.tobytes()


def test_a_run_of_another_task_is_refused(tmp_path):
    run = run_of(generations=2)
    run.save(tmp_path / "run")
    with pytest.raises(ResumeMismatch, match="a different task"):
        ev.resume(tmp_path / "run", ev.tasks.two_moons())
    (tmp_path / "run" / "run.json").write_text("{}")
    with pytest.raises(ResumeMismatch):
        ev.resume(tmp_path / "run")


def test_runs_stop_at_each_limit():
    run = ev.Evolution(ev.tasks.xor(), None, seed=0)
    assert run.run(3, target=2.0).status is ev.Status.MAX_GENERATIONS
    assert run.run(max_evaluations=600, target=2.0).status is ev.Status.MAX_EVALUATIONS
    assert run.run(max_seconds=0.0, target=2.0).status is ev.Status.MAX_TIME
    assert run.run(50, callback=lambda r: True, target=2.0).status is ev.Status.CALLBACK_STOPPED
    frozen = {"weights": 0.0, "crossover": False, "growth": False}  # the rates of growth are not 0
    run = ev.Evolution(ev.tasks.xor(), None, ev.NEAT(**frozen), seed=1)
    assert run.run(50, target=2.0).status is ev.Status.NO_MUTATION
    assert len(run.log) == 1
    assert run_of(generations=3, **{**frozen, "growth": True}).generation == 2
    assert run.counters.evaluations == 150 * len(run.log)
    with pytest.raises(LimitTooSmall):
        ev.Evolution(ev.tasks.xor(), None, ev.NEAT(max_links=2))
    limited: Any = run_of(generations=30, max_nodes=3, max_links=6)
    assert np.diff(limited.genes.node_off).max() <= 3
    assert np.diff(limited.genes.link_off).max() <= 6
    assert limited.counters.refused["split_link"] > 0


def test_a_run_without_a_generation_has_no_champion():
    run: Any = ev.Evolution(ev.tasks.xor(), None, seed=0)
    for limit in ({"max_generations": 0}, {"max_evaluations": 0}, {"max_seconds": 0}):
        result = run.run(**limit)
        assert (len(run.log), run.counters.evaluations, run.fitness) == (0, 0, None)
        assert str(result).endswith("after 0 generations: nothing was scored yet")
        assert result.to_json()["evaluations"] == 0
        with pytest.raises(UsageError, match="no champion yet"):
            _ = result.best
    assert run.run(1).status is ev.Status.MAX_GENERATIONS
    for wrong in (-1, math.nan):
        with pytest.raises(UsageError, match="limit"):
            run.run(wrong)
    with pytest.raises(UsageError, match="before its first generation"):
        ev.over_seeds(ev.tasks.xor(), seeds=2, max_generations=0)


def test_reached_target_does_not_satisfy_a_higher_one():
    run = ev.Evolution(ev.tasks.xor(), None, seed=0)
    low = run.run(300, target=0.5)
    assert low.solved
    assert low.to_json()["target"] == 0.5
    generations = len(run.log)
    high = run.run(300, target=1.0)
    assert high.solved
    assert len(run.log) > generations
    assert high.best.metric == 1.0


def test_failing_genomes_are_recorded_and_the_run_continues():
    def fitness(answers):
        value = -np.abs(answers[..., 0] - [0, 1, 1, 0]).sum(1)
        value[::7] = np.nan
        return value

    run = run_of(task=ev.Task(X, [0, 1, 1, 0], fitness_batch=fitness, split="same"), generations=3)
    assert run.counters.failed == 3 * 22
    assert run.log[-1].failed == 22
    assert "fitness is nan" in run.failures[0]
    assert np.isfinite(run.lineage.birth(run.best).fitness)


def test_failure_names_genome_mutation_and_line():
    def deeper(k):
        raise ValueError("boom")

    calls = iter(range(1000))

    def fitness(program):
        k = next(calls)
        if k % 7 == 4:
            deeper(k)
        return {9: None, 10: "many", 12: np.zeros(2)}.get(k, 1.0 / (1 + k))

    task = ev.Task(X, [0, 1, 1, 0], fitness=fitness, split="same")
    with pytest.warns(ev.NoisyFitness):
        run = run_of(task=task, population=8, generations=2, split_link=1.0)
    line = deeper.__code__.co_firstlineno
    assert run.failures[0].startswith("generation 0, genome 4 (founder): ValueError: boom, at test_evolution.py:")
    assert run.failures[0].endswith(f"test_evolution.py:{line + 1}")
    text = "; ".join(run.failures)
    assert "(split link at " in text
    for got in ("None", "'many'", "array([0., 0.])"):
        assert f"the fitness function returned {got}, not a number" in text


def test_a_fitness_function_may_return_an_array_of_one_number():
    def fitness(program):
        return program.run(x=X[:1], keep="outputs")["y"]

    task = ev.Task(X, [0, 1, 1, 0], fitness=fitness, split="same")
    run = run_of(task=task, population=4, generations=1)
    assert run.counters.failed == 0
    assert run.fitness[0] == fitness(run.population().program(0)).item()


def test_failures_do_not_change_random_numbers_of_others():
    """Without fitness for the worst genomes the others have the same children, bit for bit."""

    def least(answers):
        value = np.abs(answers[..., 0] - 0.5).sum(1)
        return np.where(value < np.quantile(value, 0.4), 0.0, value)

    def none(answers):
        return np.where(least(answers) == 0, np.nan, least(answers))

    kinds = {"mutate_only": 0.3, "population": 30, "split_link": 0.3, "add_link": 0.3, "survival": 0.4, "threshold": 9}
    runs = [
        run_of(task=ev.Task(X, [0, 1, 1, 0], fitness_batch=f, split="same"), generations=6, **kinds)
        for f in (least, none)
    ]
    assert runs[0].counters.failed == 0
    assert runs[1].counters.failed >= 60
    for a, b in zip(runs[0].genes, runs[1].genes, strict=True):
        assert a.tobytes() == b.tobytes()
    for name in ("fitter_parent", "other_parent", "mutation", "site"):
        assert (getattr(runs[0].births, name) == getattr(runs[1].births, name)).all()


def test_run_ends_when_most_of_a_generation_fails():
    def fitness(program):
        raise ZeroDivisionError("no")

    with pytest.raises(EvaluationFailed, match="ZeroDivisionError: no"):
        run_of(task=ev.Task(X, [0, 1, 1, 0], fitness=fitness, split="same"), population=4)


def test_test_cases_are_read_on_request_only():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(100, 2))
    task = ev.Task(x, (x[:, 0] > 0).astype(int), target=2.0)
    task._test.x[:] = np.nan  # a read would fail
    result = ev.Evolution(task, None, ev.Hybrid(population=4), seed=0).run(4)
    assert task.test_reads == 0
    assert result.best.metric > 0.8
    result.test()
    assert task.test_reads == 1


def test_test_labels_do_not_influence_the_run():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(60, 2))
    runs = []
    for noise in (0.0, 1.0):
        task = ev.Task(x, x[:, 0] > 0, seed=1)
        task._test.y[:] += noise * rng.random(task._test.y.shape)
        run: Any = ev.Evolution(task, None, ev.Hybrid(population=4, train=ev.Train(steps=5)), seed=2)
        run.run(4, target=2.0)
        runs.append(run)
    assert [line.best for line in runs[0].log] == [line.best for line in runs[1].log]
    assert runs[0].genes.weight.tobytes() == runs[1].genes.weight.tobytes()
    other = ev.Task(1 - x, x[:, 0] > 0, seed=1)  # and what training and fitness read does decide
    third: Any = ev.Evolution(other, None, ev.Hybrid(population=4, train=ev.Train(steps=5)), seed=2)
    third.run(4, target=2.0)
    assert third.genes.weight.tobytes() != runs[0].genes.weight.tobytes()


def test_programs_are_built_lazily(monkeypatch):
    made = []
    real = ev.program.founder
    for name in ("graphwright.evolve.neurons.program.founder", "graphwright.evolve.neurons.lineage.founder"):
        monkeypatch.setattr(name, lambda *a, **k: made.append(1) or real(*a, **k))
    run = run_of(generations=8)
    assert not made
    assert run.individual(run.best).program.nodes()
    assert len(made) == 1


def test_a_function_of_programs_can_be_the_fitness():
    def fitness(program):
        y = program.run(x=X, keep="outputs")["y"].to_numpy()[:, 0]
        return float((4 - np.abs(y - [0, 1, 1, 0]).sum()) ** 2)

    own = run_of(task=ev.Task(X, [0, 1, 1, 0], fitness=fitness, split="same"), population=4, generations=2)
    fast = run_of(population=4, generations=2)
    np.testing.assert_allclose(own.fitness, fast.fitness, rtol=1e-5)


def test_run_without_limit_or_target_is_refused():
    task = ev.Task(X, [0, 1, 1, 0], split="same")
    with pytest.raises(ValueError, match="neither a limit nor a target"):
        ev.Evolution(task).run()
    with pytest.raises(ValueError, match="not a number"):
        ev.Evolution(task).run(3, target="good")  # pyright: ignore[reportArgumentType]
    with pytest.raises(TaskError, match="no data for gradient steps"):
        ev.Evolution(ev.tasks.cartpole(), None, ev.Hybrid())


def test_noisy_fitness_warns():
    rng = np.random.default_rng(0)
    task = ev.Task(X, [0, 1, 1, 0], fitness_batch=lambda a: a[..., 0].sum(1) + rng.random(len(a)), split="same")
    with pytest.warns(ev.NoisyFitness, match="of one genome was"):
        run_of(task=task, generations=1)


def test_noisy_fitness_is_averaged_with_fixed_keys(recwarn):
    def right(answers):
        return -np.abs(answers[..., 0] - [0, 1, 1, 0]).sum(1)

    def noise(answers):
        return gw.randn(len(answers)).numpy()

    def one(program):
        return float(gw.randn(1).item())

    tasks = [
        ev.Task(X, [0, 1, 1, 0], fitness_batch=lambda a: right(a) + noise(a)[0], runs=3, split="same"),
        ev.Task(X, [0, 1, 1, 0], fitness=one, runs=3, split="same"),
        ev.Task(X, [0, 1, 1, 0], fitness_batch=right, split="same"),
    ]
    noisy, alone, plain = ([line.best for line in run_of(task=t, generations=2, population=4).log] for t in tasks)
    assert not recwarn.list  # the same when asked again
    drawn = []
    for key in range(3):
        with gw.autograd.fork_rng(key):
            drawn.append(float(gw.randn(1).item()))
    assert alone == pytest.approx([np.mean(drawn)] * 2)
    shifts = []
    for key in range(3):
        with gw.autograd.fork_rng(key):
            shifts.append(float(gw.randn(4).numpy()[0]))
    np.testing.assert_allclose(np.subtract(noisy, plain), np.mean(shifts), atol=1e-6)
    assert len({t.hash() for t in tasks}) == 2
    with pytest.raises(TaskError, match="not an integer >= 1"):
        ev.Task(X, [0, 1, 1, 0], fitness=one, runs=0)


@pytest.mark.parametrize("inherit", ["lamarck", "baldwin", "none"])
def test_children_inherit_weights_according_to_the_setting(inherit):
    run: Any = ev.Evolution(ev.tasks.xor(), None, ev.Hybrid(population=8, inherit=inherit, weights=0.0), seed=2)
    before = run.genes.weight.copy()
    run.run(1, target=2.0)
    trained = run.scored.weight.copy()
    assert not np.array_equal(before, trained)
    assert np.array_equal(run.genes.weight, before) == (inherit == "baldwin")
    parents = run.genes
    run._reproduce()
    old = {(m, i): w for m in range(8) for i, w in zip(
        parents.link_id[parents.link_off[m]:parents.link_off[m + 1]].tolist(),
        parents.weight[parents.link_off[m]:parents.link_off[m + 1]].tolist(), strict=True)}  # fmt: skip
    for g in range(8):
        for e in range(run.genes.link_off[g], run.genes.link_off[g + 1]):
            key = (int(run.births.fitter_parent[g]), int(run.genes.link_id[e]))
            if key in old:
                assert run.genes.weight[e] == np.float32(old[key])
    if inherit == "none":
        kept = run.genes.weight.copy()
        steps = run.settings.train.steps
        run._prepare()
        run._scorer.score(run.genes, run.table, run.generation)
        assert (run.genes.steps[run.genes.steps > 0] == steps).all()  # redrawn, with new moments
        assert not np.array_equal(kept, run.genes.weight)


def test_settings_round_trip_through_json():
    for settings in (
        replace(ev.NEAT.paper2002(), threshold=4.0),
        ev.Hybrid(activation=("tanh", "sin"), train=ev.Train(5, 0.1)),
    ):
        assert ev.NEAT.from_json(settings.to_json()) == settings
    assert ev.NEAT.paper2002().stagnation == 15
    with pytest.raises(ValueError, match="unknown activation"):
        ev.NEAT(activation="cube")
    shares: list[Any] = [1.5, "x", None, math.nan]
    for share in shares:
        with pytest.raises(ValueError, match="split_link: a setting is out of range"):
            ev.NEAT(split_link=share)
    with pytest.raises(ValueError, match="out of range"):
        ev.NEAT(activation=())


@pytest.mark.parametrize(
    ("name", "value"),
    [("population", 1), ("population", 20.5), ("tournament", 0), ("champions", -1), ("c1", -1.0), ("c3", math.nan),
     ("power", math.inf), ("max_links", "many"), ("target_species", -1), ("start", "other"), ("inherit", "some"),
     ("train", 3)],
)  # fmt: skip
def test_settings_out_of_range_are_named(name, value):
    with pytest.raises(ValueError, match=f"NEAT, {name}: a setting is out of range"):
        ev.NEAT(**{name: value})


@pytest.mark.parametrize(("name", "value"), [("steps", -1), ("steps", 1.5), ("lr", math.nan), ("clip", -1.0)])
def test_training_options_out_of_range_are_named(name, value):
    with pytest.raises(ValueError, match=f"Train, {name}: a setting is out of range"):
        ev.Train(**{name: value})


def test_damaged_files_are_refused(tmp_path):
    directory = tmp_path / "run"
    run = ev.Evolution(ev.tasks.xor(), None, ev.NEAT(population=10), seed=1)
    run.run(2, target=2.0, save=directory, save_every=1)
    older = r"try +resume from the previous state in .*run\.1"
    arrays = directory / "arrays.safetensors"
    whole = arrays.read_bytes()
    flipped = whole[:-1] + bytes([whole[-1] ^ 1])
    for damaged in (flipped, whole[:-5], whole[:20], b"", whole.replace(b"births.site", b"births.cite"), None):
        arrays.unlink() if damaged is None else arrays.write_bytes(damaged)
        with pytest.raises(ResumeMismatch, match=f"damaged(.|\n)*{older}"):
            ev.resume(directory)
    arrays.write_bytes(whole)
    assert ev.resume(directory).generation == 1
    text = (directory / "run.json").read_text()
    changes = ('"seed"', '"sed"'), ('"best"', '"most"'), ('"population": 10', '"population": -1')
    for damaged in (text[: len(text) // 2], *(text.replace(*change) for change in changes)):
        assert damaged != text
        (directory / "run.json").write_text(damaged)
        with pytest.raises(ResumeMismatch, match=f"damaged(.|\n)*{older}"):
            ev.resume(directory)


def test_contradictory_innovation_numbers_are_a_conflict(tmp_path):
    run: Any = run_of(generations=2)
    run.registry.keys[4] = run.registry.keys[3]
    run.save(tmp_path / "run")
    with pytest.raises(RegistryConflict, match=r"\(2, .*\) again, number 4"):
        ev.resume(tmp_path / "run")


def test_invalid_arguments_are_refused_before_the_run(tmp_path):
    run: Any = ev.Evolution(ev.tasks.xor(), None, ev.NEAT(population=4))
    calls: list[dict[str, Any]] = [{"save_every": 0}, {"save_every": 1.5}, {"keep": 0}, {"keep": "all"}]
    for options in calls:
        with pytest.raises(UsageError, match="whole number >= 1"):
            run.run(2, save=tmp_path / "run", **options)
    assert not run.log
    tasks: list[Any] = ["xor", None]
    for task in tasks:
        with pytest.raises(TaskError, match=r"evolve\.tasks"):
            ev.Evolution(task)
        with pytest.raises(TaskError):
            ev.Evolution(task, ev.blocks(gw.Program("p")))


def test_inputs_of_another_width_are_refused():
    best = run_of(generations=1, population=4).individual(ev.IndividualKey(0, 0))
    for shape in ((3, 1), (3, 5), (3, 2, 1), ()):
        with pytest.raises(TaskError, match="2 inputs"):
            best.predict(np.zeros(shape))


def test_unknown_keys_raise():
    lineage = run_of(generations=2, population=4).lineage
    for key in (
        ev.IndividualKey(9, 0),
        ev.IndividualKey(1, 4),
        ev.IndividualKey(-1, 0),
        ev.IndividualKey(1, -2),
        ev.IndividualKey(0, 0, 1),
    ):
        with pytest.raises(KeyError, match="no individual has the key"):
            lineage.birth(key)
        with pytest.raises(KeyError, match="no individual has the key"):
            lineage.genome(key)


def test_invalid_keys_and_programs_are_refused(tmp_path):
    run: Any = run_of(generations=2, population=4)
    with pytest.raises(UsageError, match="no living individual has this key"), run.edit("a"):
        pass
    b = gw.Builder("net")
    b.output(b.tanh(b.input("data", ("B", 2))), "y")
    for program in (gw.Program("empty"), b.build()):
        with pytest.raises(TaskError, match="not a genome"):
            ev.PopulationPlan([program])
    run.save(tmp_path / "run")
    directory = tmp_path / "run" / "run.json"
    content = json.loads(directory.read_text())
    for name, value in (("best", [5, 99, 0]), ("pinned", [[0, 44, 0]])):
        directory.write_text(json.dumps(content | {name: value}))
        with pytest.raises(ResumeMismatch, match="no individual has the key"):
            ev.resume(tmp_path / "run")
