"""Experts in a life: rebirths are committed and logged, and a resumed life equals one that was never stopped."""

from __future__ import annotations

import re
import warnings
from collections import Counter
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
from scipy.stats import spearmanr

import graphwright as gw
from graphwright import experts as ex
from graphwright import lifecycle as lf
from graphwright.array import NDArray
from graphwright.errors import Diverged
from graphwright.optim import Adam
from graphwright.optim.lr_scheduler import StepLR
from graphwright.testing.shift import Net, Stream, objective
from values import parameter_of

STEPS, STOPS = 24, (4, 7, 15)  # the first right after a rebirth


def made(stream: Stream) -> gw.Program:
    gw.manual_seed(0)
    x = stream.draw()["x"]
    p = gw.trace(Net(8, 6, 4), x)
    ex.calibrate(p, {"x": x}, k0=2)
    return p


def training(p: gw.Program, stream: Stream) -> tuple[Any, ex.Regeneration]:
    care = ex.Regeneration(k0=2.0, pruning=1.0, grace=2, every=2, upkeep=4)
    also = [ex.sdl(2.0, 0.01, 0.01), care.signals()]
    step = gw.compile_step(p, objective, Adam(p, lr=3e-3, lazy=True), stream.draw(), also=also)
    return step, care


def batches() -> list[dict[str, np.ndarray]]:
    stream = Stream(1, 32, 8)
    return [stream.draw() for _ in range(STEPS)]


def run(folder: Path, stops: tuple[int, ...]) -> lf.Life:
    """A life of `STEPS` steps, opened again after each of `stops`."""
    data = batches()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        life = lf.birth(made(Stream(0, 32, 8)), folder, name="bonsai")
        step, care = training(life.program, Stream(2, 32, 8))
        segment = life.segment(step, {"name": "stream"}, objective="classes")
        for stop in (*stops, STEPS):
            while segment.age < stop:
                segment.step(data[segment.age], care)
            if stop < STEPS:
                life.close()
                gw.manual_seed(99)
                life = lf.open(folder)
                step, care = training(life.program, Stream(2, 32, 8))
                segment = life.resume(step, {"name": "stream"})
    return life


def bytes_of(life: lf.Life) -> dict[str, bytes]:
    assert life.training is not None
    p, optimizer = life.program, life.training.train.optimizer
    found = {key: p.weights[key].data.tobytes() for key in p.weights}
    for key in p.weights:
        if key.startswith("mlp.experts"):
            state = optimizer.state_of(parameter_of(p, key))
            found |= {f"{key}.{n}": v.data.tobytes() for n, v in state.variables().items()}
    found |= {n: v.data.tobytes() for n, v in life.training.train.variables().items()}
    return found


def test_a_life_with_rebirths_that_was_stopped_equals_one_that_was_not(tmp_path):
    whole, parts = run(tmp_path / "whole", ()), run(tmp_path / "parts", STOPS)
    events = [[(e.step, e.facts["name"]) for e in life.log if e.kind == "expert_reborn"] for life in (whole, parts)]
    assert len(events[0]) >= 3
    assert events[0] == events[1]
    assert bytes_of(whole) == bytes_of(parts)
    assert whole.figures == parts.figures  # of steps that no decision had read when it was stopped, too
    whole.verify()
    name = events[0][0][1]
    assert any(entry.author == "lifecycle" for entry in parts.program.blame(name))
    key = f"{events[0][-1][1]}.prototype"
    before = parts.program.weights[key].data.tobytes()
    parts.program.undo()
    assert parts.program.weights[key].data.tobytes() != before
    parts.close()
    whole.close()


def test_a_life_with_an_edit_that_was_committed_before_the_next_step_is_resumed_to_the_bit(tmp_path):
    found = []
    for stops in (False, True):
        life, segment, care = begun(tmp_path / str(stops))
        data = batches()[:9]
        for b in data[:3]:
            segment.step(b, care)
        with life.program.edit("one more") as e:
            ex.add(e, "mlp", 1, birth="open")
        life.commit()
        if stops:
            life.close()
            life = lf.open(tmp_path / str(stops))
            step, care = training(life.program, Stream(2, 32, 8))
            segment = life.resume(step, {"name": "stream"}, scheduler=StepLR(step.optimizer, step_size=2))
        for b in data[3:]:
            segment.step(b, care)
        found.append(bytes_of(life))
        life.close()
    assert found[0] == found[1]


