"""`set_weight(inplace=True)`: the memory stays, and no other owner's memory is written."""

from __future__ import annotations

from itertools import permutations

import numpy as np
import pytest
from program_samples import counters, fingerprint, tiny

import graphwright as gw
from graphwright.errors import ShapeError
from graphwright.program import Builder, Program, load, replay

X = {"x": np.ones((1, 3), "f4")}


class Boom(Exception):
    pass


def write(p: Program, value: float, inplace: bool = True) -> None:
    with p.edit(f"write {value}") as e:
        e.set_weight("w", np.full((2, 3), value, "f4"), inplace=inplace)


def test_inplace_writes_keep_the_memory_and_change_its_views():
    p = tiny()
    array, view, before = p.weights.array("w"), p.weights.array("w").to_numpy(), fingerprint(p)
    write(p, 1)
    assert p.weights.array("w") is array
    assert view.tolist() == [[1, 1, 1], [1, 1, 1]]
    write(p, 2)
    after = fingerprint(p)
    for _ in range(2):
        p.undo(2)
        assert fingerprint(p) == before
        p.redo(2)
        assert fingerprint(p) == after
    assert p.weights.array("w") is array
    assert view.tolist() == [[2, 2, 2], [2, 2, 2]]


def test_runs_and_plans_use_a_weight_written_in_place():
    p = tiny()
    step = gw.compile(p)
    assert step(X)["y"].numpy().tolist() == [[0, 6]]
    write(p, 2)
    assert step(X)["y"].numpy().tolist() == [[6, 6]]
    assert p.run(X)["y"].to_numpy().tolist() == [[6, 6]]


def test_a_mapped_weight_is_copied_once_and_its_file_is_not_written(tmp_path):
    start = load(tiny().save(tmp_path / "p"))
    file, hashes = (tmp_path / "p" / "weights.safetensors").read_bytes(), start.state_hash()
    write(start, 1)
    own = start.weights.array("w")
    write(start, 2)
    assert start.weights.array("w") is own
    start.undo()
    assert start.weights.array("w") is own
    assert set(own.to_numpy().ravel()) == {1}
    start.undo()
    assert start.state_hash() == hashes
    assert start.weights.array("w").storage.readonly
    assert (tmp_path / "p" / "weights.safetensors").read_bytes() == file


def test_inplace_writes_do_not_affect_forks():
    p = tiny()
    q, before = p.fork(), p.weights.array("w").tobytes()
    write(p, 1)
    assert q.weights.array("w").tobytes() == before
    write(q, 2)
    assert set(p.weights.array("w").to_numpy().ravel()) == {1}
    past = p.at(-1)
    write(p, 3)
    assert past.weights.array("w").tobytes() == before


@pytest.mark.parametrize("order", list(permutations(["set", "write", "train", "write again"])))
def test_writes_in_any_order_in_one_edit_can_be_undone_and_redone(order):
    p = tiny()
    before, start = fingerprint(p), p.weights.array("w")

    def script(e, fails: bool = False) -> None:
        for i, step in enumerate(order):
            if step == "train":
                p.weights["w"].own().to_numpy()[...] += i + 1
                p.weights["w"].data.writable()
            else:
                e.set_weight("w", lambda w, i=i: w * 2 + i, inplace="write" in step)
        if fails:
            raise Boom

    with pytest.raises(Boom), p.edit("fails") as e:
        script(e, fails=True)
    assert fingerprint(p) == before
    assert p.weights.array("w") is start
    with p.edit("outer") as e:
        with pytest.raises(Boom), p.edit("inner") as e:
            script(e, fails=True)
        assert p.weights.array("w").tobytes() == before[1]["w"][len(repr(start.spec)) :]
        script(e)
    after = fingerprint(p)
    write(p, 7)
    p.undo(2)
    assert fingerprint(p) == before
    p.redo()
    assert fingerprint(p) == after
    p.undo()
    assert fingerprint(p) == before


def test_the_inplace_flag_is_saved_and_replayed(tmp_path):
    p = tiny()
    write(p, 1)
    assert p.journal[-1].edits[0]["inplace"] is True
    q = tiny()
    array = q.weights.array("w")
    replay(p, q)
    assert q.weights.array("w") is array
    assert set(array.to_numpy().ravel()) == {1}
    loaded = load(p.save(tmp_path / "p"))
    loaded.undo()
    assert loaded.hash() == tiny().hash()
    array = loaded.weights.array("w")
    loaded.redo()
    assert loaded.hash() == p.hash()
    assert loaded.journal[-1].edits[0]["inplace"] is True


def test_arrays_of_inplace_undo_are_spilled():
    p = tiny()
    p.history_bytes = 8
    before = fingerprint(p)
    for value in range(4):
        write(p, value)
    assert p.history.spill.moved > 0
    p.undo(4)
    assert fingerprint(p) == before


def test_weights_of_another_shape_are_refused():
    p = tiny()
    before, counts = fingerprint(p), counters(p)
    with pytest.raises(ShapeError, match="cannot change the shape or dtype") as caught, p.edit("grow") as e:
        e.set_weight("w", np.ones((2, 4), "f4"), inplace=True)
    assert caught.value.where == "w"
    assert (fingerprint(p), counters(p)) == (before, counts)


@pytest.mark.parametrize("inplace", [False, True])
def test_all_uses_of_a_tied_weight_change_and_a_rename_keeps_its_key(inplace):
    b = Builder()
    ids, table = b.input("ids", (1, 2), "int64"), b.param("embed.weight", np.eye(3, dtype="f4"))
    b.output(b.linear(b.embedding(table, ids), table, name="head"), "logits")
    p = b.build()
    with p.edit("rename") as e:
        e.rename("embed.weight", "tokens")
    assert p.key(p.node("tokens")) == "embed.weight"
    with p.edit("double") as e:
        e.set_weight("tokens", lambda w: 2 * w, inplace=inplace)
    feed = {"ids": np.array([[0, 2]])}
    for result in (p.run(feed), p.compile(feed)(feed)):
        assert result["logits"].to_numpy().tolist() == [[[4, 0, 0], [0, 0, 4]]]
    with p.edit("another key") as e:
        e.rename("tokens", "tokens", key="wte")
    assert list(p.weights) == ["wte"]
