"""Runs on disk: killed and resumed to the same bytes; at any fault within a save no state is lost."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import interrupted
import numpy as np
import pytest

import graphwright as gw
from graphwright import evolve as ev
from graphwright.errors import GraphwrightError
from graphwright.evolve.layers import train
from graphwright.evolve.layers.candidate import GENES
from graphwright.evolve.mutations.registry import MUTATIONS
from graphwright.testing.faults import check_atomic, inject, record, snapshot


def files(folder: Path) -> dict[str, bytes]:
    """All that a run wrote, but for its wall-clock times."""
    found = {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}
    assert found.pop("clock.json")
    return found


@pytest.fixture(scope="module")
def killed(tmp_path_factory, whole):
    """Directories of three runs of two threads that were killed in their tenth generation."""
    folder = tmp_path_factory.mktemp("killed")
    shutil.copytree(whole[0] / "start", folder / "start")
    command = [sys.executable, interrupted.__file__, str(folder), "2"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "halfway\n"
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    process.stdout.close()
    return folder


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The same runs, never interrupted, and their directories."""
    folder = tmp_path_factory.mktemp("whole")
    interrupted.write_start(folder)
    runs = {kind: interrupted.new(kind, folder) for kind in interrupted.KINDS}
    for kind, run in runs.items():
        interrupted.finish(run)
        run.save(folder / kind)
    return folder, runs


@pytest.mark.parametrize("kind", interrupted.KINDS)
def test_killed_and_resumed_run_equals_one_run_byte_for_byte(killed, whole, kind):
    folder, task = killed, interrupted.moons() if kind == "layers" else None
    run = ev.resume(folder / kind, task)
    assert len(run.log) == 9  # the tenth was not saved
    interrupted.finish(run, folder / kind)
    ours, theirs = files(folder / kind), files(whole[0] / kind)
    assert ours.keys() == theirs.keys()
    assert [name for name in ours if ours[name] != theirs[name]] == []
    assert {p.name for p in folder.iterdir() if p.name.startswith(kind)} == {kind, f"{kind}.1", f"{kind}.2"}


