"""Evolution of layers: survival, inheritance, saved runs."""

from __future__ import annotations

import json
import shutil
from typing import Any, cast

import numpy as np
import pytest
import torch

import graphwright as gw
from graphwright import evolve as ev
from graphwright.errors import UsageError
from graphwright.evolve import mutations as m
from graphwright.evolve.errors import EvaluationFailed, LimitTooSmall, ResumeMismatch, TaskError
from graphwright.evolve.layers import engine, train
from graphwright.evolve.layers.candidate import GENES, RATES, TrainingGenes
from graphwright.evolve.layers.engine import cross
from graphwright.evolve.mutations import registry
from graphwright.evolve.mutations.registry import parts

QUICK = {"population": 4, "steps": 20}


def start(inputs, outputs):
    b = gw.Builder()
    x = b.input("x", ("B", inputs))
    w = b.param("out.weight", np.zeros((outputs, inputs), np.float32))
    b.output(b.linear(x, w, b.param("out.bias", np.zeros(outputs, np.float32)), name="out"), "y")
    return b.build()


def evolution(seed=0, task=None, **settings) -> Any:
    return ev.Evolution(task or ev.tasks.two_moons(300), ev.blocks(start(2, 1)), ev.Layers(**settings), seed=seed)


def only(*names):
    """Rates by which nothing but these is drawn."""
    return {name: float(name in names) for name in (*m.MUTATIONS, *GENES)}


def test_layers_solve_two_moons():
    task, p = ev.tasks.two_moons(300), start(2, 1)
    before = p.hash()
    settings = ev.Layers(population=4, steps=200, pareto=ev.Pareto())
    result: Any = ev.Evolution(task, ev.blocks(p), settings, seed=0).run(max_evaluations=20)
    assert p.hash() == before  # children share weights until they are written
    assert result.evolution.champion().metric >= 0.95
    assert result.test() >= 0.9
    assert task.test_reads == 1
    values = np.array([[a.metric, -a.birth.params] for a in result.pareto_front])
    assert (ev.pareto.fronts(values) == 0).all()
    small = result.smallest_meeting_target()
    assert small is None or small.birth.params == min(a.birth.params for a in result.pareto_front if a.metric >= 0.97)
    for member in result.pareto_front:
        assert train.measure(task, member.program, task.valid) == (member.metric, member.birth.loss)
        assert member.program.journal[-1].author == "evolution"
    facts = result.to_json()
    assert facts["evaluations"] == len(result.births) == 20
    assert facts["backward_passes"] == 20 * 200 * 64
    assert facts["forward_passes"] == 20 * len(task.valid.x)
    assert str(result).startswith(str(result.status))


def test_run_is_deterministic_and_its_best_loads_from_disk(tmp_path):
    runs = [evolution(3, **QUICK) for _ in range(2)]
    for run in runs:
        run.run(max_evaluations=21)
    assert runs[0].births == runs[1].births
    runs[0].save(tmp_path / "run")
    best, task = ev.load_best(tmp_path / "run", runs[0].task), runs[0].task
    assert best.birth == runs[0].champion().birth
    assert train.measure(task, best.program, task.valid) == (best.metric, best.birth.loss)


def test_networks_are_scored_in_inference():
    """Dropout and norms of a batch are for training: answers are those of torch's evaluation; scoring moves nothing."""
    gw.manual_seed(0)
    n, t = gw.nn, torch.nn
    net = n.Sequential(n.Linear(2, 4), n.Dropout(0.5), n.BatchNorm1d(4), n.Tanh(), n.Linear(4, 1), n.Dropout(0.1))
    task, p = ev.tasks.two_moons(120), gw.trace(net, gw.zeros(16, 2))
    run: Any = ev.Evolution(task, ev.blocks(p), ev.Layers(population=2, steps=6, rates=only("learning_rate")), seed=0)
    run.run(max_generations=2, target=2.0)
    for member in run.members:
        theirs = t.Sequential(
            t.Linear(2, 4), t.Dropout(0.5), t.BatchNorm1d(4), t.Tanh(), t.Linear(4, 1), t.Dropout(0.1)
        )
        weights = {k: member.program.weights.array(k).to_numpy().copy() for k in theirs.state_dict()}
        theirs.load_state_dict({k: torch.from_numpy(v) for k, v in weights.items()})
        answers = theirs.eval()(torch.from_numpy(task.valid.x[:, 0])).detach().numpy()[:, 0]
        assert member.metric == np.mean((answers > 0) == task.valid.y[:, 0, 0])
        assert weights["2.num_batches_tracked"] == 6 * (member.birth.generation + 1)  # of training, not of scoring
        before = member.program.hash()
        assert train.measure(task, member.program, task.valid) == (member.metric, member.birth.loss)
        assert member.program.hash() == before


