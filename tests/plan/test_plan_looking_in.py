"""What a plan says about itself: liveness, sequences, hash, explanations."""

from __future__ import annotations

import json
from itertools import pairwise

import numpy as np
import pytest

from graphwright.array import Spec, float32
from graphwright.errors import UsageError
from graphwright.plan import CompileOptions, Executable, Plan, make_plan
from graphwright.program import Builder, Program


def plan_of(p: Program, **options) -> Plan:
    return make_plan(
        p, {p.path(n): p.spec(n) for n in p.inputs()}, options=CompileOptions(deterministic=True, **options)
    )


def uses(plan: Plan, *names: str) -> tuple[int | None, ...]:
    by_name = {plan.program.path(s.value.node): s.index for s in plan.slots if s.value is not None}
    return tuple(plan.last_use(by_name[n]) for n in names)


def test_last_use_of_a_chain() -> None:
    b = Builder()
    b.output(b.add(b.neg(b.input("x", (4,)), name="double"), b.const("ten", np.ones(4, np.float32)), name="add10"), "y")
    assert uses(plan_of(b.build()), "x", "double", "add10") == (None, 1, None)


def test_last_use_of_a_diamond_and_of_a_square() -> None:
    b = Builder()
    x = b.input("x", (4,))
    b.output(b.add(b.neg(x, name="left"), b.exp(x, name="right"), name="join"), "y")
    plan = plan_of(b.build())
    assert uses(plan, "x", "left", "right", "join") == (None, 2, 2, None)
    b = Builder()
    h = b.exp(b.input("x", (4,)), name="h")
    b.output(b.sum(b.mul(h, h, name="sq"), axes=(0,)), "y")
    plan = plan_of(b.build())
    freed = [i for step in range(len(plan.instrs)) for i in plan.free_after(step)]
    assert len(freed) == len(set(freed))
    assert uses(plan, "h") == (1,)


def test_a_view_lives_as_long_as_its_source_and_an_unread_result_dies_at_once() -> None:
    b = Builder()
    x = b.input("x", (2, 3))
    h = b.exp(x, name="h")
    view = b.permute(h, axes=(1, 0), name="view")
    b.output(b.matmul(b.tanh(x), b.tanh(view, name="t")), "y")
    plan = plan_of(b.build(), rewrites="none")
    assert uses(plan, "h", "view") == (2, 2)
    b = Builder()
    loss, _ = b.cross_entropy(b.input("x", (2, 3)), b.const("t", np.array([0, 1])), name="ce")
    b.output(loss, "y")
    plan = plan_of(b.build())
    second = plan.of("ce")[0].outs[1]
    assert plan.last_use(second) == 0
    assert plan.slots[second].buffer in plan.free_after(0)


def test_indices_out_of_range_are_refused() -> None:
    b = Builder()
    b.output(b.neg(b.input("x", (2,))), "y")
    plan = plan_of(b.build())
    for bad in (-1, 99):
        with pytest.raises(UsageError):
            plan.last_use(bad)
        with pytest.raises(UsageError):
            plan.free_after(bad)
        with pytest.raises(UsageError):
            plan.executable().value(bad)


def _model() -> Program:
    rng = np.random.default_rng(0)
    b = Builder()
    x, s = b.input("x", (4, 8)), b.state("s", np.zeros((), np.float32))
    h = x
    for i in range(4):
        h = b.tanh(b.linear(h, b.param(f"l{i}.w", rng.normal(size=(8, 8)).astype("f4"))), name=f"l{i}")
    b.output(h, "y")
    b.assign(s, b.add(s, b.const("one", np.float32(1))))
    return b.build()


