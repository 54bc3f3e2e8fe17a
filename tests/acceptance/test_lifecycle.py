"""Lives of experts on the planted shift: alarms, calm, growth; and a life that is killed, undone and forked."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import graphwright as gw
from graphwright import experts as ex
from graphwright import lifecycle as lf
from graphwright.array import from_numpy
from graphwright.autograd import Tensor
from graphwright.optim import Adam
from graphwright.testing.shift import Net, Run, Stream, World, objective
from seeds import deep

SHIFT = 900


# -- alarms ------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("seed", range(deep(5, 1)))
def test_a_shift_is_found_at_once_and_dead_experts_are_replaced_after_it(seed: int) -> None:
    run = Run(seed, ex.Regeneration())
    for step in range(SHIFT + 120):
        if step == SHIFT:
            run.stream.shift()
        run.step()
    alarms = [step for step, change in run.changes if change.event == "alarm"]
    renewals = [step for step, change in run.changes if change.event == "expert_reborn"]
    assert SHIFT < alarms[0] <= SHIFT + 5
    assert alarms[-1] <= SHIFT + 10
    assert all(SHIFT < step <= alarms[-1] + 110 and step % 10 == 0 for step in renewals)  # ρ·4 < 1/2 after 104 steps
    assert len(renewals) <= 20
    entries = [entry for entry in run.program.journal if entry.author == "lifecycle"]
    assert len(entries) == len(set(renewals))


@pytest.mark.parametrize("seed", range(deep(3, 1)))
def test_calm_data_give_no_alarm_few_renewals_and_the_accuracy_of_no_controller(seed: int) -> None:
    runs, steps = [Run(seed, care) for care in (ex.Regeneration(), None)], deep(2000, 1000)
    for run in runs:
        for _ in range(steps):
            run.step()
    cared, free = runs
    assert cared.count("alarm") == 0
    assert cared.count("expert_reborn") <= steps // 1000  # the upkeep
    assert np.mean(cared.accuracy[200:]) > np.mean(free.accuracy[200:]) - 0.01
    assert free.watch.signals().own.states["alarms"].item() == 0


@pytest.mark.deep
def test_an_alarm_at_one_deviation_never_rests() -> None:
    """So the threshold of three is needed: noise passes one deviation again and again."""
    run, latch = Run(0, ex.Regeneration(alarm=1.0, upkeep=0)), []
    for _ in range(1400):
        run.train(run.stream.draw())
        latch.append(run.watch.signals().own.states["rho"].item())
    assert run.watch.signals().own.states["alarms"].item() > 50
    assert min(latch[300:]) > 0.01 / 50


# -- growth ------------------------------------------------------------------------------------------------------------
def grown(seed: int, steps: int, shift: int | None = None, *, absolute: bool = False) -> tuple[list[int], list[float]]:
    """(steps of births, share of unrouted tokens of every step) with 8 of 24 experts alive at first."""
    run, unrouted = Run(seed, ex.Regeneration(upkeep=0), alive=8), []
    for step in range(steps):
        if step == shift:
            run.stream.shift()
        if absolute:
            (layer,) = run.watch.signals().layers.values()
            layer.slow.assign(Tensor(from_numpy(np.zeros((), np.float32))))
        run.step()
        unrouted.append(run.train.reports["life.mlp.router.unrouted"].item())
    return [step for step, change in run.changes if change.event == "expert_born"], unrouted


@pytest.mark.filterwarnings("ignore:alarms find no dead expert")
@pytest.mark.parametrize("seed", range(deep(3, 1)))
def test_new_clusters_get_new_experts_until_few_tokens_have_none(seed: int) -> None:
    born, unrouted = grown(seed, SHIFT + 300, SHIFT)
    assert any(SHIFT < step <= SHIFT + 50 for step in born)
    assert unrouted[SHIFT] > 0.1
    assert np.mean(unrouted[-20:]) <= 0.02


@pytest.mark.deep
@pytest.mark.parametrize("seed", range(deep(3, 1)))
def test_no_expert_is_added_while_nothing_changes(seed: int) -> None:
    assert all(step <= 200 for step in grown(seed, deep(1500, 500))[0])


@pytest.mark.deep
def test_an_absolute_share_of_unrouted_tokens_adds_experts_from_the_start() -> None:
    assert len(grown(0, 200, absolute=True)[0]) > 5


# -- one life ----------------------------------------------------------------------------------------------------------
EXPERTS, DIM, BATCH = 64, 16, 64
SEGMENT, SHIFTS, UNDONE, END = 50, (30, 80), 95, 150
CHILD = """
import sys
sys.path[:0] = {paths!r}
from test_lifecycle import live
for age in live({folder!r}):
    print(age, flush=True)
