"""Forks share weights until written and nothing else; past states are what the journal says they were."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from program_samples import fingerprint, outputs, random_program, tiny

from graphwright.errors import UsageError
from graphwright.program import Builder, NotUndoable


def test_edits_of_a_fork_and_its_parent_are_independent():
    p = tiny()
    with p.edit("before") as e:
        e.rename("h", "hidden")
    q = p.fork()
    before = fingerprint(p)
    with q.edit("there") as e:
        e.insert(q.in_edges("r")[0], "tanh")
        e.set_weight("w", lambda w: w + 1)
    assert fingerprint(p) == before
    after = fingerprint(q)
    with p.edit("here") as e:
        e.remove(e.add("relu", "x"))
        e.link("x", "j", np.ones((2, 3), "f4"))
    p.undo(2)
    assert fingerprint(q) == after
    assert p.hash() == tiny().hash()


def test_arrays_are_shared_until_either_program_trains():
    p = tiny()
    q = p.fork()
    assert q.weights.array("w") is p.weights.array("w")
    assert q.weights["w"] is not p.weights["w"]
    p.weights["w"].own().to_numpy()[...] = 1
    assert q.hash() == tiny().hash()
    q.weights["w"].own().to_numpy()[...] = 2
    assert float(p.weights.array("w").to_numpy()[0, 0]) == 1


def test_the_journal_continues_from_the_parents_hash():
    p = tiny()
    with p.edit("one") as e:
        e.rename("h", "a")
    q = p.fork()
    assert len(q.journal) == 0
    assert q.version == p.version
    with q.edit("two") as e:
        e.rename("a", "b")
    assert q.journal[0].prev == p.journal.hash
    q.journal.verify()
    q.undo()
    with pytest.raises(NotUndoable):
        q.undo()
    assert q.hash() == p.hash()


def test_handles_and_generations_continue():
    p = tiny()
    with p.edit("add and remove") as e:
        gone = e.add("relu", "x")
        e.remove(gone)
    q = p.fork()
    assert q.path(p.node("j")) == "j"
    assert q.graph.next_node() == p.graph.next_node() != gone


def test_forking_inside_an_edit_is_refused():
    p = tiny()
    with p.edit("open"), pytest.raises(UsageError, match="open"):
        p.fork()


@pytest.mark.linux
def test_a_fork_of_50_mb_and_the_undo_of_a_mapped_weight_take_no_memory(tmp_path):
    b = Builder("large")
    x = b.input("x", (1, 2500))
    b.output(b.linear(x, b.param("w", np.ones((5000, 2500), "f4"))), "y")
    b.build().save(tmp_path / "large")
    code = """
import sys
import numpy as np
import graphwright as gw

def resident():
    return int(open("/proc/self/statm").read().split()[1]) * 4096

p = gw.load(sys.argv[1])
assert p.weights.array("w").to_numpy()[0, 0] == 1
p.hash()
before = resident()
q = p.fork()
with q.edit("there") as e:
    e.add("relu", "x")
forked = resident() - before
new = np.zeros((5000, 2500), "f4") + 2
with q.edit("another") as e:
    e.set_weight("w", new)
del new
q.undo()
q.redo()
print(forked, resident() - before)
"""
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path / "large")], capture_output=True, text=True)
    assert done.stderr == ""
    forked, undone = map(int, done.stdout.split())
    assert forked < 5 << 20
    assert undone < (50 + 8) << 20, "the new value, and of the old one a reference"


@given(st.integers(0, 200))
def test_a_fork_computes_the_same(seed):
    p = random_program(seed)
    assert fingerprint(p.fork()) == fingerprint(p)
    assert outputs(p.fork()) == outputs(p)


# -- past states ----------------------------------------------------------------------------------------------------
def lived():
    p = tiny()
    for i in range(4):
        p.mark(f"m{i}")
        with p.edit(f"edit {i}") as e:
            e.set_weight("w", lambda w: w + 1)
            e.link("x", "j", np.full((2, 3), i, "f4"))
    return p


def test_every_past_state_has_the_hash_in_its_entry():
    p = lived()
    p.undo(2)
    p.redo()
    for seq, entry in enumerate(p.journal):
        assert p.at(seq).state_hash() == entry.after
        assert p.at(seq).version == entry.base_version + 1
    assert p.at(-1).hash() == tiny().hash()
    for i in range(4):
        assert p.at(f"m{i}").hash() == p.at(i - 1).hash()


def test_reading_past_states_does_not_change_the_program():
    p = lived()
    before, trained = fingerprint(p), p.weights.array("w")
    past = p.at("m1")
    assert past.readonly
    assert past.weights.array("w") is not trained
    assert fingerprint(p) == before
    for change in (lambda: past.edit("no").__enter__(), past.undo, past.redo):
        with pytest.raises(UsageError, match="fork"):
            change()
    q = lived()
    for _ in range(4):
        p.undo()
        q.undo()
        assert fingerprint(p) == fingerprint(q)
    own = past.fork()
    with own.edit("yes") as e:
        e.rename("h", "other")
    assert past.path(past.node("h")) == "h"


def test_unknown_and_abandoned_states_are_refused():
    p = lived()
    with pytest.raises(UsageError, match="m0, m1, m2, m3"):
        p.at("nowhere")
    with pytest.raises(UsageError, match="no such journal entry"):
        p.at(99)
    p.undo()
    with p.edit("another way") as e:
        e.rename("h", "other")
    with pytest.raises(NotUndoable, match="abandoned branch"):
        p.at(3)
