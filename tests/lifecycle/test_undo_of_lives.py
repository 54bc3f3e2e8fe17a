"""Edits of a life: a controller's are journal entries and events; undo works after a restart, within the horizon."""

from __future__ import annotations

import gc
import weakref
from types import SimpleNamespace

import numpy as np
import pytest
from bonsai import Reborn, X, again, begin, cared, everything, loader, program, step, train

import graphwright as gw
from graphwright import lifecycle as lf
from graphwright import optim
from graphwright.program import Transaction
from graphwright.program.editing.journal import AUTHORS
from graphwright.program.errors import NotUndoable
from seeds import deep
from values import parameter_of

pytestmark = pytest.mark.usefixtures("warm", "young_heap")


def moments(life: lf.Life, run: lf.Segment) -> tuple[bytes, ...]:
    state = run.train.optimizer.state_of(parameter_of(life.program, "0.weight"))
    return tuple(np.asarray(v.numpy()).tobytes() for v in state.variables().values())


def replace_weight(e: Transaction) -> None:
    """Make the change that a controller proposes."""
    (change,) = Reborn(1).propose(SimpleNamespace(age=1))
    assert change.apply is not None
    change.apply(e)


def test_a_controllers_change_is_an_entry_with_an_annotation_and_an_event(tmp_path):
    life, run, data = begin(tmp_path / "life")
    cared(run, data, 4)
    entry = life.program.journal[-1]
    assert (entry.author, entry.tool) == ("lifecycle", "Reborn")
    assert entry.annotations("0.weight") == [
        {"name": "0.weight", "event": "expert_reborn", "step": 4, "reason": "dead", "r": 0.01}
    ]
    assert life.program.blame("0.weight")[-1] == entry
    (event,) = life.log.of("expert_reborn")
    assert (event.step, event.facts["entry"], event.facts["hash"]) == (4, entry.seq, entry.hash)
    (alarm,) = life.log.of("alarm")
    assert (alarm.step, alarm.facts["d"]) == (2, -3.5)
    assert not life.log.of("edit")
    assert "lifecycle" in AUTHORS
    assert run.figures.curve.points[-1]["pi"] == 0.4
    life.verify()


def test_a_new_parameter_begins_without_moments_and_others_keep_theirs(tmp_path):
    life, run, data = begin(tmp_path / "life")
    cared(run, data, 4)
    assert all(not any(part) for part in moments(life, run))
    assert everything(life)["optimizer.adamw.0.weight.steps"] != everything(life)["optimizer.adamw.3.weight.steps"]
    assert life.commit(verify=True).step == 4


@pytest.mark.parametrize("restarts", [(), (5,), (4, 6, 9)])
def test_undo_brings_weights_and_moments_back_whatever_was_trained_and_restarted_since(tmp_path, restarts):
    life, run, data = begin(tmp_path / "life")
    cared(run, data, 3)
    spy = _Spy(run)
    run.step(next(iter(data)), spy)
    weight, then = spy.weight, spy.moments
    for age in (4, 5, 6, 9, 10):
        train(run, data, age)
        if age in restarts:
            life.close()
            life, run, data = again(tmp_path / "life")
    others = {k: v.numpy().tobytes() for k, v in life.program.weights.items() if k != "0.weight"}
    life.program.undo()
    assert life.program.weights["0.weight"].numpy().tobytes() == weight
    assert moments(life, run) == then
    assert {k: v.numpy().tobytes() for k, v in life.program.weights.items() if k != "0.weight"} == others
    life.program.redo()
    life.program.undo()
    life.commit(verify=True)
    life.close()
    life, run, data = again(tmp_path / "life")
    assert life.program.weights["0.weight"].numpy().tobytes() == weight
    assert moments(life, run) == then
    life.verify()


