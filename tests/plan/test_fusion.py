"""Fusion groups: what is grouped and why not, loops over tiles against ATen, layouts that would mix old with new."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from graphwright.array import bfloat16
from graphwright.array.vm.encode import fuse
from graphwright.plan import Executable, Plan
from graphwright.program import Builder, Program

SIZES = (1, 2, 17, 1023, 1024, 1025, 4100)
UNARY, BINARY = ("tanh", "relu", "neg", "sigmoid"), ("add", "mul", "sub", "maximum")


@st.composite
def elementwise_programs(draw) -> tuple[Program, dict[str, np.ndarray]]:
    """DAGs of elementwise ops over [R, C] with operands that are broadcast along either axis or both."""
    rows, cols = draw(st.sampled_from([(1, n) for n in SIZES] + [(3, 1025), (70, 40), (5, 1), (0, 7), (200, 8)]))
    shapes = [(rows, cols), (rows, cols), (cols,), (rows, 1), ()]
    b = Builder("tiles")
    feeds = {f"x{i}": np.random.default_rng(i).uniform(-2, 2, s).astype("f4") for i, s in enumerate(shapes)}
    inputs = [b.input(name, a.shape) for name, a in feeds.items()]
    made = inputs[:2]
    for _ in range(draw(st.integers(2, 24))):
        kind = draw(st.integers(0, 5))
        one = made[draw(st.integers(0, len(made) - 1))]
        if kind < 2:
            made.append(getattr(b, draw(st.sampled_from(UNARY)))(one))
        elif kind < 5:
            pool = [*made, *inputs[2:]]
            made.append(getattr(b, draw(st.sampled_from(BINARY)))(one, pool[draw(st.integers(0, len(pool) - 1))]))
        else:
            picked = b.where(b.lt(one, inputs[0]), one, made[draw(st.integers(0, len(made) - 1))])
            made.append(picked)
    for k, node in enumerate(made[-draw(st.integers(1, 3)) :]):
        b.output(node, f"y{k}")
    if draw(st.booleans()):
        b.output(b.sum(made[-1], axes=(1,), keepdims=False), "s")
    return b.build(), feeds


def shapes(feeds: dict[str, np.ndarray]) -> dict[str, tuple[int, ...]]:
    return {name: a.shape for name, a in feeds.items()}


def test_groups_contain_bfloat16_ops_and_conversions() -> None:
    """Each result rounded as by itself: the bits of ATen, op by op."""
    rng = np.random.default_rng(0)
    feeds = {"x": rng.normal(size=(30, 1100)).astype("f4"), "w": rng.normal(size=1100).astype("f4")}
    b = Builder("low")
    x, w = (b.input(name, a.shape) for name, a in feeds.items())
    a = b.cast(b.mul(x, w), dtype=bfloat16)
    c = b.mul(b.add(a, a), b.cast(w, dtype=bfloat16))
    c = b.mul(c, b.cast(b.const("third", np.float32(1 / 3)), dtype=bfloat16))
    b.output(b.sub(b.cast(c, dtype="float32"), x), "y")
    b.output(b.neg(c), "z")
    p = b.build()
    truth = Executable(p.compile(shapes(feeds))).run(feeds)
    plan = p.compile(shapes(feeds), executor="auto")
    assert {i.executor for i in plan.profile(feeds, 1).timings} == {"vm"}
    assert max(len(group) for group in plan.groups) >= 5
    for poison in (False, True):
        for name, value in Executable(plan, poison=poison).run(feeds).items():
            np.testing.assert_array_equal(value.to_numpy("float32"), truth[name].to_numpy("float32"))


@settings(deadline=None)
@given(elementwise_programs())
def test_tiled_groups_match_separate_ops(case) -> None:
    p, feeds = case
    truth = Executable(p.compile(shapes(feeds))).run(feeds)
    plan = p.compile(shapes(feeds), executor="vm")
    for poison in (False, True):
        space = Executable(plan, poison=poison)
        for _ in range(2):
            for name, value in space.run(feeds).items():
                np.testing.assert_allclose(value.to_numpy(), truth[name].to_numpy(), rtol=3e-5, atol=3e-5)
    assert_groups(plan)


def assert_groups(plan: Plan) -> None:
    """Disjoint, of neighbours, of one shape; what follows a group and is not in one has a reason."""
    members = [i for group in plan.groups for i in group]
    assert len(set(members)) == len(members)
    for group in plan.groups:
        assert list(group) == list(range(group[0], group[-1] + 1))
        assert len(group) > 1
        assert len({plan.slots[plan.instrs[i].outs[0]].layout.shape for i in group}) == 1
        follower = group[-1] + 1
        if follower < len(plan.instrs):
            assert plan.cuts[follower] in REASONS
    inner = {b.index for b in plan.buffers if b.kind == "tile"}
    for i, instr in enumerate(plan.instrs):
        touched = {plan.slots[s].buffer for s in (*instr.ins, *instr.outs)}
        assert not touched & inner or i in members
    assert not inner & {plan.slots[s].buffer for s in plan.outputs.values()}


REASONS = {"not_elementwise", "shape", "dtype", "stateful", "alias_hazard", "registers", "large", "layout", "no_form"}


def thirteen() -> Program:
    b = Builder("thirteen")
    x, y = b.input("x", ("N",)), b.input("y", ("N",))
    h = x
    for name in ("exp", "neg", "tanh", "sigmoid", "relu", "abs"):
        h = getattr(b, name)(h)
    h = b.add(b.mul(h, y), x)
    h = b.maximum(b.sub(h, y), x)
    h = b.div(h, b.add(b.abs(y), b.full_like(y, value=1.0)))
    b.output(h, "out")
    return b.build()


def test_thirteen_ops_form_one_group_without_arena_bytes() -> None:
    p = thirteen()
    feeds = {n: np.random.default_rng(0).normal(size=5000).astype("f4") for n in "xy"}
    plan = p.compile(shapes(feeds), executor="vm")
    assert plan.groups == (tuple(range(len(plan.instrs))),)
    assert len(plan.instrs) >= 13
    assert plan.schedule.coverage == 1
    assert plan.schedule.dispatches == 1
    assert plan.arena_bytes <= 3 * 20032  # the inputs and the result
    truth = p.compile(shapes(feeds))(feeds)["out"].to_numpy()
    np.testing.assert_allclose(plan(feeds)["out"].to_numpy(), truth, rtol=2e-5, atol=1e-6)


def test_running_a_group_in_parts_matches_running_it_whole() -> None:
    p = thirteen()
    feeds = {n: np.random.default_rng(0).normal(size=1500).astype("f4") for n in "xy"}
    plan = p.compile(shapes(feeds), executor="vm")
    whole = plan(feeds)["out"].to_numpy()
    for cut in range(len(plan.instrs) + 1):
        space = Executable(plan)
        space.feed(feeds)
        space.run(plan[:cut])
        space.run(plan[cut:])
        assert space.value(plan.outputs["out"]).to_numpy().tobytes() == whole.tobytes()


def test_explain_states_why_groups_end() -> None:
    b = Builder("cuts")
    x = b.input("x", (64, 2048))
    h = b.tanh(b.relu(x), name="pair")
    row = b.sum(h, axes=(1,), keepdims=True)
    small = b.exp(row)
    transposed = b.neg(b.permute(b.exp(b.mul(h, small), name="e"), axes=(1, 0)), name="transposed")
    b.output(b.abs(transposed), "y")
    p = b.build()
    plan = p.compile(x=(64, 2048), executor="vm")
    why = {p.path(plan.instrs[i].node): reason for i, reason in plan.cuts.items()}
    assert why[p.path(transposed)] == "layout"
    assert "shape" in why.values()
    assert "not_elementwise" in plan.cuts.values()
    feeds = {"x": np.random.default_rng(0).normal(size=(64, 2048)).astype("f4")}
    truth = p.compile(x=(64, 2048))(feeds)["y"].to_numpy()
    np.testing.assert_allclose(plan(feeds)["y"].to_numpy(), truth, rtol=3e-5, atol=1e-5)


def test_a_value_read_at_other_indices_ends_the_group() -> None:
    b = Builder("last row")
    x = b.input("x", (70, 300))
    h = b.tanh(b.relu(x))
    b.output(b.add(h, b.slice(h, axis=0, start=69, size=1)), "y")
    p = b.build()
    plan = p.compile(x=(70, 300), executor="vm")
    assert [s.kind for s in plan.segments] == ["vm"]
    assert "alias_hazard" in plan.cuts.values()
    feeds = {"x": np.random.default_rng(0).normal(size=(70, 300)).astype("f4")}
    truth = p.compile(x=(70, 300))(feeds)["y"].to_numpy()
    np.testing.assert_allclose(plan(feeds)["y"].to_numpy(), truth, rtol=1e-5, atol=1e-6)


def test_group_is_cut_at_sixteen_inner_values() -> None:
    b = Builder("wide")
    x = b.input("x", (3000,))
    made = [b.tanh(b.mul(x, b.full_like(x, value=0.1 * i))) for i in range(fuse.TILES + 4)]
    total = made[0]
    for other in made[1:]:
        total = b.add(total, other)
    b.output(total, "y")
    p = b.build()
    plan = p.compile(x=(3000,), executor="vm")
    assert "registers" in plan.cuts.values()
    assert_groups(plan)
    feeds = {"x": np.linspace(-1, 1, 3000, dtype="f4")}
    truth = p.compile(x=(3000,))(feeds)["y"].to_numpy()
    np.testing.assert_allclose(plan(feeds)["y"].to_numpy(), truth, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("n", SIZES)
def test_the_number_of_dispatches_is_as_declared(n: int) -> None:
    p = thirteen()
    plan = p.compile(x=(n,), y=(n,), executor="vm")
    space = Executable(plan)
    space.run({"x": np.ones(n, "f4"), "y": np.ones(n, "f4")})
    assert len(space.kernels.calls) == plan.schedule.dispatches <= len(plan.instrs)


@st.composite
def programs_with_rows(draw) -> tuple[Program, dict[str, np.ndarray]]:
    """Elementwise ops before, between and after norms and softmaxes of rows, also such as are too long for a tile."""
    rows, cols = draw(st.sampled_from([(1, 7), (3, 40), (200, 40), (5, 1025), (2, 4096), (2, 4097), (70, 33), (0, 8)]))
    b, rng = Builder("rows"), np.random.default_rng(0)
    feeds = {n: rng.uniform(-2, 2, s).astype("f4") for n, s in (("x", (rows, cols)), ("y", (rows, cols)), ("w", cols))}
    x, y, w = (b.input(name, a.shape) for name, a in feeds.items())
    made = [x, y]
    for _ in range(draw(st.integers(2, 16))):
        one, other = (made[draw(st.integers(0, len(made) - 1))] for _ in range(2))
        kind = draw(st.integers(0, 5))
        if kind == 0:
            made.append(b.rms_norm(one, w, eps=1e-3))
        elif kind == 1:
            made.append(b.softmax(one, axis=-1))
        elif kind == 2:
            made.append(b.mul(one, w))
        else:
            made.append(b.tanh(b.add(one, other)))
    for k, node in enumerate(made[-draw(st.integers(1, 3)) :]):
        b.output(node, f"y{k}")
    return b.build(), feeds


@settings(deadline=None)
@given(programs_with_rows())
def test_groups_over_rows_match_separate_ops(case) -> None:
    p, feeds = case
    truth = Executable(p.compile(shapes(feeds))).run(feeds)
    plan = p.compile(shapes(feeds), executor="vm")
    for poison in (False, True):
        for name, value in Executable(plan, poison=poison).run(feeds).items():
            np.testing.assert_allclose(value.to_numpy(), truth[name].to_numpy(), rtol=3e-5, atol=3e-5)
    assert_groups(plan)


@pytest.mark.parametrize("norm", ["softmax", "rms_norm"])
@pytest.mark.parametrize("apart", ["transposed", "every second", "second operand"])
def test_strided_rows_are_not_fused(norm: str, apart: str) -> None:
    """A turn does a whole row, so no operand's row may be walked element by element."""
    b = Builder("apart")
    x, w, wide = b.input("x", (12, 17)), b.input("w", (17,)), b.input("wide", (12, 40))
    second = b.slice(wide, axis=1, start=1, size=17, step=2)
    h = {
        "transposed": lambda: b.tanh(b.permute(b.reshape(x, shape=(17, 12)), axes=(1, 0))),
        "every second": lambda: b.tanh(second),
        "second operand": lambda: b.mul(x, second),
    }[apart]()
    b.output(b.softmax(h, axis=-1) if norm == "softmax" else b.rms_norm(h, w, eps=1e-3), "y")
    p, rng = b.build(), np.random.default_rng(0)
    feeds = {p.path(n): rng.uniform(-2, 2, p.spec(n).sizes).astype("f4") for n in p.inputs()}
    plan = p.compile(shapes(feeds), executor="vm")
    np.testing.assert_allclose(plan(feeds)["y"].to_numpy(), p.run(feeds)["y"].to_numpy(), rtol=1e-5, atol=1e-5)
    assert plan.cuts[1] == "layout"


