"""A plan patched after edits gives the bits of one made from nothing, and looks at what the edits touched alone."""

from __future__ import annotations

from contextlib import suppress

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from random_programs import programs

from graphwright.errors import GraphwrightError
from graphwright.plan import Plan, Workspace, make_plan
from graphwright.program import Builder, Program
from graphwright.testing.oracle import assert_bits

UNARY = ["neg", "tanh", "relu", "copy"]


def plan_of(p: Program, before: Plan | None = None, **options) -> Plan:
    return make_plan(p, {p.path(n): p.spec(n) for n in p.inputs()}, before=before, **options)


def edit_at_random(p: Program, draw) -> None:
    """One edit or undo; what the program refuses changes nothing."""
    kind = draw(st.sampled_from(["insert", "rewire", "add", "cut", "output", "rename", "undo", "redo", "attr"]))
    edges = sorted(p.graph.edges())
    nodes = p.order()
    with suppress(GraphwrightError):
        if kind in ("undo", "redo"):
            getattr(p, kind)()
            return
        with p.edit(kind) as e:
            if kind == "insert" and edges:
                e.insert(draw(st.sampled_from(edges)), draw(st.sampled_from(UNARY)))
            elif kind == "rewire" and edges:
                edge = draw(st.sampled_from(edges))
                like = [n for n in nodes if p.spec(n) == p.spec(p.edge_value(edge))]
                e.rewire(edge, draw(st.sampled_from(like)))
            elif kind == "cut" and edges:
                e.cut(draw(st.sampled_from(edges)))
            elif kind == "add":
                a = draw(st.sampled_from(nodes))
                made = e.add(draw(st.sampled_from(UNARY)), a)
                e.set_outputs(**dict(zip(p.output_names(), p.outputs(), strict=True)), **{f"o{len(p.journal)}": made})
            elif kind == "output":
                names = p.output_names()
                e.set_outputs(**{name: p.value(draw(st.sampled_from(nodes))) for name in names[:1]})
            elif kind == "rename":
                e.rename(draw(st.sampled_from([n for n in nodes if p.op(n) != "input"])), f"new{len(p.journal)}")
            elif kind == "attr":
                casts = [n for n in nodes if p.op(n) == "cast"]
                if casts:
                    e.set_attr(casts[0], dtype="float64")


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(case=programs(), data=st.data(), mode=st.sampled_from(["exact", "none"]), freeze=st.booleans())
def test_random_edits_patched_like_made_anew(case, data, mode: str, freeze: bool) -> None:
    p, feeds = case
    plan = plan_of(p, rewrites=mode, freeze=freeze)
    for _ in range(data.draw(st.integers(1, 6))):
        for _ in range(data.draw(st.integers(1, 2))):
            edit_at_random(p, data.draw)
        plan = plan_of(p, plan, rewrites=mode, freeze=freeze)
        fresh = plan_of(p, rewrites=mode, freeze=freeze)
        assert [(i.op, i.node, i.why) for i in plan.instrs] == [(i.op, i.node, i.why) for i in fresh.instrs]
        assert plan.pruned == fresh.pruned
        assert plan.rewrites == fresh.rewrites
        assert plan.choices == fresh.choices
        assert plan.lower_bound == fresh.lower_bound
        truth = p.run(feeds)
        for name, value in Workspace(plan, poison=True).run(feeds).items():
            assert_bits(value, truth[name], what=f"{name} {plan.patched}")
