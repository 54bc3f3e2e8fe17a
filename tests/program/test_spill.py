"""Undo beyond `history_bytes` moves to a temporary file without changing a bit; on a full disk it stays in memory."""

from __future__ import annotations

import logging

import numpy as np
import pytest
from program_samples import fingerprint, weight_bytes

import graphwright as gw
import graphwright.program.editing.undo_storage as spill_module
from graphwright.array import bfloat16
from graphwright.program import Builder, NotUndoable, Program, load, replay

LIMIT = 1 << 20
SIZE = 400  # 640 kB in float32


def wide() -> Program:
    b = Builder("wide")
    x = b.input("x", ("B", SIZE))
    w = b.param("w", np.random.default_rng(0).normal(size=(SIZE, SIZE)).astype("f4"))
    b.output(b.junction(b.linear(x, w, name="h"), b.mul(x, b.const("scale", np.float32(2.0))), name="j"), "y")
    p = b.build()
    p.history_bytes = LIMIT
    return p


def held(p: Program) -> int:
    """Bytes in memory that only undo holds."""
    live = {id(v.data) for v in p.weights.values()}
    arrays = {
        id(a): a
        for entry in p.journal
        if entry.undo is not None
        for edit in (*entry.undo.forward, *entry.undo.inverse)
        for a in edit.payloads
        if not a.storage.readonly and id(a) not in live
    }
    return sum(a.nbytes for a in arrays.values())


def worked_on(p: Program) -> list[tuple]:
    """Values set, trained in place, params removed and added; returns the state before each edit and the last one."""
    states = [fingerprint(p)]
    for i in range(8):
        with p.edit(f"edit {i}") as e:
            if i == 3:
                p.weights["w"].own().to_numpy()[...] += 1
            elif i == 4:
                e.link("x", "j", np.full((SIZE, SIZE), 0.5, "f4"), name="skip")
            elif i == 6:
                e.remove(["skip", "skip.weight"])
            else:
                e.set_weight("w", lambda w, i=i: w * 1.5 + i)
        assert held(p) <= LIMIT
        states.append(fingerprint(p))
    return states


def test_undo_beyond_the_limit_is_bit_equal():
    p = wide()
    states = worked_on(p)
    assert p.history.spill.moved > 4 * LIMIT // 2
    for _ in range(2):
        for state in states[-2::-1]:
            p.undo()
            assert held(p) <= LIMIT
            assert fingerprint(p) == state
        for state in states[1:]:
            p.redo()
            assert held(p) <= LIMIT
            assert fingerprint(p) == state
    p.journal.verify()
    for entry in p.journal[1:]:
        assert entry.before == p.journal[entry.seq - 1].after
    assert fingerprint(p.at(2)) == states[3]
    assert fingerprint(p.at(-1)) == states[0]
    twin = wide()
    replay(p, twin)
    assert twin.hash() == p.hash()


def test_spilled_arrays_are_saved_and_loaded(tmp_path):
    p = wide()
    states = worked_on(p)
    p.undo(3)
    p.save(tmp_path / "saved")
    q = load(tmp_path / "saved", verify=True)
    for r in (p, q):
        r.redo(3)
        assert fingerprint(r) == states[-1]
        r.undo(8)
        assert fingerprint(r) == states[0]


def test_a_weight_from_the_temporary_file_can_be_trained_and_is_not_written_back():
    p = wide()
    worked_on(p)
    p.undo(5)
    variable = p.weights["w"]
    assert variable.data.storage.readonly
    before = weight_bytes(p)
    with p.edit("train"):
        p.weights["w"].own().to_numpy()[...] = 3
    p.undo()
    assert weight_bytes(p) == before


def test_a_limit_of_0_spills_everything():
    p = wide()
    p.history_bytes = 0
    states = worked_on(p)
    assert held(p) == 0
    p.undo(8)
    assert fingerprint(p) == states[0]


def test_a_full_disk_warns_and_loses_no_data(monkeypatch, caplog):
    p = wide()

    def full(**_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(spill_module.tempfile, "TemporaryFile", full)
    with caplog.at_level(logging.WARNING, logger="graphwright.program"):
        states = [fingerprint(p)]
        for i in range(4):
            with p.edit(f"edit {i}") as e:
                e.set_weight("w", lambda w, i=i: w + i + 1)
            states.append(fingerprint(p))
    assert "No space left" in caplog.text
    assert "history_bytes" in caplog.text
    for state in states[-2::-1]:
        p.undo()
        assert fingerprint(p) == state


def test_a_damaged_temporary_file_is_found_before_undo_changes_anything():
    p = wide()
    worked_on(p)
    file = p.history.spill._file
    assert file is not None
    file.seek(100)
    file.write(b"damage")
    file.flush()
    before = fingerprint(p)
    with pytest.raises(NotUndoable, match="damaged"):
        p.undo(8)
    assert fingerprint(p) == before


def test_a_spilled_edited_value_is_exported(tmp_path):
    """Undo brings it back mapped and read-only, as an untouched weight of the model's file is."""
    model = gw.open("bundled")
    p, key = model.program, "model.layers.1.mlp.up_proj.weight"
    p.history_bytes = 0
    ids = np.array([[84, 104, 101, 32]])
    for factor in (0.5, 3.0):
        with p.edit("scale") as e:
            e.set_weight(key, lambda w, factor=factor: factor * w)
    p.undo()
    assert p.weights.array(key).storage.readonly
    assert p.weights.reference(key) != "source"
    cache = model.new_cache(8, kind="static")
    model.prefill(cache, ids)
    assert p.weights.array(key).dtype is bfloat16
    wanted = model.logits(ids)
    model.export(tmp_path / "half", check="none", timed=False)
    assert np.array_equal(gw.open(tmp_path / "half").logits(ids), wanted)
    p.undo()
    with pytest.raises(gw.GraphwrightError, match="attn"):
        cache.check()