def test_saved_run_of_another_task_or_with_missing_files_is_refused(tmp_path):
    run = evolution(**QUICK)
    run.run(max_generations=2)
    run.save(tmp_path / "run")
    with pytest.raises(ResumeMismatch, match="a different task"):
        ev.resume(tmp_path / "run", ev.tasks.two_moons(300, seed=1))
    text = json.loads((tmp_path / "run" / "run.json").read_text())
    text["members"].append(999)
    (tmp_path / "run" / "run.json").write_text(json.dumps(text))
    with pytest.raises(ResumeMismatch, match="candidate of the saved run is missing"):
        ev.resume(tmp_path / "run", run.task)
    text["members"].pop()
    (tmp_path / "run" / "run.json").write_text(json.dumps(text))
    home = next((tmp_path / "run" / "candidates").iterdir())
    raw = bytearray((home / "moments.safetensors").read_bytes())
    raw[-1] ^= 1
    (home / "moments.safetensors").write_bytes(raw)
    with pytest.raises(ResumeMismatch, match="damaged"):
        ev.resume(tmp_path / "run", run.task)
    shutil.rmtree(tmp_path / "run" / "candidates")


@pytest.mark.deep
def test_replaying_the_fitter_parents_gives_the_same_structure():
    run = evolution(5, **QUICK)
    run.run(max_evaluations=40)
    for member in run.members:
        line = run.line(member.number)
        assert line[0].number == 0
        assert [b.fitter_parent for b in line[1:]] == [b.number for b in line[:-1]]
        assert run.replay(member.number).structure_hash() == member.program.structure_hash()
    assert any(b.other_parent is not None for b in run.births)
    with pytest.raises(UsageError):
        run.line(10**6)


def test_equal_mutations_get_equal_part_names():
    run = evolution(**QUICK)
    kind = "insert_layer"
    a, b = start(2, 1), start(2, 1)
    assert run._block_name(kind, "out", parts(a)) == run._block_name(kind, "out", parts(b)) == "b1"
    with a.edit("one") as e:
        m.insert_layer(e, "out", np.random.default_rng(0), block="b1")
    assert run._block_name(kind, "out", parts(a)) == "b2"
    assert run._block_name(kind, "out", parts(b)) == "b1"
    assert run._block_name("add_skip", "out", parts(b)) == "b3"


def test_crossover_takes_each_layer_with_its_moments_from_one_parent():
    run = evolution(2, population=6, steps=10, crossover=0.0)
    run.run(max_evaluations=40)
    rng = np.random.default_rng(0)
    seen = 0
    for fitter_parent in run.members:
        for other_parent in run.members:
            child = fitter_parent.program.fork()
            moments, taken = cross(child, fitter_parent.moments, other_parent.program, other_parent.moments, rng)
            assert child.structure_hash() == fitter_parent.program.structure_hash()
            for key in child.weights:
                layer = key.rpartition(".")[0]
                whose = other_parent if layer in taken else fitter_parent
                assert child.weights.array(key).tobytes() == whose.program.weights.array(key).tobytes()
                for name, value in moments.items():
                    if name.partition(".")[2].rpartition(".")[0] == key:
                        assert value.tobytes() == whose.moments[name].tobytes()
            seen += len(taken)
            if other_parent is fitter_parent:
                assert child.hash() == fitter_parent.program.fork().hash() or taken
    assert seen > 20


