"""Replay finds edits again by path, port and key, on programs whose handles are others; what does not fit stops it."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from program_samples import counters, fingerprint, random_program, tiny
from test_edit_machine import VERBS

from axis_samples import perceptron
from graphwright.array import dtype, empty, from_numpy
from graphwright.errors import GraphwrightError
from graphwright.patterns import causal_full
from graphwright.program import Builder, Program, ReplayConflict, load, replay
from graphwright.program.axes.divide import Share, divided
from graphwright.program.editing.edits import PRIMITIVES, AddNode, RecordReader, SetWeight
from graphwright.program.editing.replay import PayloadFinder
from graphwright.program.weights import array_digest


def scripted(p: Program) -> Program:
    """Every primitive at least once, something undone and something redone."""
    with p.edit("link", author="pass", tool="test") as e:
        e.link("x", "j", np.ones((2, 3), "f4"), name="skip")
        e.insert(p.in_edges("r")[0], "tanh", name="t")
    with p.edit("values") as e:
        e.set_weight("w", lambda w: w + 1)
        e.set_attr("w", trainable=False)
    with p.edit("wrong") as e:
        e.rename("t", "wrong")
    p.undo()
    with p.edit("names") as e:
        e.rename("t", "act", key=None)
        e.set_outputs(y="r", inner="act")
    with p.edit("cut") as e:
        e.cut(p.in_edges("j")[0])
        e.remove("h")
    p.undo(2)
    p.redo(2)
    return p


def test_a_journal_replays_on_a_program_with_equal_names():
    p, q = scripted(tiny()), tiny()
    with q.edit("handles differ") as e:
        e.remove(e.add("relu", "x"))
    done = replay(p, q)
    assert q.hash() == p.hash()
    assert [e.why for e in done.entries] == ["link", "values", "names", "cut"]
    assert [(e.author, e.tool) for e in done.entries[:2]] == [("pass", "test"), ("human", "replay")]
    assert done.conflicts == ()
    q.undo(len(done.entries))
    assert q.hash() == tiny().hash()


def test_a_replay_gives_the_topological_order_of_the_recorded_program():
    p, q = tiny(), tiny()
    with p.edit("in the middle") as e:
        e.insert(p.in_edges("j")[0], "tanh", name="t")
        e.link("x", "j", np.ones((2, 3), "f4"), name="skip")
    replay(p, q)
    assert [*map(q.path, q.order())] == [*map(p.path, p.order())]


def test_a_journal_with_gates_replays():
    p, q = tiny(), tiny()
    with p.edit("two gates") as e:
        e.gate([p.in_edges("j")[0], "h"], "sigmoid")
    assert not replay(p, q).conflicts
    assert q.hash() == p.hash()
    assert len(q.gates()) == 2


def test_a_saved_journal_can_be_replayed(tmp_path):
    p = scripted(tiny())
    q = tiny()
    replay(p.save(tmp_path / "full"), q)
    assert q.hash() == p.hash()
    p.save(tmp_path / "edits", history="edits")
    with pytest.raises(ReplayConflict, match="not in the history") as caught:
        replay(tmp_path / "edits", tiny())
    assert "payloads" in str(caught.value.fix)
    edits = [edit for e in p.journal if e.undo for edit in e.undo.forward]
    arrays = [e.array for e in edits if isinstance(e, SetWeight)]
    arrays += [e.variable.data for e in edits if isinstance(e, AddNode) and e.variable is not None]
    q = tiny()
    replay(tmp_path / "edits" / "journal.jsonl", q, payloads={array_digest(a): a for a in arrays})
    assert q.hash() == p.hash()


def test_a_journal_replays_on_a_bfloat16_program():
    def build(kind: str) -> Program:
        b = Builder()
        x = b.input("x", ("B", 3), kind)
        w = empty((2, 3), dtype(kind)).copy_from(from_numpy(np.ones((2, 3), "f4")))
        j = b.junction(b.linear(x, b.param("w", w), name="h"), name="j")
        b.output(b.relu(j, name="r"), "y")
        return b.build()

    p, twin = scripted(build("float32")), build("bfloat16")
    with pytest.raises(ReplayConflict, match="entry 0"):
        replay(p, twin)
    replay(p, twin, cast="bfloat16")
    assert {repr(v.dtype) for v in twin.weights.values()} == {"gw.bfloat16"}
    assert [twin.path(n) for n in twin.order()] == [p.path(n) for n in p.order()]
    assert twin.spec("r").dtype.name == "bfloat16"


def test_a_missing_path_raises_with_similar_names():
    p, q = scripted(tiny()), tiny()
    with q.edit("other name") as e:
        e.rename("j", "jj")
    before, counts = fingerprint(q), counters(q)
    with pytest.raises(ReplayConflict) as caught:
        replay(p, q)
    assert str(caught.value.where).startswith("entry 0 (link), edit ")
    assert "jj" in str(caught.value.fix)
    assert (fingerprint(q), counters(q)) == (before, counts)


def test_a_conflict_at_the_last_entry_changes_nothing():
    p, q = scripted(tiny()), tiny()
    with q.edit("in the way") as e:
        e.add("relu", "x", name="act")
    before, counts = fingerprint(q), counters(q)
    with pytest.raises(ReplayConflict, match="entry 4"):
        replay(p, q)
    assert (fingerprint(q), counters(q)) == (before, counts)
    done = replay(p, q, strict=False)
    assert [e.why for e in done.entries] == ["link", "values", "cut"]
    assert len(done.conflicts) == 1


def test_a_slice_with_an_undo_of_an_outside_entry_raises():
    p = scripted(tiny())
    with pytest.raises(ReplayConflict, match="undoes or redoes an entry"):
        replay(p.journal[3:], tiny())


def test_a_taken_junction_port_is_replaced_by_a_free_one():
    p, q = tiny(), tiny()
    with p.edit("link") as e:
        edge = e.link("x", "j", np.ones((2, 3), "f4"), name="skip")
    with p.edit("cut") as e:
        e.cut(edge)
    with q.edit("here first") as e:
        e.link("x", "j", np.zeros((2, 3), "f4"), name="first")
    replay(p, q)
    assert [q.path(v) for v in q.operands(q.node("j"))] == ["h", "first"]


# -- JSON forms -----------------------------------------------------------------------------------------------------
def test_every_primitive_is_serializable():
    p, q = scripted(tiny()), perceptron()
    with q.edit("other order") as e:
        e.permute("first.neurons", [2, 0, 1, 4, 3])
        e.annotate("first.neurons", why="for a test", p=0.25)
        e.pattern("pattern", pattern := causal_full(8, block=4))
    pattern.cut(pattern.edges()[:1])
    with q.edit("one share") as e:
        e.do(whole := divided(q, [Share("first.neurons", (5,))], q.structure_hash()))
        e.do(whole.invert(q))
    seen = {record["edit"] for entry in (*p.journal, *q.journal) for record in entry.edits}
    assert seen == set(PRIMITIVES)


@given(
    st.integers(0, 100),
    st.lists(st.tuples(st.sampled_from(VERBS), st.integers(0, 999), st.integers(0, 999)), max_size=6),
)
def test_edits_round_trip_through_json(seed, script):
    """Each record, read on a program in the same state, is written the same again."""
    p, q = random_program(seed), random_program(seed)
    for verb, a, b in script:
        try:
            with p.edit("random") as e:
                verb(e, a, b)
        except GraphwrightError:
            pass
    arrays = PayloadFinder(p.journal, {})
    for entry in p.journal:
        assert entry.undo is not None
        with q.edit(entry.why) as e:
            for i, record in enumerate(entry.edits):  # a variable that an edit added may have been trained since
                again = RecordReader(q, partial(arrays.find, entry, i)).edit(record)
                assert handle_free(again.to_json(q)) == handle_free(record)
                e.do(again)
    assert q.hash() == p.hash()


def handle_free(record):
    """A record without handles and creation numbers: an edit that failed in between takes some."""
    if isinstance(record, dict):
        return {k: handle_free(v) for k, v in record.items() if k not in ("handle", "seq")}
    return [handle_free(v) for v in record] if isinstance(record, list) else record


def test_loaded_and_live_journals_replay_equally(tmp_path):
    p = scripted(tiny())
    q, r = tiny(), tiny()
    replay(load(p.save(tmp_path / "p")), q)
    replay(p.journal, r)
    assert q.hash() == r.hash()
