"""A plan gives the bits of the interpreted run, with and without rewrites, reuse and poison, as often as it is run."""

from __future__ import annotations

import gc
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from random_programs import programs

from graphwright.array import CPU, Spec, float32
from graphwright.plan import CompileOptions, Executable, Plan, make_plan
from graphwright.plan.planning.passes import aligned
from graphwright.plan.table import ARENA
from graphwright.program import Builder, Program
from graphwright.testing.oracle import assert_bits


def plan_of(p: Program, feeds: dict[str, np.ndarray], **options) -> Plan:
    return make_plan(
        p,
        {p.path(n): Spec(feeds[p.path(n)].shape, p.spec(n).dtype) for n in p.inputs()},
        options=CompileOptions(deterministic=True, **options),
    )


MODES = [{"rewrites": r, "layout": m} for r in ("exact", "none") for m in ("reuse", "naive")]


@given(case=programs(), options=st.sampled_from(MODES), freeze=st.booleans())
def test_plans_of_random_programs_equal_runs_bit_for_bit(
    case: tuple[Program, dict[str, np.ndarray]], options: dict, freeze: bool
) -> None:
    p, feeds = case
    before, version = p.hash(), p.version
    truth = p.run(feeds)
    plan = plan_of(p, feeds, freeze=freeze, **options)
    for poison in (False, True):
        space = Executable(plan, poison=poison)
        for _ in range(2):
            for name, value in space.run(feeds).items():
                assert_bits(value, truth[name], what=f"{name} {options} poison={poison}")
    assert (p.hash(), p.version) == (before, version)
    _no_overlap(plan)


def _no_overlap(plan: Plan) -> None:
    """No two buffers that are live together share a byte; the arena is between the lower bound and the plain sum."""
    live = [b for b in plan.buffers if b.kind in ARENA and b.nbytes]
    for i, a in enumerate(live):
        assert 0 <= a.offset <= a.offset + a.nbytes <= plan.arena_bytes
        assert a.offset % min(64, aligned(a.nbytes)) == 0
        for b in live[i + 1 :]:
            if a.first <= b.last and b.first <= a.last:
                assert a.offset + a.nbytes <= b.offset or b.offset + b.nbytes <= a.offset, (a, b)
    assert plan.lower_bound <= plan.arena_bytes <= sum(aligned(b.nbytes) + 63 for b in plan.buffers if b.kind in ARENA)


@given(case=programs(most=30))
def test_live_buffers_never_overlap_in_larger_programs(case) -> None:
    p, feeds = case
    plan = plan_of(p, feeds, rewrites="none")
    _no_overlap(plan)
    assert plan.arena_bytes <= plan_of(p, feeds, rewrites="none", layout="naive").arena_bytes + 64


@given(case=programs())
def test_every_node_is_an_instruction_a_view_a_fold_or_a_rewrite(case) -> None:
    p, feeds = case
    plan = plan_of(p, feeds)
    run = {i.node for i in plan.instrs}
    slots = {s.value.node for s in plan.slots if s.value is not None}
    gone = {f.node for f in plan.rewrites}
    for node in p.nodes():
        path = p.path(node)
        assert (
            path in plan.pruned
            or node in run
            or node in slots
            or path in gone
            or p.op(node) == "const"
            or _dead(p, node, gone)
        )
    writers = [s for i in plan.instrs for s in i.outs]
    assert len(writers) == len(set(writers))
    assert all(plan.slots[s].base == s for s in writers)


def _dead(p: Program, node, gone: set[str]) -> bool:
    """True if all readers were rewritten away."""
    return all(p.path(c) in gone or _dead(p, c, gone) for c in p.consumers(node))


@given(case=programs(), data=st.data())
def test_watched_values_equal_those_of_a_run(case, data) -> None:
    p, feeds = case
    nodes = [p.path(n) for n in p.nodes()]
    names = data.draw(st.lists(st.sampled_from(nodes), min_size=1, max_size=3, unique=True))
    truth = p.run(feeds)
    space = Executable(plan_of(p, feeds, watch=names), poison=True)
    for name, value in space.run(feeds).items():
        assert_bits(value, truth[name])
    for name in names:
        if p.node(name) in {v.node for v in truth.values}:
            assert_bits(space.watched(name), truth.value(name), what=name)


def _figure() -> tuple[Program, dict[str, np.ndarray]]:
    b = Builder()
    x = b.input("x", (2, 3))
    w = b.param("w", np.ones((2, 3), np.float32))
    h = b.tanh(b.mul(x, w), name="h")
    b.output(b.permute(x, axes=(1, 0)), "view of an input")
    b.output(x, "input")
    b.output(w, "param")
    b.output(b.reshape(w, shape=(6,)), "view of a param")
    b.output(h, "h")
    b.output(h, "h again")
    b.output(b.slice(h, axis=1, start=1, size=2), "part")
    return b.build(), {"x": np.arange(6, dtype=np.float32).reshape(2, 3)}