def test_candidates_of_equal_structure_share_a_compiled_step(monkeypatch):
    task, settings, rng = ev.tasks.two_moons(300), ev.Layers(steps=12), np.random.default_rng(0)
    programs = []
    for width in (2, 3, 4, 5):
        for _ in range(3):
            p = start(2, 1)
            with p.edit("grow") as e:
                m.insert_layer(e, "out", rng, width, "tanh")
            programs.append(p)
    shared, made = train.StepCache(), []
    native = train.compile
    monkeypatch.setattr(train, "compile", lambda step: made.append(1) or native(step))
    for k, p in enumerate(programs):
        training = TrainingGenes(6 + k % 3, "adam", "bce")
        alone, steps = p.fork("alone"), []
        for program, cache in ((p, shared), (alone, train.StepCache())):
            opt = train.optimizer(program, training)
            train.fit(task, program, opt, training, settings, np.random.default_rng(k), cache)
            steps.append((program, train.moments(opt)))
        (_, ours), (_, theirs) = steps  # no weight, moment or rate of who sat there before
        for key in p.weights:
            assert p.weights.array(key).to_numpy().tobytes() == alone.weights.array(key).to_numpy().tobytes()
        assert {n: v.tobytes() for n, v in ours.items()} == {n: v.tobytes() for n, v in theirs.items()}
    assert shared.planned == 4
    assert len(made) == 4 + 12


def test_moments_follow_weights_and_new_weights_have_none():
    run = evolution(**QUICK)
    run.run(max_generations=1)
    (fitter_parent,) = run.members
    program = fitter_parent.program.fork()
    opt = train.optimizer(program, fitter_parent.birth.training)
    train.restore(opt, fitter_parent.moments)
    with program.edit("grow") as e:
        m.insert_layer(e, "out", np.random.default_rng(0), 3, block="b1")
    state = train.moments(opt)
    for name, value in fitter_parent.moments.items():
        assert state[name].tobytes() == value.tobytes()
    fresh = [v for k, v in state.items() if ".b1." in k]
    assert fresh
    assert all((v == 0).all() for v in fresh)


@pytest.mark.parametrize("inherit", ["lamarck", "baldwin"])
def test_children_inherit_trained_or_untrained_weights(inherit):
    run = evolution(1, population=1, steps=10, crossover=0, rates=only("learning_rate"), inherit=inherit)
    run.run(max_generations=1)
    fitter_parent = run.members[0]
    program, moments = fitter_parent.heritage
    weight = program.weights.array("out.weight").to_numpy()
    assert (weight == 0).all() == (inherit == "baldwin")
    assert all((v == 0).all() for v in moments.values()) == (inherit == "baldwin")
    assert (fitter_parent.program.weights.array("out.weight").to_numpy() != 0).any()


def test_training_genes_stay_in_range():
    rng, training = np.random.default_rng(0), TrainingGenes.of(0.01, "adam", "bce")
    assert training.lr == pytest.approx(0.01)
    steps = []
    for _ in range(10_000):
        after = training.changed("learning_rate", (), rng)
        steps.append(abs(after.rate - training.rate))
        assert 0 <= after.rate < len(RATES)
        training = after if rng.random() < 0.5 else TrainingGenes(int(rng.integers(13)), "adam", "bce")
    middle = [s for s in steps if s]
    assert 0.75 < np.mean([s == 1 for s in middle]) < 0.87
    assert 1e-4 <= TrainingGenes(0, "sgd", "bce").changed("optimizer", (), rng).lr <= 1.001e-2
    assert 4e-3 <= TrainingGenes(0, "adam", "bce").changed("optimizer", (), rng).lr <= 1.001e-1
    for loss, other in (("mse", "huber"), ("huber", "mse")):
        assert TrainingGenes(3, "adam", loss).changed("loss", ("mse", "huber"), rng).loss == other


def test_child_is_trained_by_its_own_genes(monkeypatch):
    rates = []
    make = train.optimizer
    monkeypatch.setattr(train, "optimizer", lambda p, r, *state: rates.append(r) or make(p, r, *state))
    run = evolution(1, population=2, steps=1, crossover=0,
                    rates=only("learning_rate", "optimizer", "loss"))  # fmt: skip
    run.run(max_evaluations=15)
    used = [r for r in rates]
    assert all(b.training in used for b in run.births)
    assert {b.training.optimizer for b in run.births} == {"adam", "sgd"}
    assert {b.training.loss for b in run.births} == {"bce", "mse"}


