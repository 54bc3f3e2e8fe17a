"""Copies that a layout makes necessary of what depends on frozen weights alone: made when these are new, in no run."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from graphwright.array import Device, DType, NDArray, bfloat16, float32, from_numpy, int8
from graphwright.ops import OPS, compute
from graphwright.plan import CompileOptions, Executable, Plan, StalePlan, make_plan
from graphwright.plan.running import derived_weights as folding
from graphwright.program import Builder, Program
from graphwright.testing.oracle import assert_bits

RNG = np.random.default_rng(0)
IMAGE = {"x": RNG.normal(size=(2, 3, 5, 5)).astype("f4")}
KERNEL = RNG.normal(size=(2, 3, 3, 4)).astype("f4")


def image(b: Builder):
    return b.input("x", (2, 3, 5, 5))


def transposed() -> Program:
    """A convolution by a kernel stored channels-last, transposed in three steps, with a second reader."""
    b = Builder("transposed")
    w = b.param("w", KERNEL)
    for axes in ((3, 1, 2, 0), (0, 2, 1, 3), (0, 1, 3, 2)):
        w = b.permute(w, axes=axes)
    x = image(b)
    b.output(b.conv(x, w, name="first"), "y")
    b.output(b.conv(b.neg(x), w, name="second"), "z")
    return b.build()


def plan_of(p: Program, before: Plan | None = None, **options: object) -> Plan:
    return make_plan(
        p,
        {p.path(n): p.spec(n) for n in p.inputs()},
        options=CompileOptions(**{"freeze": True, **options}),
        before=before,
    )


def ops(plan: Plan) -> list[str]:
    return [i.op for i in plan.instrs]


def cast(host: np.ndarray, kind: DType) -> NDArray:
    return compute(OPS["cast"], [from_numpy(host.astype(np.float32))], {"dtype": kind})[0]


def agrees(plan: Plan, feeds: dict) -> Plan:
    """The plan, after it gave the bits of the run."""
    truth = plan.program.run(feeds)
    for name, value in Executable(plan, poison=True).run(feeds).items():
        assert_bits(value, truth[name], what=name)
    return plan


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> Counter:
    """How often folded values of each op were computed."""
    counts: Counter = Counter()

    def counted(op, *rest):
        counts[op.name] += 1
        return compute(op, *rest)

    monkeypatch.setattr(folding, "compute", counted)
    return counts


def test_stacked_transposes_of_a_frozen_weight_cost_no_instruction() -> None:
    p = transposed()
    assert ops(agrees(plan_of(p, freeze=False), IMAGE)).count("copy") == 1
    plan = agrees(plan_of(p), IMAGE)
    assert sorted(ops(plan)) == ["conv", "conv", "neg"]
    assert [i.op for i in plan.folds.values()] == ["copy"]
    text = "a row-major copy of 'w', f32[4, 3, 2, 3], 288 bytes, made once from frozen weights"
    assert f"operand 1: {text}" in plan.explain("first")
    assert f"operand 1: {text}" in plan.explain("second")
    assert text in plan.explain("w")
    assert "folded" not in plan.explain("w")


@pytest.mark.parametrize("device", ["cpu", "sim"])
@pytest.mark.usefixtures("sim")
def test_changed_weight_is_copied_once_for_all_executables(device: str, made: Counter) -> None:
    p = transposed()
    plan, other = p.compile(x=(2, 3, 5, 5), freeze=True, device=device), plan_of(p, device=Device(device))
    spaces = [plan.new_executable(), plan.new_executable(), Executable(other)]
    for k in range(3):
        truth = p.run(IMAGE)
        for _ in range(2):
            for space in spaces:
                for name, value in space.run(IMAGE).items():
                    np.testing.assert_array_equal(value.to_numpy(), truth[name].to_numpy())
        assert made == {"copy": k + 1}
        p.weights["w"].own().copy_from(from_numpy(KERNEL * np.float32(k + 2)))
    with p.edit("another array") as e:
        e.set_weight("w", from_numpy(-KERNEL))
    np.testing.assert_array_equal(spaces[0].run(IMAGE)["y"].to_numpy(), p.run(IMAGE)["y"].to_numpy())


def test_views_of_copies_and_of_other_folded_values(made: Counter) -> None:
    b = Builder()
    w = b.tanh(b.permute(b.param("w", KERNEL), axes=(3, 2, 0, 1), name="view"), name="bent")
    flat = b.reshape(b.permute(w, axes=(1, 0, 2, 3)), shape=(12, 6), name="flat")  # of a copy
    again = b.reshape(b.permute(flat, axes=(1, 0)), shape=(4, 3, 2, 3), name="again")  # of a copy of that
    b.output(b.conv(image(b), again, name="c"), "y")
    b.output(b.add(b.input("v", (12, 6)), b.exp(flat, name="grown")), "z")
    p, feeds = b.build(), {**IMAGE, "v": np.ones((12, 6), np.float32)}
    plan = agrees(plan_of(p), feeds)
    assert ops(plan) == ["conv", "add"]
    assert made == {"tanh": 1, "copy": 2, "exp": 1}
    assert "a row-major copy of 'bent'" in plan.explain("c")
    assert "folded" in plan.explain("grown")


@pytest.mark.parametrize("kind", [float32, bfloat16, int8], ids=str)
@pytest.mark.parametrize("device", ["cpu", "sim"])
@pytest.mark.usefixtures("sim")
def test_narrow_weights_are_copied_as_they_are(kind, device: str) -> None:
    host = RNG.integers(-9, 9, (4, 6))
    w = cast(host, kind)
    b = Builder()
    flat = b.reshape(b.permute(b.param("w", w, trainable=False), axes=(1, 0)), shape=(24,))
    b.output(b.mul(b.input("x", (24,), kind), flat), "y")
    p, feeds = b.build(), {"x": cast(np.arange(24) / 8, kind)}
    plan = p.compile(x=(24,), freeze=True, device=device)
    assert ops(plan) == ["mul"]
    assert {plan.buffers[b].nbytes for b in plan.folds} == {24 * kind.itemsize}
    assert plan(feeds)["y"].to_numpy("float64").tolist() == p.run(feeds)["y"].to_numpy("float64").tolist()


def test_copy_much_larger_than_its_weight_is_not_folded() -> None:
    b = Builder()
    wide = b.expand(b.param("w", np.ones((1, 3), np.float32)), shape=(1 << 14, 3))
    b.output(b.reshape(wide, shape=(3 << 14,)), "y")
    plan = agrees(plan_of(b.build()), {})
    assert ops(plan) == ["copy"]
    assert not plan.folds


def test_reader_of_a_value_too_large_to_fold_is_not_folded() -> None:
    b = Builder()
    large = b.matmul(
        b.param("column", np.arange(-9, 191, dtype="f4")[:, None]), b.param("row", np.ones((1, 200), "f4"))
    )
    b.output(b.add(b.input("x", (200,)), b.sum(b.relu(large), axes=(1,))), "y")
    plan = agrees(plan_of(b.build()), {"x": np.ones(200, "f4")})
    assert not plan.folds


# -- edits -------------------------------------------------------------------------------------------------------------
def test_unrelated_edit_makes_no_new_copy(made: Counter) -> None:
    p = transposed()
    plan = p.compile(x=(2, 3, 5, 5), freeze=True)
    plan(IMAGE)
    for k in range(3):
        with p.edit("beside") as e:
            e.insert(p.in_edges("second")[0], "relu")
        plan = p.compile(x=(2, 3, 5, 5), freeze=True)
        assert_bits(plan(IMAGE)["z"], p.run(IMAGE)["z"], what=str(k))
    assert made == {"copy": 1}


def test_changing_a_view_and_undoing_it_reuses_the_copy(made: Counter) -> None:
    b = Builder()
    w = b.permute(b.param("w", RNG.normal(size=(4, 4, 4, 3)).astype("f4")), axes=(0, 3, 2, 1), name="view")
    b.output(b.conv(image(b), w, name="c"), "y")
    p = b.build()
    first = p.compile(x=(2, 3, 5, 5), freeze=True)
    before = first(IMAGE)["y"]
    with p.edit("transposed otherwise") as e:
        e.set_attr("view", axes=(1, 3, 0, 2))
    second = p.compile(x=(2, 3, 5, 5), freeze=True)
    assert_bits(second(IMAGE)["y"], p.run(IMAGE)["y"])
    assert second.diff(first).changed == ("c",)
    assert second.hash != first.hash
    assert second.compact().hash == second.hash
    assert not second.diff(second.compact())
    assert_bits(Executable(first).run(IMAGE)["y"], before)  # a plan stays what it was
    p.undo()
    third = p.compile(x=(2, 3, 5, 5), freeze=True)
    assert_bits(third(IMAGE)["y"], before)
    assert third.hash == first.hash
    assert made["copy"] <= 4


def test_deleting_the_first_view_keeps_the_shared_copy() -> None:
    b = Builder()
    w, x = b.param("w", KERNEL), image(b)
    for name, source in (("1", x), ("2", b.neg(x))):
        shown = b.permute(w, axes=(3, 2, 0, 1), name=f"view{name}")
        b.output(b.conv(source, shown, name=f"c{name}"), f"y{name}")
    p = b.build()
    plans = {freeze: plan_of(p, freeze=freeze) for freeze in (False, True)}
    with p.edit("only the second") as e:
        e.set_outputs(y2=p.output("y2"))
        e.remove("c1")
        e.remove("view1")
    for freeze, old in plans.items():
        plan = agrees(plan_of(p, old, freeze=freeze), IMAGE)
        assert ("copy" in ops(plan)) is not freeze
        diff = plan.diff(old)
        assert diff.removed == (("c1",) if freeze else ("c1", "view1"))
        assert diff.changed == (() if freeze else ("c2",))  # a copy in the run is its first reader's
        assert not plan.diff(plan.compact())


def test_copies_of_written_weights_run_in_every_step() -> None:
    p = transposed()
    plan = plan_of(p)
    with p.edit("train it") as e:
        e.assign("w", e.add("neg", "w"))
    plan = plan_of(p, plan)
    assert "copy" in ops(plan)
    assert not plan.folds
    twin = p.fork()
    for _ in range(2):
        assert_bits(Executable(plan).run(IMAGE)["y"], twin.run(IMAGE)["y"])


# -- folded values of any kind -----------------------------------------------------------------------------------------
def test_weight_of_another_shape_raises() -> None:
    b = Builder()
    b.output(b.add(b.input("x", (3,)), b.tanh(b.param("w", np.ones(3, np.float32)))), "y")
    p, feed = b.build(), {"x": np.zeros(3, np.float32)}
    plan = plan_of(p)
    plan(feed)
    p.weights["w"].data = from_numpy(np.ones(2, np.float32))
    with pytest.raises(StalePlan, match="shape or dtype of a weight changed"):
        plan(feed)


def test_result_of_a_fast_rewrite_is_folded() -> None:
    b = Builder()
    x, w, v = (b.param(n, RNG.normal(size=s).astype("f4")) for n, s in (("x", (5, 3)), ("w", (4, 3)), ("v", (4,))))
    b.output(b.mul(b.input("z", (5, 4)), b.add(b.linear(x, w), v)), "y")
    p, feed = b.build(), {"z": np.ones((5, 4), np.float32)}
    plan = plan_of(p, rewrites="fast")
    assert ops(plan) == ["mul"]
    np.testing.assert_allclose(plan(feed)["y"].to_numpy(), p.run(feed)["y"].to_numpy(), rtol=1e-5, atol=1e-6)


def test_copy_after_a_conversion_has_the_wide_dtype() -> None:
    """The copy reads the narrow value, as a widening loses nothing; its result is wide all the same."""
    b = Builder("narrow")
    c = b.const("c", np.array([1 / 3, 2.5], np.float32))
    narrow = b.cast(c, dtype="bfloat16")
    wide = b.copy(b.cast(narrow, dtype="float32"))
    b.output(b.add(b.add(wide, c), b.input("x", (2,))), "y")
    b.output(b.copy(narrow), "z")
    plan = agrees(plan_of(b.build()), {"x": np.ones(2, "f4")})
    assert ops(plan).count("cast") == 0