def test_outputs_may_be_inputs_params_views_and_each_other() -> None:
    p, feeds = _figure()
    truth = p.run(feeds)
    plan = plan_of(p, feeds)
    results = [plan(feeds), plan(feeds)]
    for result in results:
        for name in p.output_names():
            assert_bits(result[name], truth[name], what=name)
    results[0]["param"].to_numpy()[:] = 9  # what is given out is the caller's own
    results[0]["input"].to_numpy()[:] = 9
    assert_bits(plan(feeds)["param"], truth["param"])
    assert_bits(results[1]["param"], truth["param"])
    assert feeds["x"][0, 1] == 1


def _freed_early() -> tuple[Program, dict[str, np.ndarray]]:
    b = Builder()
    h = b.exp(b.input("x", (4,)))
    b.output(b.add(b.tanh(b.neg(h)), h), "y")
    return b.build(), {"x": np.ones(4, np.float32)}


def _broken(plan: Plan) -> Plan:
    """The plan with a buffer declared dead before its last reader."""
    at = plan.slots[plan.of("exp")[0].outs[0]].buffer
    early = tuple(replace(q, last=q.first + 1) if q.index == at else q for q in plan.buffers)
    broken = replace(plan)
    broken.__dict__["buffers"] = early
    return broken


def test_an_early_free_gives_nan_under_poison() -> None:
    """The red twin: the early free turns the result into NaN."""
    p, feeds = _freed_early()
    plan = plan_of(p, feeds)
    assert np.isfinite(Executable(plan, poison=True).run(feeds)["y"].to_numpy()).all()
    assert np.isnan(Executable(_broken(plan), poison=True).run(feeds)["y"].to_numpy()).all()


@pytest.mark.parametrize("device", ["cpu", "sim"])
def test_a_plan_compiled_under_poison_stays_poisoned_after_an_edit(device: str) -> None:
    p, feeds = _freed_early()
    for why in ("say it twice", "and again"):
        for poison in (False, True):
            plan = p.compile(x=(4,), device=device, poison=poison, executor="aten")
            truth = p.run(feeds)
            for name, value in plan(feeds).items():
                assert_bits(value.to(CPU), truth[name])
            assert np.isnan(_broken(plan)(feeds)["y"].to_numpy()).all() == poison
            assert plan is p.compile(x=(4,), device=device, poison=poison, executor="aten")
        with p.edit(why) as e:
            e.set_outputs(**dict(zip(p.output_names(), p.outputs(), strict=True)), **{why: p.output("y")})


def test_views_of_any_source_cost_no_instruction() -> None:
    def build(views: int) -> Program:
        b = Builder()
        x, w = b.input("x", (2, 3)), b.param("w", np.ones((2, 3), np.float32))
        for source in (x, w):
            h = source
            for k in range(views):
                h = (
                    b.permute(h, axes=(1, 0))
                    if k % 2
                    else b.expand(b.reshape(h, shape=(1, *b.spec(h).shape)), shape=(2, *b.spec(h).shape))
                )
                h = (
                    b.reshape(b.slice(h, axis=0, start=1, size=1), shape=b.spec(h).shape[1:])
                    if len(b.spec(h).shape) == 3
                    else h
                )
            b.output(b.neg(h), f"y{source.node.index}")
        return b.build()

    feeds = {"x": np.arange(6, dtype=np.float32).reshape(2, 3)}
    plain = len(plan_of(build(0), feeds).instrs)
    for rewrites in ("none", "exact"):
        p = build(9)
        plan = plan_of(p, feeds, rewrites=rewrites)
        assert len(plan.instrs) == plain
        assert_bits(plan(feeds)["y0"], p.run(feeds)["y0"])


def test_a_reshape_that_must_copy_is_a_copy_with_its_reason() -> None:
    b = Builder()
    x = b.input("x", (2, 3))
    b.output(b.reshape(b.permute(x, axes=(1, 0)), shape=(6,)), "y")
    p, feeds = b.build(), {"x": np.arange(6, dtype=np.float32).reshape(2, 3)}
    plan = plan_of(p, feeds)
    assert [(i.op, bool(i.why)) for i in plan.instrs] == [("copy", True)]
    assert plan(feeds)["y"].to_numpy().tolist() == [0, 3, 1, 4, 2, 5]