def test_sequences_of_a_plan_are_tuples() -> None:
    p = _model()
    plan = plan_of(p)
    for seq in (
        plan.instructions,
        plan.slots,
        plan.buffers,
        plan.segments,
        plan.groups,
        plan.frozen,
        plan.input_slots,
        plan.output_slots,
        plan.pruned,
        plan.rewrites,
        plan.memory_timeline(),
        plan.free_after(0),
    ):
        assert isinstance(seq, tuple)

    def path(slot: int) -> str:
        value = plan.slots[slot].value
        assert value is not None
        return p.path(value.node)

    assert [s.kind for s in plan.segments] == ["aten"]
    assert plan.segments[-1].stop == len(plan.instructions)
    assert [path(s) for s in plan.frozen] == [f"l{i}.w" for i in range(4)] + ["one"]
    assert [path(s) for s in plan.input_slots] == ["x"]
    assert plan.output_slots == (plan.outputs["y"],)
    assert max(plan.memory_timeline()) == plan.lower_bound <= plan.arena_bytes
    assert all(p.path(i.node) for i in plan.instructions)


def test_the_schedule_counts_the_dispatches_of_a_run() -> None:
    p = _model()
    plan = plan_of(p)
    space = Executable(plan)
    space.run({"x": np.ones((4, 8), np.float32)})
    assert plan.schedule.dispatches == len(plan.instrs) == len(space.kernels.call_ends)
    assert plan.schedule.coverage == 0


def test_naive_layout_gives_each_buffer_its_own_bytes() -> None:
    p = _model()
    reuse, naive = plan_of(p, rewrites="none"), plan_of(p, rewrites="none", layout="naive")
    assert naive.arena_bytes > reuse.arena_bytes
    spans = sorted((b.offset, b.offset + b.nbytes) for b in naive.buffers if b.kind in ("input", "temp"))
    assert all(a[1] <= b[0] for a, b in pairwise(spans))
    feeds = {"x": np.ones((4, 8), np.float32)}
    assert Executable(naive).run(feeds)["y"].tobytes() == Executable(reuse).run(feeds)["y"].tobytes()


def test_the_hash_covers_the_tables_and_is_equal_after_edit_and_undo() -> None:
    first, again = plan_of(_model()), plan_of(_model())
    assert first.hash == again.hash
    assert json.loads(json.dumps(first.to_json())) == json.loads(json.dumps(again.to_json()))
    p = _model()
    with p.edit("another activation") as e:
        e.insert(p.in_edges("l2")[0], "relu")
    changed = plan_of(p).hash
    p.undo()
    assert plan_of(p).hash == first.hash != changed
    assert (
        make_plan(p, {"x": Spec((4, 8), float32)}, options=CompileOptions(rewrites="none", deterministic=True)).hash
        != first.hash
    )


def test_the_hash_depends_on_shapes_and_attributes() -> None:
    def made(n: int, value: float) -> str:
        b = Builder()
        b.output(b.add(b.full_like(b.input("x", (n,)), value=value), b.input("z", (n,))), "y")
        return plan_of(b.build()).hash

    assert len({made(2, 0.5), made(3, 0.5), made(2, 0.25)}) == 3


def test_explain_describes_how_a_node_was_planned() -> None:
    b = Builder()
    x = b.input("x", (2, 3))
    b.exp(x, name="dead")
    same = b.mul(x, b.const("one", np.float32(1)), name="same")
    b.output(b.neg(b.permute(same, axes=(1, 0), name="transposed"), name="out"), "y")
    plan = plan_of(b.build())
    assert "pruned" in plan.explain("dead")
    assert "view" in plan.explain("transposed")
    assert "neutral operand" in plan.explain("same")
    assert "instr 0: neg" in plan.explain("out")
    assert "arena" in plan.explain("x")


def test_explain_ends_with_the_edit_that_last_touched_the_node() -> None:
    p = _model()
    with p.edit("a relu is wanted") as e:
        e.insert(p.in_edges("l2")[0], "relu", name="wanted")
    with p.edit("elsewhere") as e:
        e.insert(p.in_edges("l2")[0], "neg", name="negated")
    plan = plan_of(p)
    assert "a relu is wanted" in plan.explain("wanted")
    assert "elsewhere" in plan.explain("negated").splitlines()[-1]
    assert "elsewhere" not in plan.explain("wanted")
    assert not any(why in plan.explain("l1") for why in ("a relu is wanted", "elsewhere"))
