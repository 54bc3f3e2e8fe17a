"""The assembly check finds every planted fault in one call, and nothing in a program that is whole."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from program_samples import random_program, tiny

from graphwright.array import Spec, float32
from graphwright.program import Builder, InvalidProgram, SpecMismatch
from graphwright.program.edits import RemoveEdge
from graphwright.program.kinds import SOURCES


@given(st.integers(0, 300))
def test_whole_programs_have_no_findings(seed):
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
        p.update_node(node, specs=(Spec((2, 5), float32),))
    report = p.validate()
    assert sorted(m.where for m in report.mismatches) == sorted(p.path(n) for n in faults)
    assert all(m.axis == 1 and m.got == "f32[2, 5]" for m in report.mismatches if m.expected == "f32[2, 4]")


def test_seven_to_four_into_five_to_three():
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
    with p.edit("mend") as e:
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


def test_ports_weights_names_and_outputs():
    p = tiny()
    with p.edit("break", check=False) as e:
        e.do(RemoveEdge(p.in_edges("h")[1]))
    p.weights.set("w", random_program(0).weights.array("m0.w"))
    p._names["r"] = p.node("j")
    p._outputs["y"] = p._outputs["y"]._replace(port=3)
    report = p.validate()
    assert {(m.kind, m.where) for m in report.mismatches} == {
        ("port", "h"),
        ("weight", "w"),
        ("name", "r"),
        ("output", "y"),
    }
    with pytest.raises(InvalidProgram, match="do not fit"):
        report.check("tiny")