def spoilt(batch: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    return {**batch, "x": batch["x"] * np.float32(np.nan)}


def begun(folder: Path) -> tuple[lf.Life, lf.Segment, ex.Regeneration]:
    life = lf.birth(made(Stream(0, 32, 8)), folder, name="bonsai")
    step, care = training(life.program, Stream(2, 32, 8))
    schedule = StepLR(step.optimizer, step_size=2)
    return life, life.segment(step, {"name": "stream"}, objective="classes", scheduler=schedule), care


def weights(life: lf.Life) -> dict[str, bytes]:
    assert life.training is not None
    p, optimizer = life.program, life.training.train.optimizer
    return {n: v.data.tobytes() for n, v in {**p.weights, **optimizer.variables()}.items()}


@pytest.mark.filterwarnings("ignore:alarms find no dead expert")
@pytest.mark.parametrize("bad", [{0: 1, 3: 4, 4: 1}, {3: 1}, {1: 1}], ids=["many", "at a decision", "before one"])
def test_a_life_with_skipped_steps_decides_as_one_without_them(tmp_path, bad):
    data = batches()[:8]
    found = []
    for name, repeated in (("whole", {}), ("life", bad)):
        life, run_, care = begun(tmp_path / name)
        for t, b in enumerate(data):
            for _ in range(repeated.get(t, 0)):
                run_.step(spoilt(b), care)
            run_.step(b, care)
        final = weights(life)
        run_.end()
        (facts,) = (e.facts for e in life.log.of("segment_end"))
        reborn = [{**e.facts, "hash": None} for e in life.log.of("expert_reborn")]  # hashes have the ages of lives
        found.append((facts["measured"], final, reborn))
    assert found[0] == found[1]


def test_a_skipped_step_is_a_fault_of_the_log_and_the_life_continues_as_without_it(tmp_path):
    data = batches()[:8]
    whole, run_, care = begun(tmp_path / "whole")
    losses = [run_.step(b, care) for b in data]
    life, run_, care = begun(tmp_path / "life")
    found, bad = [], {0: 1, 3: 4, 4: 1}
    for t, b in enumerate(data):
        for _ in range(bad.get(t, 0)):
            before = weights(life)
            assert np.isnan(run_.step(spoilt(b), care))
            assert weights(life) == before
        found.append(run_.step(b, care))
        if t == 3:  # the counts are resumed too
            life.close()
            life = lf.open(tmp_path / "life")
            step, care = training(life.program, Stream(2, 32, 8))
            run_ = life.resume(step, {"name": "stream"}, scheduler=StepLR(step.optimizer, step_size=2))
    assert found == losses
    assert weights(life) == weights(whole)
    assert (life.age, whole.age) == (14, 8)
    faults = life.log.of("fault")
    assert [(e.step, e.facts["streak"]) for e in faults] == [(1, 1), (5, 1), (6, 2), (7, 3), (8, 4), (10, 1)]
    run_.end()
    (facts,) = (e.facts for e in life.log.of("segment_end"))
    assert (facts["steps"], facts["skipped"], facts["loss_first"], facts["loss_last"]) == (14, 6, losses[0], losses[-1])
    assert life.verify()
    drawn = ElementTree.fromstring(life.to_svg())
    events = Counter(e.get("class", "") for e in drawn.iter() if "event-" in e.get("class", ""))
    assert events == {f"event-{k}": n for k, n in life.log.counts().items() if k not in ("birth", "segment_end")}


@pytest.mark.filterwarnings("ignore:alarms find no dead expert")
def test_a_life_draws_pi_its_latch_and_the_number_of_experts_per_token(tmp_path):
    life, run_, care = begun(tmp_path / "life")
    seen: dict[str, list[float]] = {name: [] for name in ("loss", "pi", "rho", "k")}
    for b in batches()[:6]:
        out = life.program.run({"x": b["x"]})
        (router,) = ex.threshold_routers(life.program)
        seen["k"].append(float(out.value(router.value("hits")).to_numpy().sum(axis=1).mean()))
        seen["loss"].append(run_.step(b, care))
        for name in ("pi", "rho"):
            seen[name].append(care.signals().own.states[name].item())
    assert life.figures is not None
    rows = life.figures.curve.points
    for name, values in seen.items():
        assert [row[name] for row in rows] == pytest.approx(values, rel=1e-5)
    text = life.to_svg()
    drawn = re.findall(r"<polyline points=\"([^\"]*)\"[^>]*><title>(\w+)", text)
    names = ("loss", "pi", "d", "rho", "k", "gradient")
    assert [(name, len(points.split())) for points, name in drawn] == [(n, 6) for n in names]
    assert "k, experts per token" in text
    heights = [-float(pair.split(",")[1]) for pair in dict((n, p) for p, n in drawn)["k"].split()]
    assert np.corrcoef(heights, seen["k"])[0, 1] == pytest.approx(1, abs=1e-3)


@pytest.mark.filterwarnings("ignore:alarms find no dead expert")
def test_five_skipped_steps_in_a_row_end_the_training_and_the_life_on_disk_stays_whole(tmp_path):
    data = batches()[:4]
    life, run_, care = begun(tmp_path / "life")

    def train() -> None:
        with run_:
            for b in (*data[:2], *[spoilt(b) for b in (*data, *data)]):
                run_.step(b, care)

    with pytest.raises(Diverged, match="its last commit is step 6") as caught:
        train()
    error = caught.value
    assert all((error.where, error.expected, error.got, error.fix))
    life = lf.open(tmp_path / "life")
    assert (life.age, life.log.counts()["fault"]) == (6, 4)
    assert life.verify()
    step, care = training(life.program, Stream(2, 32, 8))
    run_ = life.resume(step, {"name": "stream"}, scheduler=StepLR(step.optimizer, step_size=2))
    whole, other, care_ = begun(tmp_path / "whole")
    expected = [other.step(b, care_) for b in data][2:]
    assert [run_.step(b, care) for b in data[2:]] == expected
    assert weights(life) == weights(whole)


def test_only_experts_with_tokens_are_written(tmp_path):
    """Commits between rebirths hold the experts that had tokens, the head and the states of the controller."""
    life = run(tmp_path / "life", ())
    before = {i: life.program.weights[f"mlp.experts.{i}.up.weight"].data.tobytes() for i in range(6)}
    batch = batches()[0]
    found = life.program.run({"x": batch["x"]})
    (router,) = ex.threshold_routers(life.program)
    used = np.any(found.value(router.value("mask")).to_numpy(), axis=0)
    assert life.training is not None
    life.training.step(batch)
    for i in range(6):
        moved = life.program.weights[f"mlp.experts.{i}.up.weight"].data.tobytes() != before[i]
        assert moved == used[i]
    life.close()


def test_a_life_reads_what_the_steps_measured_every_tenth_step_and_at_its_end(tmp_path, monkeypatch):
    """The log has PI of each step, and each alarm, as if they were read in each step."""
    p, stream = made(Stream(0, 32, 8)), Stream(1, 32, 8)
    care = ex.Regeneration(k0=2.0, grace=10, alarm=0.5, upkeep=0)
    step = gw.compile_step(p, objective, Adam(p, lr=3e-2), stream.draw(), also=[care.signals()])
    life, seen, alarms, sizes = lf.birth(p, tmp_path / "life", name="bonsai"), [], [0.0], list[int]()
    host = NDArray._host
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with life.segment(step, {"name": "stream"}) as run:
            for age in range(1, 36):
                if age in (15, 33):
                    stream.shift()
                with monkeypatch.context() as patch:
                    patch.setattr(NDArray, "_host", lambda array: (sizes.append(array.size), host(array))[1])
                    patch.setattr(life, "_commit_step", lambda: None)
                    run.step(stream.draw(), care)
                if age % 10 and age > 1:
                    assert sizes == [1], age  # the loss
                sizes.clear()
                seen.append({n: step.reports[f"integrity.{n}"].item() for n in ("pi", "d", "rho", "gradient")})
                alarms.append(step.reports["integrity.alarms"].item())
    (end,) = life.log.of("segment_end")
    assert [{n: point[n] for n in seen[0]} for point in end.facts["curve"]["points"]] == seen
    at = [e.step for e in life.log.of("alarm")]
    assert at == [t for t in range(1, 36) if alarms[t] > alarms[t - 1]]
    assert any(15 <= t < 20 for t in at)
    assert any(t > 30 for t in at)  # after the last decision
    assert end.facts["alarms"] == len(at)
    pi, norms = ([row[n] for row in seen] for n in ("pi", "gradient"))
    assert end.facts["measured"]["pi"] == {"mean": pytest.approx(np.mean(pi)), "least": min(pi)}
    assert end.facts["rank_correlations"]["gradient"]["pi"] == pytest.approx(spearmanr(pi, norms)[0])
    life.close()
