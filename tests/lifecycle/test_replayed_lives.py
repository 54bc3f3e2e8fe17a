"""Edits of a life, replayed on a program that is trained beside it, give the same weights."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import pytest
from bonsai import Reborn, again, begin, cared, program, step, train

import graphwright as gw
from graphwright import lifecycle as lf
from graphwright.lifecycle.writer import Writer
from graphwright.program.errors import ReplayConflict

pytestmark = pytest.mark.usefixtures("warm")


def values(p: gw.Program) -> dict[str, bytes]:
    return {key: v.numpy().tobytes() for key, v in p.weights.items()}


class Noted:
    """A loader whose batches are noted."""

    def __init__(self, data: Iterable[Any], batches: list) -> None:
        self.data, self.batches = data, batches

    def __iter__(self) -> Iterator[Any]:
        for batch in self.data:
            self.batches.append(batch)
            yield batch


def beside(life: lf.Life, batches: list) -> gw.Program:
    """A program of the same seed that is trained on the same batches and gets the edits of each step."""
    p = program()
    train_ = step(p)
    life.replay(p, step=0)
    for age, batch in enumerate(batches, 1):
        train_(dict(zip(("x", "y"), batch, strict=True)))
        life.replay(p, step=age)
    return p


@pytest.mark.parametrize("kind", ["as it was trained", "opened again", "compacted", "asynchronous", "a fork"])
def test_the_edits_of_a_controller_replayed_at_their_steps_give_the_same_weights(tmp_path, kind, monkeypatch):
    """New parameters were trained since; some were replaced again."""
    life, run, data = begin(tmp_path / "life", asynchronous=kind == "asynchronous")
    batches: list = []
    data = Noted(data, batches)
    if kind == "asynchronous":  # no commit between the edit and the next update
        monkeypatch.setattr(Writer, "ready", property(lambda writer: False))
    cared(run, data, 11)
    if kind == "compacted":
        life.compact()
    if kind == "opened again":
        life.close()
        life, run, data = again(tmp_path / "life")
        cared(run, Noted(data, batches), 13)
    if kind == "a fork":
        life = life.fork(tmp_path / "fork")
    assert [e.step for e in life.log.of("expert_reborn")] == [4, 8, *([12] if life.age == 13 else [])]
    assert values(beside(life, batches)) == values(life.program)
    life.verify()


def test_manual_edits_undo_and_redo_between_steps_are_replayed(tmp_path):
    life, run, data = begin(tmp_path / "life")
    batches: list = []
    data = Noted(data, batches)
    with life.program.edit("before the first step") as e:
        e.set_weight("0.bias", np.ones(16, np.float32))
    train(run, data, 2)
    with life.program.edit("other biases") as e:
        e.set_weight("3.bias", np.full(3, 2, np.float32))
    train(run, data, 4)
    life.program.undo()
    cared(run, data, 6, Reborn(5))
    life.program.undo()
    train(run, data, 8)
    life.program.redo()
    train(run, data, 9)
    assert values(beside(life, batches)) == values(life.program)
    before = len(life.program.journal)
    p = program()
    assert [e.why for e in life.replay(p)] == ["before the first step", "expert_reborn 0.weight"]
    assert len(life.program.journal) == before


def test_a_missing_value_or_another_latest_edit_is_a_conflict(tmp_path):
    life, run, data = begin(tmp_path / "life")
    life.program.undo_horizon = 2
    cared(run, data, 13)
    life.compact()
    p = program()
    assert life.replay(p, step=3) == ()
    before = p.hash()
    with pytest.raises(ReplayConflict, match="not in the history"):
        life.replay(p, step=4)
    assert p.hash() == before
    life.replay(p, step=8)
    train(run, data, 14)
    life.program.undo()
    train(run, data, 15)
    with pytest.raises(ReplayConflict, match="not the latest one"):
        life.replay(program(), step=14)