@pytest.mark.parametrize("restarted", [False, True])
def test_undo_of_several_births_after_more_steps_changes_only_what_they_replaced(tmp_path, restarted):
    """Undo one, two more, then redo: the others keep what they learned since."""
    life, run, data = begin(tmp_path / "life")
    names, before = ("0.weight", "0.bias", "3.bias"), {}
    for i, name in enumerate(names):
        train(run, data, 3 * i + 2)
        run.step(next(iter(data)), Once(name, before))
    train(run, data, 9 + deep(50, 5))
    if restarted:
        life.close()
        life, run, data = again(tmp_path / "life")
    p = life.program
    trained = {key: v.numpy().tobytes() for key, v in p.weights.items()}

    def expect(old: tuple[str, ...]) -> None:
        found = {key: v.numpy().tobytes() for key, v in p.weights.items()}
        assert found == {**trained, **{name: before[name] for name in old}}

    p.undo()
    expect(("3.bias",))
    p.undo(2)
    expect(names)
    p.redo(3)
    expect(())
    p.undo(3)
    life.commit(verify=True)
    life.close()
    life = lf.open(tmp_path / "life")
    p = life.program
    expect(names)
    p.redo()
    expect(("0.bias", "3.bias"))
    assert [e.facts["name"] for e in life.log.of("expert_reborn")] == list(names)


class Once(Reborn):
    """Replaces one parameter by zeros."""

    def __init__(self, name: str, before: dict[str, bytes]) -> None:
        self.name, self.before = name, before

    def propose(self, view):
        self.before[self.name] = view.program.weights[self.name].numpy().tobytes()

        def apply(e):
            before = e.program.node(self.name)
            value = np.zeros(e.program.spec(before).sizes, np.float32)
            (edge,) = e.program.out_edges(before)
            e.rename(before, "old")
            e.rewire(edge, e.param("new", value, key=f"new.{self.name}"))
            e.remove("old")
            e.rename("new", self.name, key=self.name)

        return [lf.Proposal("expert_reborn", self.name, "a test", {}, apply)]


def test_what_neither_the_program_nor_undo_reaches_is_released(tmp_path):
    """Parameters that were replaced, with their moments: in memory, and on disk after a compaction."""
    life, run, data = begin(tmp_path / "life", durable="process")
    life.program.undo_horizon, batch = 4, next(iter(data))
    care, past, sizes = Reborn(1), [], []
    for i in range(deep(1000, 40)):
        past.append(weakref.ref(life.program.weights["0.weight"]))
        run.step(batch, care)
        if i % 10 == 9:
            gc.collect()
            states = len(run.train.optimizer.state), len(life._added)
            sizes.append((*states, len(life.store.fold), life.store.live_bytes))
    assert len(set(sizes)) == 1
    assert [r() is None for r in past[1:]] == [True] * (len(past) - 5) + [False] * 4  # the traced module has the first
    life.compact()
    assert len([*(tmp_path / "life" / "structure").iterdir()]) == 1
    assert len(life.program.journal) == len(past)


class _Spy(Reborn):
    """Notes weights and moments before the change."""

    def __init__(self, run: lf.Segment) -> None:
        super().__init__()
        self.run = run

    def propose(self, view):
        self.weight = view.program.weights["0.weight"].numpy().tobytes()
        self.moments = moments(view.life, self.run)
        return super().propose(view)


def test_undo_and_edits_without_a_training_keep_moments(tmp_path):
    """Between opening and resuming no optimizer holds them."""
    life, run, data = begin(tmp_path / "life")
    train(run, data, 3)
    wanted = moments(life, run)
    life.close()
    with lf.open(tmp_path / "life") as life:
        with life.program.edit("replace it") as e:
            replace_weight(e)
        life.commit()
    with lf.open(tmp_path / "life") as life:
        assert "optimizer.adamw.0.weight.m" not in everything(life)
        life.program.undo()
        life.commit()
    life, run, data = again(tmp_path / "life")
    assert moments(life, run) == wanted
    train(run, data, 6)
    whole, run, data = begin(tmp_path / "whole")
    train(run, data, 6)
    assert {k: v.numpy().tobytes() for k, v in life.program.weights.items()} == {
        k: v.numpy().tobytes() for k, v in whole.program.weights.items()
    }


