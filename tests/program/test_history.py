"""Around an edit: order of steps, listeners, threads, marks, blame, the size of the work."""

from __future__ import annotations

import logging
import signal
import threading
from contextlib import suppress

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from program_samples import random_program, tiny
from test_edit_machine import PICK, VERBS

import graphwright as gw
import graphwright.program.editing.transaction as transaction_module
from graphwright.errors import GraphwrightError, UsageError
from graphwright.graph import EditBusy
from graphwright.program import Builder, NotUndoable, load
from graphwright.program.weights import Weights


def test_the_steps_of_a_commit_run_in_order(monkeypatch):
    seen = []
    p = tiny()

    def spy(owner, name, label):
        real = getattr(owner, name)
        monkeypatch.setattr(owner, name, lambda *a, **k: (seen.append(label), real(*a, **k))[1])

    spy(transaction_module, "check_ports", "ports")
    spy(transaction_module, "infer", "infer")
    spy(p.journal, "append", "journal")
    p.on_edit(lambda entry: seen.append(f"listener at version {p.version}"))
    with p.edit("add") as e:
        e.add("relu", "h")
    assert list(dict.fromkeys(seen)) == ["ports", "infer", "journal", "listener at version 1"]


def test_an_error_in_a_listener_is_logged_and_the_commit_is_kept(caplog):
    p = tiny()
    notified = []
    p.on_edit(lambda entry: 1 / 0)
    stop = p.on_edit(lambda entry: notified.append((entry.why, len(entry.edits), {p.path(n) for n in entry.cone})))
    with caplog.at_level(logging.ERROR, logger="graphwright.program"), p.edit("add") as e:
        e.insert(p.in_edges("r")[0], "tanh", name="t")
    assert p.version == 1
    assert "ZeroDivisionError" in caplog.text
    assert "entry 0 (add)" in caplog.text
    assert notified == [("add", 3, {"t", "r"})]
    stop()
    p.undo()
    assert len(notified) == 1


def test_an_edit_visits_few_nodes():
    b = Builder()
    value = b.input("x", (2,))
    for i in range(5000):
        value = b.relu(value, name=f"n{i}")
    b.output(value, "y")
    p = b.build()
    for at in (1, 2500, 4998):
        visited = p.order_labels.visited
        with p.edit("insert") as e:
            e.insert(p.in_edges(f"n{at}")[0], "tanh")
        cone = 2  # the new node and its reader, whose spec stays
        assert len(p.journal[-1].cone) + p.order_labels.visited - visited <= 4 * cone


def test_training_inside_an_edit_runs_no_checks(monkeypatch):
    """What leaving costs is paid once, however many steps there were."""
    spent = []
    for steps in (1, 100):
        p, calls = tiny(), []
        for name in ("infer", "check_ports"):
            real = getattr(transaction_module, name)
            monkeypatch.setattr(transaction_module, name, lambda *a, real=real, to=calls: (to.append(1), real(*a))[1])
        real_hash = p.state_hash
        p.state_hash = lambda real=real_hash, calls=calls: (calls.append(1), real())[1]
        step = gw.compile(p)
        with p.edit("fine-tune"):
            for _ in range(steps):
                step(x=np.ones((1, 3), "f4"))
                p.weights["w"].own().to_numpy()[...] += np.float32(0.5)
        monkeypatch.undo()
        spent.append(len(calls))
    assert spent[0] == spent[1] > 0


def rows(count: int):
    """`count` times a product with a weight of its own and an activation, all in one sum."""
    b = Builder()
    x = b.input("x", ("B", 2))
    products = [b.linear(x, b.param(f"w{i}", np.eye(2, dtype="f4")), name=f"h{i}") for i in range(count)]
    made = [b.tanh(product, name=f"t{i}") for i, product in enumerate(products)]
    b.output(b.junction(*made, name="j"), "y")
    return b.build()


def test_hashing_reads_only_touched_weights(monkeypatch):
    """Values are compared, which costs little; what stands for one is worked out where it is another."""
    for count in (4, 100):
        p, asked, walks = rows(count), [], []
        p.state_hash()
        for owner, name, to in ((Weights, "reference", asked), (Weights, "items", walks), (Weights, "values", walks)):
            real = getattr(owner, name)
            monkeypatch.setattr(
                owner, name, lambda *a, real=real, name=name, to=to: (to.append((name, *a[1:])), real(*a))[1]
            )
        spent = []
        for few in (1, 3):
            walks.clear()
            with p.edit("remove") as e:
                for i in range(few):
                    e.remove([f"h{i}", f"t{i}", f"w{i}"])
            spent.append(len(walks))
            assert asked == []
            p.undo()
            assert asked == [("reference", f"w{i}") for i in range(few)]
            asked.clear()
        assert spent[0] == spent[1] <= 4
        p.weights["w1"].own().copy_from(p.weights.array("w0"))  # in the memory that is there
        with p.edit("train and remove") as e:
            p.weights["w2"].own().to_numpy()[...] = 5  # in memory of its own
            e.remove(["h3", "t3"])
            e.remove("w3")
        assert asked == [("reference", "w1"), ("reference", "w2")]
        p.journal.verify()
        monkeypatch.undo()
        assert p.journal[-1].after == p.state_hash() == p.fork().hash()


