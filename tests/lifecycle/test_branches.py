"""Forks and merges: identity and values of each, edits replayed, conflicts named."""

from __future__ import annotations

import shutil

import numpy as np
import pytest
from bonsai import X, Y, again, begin, everything, loader, loss, program, train

import graphwright as gw
from graphwright import lifecycle as lf
from graphwright import optim
from graphwright.errors import UsageError
from graphwright.program.errors import ReplayConflict

pytestmark = pytest.mark.usefixtures("warm")


def grown(tmp_path, steps: int = 3) -> lf.Life:
    """A life whose segment ended."""
    life, run, data = begin(tmp_path / "life")
    with run:
        train(run, data, steps)
    return life


def train_only(life: lf.Life, keys: tuple[str, ...], steps: int = 2) -> None:
    """Train some parameters of a life, others are frozen."""
    chosen = [life.program.weights[key] for key in keys]
    opt = optim.AdamW(chosen, 1e-2)
    train_ = gw.compile_step(life.program, loss, opt, {"x": X[:8], "y": Y[:8]})
    with life.segment(train_, loader(), objective="part") as run:
        for _ in range(steps):
            run.step([X[:8], Y[:8]])


def values(life: lf.Life) -> dict[str, bytes]:
    return {k: v.numpy().tobytes() for k, v in life.program.weights.items()}


def test_a_fork_has_its_own_identity_and_the_same_state(tmp_path):
    life, run, data = begin(tmp_path / "life")
    train(run, data, 5)
    child = life.fork(tmp_path / "child", name="twin")
    assert child.identity.id != life.identity.id
    assert child.identity.parent == {"id": life.identity.id, "step": 5, "commit": child.store.last.number + 5}
    assert child.identity.substrate == life.identity.substrate
    assert (child.name, child.age) == ("twin", 5)
    assert everything(child) == everything(life)
    assert len(list((tmp_path / "child" / "commits").iterdir())) == 1
    child.close()
    child, other_run, other = again(tmp_path / "child")
    train(other_run, other, 9)
    whole, whole_run, whole_data = begin(tmp_path / "whole")
    train(whole_run, whole_data, 9)
    assert everything(child) == everything(whole)
    assert [e.kind for e in life.log.of("fork")] == ["fork"]
    train(run, data, 6)
    life.verify()
    child.verify()


def test_a_fork_of_an_earlier_step(tmp_path):
    life, run, data = begin(tmp_path / "life")
    train(run, data, 3)
    then = everything(life)
    train(run, data, 6)
    child = life.fork(tmp_path / "child", step=3)
    assert (child.age, everything(child)) == (3, then)
    with pytest.raises(lf.StepGone):
        life.fork(tmp_path / "other", step=77)
    assert not (tmp_path / "other").exists()


def test_branches_that_trained_different_parameters_are_merged_with_their_moments(tmp_path):
    life = grown(tmp_path)
    child = life.fork(tmp_path / "child")
    train_only(life, ("0.weight", "0.bias"))
    train_only(child, ("3.weight", "3.bias"))
    ours, theirs, hash_ = values(life), values(child), life.program.hash()
    found = life.merge(child)
    assert set(found.taken) == {"3.weight", "3.bias"}
    assert set(found.kept) >= {"0.weight", "0.bias"}
    assert {k: v for k, v in values(life).items() if k[0] in "03"} == {
        key: (ours if key[0] == "0" else theirs)[key] for key in ours if key[0] in "03"
    }
    mine, its = everything(life), everything(child)
    for label in ("m", "v", "steps"):
        assert mine[f"optimizer.adamw.3.weight.{label}"] == its[f"optimizer.adamw.3.weight.{label}"]
    (event,) = life.log.of("merge")
    assert event.facts["id"] == child.identity.id
    life.verify()
    life.program.undo()
    assert life.program.hash() == hash_
    life.close()
    assert lf.open(tmp_path / "life").age == 5


def test_a_value_that_both_changed_is_a_conflict_that_names_it(tmp_path):
    life = grown(tmp_path)
    child = life.fork(tmp_path / "child")
    train_only(life, ("0.weight", "3.weight"))
    train_only(child, ("3.weight", "3.bias"))
    before = everything(life), len(life.program.journal)
    with pytest.raises(lf.MergeConflict) as conflict:
        life.merge(tmp_path / "child")
    assert "3.weight" in conflict.value.names
    assert "3.bias" not in conflict.value.names
    assert (everything(life), len(life.program.journal)) == before
    mine, its = values(life), values(child)
    life.merge(child, prefer="ours")
    assert (values(life)["3.weight"], values(life)["3.bias"]) == (mine["3.weight"], its["3.bias"])
    life.program.undo()
    life.merge(child, prefer="theirs")
    assert values(life)["3.weight"] == its["3.weight"]