def test_three_stacked_transposes_cost_no_instruction() -> None:
    b = Builder()
    x, w = b.input("x", (2, 3)), b.param("w", np.arange(12, dtype=np.float32).reshape(3, 4))
    t = w
    for axes in ((1, 0), (1, 0), (1, 0)):
        t = b.permute(t, axes=axes)
    b.output(b.matmul(x, b.permute(t, axes=(1, 0))), "y")
    p, feeds = b.build(), {"x": np.ones((2, 3), np.float32)}
    for rewrites in ("none", "exact"):
        assert [i.op for i in plan_of(p, feeds, rewrites=rewrites).instrs] == ["matmul"]


class TestInPlace:
    """A result takes its operand's memory only if the row allows it and no other instruction reads it."""

    @staticmethod
    def shares(build, op: str) -> bool:
        b = Builder()
        build(b, b.exp(b.input("x", (2, 2)), name="h"))
        p, feeds = b.build(), {"x": np.array([[0.1, 0.2], [0.3, 0.4]], np.float32)}
        plan = plan_of(p, feeds, rewrites="none")
        assert_bits(Executable(plan, poison=True).run(feeds)["y"], p.run(feeds)["y"])
        instr = plan.of(op)[0]
        return plan.slots[instr.outs[0]].buffer == plan.slots[instr.ins[0]].buffer

    def test_an_operand_read_for_the_last_time_is_overwritten(self) -> None:
        assert self.shares(lambda b, h: b.output(b.tanh(h), "y"), "tanh")

    def test_an_operand_read_later_is_not_overwritten(self) -> None:
        assert not self.shares(lambda b, h: b.output(b.add(b.tanh(h), h), "y"), "tanh")

    def test_an_operand_whose_view_is_read_later_is_not_overwritten(self) -> None:
        def build(b, h):
            view = b.permute(h, axes=(1, 0))
            b.output(b.add(b.tanh(h), view), "y")

        assert not self.shares(build, "tanh")

    def test_an_output_is_not_overwritten(self) -> None:
        assert not self.shares(lambda b, h: (b.output(b.tanh(h), "y"), b.output(h, "h")), "tanh")

    def test_an_operand_read_in_two_layouts_is_not_overwritten(self) -> None:
        assert not self.shares(lambda b, h: b.output(b.add(h, b.permute(h, axes=(1, 0))), "y"), "add")

    def test_an_op_without_the_inplace_trait_overwrites_no_operand(self) -> None:
        assert not self.shares(lambda b, h: b.output(b.softmax(h), "y"), "softmax")

    def test_a_broadcast_or_strided_operand_is_not_overwritten(self) -> None:
        assert not self.shares(lambda b, h: b.output(b.tanh(b.permute(h, axes=(1, 0))), "y"), "tanh")
        assert not self.shares(lambda b, h: b.output(b.tanh(b.slice(h, axis=0, start=0, size=1)), "y"), "tanh")

    def test_an_operand_of_another_rank_is_not_overwritten(self) -> None:
        """ATen sees a partial overlap there, though the bytes are the same."""
        assert not self.shares(
            lambda b, h: b.output(b.add(b.sum(h, axes=(0,)), b.exp(b.expand(b.sum(h, axes=(0,)), shape=(1, 2)))), "y"),
            "add",
        )

    def test_inputs_and_params_are_never_overwritten(self) -> None:
        b = Builder()
        b.output(b.tanh(b.param("w", np.ones(3, np.float32))), "y")
        b.output(b.neg(b.input("x", (3,))), "z")
        p, feeds = b.build(), {"x": np.ones(3, np.float32)}
        plan = plan_of(p, feeds)
        plan(feeds)
        assert p.weights.array("w").to_numpy().tolist() == [1, 1, 1]


def test_an_empty_junction_is_zero_of_its_spec() -> None:
    b = Builder()
    x = b.input("x", (2, 3))
    b.output(b.add(b.junction(b.neg(x), x, name="sum"), x), "y")
    p, feeds = b.build(), {"x": np.ones((2, 3), np.float32)}
    with p.edit("cut both") as e:
        for edge in p.in_edges("sum"):
            e.cut(edge)
    assert plan_of(p, feeds)(feeds)["y"].to_numpy().tolist() == p.run(feeds)["y"].to_numpy().tolist() == [[1] * 3] * 2


def test_named_sizes_are_bound_by_the_feeds() -> None:
    b = Builder()
    x = b.input("x", ("B", 3))
    b.output(b.sum(b.tanh(x), axes=(0,)), "y")
    p = b.build()
    for n in (1, 4, 0):
        feeds = {"x": np.ones((n, 3), np.float32)}
        assert_bits(plan_of(p, feeds)(feeds)["y"], p.run(feeds)["y"])


def test_planning_restores_the_garbage_collector() -> None:
    p, feeds = _figure()
    plan_of(p, feeds)
    assert gc.isenabled()
    gc.disable()
    try:
        plan_of(p, feeds)
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_a_spec_counts_its_bytes() -> None:
    assert Spec((2, 3), float32).nbytes == 24
