"""A life is born, trained, closed and resumed: the same bits as without the interruption."""

from __future__ import annotations

import os
from contextlib import suppress
from typing import Any

import numpy as np
import pytest
from bonsai import X, Y, again, begin, everything, loader, loss, program, step, train
from safetensors.numpy import load_file

import graphwright as gw
from graphwright import lifecycle as lf
from graphwright import optim
from graphwright.errors import NonFinite, UsageError
from graphwright.lifecycle.contents import Contents, payload
from graphwright.lifecycle.writer import Writer
from seeds import deep
from values import parameter_of

pytestmark = pytest.mark.usefixtures("warm")


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """Losses and digests of 25 steps without an interruption."""
    life, run, data = begin(tmp_path_factory.mktemp("whole") / "life")
    losses = train(run, data, 25)
    found = losses, everything(life), life.program.hash()
    life.close()
    return found


@pytest.mark.parametrize("at", [1, 7, 8, 12, 24])
def test_a_resumed_training_has_the_same_losses_and_the_same_bytes(tmp_path, whole, at):
    life, run, data = begin(tmp_path / "life")
    losses = train(run, data, at)
    life.close()
    life, run, data = again(tmp_path / "life")
    assert life.age == run.steps == at
    losses += train(run, data, 25)
    assert (losses, everything(life), life.program.hash()) == whole


@pytest.mark.parametrize("threads", [1, 2])
def test_a_resumed_training_is_equal_for_each_number_of_threads(tmp_path, threads):
    before = gw.get_num_threads()
    gw.set_num_threads(threads)
    try:
        life, run, data = begin(tmp_path / "whole")
        wanted = train(run, data, 6), everything(life)
        life, run, data = begin(tmp_path / "life")
        losses = train(run, data, 3)
        life.close()
        life, run, data = again(tmp_path / "life")
        assert (losses + train(run, data, 6), everything(life)) == wanted
    finally:
        gw.set_num_threads(before)


def test_every_commit_is_a_safetensors_file_of_what_changed(tmp_path):
    life, run, data = begin(tmp_path / "life")
    train(run, data, 3)
    commit = life.store.last
    found = load_file(commit.path)
    assert found.keys() == commit.record.tensors.keys()
    np.testing.assert_array_equal(found["model.0.weight"], life.program.weights["0.weight"].numpy())
    state = run.train.optimizer.state_of(parameter_of(life.program, "0.weight"))
    np.testing.assert_array_equal(found["optimizer.adamw.0.weight.v"], state.moments["v"].numpy())
    assert found["optimizer.adamw.0.weight.steps"] == 3
    assert "model.const" not in found  # of dropout, which no step changes
    assert "model.const" in load_file(life.store.commits[0].path)


def test_the_fold_of_all_commits_is_a_snapshot(tmp_path):
    life, run, data = begin(tmp_path / "life", durable="process")
    train(run, data, deep(1000, 20))
    life.commit(verify=True)
    life.snapshot(tmp_path / "saved")
    saved = gw.load(tmp_path / "saved")
    opened = lf.open(tmp_path / "life", readonly=True)
    assert opened.program.hash() == saved.hash() == life.program.hash()
    held = Contents(life.program, run.train)
    stored = {n: digest for n, digest in everything(opened).items() if not n.startswith("states.")}
    assert stored == {name: payload(h.variable.data).digest() for name, h in held.items()}


def test_the_state_at_an_earlier_step_is_the_snapshot_taken_then(tmp_path):
    life, run, data = begin(tmp_path / "life")
    hashes = {}
    for age in (1, 4, 9):
        train(run, data, age)
        hashes[age] = life.program.hash()
    assert {age: life.at(age).hash() for age in hashes} == hashes
    with pytest.raises(lf.StepGone) as gone:
        life.at(12)
    assert gone.value.nearest == 9
    with pytest.raises(UsageError, match="past state"), life.at(4).edit("x"):
        pass


def test_a_closed_life_has_no_other_writer_and_an_open_one_has_one(tmp_path):
    life, _, _ = begin(tmp_path / "life")
    with pytest.raises(lf.LifeBusy) as busy:
        lf.open(tmp_path / "life")
    assert busy.value.pid == os.getpid()
    assert "close() it" in str(busy.value.fix)
    assert lf.open(tmp_path / "life", readonly=True).age == 0
    life.close()
    with lf.open(tmp_path / "life") as twin:
        assert twin.identity == life.identity
    with pytest.raises(UsageError, match="closed"):
        life.commit()