@pytest.mark.parametrize("resumed_before", [True, False])
def test_moments_follow_a_cut_of_units_in_and_without_a_training(tmp_path, resumed_before):
    life, run, data = begin(tmp_path / "life")
    train(run, data, 3)
    state = run.train.optimizer.state_of(parameter_of(life.program, "3.weight"))
    wanted = np.delete(state.moments["m"].numpy(), [1, 4], axis=1)
    life.close()
    if resumed_before:
        life, run, data = again(tmp_path / "life")
    else:
        life = lf.open(tmp_path / "life")
    name = next(n for n, a in life.program.axes().items() if a.size == 16)
    with life.program.edit("two neurons less") as e:
        e.cut_units(life.program.axes()[name].units([1, 4]))
    life.commit()
    life.close()
    life, run, data = again(tmp_path / "life")
    state = run.train.optimizer.state_of(parameter_of(life.program, "3.weight"))
    np.testing.assert_array_equal(state.moments["m"].numpy(), wanted)
    assert float(state.steps.numpy()) == 3
    train(run, data, 5)
    life.commit(verify=True)


def test_entries_beyond_the_horizon_keep_their_record_and_release_their_arrays(tmp_path):
    life, run, _ = begin(tmp_path / "life")
    p = life.program
    p.undo_horizon = 3
    for i in range(5):
        with p.edit(f"edit {i}") as e:
            e.set_weight("0.bias", np.full(16, i, np.float32))
        run.step((X[:8], np.zeros(8, np.int64)))
    assert len(p.journal) == 5
    assert [e.undo is None for e in p.journal] == [True, True, False, False, False]
    assert sum(name.startswith("undo.") for name in everything(life)) == 6
    for again_ in (False, True):
        if again_:
            life.close()
            life = lf.open(tmp_path / "life")
            p = life.program
            assert p.undo_horizon == 3
        with pytest.raises(NotUndoable, match="no undo data"):
            p.undo(4)
        p.undo(3)
        p.redo(3)
    life.commit()
    life.verify()


def test_a_saved_training_after_a_rebirth_is_loaded_into_a_new_optimizer(tmp_path):
    """The names of moments do not depend on parameters that are gone."""
    p = program()
    run = step(p)
    batch = dict(zip(("x", "y"), next(iter(loader())), strict=True))
    for _ in range(2):
        run(batch)
        with p.edit("again") as e:
            replace_weight(e)
    run(batch)
    gw.save_state(tmp_path / "state", p, run.optimizer, compiled=run)
    p.save(tmp_path / "program")
    twin = gw.load(tmp_path / "program")
    other = step(twin)
    gw.load_state(tmp_path / "state", twin, other.optimizer, compiled=other)
    assert other(batch).item() == run(batch).item()
    assert isinstance(other.optimizer, optim.AdamW)


def test_a_manual_edit_and_its_undo_are_events(tmp_path):
    life, run, data = begin(tmp_path / "life")
    train(run, data, 1)
    with life.program.edit("manual") as e:
        e.set_weight("0.bias", np.zeros(16, np.float32))
    train(run, data, 2)
    life.program.undo()
    train(run, data, 3)
    assert [(e.step, e.facts["why"], e.facts["author"]) for e in life.log.of("edit")] == [
        (1, "manual", "human"),
        (2, "undo: manual", "human"),
    ]
    life.verify()


def test_moments_begin_again_after_another_change_of_shape(tmp_path):
    """A weight of another shape that is not a cut or growth of an axis has no moments."""
    life, run, data = begin(tmp_path / "life")
    train(run, data, 3)
    life.close()
    life = lf.open(tmp_path / "life")
    chance = np.random.default_rng(0)
    with life.program.edit("another width") as e:
        for key, shape in {"0.weight": (20, 8), "0.bias": (20,), "3.weight": (3, 20)}.items():
            e.set_weight(key, chance.normal(size=shape))
    life.commit()
    life.close()
    life, run, data = again(tmp_path / "life")
    assert not any(any(part) for part in moments(life, run))
    assert float(run.train.optimizer.state_of(parameter_of(life.program, "3.bias")).steps.numpy()) == 3
    train(run, data, 5)
    life.commit(verify=True)