"""


def batches() -> list[dict[str, np.ndarray]]:
    stream, found = Stream(1, BATCH, DIM), []
    for age in range(END + 5):
        if age in SHIFTS:
            stream.shift()
        found.append(stream.draw())
    return found


def live(folder: Any) -> Any:
    """Begin or continue a life to its end, in three segments, with one undo; iterate over the ages."""
    data = batches()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        gw.manual_seed(0)
        if Path(folder).exists():
            life = lf.open(folder, asynchronous=True)
        else:
            x = World.drawn(np.random.default_rng(0), 8, DIM).draw(np.random.default_rng(0), BATCH)["x"]
            program = gw.trace(Net(DIM, EXPERTS, 8), x)
            ex.calibrate(program, {"x": x}, k0=2)
            life = lf.birth(program, folder, name="bonsai", asynchronous=True)
        while life.age < END:
            care = ex.Regeneration(pruning=0.3, decay=0.9, grace=25, every=5, window=20, upkeep=20)
            also = [ex.sdl(2.0, 0.01, 0.01), care.signals()]
            train = gw.compile_step(life.program, objective, Adam(life.program, 3e-3, lazy=True), data[0], also=also)
            kinds = [event.kind for event in life.log if event.kind.startswith("segment_")]
            facts = {"name": "planted shift", "clusters": 8}
            begins = not kinds or kinds[-1] == "segment_end"
            run = life.segment(train, facts, objective="classes") if begins else life.resume(train, facts)
            while run.age < (run.figures.start // SEGMENT + 1) * SEGMENT:
                if run.age == UNDONE:
                    life.program.undo()
                run.step(data[run.age], care)
                yield run.age
            run.end()
        life.close()


def state(life: lf.Life) -> dict[str, str]:
    """Name -> digest of every tensor of the last commit, moments and states included."""
    return {name: home.digest for name, home in life.store.fold.items()}


def lives(events: Any) -> list[tuple[int, str, str]]:
    return [(e.step, e.kind, e.facts["name"]) for e in events if e.kind.startswith("expert_") or e.kind == "alarm"]


@pytest.mark.deep
def test_a_life_of_64_experts_that_is_killed_undone_and_forked(tmp_path: Path) -> None:
    """Its log has every segment and all lives of experts; its bytes are those of a life without interruptions."""
    folder, chance = tmp_path / "life", random.Random(0)
    paths = [str(Path(__file__).parent), str(Path(__file__).parents[1])]
    text = CHILD.format(paths=paths, folder=str(folder))
    ages = [0]
    for _ in range(5):
        with subprocess.Popen([sys.executable, "-c", text], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as child:
            try:
                assert child.stdout is not None
                assert child.stderr is not None
                assert child.stdout.readline().strip().isdigit(), child.stderr.read().decode()[-3000:]
                time.sleep(chance.uniform(0.05, 0.5))
            finally:
                os.kill(child.pid, signal.SIGKILL)
        with lf.open(folder, readonly=True) as life:
            life.verify()
            ages.append(life.age)
    assert ages == sorted(ages)
    for _ in live(folder):
        pass
    for _ in live(tmp_path / "whole"):
        pass
    life, whole = lf.open(folder), lf.open(tmp_path / "whole")
    assert state(life) == state(whole)
    life.verify()

    # the log alone has the segments, and all lives of the experts
    assert lives(life.log) == lives(whole.log)
    ends = [event.facts for event in life.log.of("segment_end")]
    assert [event.step for event in life.log.of("segment_end")] == [SEGMENT, 2 * SEGMENT, END]
    assert [facts["steps"] for facts in ends] == [SEGMENT] * 3
    assert len(life.log.of("restore")) >= (1 if 0 < ages[-1] < END else 0)
    reborn = [(name, step) for step, kind, name in lives(life.log) if kind == "expert_reborn"]
    assert len(reborn) > 3
    journal = life.program.journal
    noted = [a for entry in journal if entry.undoes is None for a in entry.annotations()]
    assert reborn == [(a["name"], a["step"]) for a in noted if a["event"] == "expert_reborn"]
    (undo,) = [entry for entry in journal if entry.undoes is not None]
    assert journal[undo.undoes].author == "lifecycle"
    (event,) = [event for event in life.log.of("edit") if event.facts["entry"] == undo.seq]
    assert event.step == UNDONE

    # a fork changes nothing of its parent
    before = state(life)
    child = life.fork(tmp_path / "twig", name="twig")
    assert (child.identity.parent or {})["id"] == life.identity.id
    with child.program.edit("a bias") as e:
        e.set_weight("head.bias", lambda bias: bias + 1)
    child.commit()
    child.verify()
    assert state(life) == before
    for one in (life, whole, child):
        one.close()