def test_other_options_data_or_programs_are_not_resumed(tmp_path):
    life, run, data = begin(tmp_path / "life")
    train(run, data, 2)
    life.close()
    before = {p: p.read_bytes() for p in (tmp_path / "life").rglob("*") if p.is_file()}
    life = lf.open(tmp_path / "life")
    p = life.program
    other = {"x": X[:8], "y": Y[:8]}
    for train_, given, what in [
        (gw.compile_step(p, loss, optim.SGD(p, 1e-2), other), loader(), "optimizer.class: expected AdamW, got SGD"),
        (gw.compile_step(p, loss, optim.AdamW(p, 1e-2, (0.5, 0.9)), other), loader(), "optimizer.groups"),
        (step(p, clip=1.0), loader(), "step.clip: expected None, got 1.0"),
        (step(p), loader(X + 1), "data.digest"),
        (step(program()), loader(), "another program"),
    ]:
        with pytest.raises(lf.ResumeMismatch, match=what):
            life.resume(train_, given)
    data = loader()
    data.seed = 4
    with pytest.raises(lf.ResumeMismatch, match="a state cannot be restored"):
        life.resume(step(p), data)
    life.close()
    assert {p: p.read_bytes() for p in (tmp_path / "life").rglob("*") if p.is_file()} == before


def test_a_loss_that_is_not_finite_is_not_committed(tmp_path):
    life, run, data = begin(tmp_path / "life")
    train(run, data, 2)
    good = life.program.hash()
    with pytest.raises(NonFinite, match="its last commit is step 2"), run:
        run.step({"x": X[:8] * np.float32(np.inf), "y": Y[:8]})
    life, run, data = again(tmp_path / "life")
    assert life.program.hash() == good
    train(run, data, 4)


def test_an_exception_between_two_steps_loses_no_step(tmp_path, whole):
    life, run, data = begin(tmp_path / "life", asynchronous=True)
    losses: list[float] = []
    with suppress(KeyboardInterrupt), run:
        losses += train(run, data, 10)
        raise KeyboardInterrupt
    life, run, data = again(tmp_path / "life")
    assert life.age == 10
    assert (losses + train(run, data, 25), everything(life), life.program.hash()) == whole


def test_a_second_segment_trains_on(tmp_path):
    life, run, data = begin(tmp_path / "life")
    with run:
        train(run, data, 3)
    with life.segment(
        gw.compile_step(life.program, loss, optim.SGD(life.program, 0.1), {"x": X[:8], "y": Y[:8]})
    ) as run:
        run.step([X[:8], Y[:8]])
    assert life.age == 4
    starts, ends = life.log.of("segment_start"), life.log.of("segment_end")
    assert [e.facts["optimizer"]["class"] for e in starts] == ["AdamW", "SGD"]
    assert [(e.facts["start"], e.facts["steps"]) for e in ends] == [(0, 3), (3, 1)]
    assert ends[0].facts["items"] == 24
    assert not any(name.endswith(".m") for name in everything(life))


def test_birth_refuses_what_it_cannot_begin(tmp_path):
    begin(tmp_path / "life")[0].close()
    with pytest.raises(lf.LifeExists):
        lf.birth(program(), tmp_path / "life", name="x")
    with pytest.raises(lf.NoLife):
        lf.open(tmp_path)
    with pytest.raises(UsageError, match="only programs and models live"):
        lf.birth(3, tmp_path / "three", name="x")
    with pytest.raises(UsageError, match="invalid name"):
        lf.birth(program(), tmp_path / "x", name="")
    never: Any = "never"
    with pytest.raises(UsageError, match="durable"):
        lf.birth(program(), tmp_path / "x", name="x", durable=never)
    assert not (tmp_path / "x").exists()


def test_eager_draws_beside_a_program_with_dropout_are_resumed(tmp_path):
    """Dropout advances the default generator, from which eager code draws noise between two steps."""

    def noisy(run, age: int) -> list[float]:
        losses = []
        while run.age < age:
            noise = gw.rand(8, 8).numpy()
            losses.append(run.step([X[:8] + noise, Y[:8]]))
        return losses

    _, run, _ = begin(tmp_path / "whole")
    wanted = noisy(run, 9)
    life, run, _ = begin(tmp_path / "life")
    losses = noisy(run, 4)
    life.close()
    _, run, _ = again(tmp_path / "life")
    assert losses + noisy(run, 9) == wanted


@pytest.mark.parametrize("where", [(lf.Life, "_states_now"), (Writer, "submit")], ids=["staging", "submitting"])
def test_an_interrupt_within_a_commit_loses_no_change(tmp_path, where, monkeypatch):
    """What was noted as changed but not written is written by the commit that closes the life."""
    life, run, data = begin(tmp_path / "life")
    train(run, data, 6)

    def interrupted(*_):
        monkeypatch.undo()
        raise KeyboardInterrupt

    with suppress(KeyboardInterrupt), run:
        monkeypatch.setattr(*where, interrupted)
        train(run, data, 8)
    assert life.age == 7
    wanted = {name: payload(h.variable.data).digest() for name, h in Contents(life.program, run.train).items()}
    assert everything(lf.open(tmp_path / "life", readonly=True)) == wanted
