"""The assembly check finds every planted fault in one call, and nothing in a program that is whole."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from program_samples import fingerprint, random_program, tiny

from graphwright.array import Spec, float32
from graphwright.errors import CycleError, UsageError
from graphwright.program import Builder, InvalidProgram, SpecMismatch, load
from graphwright.program.derived.rewrite import rewrite
from graphwright.program.editing.edits import RemoveEdge
from graphwright.program.kinds import SOURCES
from graphwright.program.primitives import add_assign, update_node


@given(st.integers(0, 300))
def test_valid_programs_have_no_mismatches(seed):
    report = random_program(seed).validate()
    assert report.ok
    assert report.to_json()["mismatches"] == []


@given(st.integers(0, 300), st.integers(1, 20))
def test_planted_spec_faults_are_all_found_at_once(seed, count):
    p = random_program(seed)
    rng = np.random.default_rng(seed)
    # leaves of the reading order: a fault there is not also seen by a reader, so that findings = faults
    unread = [n for n in p.nodes() if p.op(n) not in SOURCES and p.specs(n) and not p.consumers(n)]
    faults = [unread[i] for i in rng.permutation(len(unread))[:count]]
    for node in faults:
        update_node(p, node, specs=(Spec((2, 5), float32),))
    report = p.validate()
    assert sorted(m.where for m in report.mismatches) == sorted(p.path(n) for n in faults)
    assert all(m.axis == 1 and m.got == "f32[2, 5]" for m in report.mismatches if m.expected == "f32[2, 4]")


def test_twenty_faults_among_forty_branches_are_found_in_one_call():
    rng = np.random.default_rng(0)
    b = Builder()
    x = b.input("x", ("B", 4))
    for i in range(40):
        h = b.tanh(b.linear(x, b.param(f"w{i}", np.ones((4, 4), "f4")), name=f"h{i}"), name=f"t{i}")
        b.output(h, f"y{i}")
    p = b.build()
    assert p.validate().ok
    wrong = {f"t{i}" for i in rng.permutation(40)[:20]}
    for path in wrong:
        update_node(p, p.node(path), specs=(Spec(("B", 5), float32),))
    found = p.validate().mismatches
    assert {(m.kind, m.where, m.axis, m.expected, m.got) for m in found} == {
        ("spec", path, 1, "f32[B, 4]", "f32[B, 5]") for path in wrong
    }
    assert len(found) == 20


def test_mismatched_matrices_are_reported():
    b = Builder()
    x = b.input("x", ("B", 7))
    first = b.linear(x, b.param("a", np.zeros((4, 7), "f4")), name="first")
    b.output(b.linear(first, b.param("b", np.zeros((3, 4), "f4")), name="second"), "y")
    p = b.build()
    with pytest.raises(SpecMismatch), p.edit("misfit") as e:
        e.set_weight("b", np.zeros((3, 5), "f4"))
    assert p.validate().ok
    with p.edit("misfit", check=False) as e:
        e.set_weight("b", np.zeros((3, 5), "f4"))
    report = p.validate()
    assert [m.where for m in report.mismatches] == ["second"]
    assert "5" in str(report)
    assert "4" in str(report)
    with pytest.raises(InvalidProgram) as caught:
        p.run(x=np.zeros((1, 7), "f4"))
    assert caught.value.findings == report.mismatches
    with pytest.raises(InvalidProgram):
        p.compile(x=(1, 7))
    with p.edit("repair") as e:
        e.set_weight("b", np.zeros((3, 4), "f4"))
    assert p.valid
    assert p.validate().ok


def test_an_edit_elsewhere_does_not_make_a_broken_program_valid():
    p = tiny()
    with p.edit("break", check=False) as e:
        e.set_weight("w", np.zeros((2, 5), "f4"))
    with pytest.raises(SpecMismatch), p.edit("elsewhere") as e:
        e.add("neg", "x")
    assert not p.valid
    with p.edit("elsewhere", check=False) as e:
        e.add("neg", "x")
    assert not p.valid
    p.undo(2)
    assert p.valid
    p.redo(2)
    assert not p.valid


def test_invalid_ports_weights_names_and_outputs_are_reported():
    p = tiny()
    with p.edit("break", check=False) as e:
        e.do(RemoveEdge(p.in_edges("h")[1]))
    p.weights["w"].data = random_program(0).weights.array("m0.w")
    p._names["r"] = p.node("j")
    p._outputs["y"] = p._outputs["y"]._replace(port=3)
    report = p.validate()
    assert {(m.kind, m.where) for m in report.mismatches} == {
        ("port", "h"),
        ("weight", "w"),
        ("name", "r"),
        ("output", "y"),
    }
    with pytest.raises(InvalidProgram, match="the program is invalid"):
        report.check("tiny")


def test_the_text_of_mismatches_states_all_facts():
    p = tiny()
    with p.edit("break", check=False) as e:
        e.do(RemoveEdge(p.in_edges("h")[1]))
    assert str(p.validate()).splitlines()[1] == "  h: a port has no edge (expected an edge at port 1)"
    with p.edit("and a cycle", check=False) as e:
        e.connect("r", "j")
    assert str(p.validate()).splitlines()[2] == "  j: the nodes form a cycle (got j -> r -> j)"
    assert "None" not in str(p.validate())


FAULTS = {
    ("spec", "r", "wrong number of results"): lambda p: update_node(p, p.node("r"), specs=2 * p.specs(p.node("r"))),
    ("spec", "w", "wrong number of results"): lambda p: update_node(p, p.node("w"), specs=()),
    ("spec", "x", "wrong number of results"): lambda p: update_node(p, p.node("x"), specs=2 * p.specs(p.node("x"))),
    ("op", "h", "unknown op"): lambda p: update_node(p, p.node("h"), op="no_such_op"),
    ("weight", "w", "its checkpoint key names no weight"): lambda p: update_node(
        p, p.node("w"), attrs={"key": "other"}
    ),
    ("port", "j", "reads a result that does not exist"): lambda p: update_node(p, p.node("h"), specs=()),
}


@pytest.mark.parametrize("fault", FAULTS, ids=[f"{kind} {where}: {what}" for kind, where, what in FAULTS])
def test_defects_caused_by_files_and_plugins_are_found(fault):
    p = tiny()
    FAULTS[fault](p)
    assert fault in {(m.kind, m.where, m.what) for m in p.validate().mismatches}


def test_a_state_assigned_twice_is_reported():
    b = Builder()
    state = b.state("s", np.zeros(2, "f4"))
    b.assign(state, b.tanh(state, name="t"))
    p = b.build()
    add_assign(p, p.value("s"), p.value("s"), "again")
    (found,) = p.validate().mismatches
    assert (found.kind, found.where, found.what) == ("weight", "s", "is assigned twice in a step")


def test_an_assignment_of_another_spec_is_reported():
    def program(kind: str, shape: tuple[int, ...]) -> None:
        b = Builder()
        target = b.state("s", np.zeros(2, "f4")) if kind == "state" else b.input("s", (2,))
        b.output(b.tanh(target, name="t"), "y")
        p = b.build()
        with p.edit("write") as e:
            e.assign("s", e.add("full_like", e.param("v", np.zeros(shape, "f4")), value=1.0))

    program("state", (2,))
    with pytest.raises(SpecMismatch, match=r"f32\[3\]"):
        program("state", (3,))
    with pytest.raises(UsageError, match="not a param or a state"):
        program("input", (2,))


# -- cycles ---------------------------------------------------------------------------------------------------------
def test_a_cycle_admitted_without_checks_is_found_and_repaired():
    p = tiny()
    whole = fingerprint(p)
    with pytest.raises(CycleError), p.edit("refused") as e:
        e.connect("r", "j")
    with p.edit("cycle and mismatch", check=False) as e:
        closing = e.connect("r", "j")
        e.set_weight("w", np.zeros((2, 5), "f4"))
    assert not p.valid
    assert {(m.kind, m.where) for m in p.validate().mismatches} == {("cycle", "j"), ("spec", "h")}
    x = np.zeros((1, 3), "f4")
    uses = [lambda: p.run(x=x), lambda: p.compile(x=(1, 3)), lambda: p(x=x)]
    for use in (*uses, lambda: p.extract([p.node("r")]), lambda: rewrite(p, "derived")):
        with pytest.raises(InvalidProgram) as caught:
            use()
        assert caught.value.findings == p.validate().mismatches
    with pytest.raises(CycleError, match="r -> j"), p.edit("elsewhere") as e:
        e.add("neg", "x")
    assert "j" in p.to_svg()
    with p.edit("repair") as e:
        e.cut(closing)
        e.set_weight("w", np.ones((2, 3), "f4"))
    assert p.valid
    assert p.validate().ok
    broken = p.at(0)
    assert (broken.valid, broken.back_edges) == (False, {closing})
    p.undo(2)
    assert fingerprint(p) == whole
    p.redo()
    assert (p.valid, p.back_edges) == (False, {closing})


def test_a_back_edge_becomes_ordinary_when_its_cycle_is_cut_elsewhere():
    """The rest of the cycle goes: the order must turn round, and undo must turn it back."""
    b = Builder()
    x = b.input("x", (2,))
    first = b.junction(x, name="first")
    second = b.junction(b.tanh(first, name="t"), name="second")
    b.output(second, "y")
    p = b.build()
    before = fingerprint(p)
    with p.edit("close", check=False) as e:
        back = e.connect("second", "first")
    with p.edit("open elsewhere") as e:
        e.cut(p.in_edges("second")[0])
    assert (p.valid, p.back_edges) == (True, set())
    assert p.order_labels.key(p.node("second")) < p.order_labels.key(p.node("first"))
    assert p.validate().ok
    p.undo()
    assert (p.valid, p.back_edges) == (False, {back})
    p.undo()
    assert fingerprint(p) == before


def test_self_loops_and_rewires_close_cycles_too():
    p = tiny()
    before = fingerprint(p)
    with p.edit("loops", check=False) as e:
        own = e.connect("j", "j")
        e.rewire(p.in_edges("h")[0], "r")
    assert len(p.back_edges) == 2
    with p.edit("half", check=False) as e:
        e.cut(own)
    assert not p.valid
    with p.edit("whole") as e:
        e.rewire(p.in_edges("h")[0], "x")
    assert p.validate().ok
    p.undo(3)
    assert fingerprint(p) == before


def test_a_failed_edit_restores_back_edges():
    p = tiny()
    with p.edit("close", check=False) as e:
        closing = e.connect("r", "j")
    before = fingerprint(p)

    def fail(why: str) -> None:
        with p.edit(why, check=False) as e:
            e.cut(closing)
            e.connect("j", "j")
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail("alone")
    assert (p.back_edges, fingerprint(p)) == ({closing}, before)
    with p.edit("inner fails", check=False) as e:
        e.rename("r", "last")
        with pytest.raises(ZeroDivisionError):
            fail("inner")
        assert p.back_edges == {closing}
    assert (p.valid, p.back_edges) == (False, {closing})


def test_a_cycle_is_saved_and_loaded(tmp_path):
    p = tiny()
    with p.edit("close", check=False) as e:
        closing = e.connect("r", "j")
    p.save(tmp_path / "broken")
    with pytest.raises(InvalidProgram):
        load(tmp_path / "broken")
    q = load(tmp_path / "broken", check=False)
    assert (q.valid, q.back_edges, q.validate()) == (False, {closing}, p.validate())
    with q.edit("repair") as e:
        e.cut(closing)
    assert q.hash() == tiny().hash()