def test_run_ends_with_each_status(monkeypatch):
    run = evolution(**QUICK)
    assert run.run(max_generations=2, target=2).status == "MaxGenerations"
    assert run.run(max_evaluations=run.counters.evaluations, target=2).status == "MaxEvaluations"
    assert run.run(max_seconds=0.0, target=2).status == "MaxTime"
    assert run.run(max_generations=9, target=2, callback=lambda r: True).status == "CallbackStopped"
    found = run.run(target=0.0)
    assert found.status == "TargetReached"
    assert found.best is run.champion()
    several = evolution(population=3, steps=60, rates=only("insert_layer"), pareto=ev.Pareto())
    several.run(max_generations=5, target=2)
    met = several.run(target=0.0)
    assert met.status == "TargetReached"
    assert met.best.birth.params == min(m.birth.params for m in met.pareto_front) < several.champion().birth.params
    monkeypatch.setattr(engine, "MUTATIONS", {})
    idle = evolution(population=2, steps=1, crossover=0, rates=dict.fromkeys(GENES, 0.0))
    assert idle.run(max_generations=50, target=2).status == "NoApplicableMutation"
    monkeypatch.undo()
    still = evolution(population=1, steps=0, crossover=0, rates=only("learning_rate"), pareto=ev.Pareto())
    assert still.run(max_generations=60, target=2).status == "Converged"
    assert len(still.log) == 21


def test_invalid_arguments_are_refused():
    with pytest.raises(TaskError, match="do not match the task"):
        ev.Evolution(ev.tasks.two_moons(), ev.blocks(start(3, 1)))
    with pytest.raises(TaskError, match="do not match the task"):  # no steps in this program
        ev.Evolution(ev.tasks.parity(), ev.blocks(start(1, 1)))
    with pytest.raises(TaskError, match="the task has no data"):
        ev.Evolution(ev.tasks.cartpole(), ev.blocks(start(4, 1)))
    with pytest.raises(UsageError, match="not for layers"):
        ev.Evolution(ev.tasks.two_moons(), ev.blocks(start(2, 1)), ev.NEAT())  # pyright: ignore[reportCallIssue,reportArgumentType]
    with pytest.raises(UsageError, match="the argument `start` has the wrong type"):
        ev.Evolution(ev.tasks.two_moons(), start(2, 1))  # pyright: ignore[reportCallIssue,reportArgumentType]
    with pytest.raises(LimitTooSmall):
        evolution(max_params=2)
    for wrong in ({"crossover": 2}, {"optimizer": "magic"}, {"lr": 0.0}):
        with pytest.raises(UsageError):
            ev.Layers(**wrong)  # pyright: ignore[reportArgumentType]
    with pytest.raises(UsageError, match="objectives"):
        ev.Pareto(("speed",))
    p = start(2, 1)
    with p.edit("spoil") as e:
        e.set_weight("out.weight", np.full((1, 2), np.nan, np.float32))
    with pytest.raises(EvaluationFailed, match="loss is nan"):
        ev.Evolution(ev.tasks.two_moons(), ev.blocks(p)).run(4)


def test_candidates_stay_within_the_limits():
    run = evolution(4, population=3, steps=1, crossover=0, max_params=40, max_flops=150, max_width=16)
    run.run(max_evaluations=60, target=2)
    assert max(b.params for b in run.births) <= 40
    assert max(b.flops for b in run.births) <= 150
    assert run.counters.refused


def test_user_mutations_are_sampled_like_built_in_ones(monkeypatch):
    table = dict(m.MUTATIONS)
    monkeypatch.setattr(registry, "MUTATIONS", table)
    monkeypatch.setattr(engine, "MUTATIONS", table)

    @ev.mutation("halve", sites=m.linears, weight=1e9)
    def halve(e, site, rng):
        e.set_weight(e.program.operands(site)[1].node, lambda w: w / 2)

    run = evolution(population=2, steps=5, rates=dict.fromkeys(GENES, 0.0), crossover=0)
    run.run(max_evaluations=4, target=2)
    assert [b.what for b in run.births[1:]] == ["halve at out"] * 3

    @ev.mutation("never", sites=m.linears, weight=1e18)
    def never(e, site, rng):
        raise UsageError("not here")

    run = evolution(population=2, steps=5, rates=dict.fromkeys(GENES, 0.0), crossover=0)
    run.run(max_evaluations=4, target=2)
    assert run.counters.refused["never"] >= 3  # refused for each child, named, and another one was made
    assert [b.what for b in run.births[1:]] == ["halve at out"] * 3


