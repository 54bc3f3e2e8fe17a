"""What planning makes of a program as numbers: read in bulk, kept in order, walked by compiled loops or by Python."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from tests.plan.random_programs import programs

from graphwright.array import Spec
from graphwright.plan import make_plan
from graphwright.plan.planning import native, passes, planner
from graphwright.plan.planning.plan_tables import InstructionOrder, all_records
from graphwright.plan.running.kernels import _removed
from graphwright.program import Builder, Program


def planned(p: Program, run: Any, specs: dict[str, Spec], before: Any = None) -> Any:
    with patch.object(planner, "loops", lambda size: run):
        return make_plan(p, specs, before=before)


@given(made=programs(), at=st.integers(0, 99))
def test_compiled_planning_loops_match_their_python_versions(
    made: tuple[Program, dict[str, np.ndarray]], at: int
) -> None:
    native.part.wait()
    p, feeds = made
    specs = {name: p.spec(p.node(name)) for name in feeds}
    first = [planned(p, run, specs) for run in (passes, native.build())]
    edges = list(p.graph.edges())
    with p.edit("another node") as e:
        for edge in edges[at % max(len(edges), 1) :][:1]:
            e.insert(edge, "copy")
    after = [planned(p, run, specs, plan) for run, plan in zip((passes, native.build()), first, strict=True)]
    for one, other in (first, after):
        assert one.hash == other.hash
        for name in ("order", "home", "first", "last", "offsets", "used"):
            assert getattr(one.buffer_layout, name).tolist() == getattr(other.buffer_layout, name).tolist(), name


@given(made=programs())
def test_reading_a_program_in_bulk_equals_reading_it_node_by_node(made: tuple[Program, dict[str, np.ndarray]]) -> None:
    p, _ = made
    rows, begins, reads, stops = all_records(p)
    assert [r.node for r in rows] == list(p.order_labels)
    values = [v for row in rows for v in ((row.node, port) for port in range(len(row.specs)))]
    start = 0
    for row, begin, stop in zip(rows, begins, stops, strict=False):
        n = row.node
        assert (row.path, row.op, row.attrs, row.specs) == (p.path(n), p.op(n), p.attrs(n), p.specs(n))
        assert list(row.sources) == list(p.operands(n)) == [values[k] for k in reads[start:stop]]
        assert begin == len(row.specs) or values[begin : begin + 1] == [(n, 0)]
        start = stop


@given(st.lists(st.tuples(st.sets(st.integers(0, 60)), st.sets(st.integers(0, 60))), max_size=6))
def test_removals_and_insertions_keep_the_order_sorted(turns: list[tuple[set[int], set[int]]]) -> None:
    order, here = InstructionOrder(), set(range(0, 40, 2))
    order.reset(sorted(here))
    for going, coming in turns:
        before, stay = order.now, here - going
        for q in here & going:
            order.remove(q)
        for q in coming - stay:
            order.add(q)
        order.update(lambda q: (q,), 61)
        here = stay | coming
        assert order.now.tolist() == sorted(here)
        assert order.now.dtype == np.int32
        assert _removed(before, order.now) == set(before.tolist()) - here


def test_sources_after_edits_match_a_full_plan() -> None:
    b = Builder("grows")
    x = b.input("x", ("B", 4))
    y = b.add(x, b.param("a", np.ones(4, np.float32)), name="sum")
    for _ in range(20):
        y = b.abs(y)
    b.output(y, "y")
    p, specs = b.build(), {"x": (2, 4)}
    builder = p.compile(specs).buffer_layout.builder
    feed = np.ones((2, 4), np.float32)

    def check(names: list[str], total: float) -> None:
        plan, fresh = p.compile(specs), p.compile(specs).compact()
        assert plan.buffer_layout.builder is builder
        assert plan.buffer_layout.read == fresh.buffer_layout.read
        assert sorted(plan.buffer_layout.read) == names
        assert [plan.slots[s].value for s in plan.frozen] == [fresh.slots[s].value for s in fresh.frozen]
        assert plan(x=feed)["y"].to_numpy().tolist() == [[total] * 4] * 2

    with p.edit("another weight") as e:
        e.rewire(p.in_edges("sum")[0], e.add("add", x, e.param("b", np.full(4, 2, np.float32))))
    check(["a", "b"], 4.0)
    p.undo()
    check(["a"], 2.0)
