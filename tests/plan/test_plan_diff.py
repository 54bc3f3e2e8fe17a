"""Two plans beside each other, plans as JSON, and the tables as sequences."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given
from random_programs import programs

from graphwright.plan import Plan
from graphwright.program import Builder, Program


def chain() -> Program:
    b = Builder("chain")
    h = b.input("x", (4, 4))
    for k in range(6):
        h = b.tanh(h, name=f"t{k}")
    b.output(b.softmax(h, name="soft"), "y")
    b.output(b.exp(b.input("z", (2,)), name="apart"), "z")
    return b.build()


def plan_of(p: Program) -> Plan:
    return p.compile({p.path(n): p.spec(n).sizes for n in p.inputs()}, deterministic=True)


def test_the_difference_after_an_edit_is_its_cone() -> None:
    p = chain()
    old = plan_of(p)
    with p.edit("a relu in the middle") as e:
        e.insert(p.in_edges("t3")[0], "relu")
    new = plan_of(p)
    diff = new.diff(old)
    (relu,) = diff.added
    assert p.op(p.node(relu)) == "relu"
    assert (diff.removed, diff.changed) == ((), ("t3",))
    assert diff.dispatches == (8, 9)
    assert relu in str(diff)
    assert "a relu in the middle" in new.explain(relu)
    assert "a relu in the middle" not in new.explain("t0")
    back = old.diff(new)
    assert (back.added, back.removed, back.changed) == ((), (relu,), ("t3",))
    with p.edit("another op") as e:
        e.replace(p.select("t5"), _sigmoid())
    assert set(plan_of(p).diff(new).changed) | set(plan_of(p).diff(new).added) >= {"soft"}
    assert "apart" not in {*plan_of(p).diff(new).changed}
    p.undo(2)
    assert not plan_of(p).diff(old)
    assert plan_of(p).hash == old.hash


def _sigmoid() -> Program:
    b = Builder()
    b.output(b.sigmoid(b.input("x", (4, 4))), "y")
    return b.build()


def test_the_difference_lists_changed_executors() -> None:
    p = chain()
    vm = p.compile({"x": (4, 4), "z": (2,)}, executor="vm")
    diff = vm.diff(plan_of(p))
    assert not diff.added
    assert not diff.removed
    assert "t0" in diff.changed
    assert diff.to_json() == json.loads(json.dumps(diff.to_json()))


@given(programs())
def test_plans_are_serialised_as_json_with_every_node(case) -> None:
    p, feeds = case
    plan = p.compile({name: a.shape for name, a in feeds.items()}, deterministic=True)
    made = plan.to_json()
    assert json.loads(json.dumps(made)) == made
    assert made["hash"] == plan.hash
    for path, one in made["nodes"].items():
        assert [plan.instrs[i] for i in one["instrs"]] == list(plan.of(path))
        for row in one["results"]:
            slot = plan.slots[row["slot"]]
            assert (row["buffer"], row["bytes"]) == (slot.buffer, slot.spec.nbytes)
    ran = {plan.program.path(i.node) for i in plan.instrs}
    assert ran <= made["nodes"].keys()
    assert not plan.diff(plan)


SEQUENCES = "instructions slots buffers layout segments groups frozen pruned input_slots output_slots rewrites"


@pytest.mark.parametrize("name", [*SEQUENCES.split(), "regions", "memory_timeline"])
def test_tables_are_tuples(name: str) -> None:
    p = chain()
    plan = p.compile({"x": (4, 4), "z": (2,)}, executor="vm")
    found = getattr(plan, name)
    found = found() if callable(found) else found
    assert isinstance(found, tuple)
    assert list(found) == [found[i] for i in range(len(found))]
    assert not found or found[-1] == found[len(found) - 1]
    with pytest.raises(IndexError):
        found[len(found)]
    assert not found or found[0] in found
    assert plan.lower_bound <= plan.arena_bytes
    assert plan.last_use(plan.input_slots[0]) is None
    assert isinstance(plan.free_after(0), tuple)


def test_layout_lists_owner_and_lifetime_of_bytes() -> None:
    plan = plan_of(chain())
    placed = plan.layout
    for a in placed:
        assert (a.offset, a.nbytes) == (plan.buffers[a.buffer].offset, plan.buffers[a.buffer].nbytes)
        for b in placed:
            apart = a.offset + a.nbytes <= b.offset or b.offset + b.nbytes <= a.offset
            assert a is b or apart or a.last < b.first or b.last < a.first
    assert np.all(np.diff([p.offset for p in plan.layout]) >= 0)