@pytest.mark.parametrize("cols", [1, 34, 1025])
@pytest.mark.parametrize("both", [False, True])
def test_weights_computed_in_a_group_are_read_from_its_tile(cols: int, both: bool) -> None:
    """Of one axis, its producer has the shape of a member, so that it is in a tile."""
    b = Builder("weighed")
    x, w = b.input("x", (cols,)), b.input("w", (cols,))
    h = b.tanh(x)
    b.output(b.neg(b.rms_norm(h, h if both else b.sigmoid(w), eps=1e-3)), "y")
    p, rng = b.build(), np.random.default_rng(0)
    feeds = {n: rng.uniform(-2, 2, cols).astype("f4") for n in ("x", "w")}
    plan = p.compile(shapes(feeds), executor="vm")
    assert plan.groups == (tuple(range(len(plan.instrs))),)
    for _ in range(2):
        np.testing.assert_allclose(plan(feeds)["y"].to_numpy(), p.run(feeds)["y"].to_numpy(), rtol=1e-5, atol=1e-5)
    assert_groups(plan)


def test_norm_fuses_with_the_sum_before_and_the_product_after() -> None:
    b = Builder("norm")
    x, y, w = b.input("x", (64, 1500)), b.input("y", (64, 1500)), b.input("w", (1500,))
    b.output(b.mul(b.rms_norm(b.add(x, y), w, eps=1e-6), y), "z")
    plan = b.build().compile(x=(64, 1500), y=(64, 1500), w=(1500,), executor="vm")
    assert plan.groups == ((0, 1, 2),)
    assert plan.buffers[plan.slots[plan.instrs[0].outs[0]].buffer].kind == "tile"
    assert plan.arena_bytes <= 3 * 64 * 1500 * 4 + 1500 * 4 + 64  # the inputs and the result


def test_rows_of_several_tiles_allow_fewer_inner_values() -> None:
    b = Builder("wide rows")
    x, w = b.input("x", (3, 4096)), b.input("w", (4096,))
    made = [b.tanh(b.mul(x, b.full_like(x, value=0.2 * i))) for i in range(7)]
    total = b.rms_norm(made[0], w, eps=1e-3)
    for other in made[1:]:
        total = b.add(total, other)
    b.output(total, "y")
    p = b.build()
    plan = p.compile(x=(3, 4096), w=(4096,), executor="vm")
    assert "registers" in plan.cuts.values()
    assert max(b.offset for b in plan.buffers if b.kind == "tile") < fuse.TILES // 4
    feeds = {
        "x": np.random.default_rng(0).normal(size=(3, 4096)).astype("f4"),
        "w": np.linspace(-1, 1, 4096, dtype="f4"),
    }
    truth = p.compile(shapes(feeds))(feeds)["y"].to_numpy()
    np.testing.assert_allclose(plan(feeds)["y"].to_numpy(), truth, rtol=1e-5, atol=1e-5)