def test_the_interrupt_handler_is_installed_once_per_edit(monkeypatch):
    spent, before = [], signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell may have it ignored
    try:
        for count in (1, 20):
            p, calls, real = rows(count), [], signal.signal
            monkeypatch.setattr(signal, "signal", lambda *a, calls=calls, real=real: (calls.append(a), real(*a))[1])
            with p.edit("remove") as e:
                e.remove([n for n in p.nodes() if p.op(n) == "tanh"])
            monkeypatch.undo()
            spent.append(len(calls))
    finally:
        signal.signal(signal.SIGINT, before)
    assert spent[0] == spent[1] == 2


def test_threads_wait_for_each_other():
    p = tiny()
    errors: list[Exception] = []

    def work(k: int) -> None:
        try:
            for i in range(30):
                with p.edit(f"{k}.{i}") as e:
                    e.add("relu", "h", name=f"n{k}_{i}")
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(k,)) for k in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert errors == []
    assert len(p.journal) == 120
    assert len(p) == 5 + 120
    p.journal.verify()
    p.undo(120)
    assert p.hash() == tiny().hash()


def test_an_edit_waits_for_the_edit_of_another_thread():
    p = tiny()
    p.graph.timeout = 0.05
    caught: list[Exception] = []

    def other() -> None:
        try:
            with p.edit("other"):
                pass
        except Exception as error:
            caught.append(error)

    with p.edit("mine"):
        t = threading.Thread(target=other)
        t.start()
        t.join()
    assert [type(e) for e in caught] == [EditBusy]


def test_blame_distinguishes_nodes_from_edges():
    p = tiny()
    with p.edit("one") as e:
        node = e.add("relu", "h", name="a")
    with p.edit("two") as e:
        e.rename("r", "rr")
    with p.edit("three") as e:
        edge = e.connect("h", "j")
    assert [x.why for x in p.blame(node)] == ["one"]
    assert [x.why for x in p.blame(edge)] == ["three"]
    assert [x.why for x in p.blame("rr")] == ["two"]
    assert [x.why for x in p.blame(p.node("rr"))] == ["two"]


@given(st.integers(0, 100), st.lists(st.tuples(st.sampled_from(VERBS), PICK, PICK), min_size=20, max_size=60))
def test_blame_matches_bookkeeping_of_every_primitive(seed, script):
    """Written down as each edit is made, by the handles it has, through renames, deletions and undo."""
    p, books, now = random_program(seed), {}, []
    do = transaction_module.Transaction.do

    def noted(self, edit):
        at = getattr(edit, "node", getattr(edit, "dst", None))
        at = p.graph.target(edit.edge) if at is None and hasattr(edit, "edge") else at
        do(self, edit)
        now.append(at)

    transaction_module.Transaction.do = noted
    try:
        for verb, a, b in script:
            now.clear()
            count = len(p.journal)
            if a % 4 == 0 and p.history.undoable:
                last = p.history.undoable[-1].seq
                p.undo()
                books[count] = books[last]
                continue
            with suppress(GraphwrightError), p.edit("random") as e:
                verb(e, a, b)
            if len(p.journal) > count:
                books[count] = {n for n in now if n is not None}
    finally:
        transaction_module.Transaction.do = do
    for node in {n for nodes in books.values() for n in nodes} | set(p.nodes()):
        assert [entry.seq for entry in p.blame(node)] == [seq for seq, nodes in books.items() if node in nodes]


def test_nodes_of_a_kind_are_listed_by_creation_after_undo():
    b = Builder()
    for name in "abc":
        b.output(b.input(name, (2,)), name)
    p = b.build()
    with p.edit("remove the first") as e:
        e.set_outputs(b="b", c="c")
        e.remove("a")
    p.undo()
    assert [p.path(n) for n in p.inputs()] == ["a", "b", "c"]


def test_weights_are_listed_by_creation_after_undo_and_after_a_failed_edit(tmp_path):
    b = Builder()
    x = b.input("x", (2,))
    b.output(b.junction(*(b.mul(x, b.param(k, [1.0, 2.0]), name=f"n{k}") for k in "cab"), name="j"), "y")
    p = b.build()

    def change(e) -> None:
        e.rename("a", "a", key="k")
        e.remove("nc")
        e.remove("c")
        e.param("d", [0.0, 0.0])

    with p.edit("take out the first") as e:
        change(e)
    assert list(p.weights) == ["k", "b", "d"]
    p.undo()
    assert list(p.weights) == ["c", "a", "b"]
    p.redo()
    assert list(p.weights) == ["k", "b", "d"]
    p.undo()
    p.save(tmp_path / "p")

    def fail() -> None:
        with p.edit("fails") as e:
            change(e)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert list(p.weights) == list(load(tmp_path / "p").weights) == ["c", "a", "b"]


def test_a_mark_names_a_state_not_an_undo_depth():
    p = tiny()
    with p.edit("one") as e:
        e.rename("h", "a")
    p.mark("here")
    p.undo()
    with pytest.raises(NotUndoable, match="redo"):
        p.rollback("here")
    with p.edit("other") as e:
        e.rename("h", "b")
    with pytest.raises(NotUndoable, match="not on the current branch"):
        p.rollback("here")
    with pytest.raises(UsageError, match="here"):
        p.rollback("there")