@pytest.mark.deep
def test_saved_candidates_score_the_same_in_a_new_process(whole):
    """Champions of neurons, some with delays, and members of layers with running statistics: to the bit."""
    code = (
        "import sys; from pathlib import Path; sys.path.insert(0, sys.argv[2]); import interrupted\n"
        "from graphwright import evolve as ev; from graphwright.evolve.layers import train\n"
        "folder = Path(sys.argv[1])\n"
        "for kind in ('neat', 'hybrid'):\n"
        "    run = ev.resume(folder / kind)\n"
        "    for birth in run.lineage.champions():\n"
        "        one = run.individual(birth.key)\n"
        "        late = any(link.delay for link in one.genome.links)\n"
        "        print('late' if late else 'still', one.rescore().hex(), one.fitness.hex())\n"
        "run = ev.resume(folder / 'layers', interrupted.moons())\n"
        "for m in {*run.members, *run.archive}:\n"
        "    metric, loss = train.measure(run.task, m.program, run.task.valid)\n"
        "    print('layers', (metric + loss).hex(), (m.metric + m.birth.loss).hex())\n"
    )
    command = [sys.executable, "-c", code, str(whole[0]), str(Path(interrupted.__file__).parent)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    lines = [line.split() for line in done.stdout.splitlines()]
    assert {kind for kind, _, _ in lines} == {"late", "still", "layers"}
    assert all(again == recorded for _, again, recorded in lines)
    layers = whole[1]["layers"]
    assert sum(kind == "layers" for kind, _, _ in lines) == len({*layers.members, *layers.archive})


def test_neuron_run_is_restored_completely(whole):
    for kind in ("neat", "hybrid"):
        run, again = whole[1][kind], ev.resume(whole[0] / kind)
        for a, b in zip(run.genes, again.genes, strict=True):  # weights, moments and step counts among them
            assert a.tobytes() == b.tobytes()
        used = int(run.registry.count[0])
        assert int(again.registry.count[0]) == used
        assert run.registry.keys[:used].tobytes() == again.registry.keys[:used].tobytes()
        for name in ("of", "ids", "best", "gained", "threshold", "next_id"):
            assert np.array_equal(getattr(run.species, name), getattr(again.species, name))
        assert (run.fitness.tobytes(), run.metric.tobytes()) == (again.fitness.tobytes(), again.metric.tobytes())
        assert (run.seed, run.settings, run.generation, run.gained) == (
            again.seed, again.settings, again.generation, again.gained)  # fmt: skip
        assert (run.log, run.best, run.failures) == (again.log, again.best, again.failures)
        assert run.counters == again.counters
        assert run.lineage.pinned == again.lineage.pinned
        for g in range(0, interrupted.GENERATIONS, 6):
            assert run.lineage.birth(ev.IndividualKey(g, 2)) == again.lineage.birth(ev.IndividualKey(g, 2))
        assert run.lineage.genome(run.best) == again.lineage.genome(run.best)
    assert run.genes.steps.any()
    assert whole[1]["neat"].genes.link_delay.any()


def test_a_resumed_run_without_a_possible_mutation_makes_no_generation(tmp_path):
    interrupted.write_start(tmp_path)
    settings = ev.Layers(population=2, steps=0, rates=dict.fromkeys((*MUTATIONS, *GENES), 0.0))
    run = ev.Evolution(interrupted.moons(), ev.blocks(gw.load(tmp_path / "start")), settings)
    assert run.run(9, target=2.0).status is ev.Status.NO_MUTATION
    run.save(tmp_path / "run")
    again = ev.resume(tmp_path / "run", interrupted.moons())
    assert again.run(9, target=2.0).status is ev.Status.NO_MUTATION
    assert len(again.log) == len(run.log) == 2


def test_layer_run_is_restored_completely(whole):
    run: Any = whole[1]["layers"]
    again = ev.resume(whole[0] / "layers", interrupted.moons())
    assert (run.births, run.log, run.counters, run.numbers) == (again.births, again.log, again.counters, again.numbers)
    assert (run.gained, run.steady, run.settings) == (again.gained, again.steady, again.settings)
    for name in ("members", "archive"):
        ours, theirs = getattr(run, name), getattr(again, name)
        assert [m.birth for m in ours] == [m.birth for m in theirs]
        for a, b in zip(ours, theirs, strict=True):
            for p, q in ((a.program, b.program), (a.untrained, b.untrained)):
                assert p.hash() == q.hash()
                assert list(p.gates()) == list(q.gates())
                values = {k: v.data.to_numpy().tobytes() for k, v in p.variables().items()}
                assert values == {k: v.data.to_numpy().tobytes() for k, v in q.variables().items()}
                assert {"1.running_mean", "1.num_batches_tracked", "gates.logits", "rng"} <= values.keys()
            for one, other in ((a.moments, b.moments), (a.untrained_moments, b.untrained_moments)):
                assert {k: v.tobytes() for k, v in one.items()} == {k: v.tobytes() for k, v in other.items()}
            assert train.measure(again.task, b.program, again.task.valid) == (b.metric, b.birth.loss)
    member = run.members[0]
    assert any(value.any() for value in member.moments.values())
    assert member.program.weights.array("1.running_mean").to_numpy().any()


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """A run that was saved after each of three generations, and what to write next."""
    folder, run = tmp_path_factory.mktemp("small"), ev.Evolution(ev.tasks.xor(), None, ev.NEAT(population=4), seed=1)
    for n in range(1, 4):
        run.run(n, target=2.0, save=folder / "run")
    run.run(4, target=2.0)
    return folder, run


def state(tree, name):
    """The files of one of the states in a snapshot of their folder; leftovers of an attempt have a hidden name."""
    return {path.partition("/")[2]: content for path, content in tree.items() if path.split("/")[0] == name}


def check_none_lost(tree, old, new, where):
    """The last state is the old or the new one, whole; where it is the new one, the old one is kept."""
    last, before, oldest = (state(tree, name) for name in ("run", "run.1", "run.2"))
    states = [state(old, name) for name in ("run", "run.1", "run.2")]
    assert last in (states[0], state(new, "run")), where
    assert before in (states[0], states[1]), where
    assert oldest in (states[1], states[2]), where
    if last != states[0]:
        assert before == states[0], where  # what was the last is kept


def test_fault_at_any_write_leaves_a_complete_state(small, tmp_path):
    """The states before move on, then the new one is put in place: faults at each operation, losses of power."""
    template, run = small
    old, made = snapshot(template), 0

    def copy() -> Path:
        nonlocal made
        made += 1
        shutil.copytree(template, tmp_path / str(made))
        return tmp_path / str(made)

    folder = copy()
    with record(folder) as operations:
        run._save(folder / "run", 3)
    new = snapshot(folder)
    assert [len(ev.resume(folder / name).log) for name in ("run", "run.1", "run.2")] == [4, 3, 2]
    assert len(operations) > 20
    for at in range(999):
        folder, failed = copy(), False
        with inject(folder, "EIO" if at % 2 else "ENOSPC", at) as log:
            try:
                run._save(folder / "run", 3)
            except (OSError, GraphwrightError):
                failed = True
        tree = snapshot(folder)
        check_none_lost(tree, old, new, f"operation {at}")
        if not failed:
            assert all(state(tree, name) == state(new, name) for name in ("run", "run.1", "run.2"))
        elif at % 9 == 0:
            assert len(ev.resume(folder / "run").log) >= 3
            run._save(folder / "run", 3)
            assert state(snapshot(folder), "run") == state(new, "run")
        if at > len(operations) and not any(op.fault for op in log):
            break


def test_power_loss_while_saving_leaves_a_complete_state(small, tmp_path):
    template, run = small
    survived = check_atomic(tmp_path, lambda folder: shutil.copytree(template / "run", folder / "run"),
                            lambda folder: run.save(folder / "run"), kinds=(), seeds=1)  # fmt: skip
    assert survived.crashes > 10


def test_fault_while_saving_layers_leaves_the_previous_state(whole, tmp_path):
    run = whole[1]["layers"]
    run.save(tmp_path / "run")
    before = files(tmp_path / "run")
    for at in range(0, 60, 7):
        with inject(tmp_path, "ENOSPC", at) as log, suppress(OSError, GraphwrightError):
            run.save(tmp_path / "run")
        assert any(op.fault for op in log)
        assert files(tmp_path / "run") == before
    content = json.loads((tmp_path / "run" / "run.json").read_text())
    assert content["settings"]["kind"] == "Layers"