def test_the_edits_of_a_branch_are_replayed(tmp_path):
    life = grown(tmp_path)
    child = life.fork(tmp_path / "child")
    with child.program.edit("an output more") as e:
        e.add("tanh", child.program.outputs()[0], name="squashed")
    child.commit()
    train_only(life, ("0.weight",))
    mine = values(life)
    found = life.merge(child)
    assert len(found.entries) == 1
    assert "squashed" in [life.program.path(n) for n in life.program.nodes()]
    assert life.program.journal[-1].why == "an output more"
    assert values(life) == mine
    life.verify()


def test_a_parameter_that_a_branch_added_and_trained_comes_with_its_value_and_moments(tmp_path):
    life = grown(tmp_path)
    child = life.fork(tmp_path / "child")
    with child.program.edit("a second bias, and one that goes again") as e:
        out = child.program.outputs()[0]
        more = e.param("more", np.zeros(3, np.float32))
        e.set_outputs(out=e.add("add", out, more, name="more.sum"))
        e.param("brief", np.ones(5, np.float32))
    with child.program.edit("it goes") as e:
        e.remove("brief")
    train_only(child, ("more",))
    train_only(life, ("0.weight",))
    mine = values(life)
    child.close()
    found = life.merge(tmp_path / "child")
    assert "more" in found.taken
    theirs = values(lf.open(tmp_path / "child", readonly=True))
    assert values(life) == {**mine, "more": theirs["more"]}
    assert any(np.frombuffer(theirs["more"], np.float32))
    assert "optimizer.adamw.more.m" in everything(life)
    life.verify()


def test_an_edit_that_does_not_fit_changes_nothing(tmp_path):
    life = grown(tmp_path)
    child = life.fork(tmp_path / "child")
    out = child.program.outputs()[0]
    for one in (life, child):
        with one.program.edit("a node of the same name") as e:
            e.add("tanh", out, name="squashed")
    before = life.program.hash(), len(life.program.journal)
    with pytest.raises(ReplayConflict):
        life.merge(child)
    assert (life.program.hash(), len(life.program.journal)) == before


def test_lives_without_a_common_commit_are_not_merged(tmp_path):
    life = grown(tmp_path)
    other = lf.birth(program(), tmp_path / "other", name="other")
    with pytest.raises(UsageError, match="no common commit"):
        life.merge(other)
    run = life.segment(gw.compile_step(life.program, loss, optim.SGD(life.program, 0.1), {"x": X[:8], "y": Y[:8]}))
    with pytest.raises(UsageError, match="a segment is open"):
        life.merge(other)
    run.end()


def test_two_forks_of_one_state_are_merged(tmp_path):
    life = grown(tmp_path)
    one, two = life.fork(tmp_path / "one"), life.fork(tmp_path / "two")
    train_only(one, ("0.weight",))
    train_only(two, ("3.bias",))
    mine = values(one)
    assert "3.bias" in one.merge(two).taken
    assert values(one) == {**mine, **{k: values(two)[k] for k in ("3.bias",)}}
    assert "0.weight" in life.merge(one).taken
    train_only(life, ("3.weight",))
    three = life.fork(tmp_path / "three")
    with pytest.raises(UsageError, match="no common commit"):
        two.merge(three)


def test_a_copy_has_the_same_identity_and_where_it_diverges_is_found(tmp_path):
    life = grown(tmp_path)
    life.close()
    shutil.copytree(tmp_path / "life", tmp_path / "copy")
    life, copy = lf.open(tmp_path / "life"), lf.open(tmp_path / "copy")
    assert life.identity == copy.identity
    assert life.same(copy) is None
    length = len(life.log)
    copy.rename("the copy")
    found = life.same(tmp_path / "copy")
    assert found is not None
    assert (found.line, found.here, found.there.kind) == (length + 1, None, "rename")
    life.rename("the original")
    found = life.same(copy)
    assert found is not None
    assert (found.line, found.here.facts, found.there.facts) == (
        length + 1, {"name": "the original"}, {"name": "the copy"}
    )  # fmt: skip