def test_failed_candidate_does_not_change_random_numbers_of_others(monkeypatch):
    runs = [evolution(1, population=4, steps=3) for _ in range(2)]
    runs[0].run(max_generations=2, target=2)
    real = train.measure

    def broken(task, program, part):
        if program.name == "candidate 2":
            raise FloatingPointError("no")
        return real(task, program, part)

    monkeypatch.setattr(train, "measure", broken)
    runs[1].run(max_generations=2, target=2)
    assert [b.number for b in runs[1].births if b.failure] == [2]
    assert "FloatingPointError: no" in runs[1].failures[0]
    assert [b for b in runs[0].births if b.number != 2] == [b for b in runs[1].births if b.number != 2]


def test_delay_link_is_found_for_a_delayed_target():
    x = np.random.default_rng(0).normal(size=(60, 5, 2)).astype("f4")
    y = np.concatenate([np.zeros((60, 1, 1), "f4"), x[:, :-1, :1] - x[:, :-1, 1:]], 1)
    b = gw.Builder("sequence")
    w = b.param("out.weight", np.zeros((1, 2), np.float32))
    b.output(b.linear(b.input("x", (6, 5, 2)), w, name="out"), "y")
    settings = ev.Layers(population=2, steps=80, lr=0.1, crossover=0, rates=only("add_delay_link", "remove_delay_link"))
    run: Any = ev.Evolution(ev.Task(x, y, "mse", target=2.0), ev.blocks(b.build()), settings, seed=0)
    run.run(max_evaluations=9)
    assert run.births[0].loss > 1
    assert run.champion().birth.loss < 0.01
    assert {b.mutation for b in run.births} == {"", "add_delay_link", "remove_delay_link"}
    for birth in run.births[1:]:  # a part of the same site gets the name of a removed one
        assert birth.block in ("", "b1", "b2", "b3")
    for member in run.members:
        assert run.replay(member.number).structure_hash() == member.program.structure_hash()


@pytest.mark.deep
def test_layer_evolution_works_on_images():
    gw.manual_seed(0)
    n = gw.nn
    net = n.Sequential(n.Conv2d(1, 4, 3, padding=1), n.ReLU(), n.AdaptiveAvgPool2d(1), n.Flatten(), n.Linear(4, 2))
    p = gw.trace(net, gw.zeros(16, 1, 6, 6))  # for batches of 16, and no others
    rng = np.random.default_rng(0)
    x = rng.normal(size=(90, 36)).astype("f4")
    y = np.arange(90) % 2
    x.reshape(90, 6, 6)[y == 1, 1:3, 1:3] += 2
    task = ev.Task(x, y, "cross_entropy", target=2.0, name="spots")
    run: Any = ev.Evolution(task, ev.blocks(p), ev.Layers(population=4, steps=40), seed=1)
    run.run(max_evaluations=25)
    assert run.champion().metric > 0.8
    assert {b.mutation for b in run.births} & {"kernel", "stride", "widen"}


@pytest.mark.parametrize(
    ("name", "value"),
    [("population", 1.5), ("steps", "a"), ("clip", -1), ("clip", np.nan), ("lr", np.nan), ("lr", 0), ("crossover", "x"),
     ("explore", 2), ("stagnation", -1), ("max_params", "x"), ("pareto", 3), ("rates", 3), ("rates", {"widen": -1}),
     ("inherit", "none"), ("optimizer", "adamw")],
)  # fmt: skip
def test_settings_of_layers_out_of_range_are_named(name, value):
    with pytest.raises(UsageError, match=f"Layers, {name}"):
        ev.Layers(**{name: value})


def test_invalid_starts_of_layers_are_refused():
    def refused(limits: Any, message: str, expected: Any) -> None:
        with pytest.raises(LimitTooSmall, match=message) as caught:
            evolution(**limits)
        assert caught.value.expected == expected

    refused({"max_params": 2}, "parameters", 2)
    refused({"max_flops": 1}, "operations", 1)
    refused({"max_width": 0}, "wider", 0)
    own = ev.Task([[0, 0], [0, 1], [1, 0], [1, 1]], [0, 1, 1, 0], fitness=lambda p: 1.0, split="same")
    with pytest.raises(TaskError, match="has a fitness function"):
        ev.Evolution(own, ev.blocks(start(2, 1)))
    with pytest.raises(UsageError, match="is not a Program"):
        ev.blocks(cast(Any, 3))
