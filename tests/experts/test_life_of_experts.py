"""Experts in a life: rebirths are committed and logged, and a resumed life equals one that was never stopped."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import numpy as np

import graphwright as gw
from graphwright import experts as ex
from graphwright import lifecycle as lf
from graphwright.optim import Adam
from graphwright.testing.shift import Net, Stream, objective

STEPS = 24


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
    p, optimizer = life.program, life.training.train.optimizer
    found = {key: p.weights[key].data.tobytes() for key in p.weights}
    for key, variable in p.weights.items():
        if key.startswith("mlp.experts"):
            found |= {f"{key}.{n}": v.data.tobytes() for n, v in optimizer.state_of(variable).variables().items()}
    found |= {n: v.data.tobytes() for n, v in life.training.train.variables().items()}
    return found


def test_a_life_with_rebirths_that_was_stopped_twice_equals_one_that_was_not(tmp_path):
    whole, parts = run(tmp_path / "whole", ()), run(tmp_path / "parts", (7, 15))
    events = [[(e.step, e.facts["name"]) for e in life.log if e.kind == "expert_reborn"] for life in (whole, parts)]
    assert len(events[0]) >= 3
    assert events[0] == events[1]
    assert bytes_of(whole) == bytes_of(parts)
    whole.verify()
    name = events[0][0][1]
    assert any(entry.author == "lifecycle" for entry in parts.program.blame(name))
    key = f"{events[0][-1][1]}.prototype"
    before = parts.program.weights[key].data.tobytes()
    parts.program.undo()
    assert parts.program.weights[key].data.tobytes() != before
    parts.close()
    whole.close()


def test_only_experts_with_tokens_are_written(tmp_path):
    """Commits between rebirths hold the experts that had tokens, the head and the states of the controller."""
    life = run(tmp_path / "life", ())
    before = {i: life.program.weights[f"mlp.experts.{i}.up.weight"].data.tobytes() for i in range(6)}
    batch = batches()[0]
    found = life.program.run({"x": batch["x"]})
    (router,) = ex.threshold_routers(life.program)
    used = found.value(router.value("mask")).to_numpy().any(axis=0)
    life.training.step(batch)
    for i in range(6):
        moved = life.program.weights[f"mlp.experts.{i}.up.weight"].data.tobytes() != before[i]
        assert moved == used[i]
    life.close()
