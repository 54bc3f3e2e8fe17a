"""Every method of an edit raises EditClosed outside its with-block, and the program stays as it was."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest
from program_samples import counters, fingerprint, tiny

from graphwright.array import Spec, float32
from graphwright.errors import UsageError
from graphwright.patterns import causal_full
from graphwright.program import EditClosed, PortEmpty, Transaction, Value
from graphwright.program.editing.edits import RemoveEdge
from graphwright.program.kinds import CONST

EDGE = "h -> j"
CALLS = {
    "do": lambda e, p: e.do(RemoveEdge(p.edge(EDGE))),
    "spec": lambda e, p: e.spec("h"),
    "add": lambda e, p: e.add("relu", "h"),
    "add_op": lambda e, p: e.add_op("relu", [p.value("h")], {}, "extra"),
    "add_node": lambda e, p: e.add_node(CONST, {}, "extra", (Spec((2,), float32),)),
    "add_edge": lambda e, p: e.add_edge(p.value("h"), p.node("j"), 5),
    "input": lambda e, p: e.input("extra", (2, 3)),
    "param": lambda e, p: e.param("extra", np.ones(2, "f4")),
    "const": lambda e, p: e.const("extra", np.ones(2, "f4")),
    "state": lambda e, p: e.state("extra", np.ones(2, "f4")),
    "assign": lambda e, p: e.assign("w", "w"),
    "remove": lambda e, p: e.remove("r"),
    "set_attr": lambda e, p: e.set_attr("h"),
    "rename": lambda e, p: e.rename("h", "h"),
    "set_weight": lambda e, p: e.set_weight("w", lambda w: w * 2),
    "annotate": lambda e, p: e.annotate("h", reason="none"),
    "set_outputs": lambda e, p: e.set_outputs(y="h"),
    "connect": lambda e, p: e.connect("h", "j"),
    "cut": lambda e, p: e.cut(EDGE),
    "rewire": lambda e, p: e.rewire(EDGE, "h"),
    "insert": lambda e, p: e.insert(EDGE, "tanh"),
    "link": lambda e, p: e.link("x", "j", np.ones((2, 3), "f4")),
    "replace": lambda e, p: e.replace([p.node("r")], p.extract([p.node("r")])),
    "duplicate": lambda e, p: e.duplicate("h"),
    "unfold": lambda e, p: e.unfold("h", "in"),
    "fold": lambda e, p: e.fold("h"),
    "cut_units": lambda e, p: e.cut_units(p.axes()["w:1"].units([0]), allow_io=True),
    "grow": lambda e, p: e.grow("w:1", 1, allow_io=True),
    "permute": lambda e, p: e.permute("w:1", (2, 1, 0), allow_io=True),
    "gate": lambda e, p: e.gate(EDGE),
    "pattern": lambda e, p: e.pattern("pattern", causal_full(8, block=4)),
    "ungate": lambda e, p: e.ungate(p.node("h")),
    "set_gate": lambda e, p: e.set_gate(p.node("h"), "open"),
}


def test_the_calls_cover_every_method():
    methods = {name for name, kind in vars(Transaction).items() if callable(kind) and not name.startswith("_")}
    assert methods == set(CALLS)


def after_commit(p):
    with p.edit("rename") as e:
        e.rename("r", "relu")
        e.rename("relu", "r")
    return e


def before_the_block(p):
    return p.edit("never entered")


def after_failure(p):
    with pytest.raises(PortEmpty), p.edit("failed") as e:
        e.cut("j -> r")
    return e


def entered_inside_another(p):
    inner = p.edit("inner")
    with p.edit("outer"), inner:
        pass
    return inner


@pytest.mark.parametrize("closed", [after_commit, before_the_block, after_failure, entered_inside_another])
@pytest.mark.parametrize("name", CALLS)
def test_calls_on_a_closed_edit_are_refused(closed, name):
    p = tiny()
    e = closed(p)
    before = fingerprint(p), counters(p)
    with pytest.raises(EditClosed, match=r"this edit is (closed|not open)") as caught:
        CALLS[name](e, p)
    assert "tiny" in str(caught.value.where)
    assert "use e inside the block" in str(caught.value.fix)
    assert (fingerprint(p), counters(p)) == before


@pytest.mark.parametrize("name", CALLS)
def test_a_closed_edit_stays_closed_while_a_newer_one_is_open(name):
    p = tiny()
    old = after_commit(p)
    with p.edit("newer") as e:
        before = fingerprint(p), counters(p)
        with pytest.raises(EditClosed):
            CALLS[name](old, p)
        assert not e.done
        assert not e.touched
        assert (fingerprint(p), counters(p)) == before
    assert len(p.journal) == 1


def test_a_nested_edit_belongs_to_the_outer_one():
    p = tiny()
    before = fingerprint(p)
    with p.edit("outer") as outer:
        with p.edit("inner") as inner:
            inner.insert(EDGE, "tanh", name="one")
        inner.insert("one -> j", "tanh", name="two")
    assert [entry.why for entry in p.journal] == ["outer"]
    for e in (outer, inner):
        with pytest.raises(EditClosed):
            e.cut("two -> j")
    p.undo()
    assert fingerprint(p) == before


def test_listeners_receive_a_closed_edit():
    p, raised = tiny(), []

    def listen(entry):
        with pytest.raises(EditClosed):
            e.insert(EDGE, "tanh")
        raised.append(entry.seq)

    p.on_edit(listen)
    with p.edit("rename") as e:
        e.rename("r", "relu")
    assert raised == [0]


def test_undo_does_not_reopen_a_closed_edit():
    p = tiny()
    e = after_commit(p)
    p.undo()
    with pytest.raises(EditClosed):
        e.rewire(EDGE, Value(p.node("h")))
    p.redo()
    with pytest.raises(EditClosed):
        e.set_weight("w", np.zeros((2, 3), "f4"))


def test_an_edit_of_another_program_does_not_reopen_an_edit():
    p, other = tiny(), tiny()
    e = after_commit(p)
    with other.edit("other"), pytest.raises(EditClosed):
        e.cut(EDGE)


def test_an_edit_in_another_thread_does_not_reopen_an_edit():
    p, opened, done = tiny(), threading.Event(), threading.Event()
    old = after_commit(p)

    def hold():
        with p.edit("held"):
            opened.set()
            done.wait(10)

    thread = threading.Thread(target=hold)
    thread.start()
    assert opened.wait(10)
    try:
        with pytest.raises(EditClosed):
            old.cut(EDGE)
    finally:
        done.set()
        thread.join()


@pytest.mark.parametrize("option", ["check", "keep_undo"])
def test_an_inner_edit_cannot_relax_an_option_of_the_outer_one(option):
    p = tiny()
    before = p.hash()
    weaker: dict[str, Any] = {option: False}
    with p.edit("outer"), pytest.raises(UsageError, match="weaker options") as caught:  # noqa: SIM117
        with p.edit("inner", **weaker):
            pytest.fail("the block ran")
    error = caught.value
    assert error.expected == f"{option}=True"
    assert error.got == f"{option}=False"
    assert "'inner' within 'outer'" in str(error)
    assert error.fix
    assert p.hash() == before
    with p.edit("outer", **weaker), p.edit("inner"), p.edit("innermost", **weaker):
        pass
