"""Weights of bfloat16 that products read as they are stored: where the rewrite fires, where not, and after edits."""

from __future__ import annotations

import numpy as np
import pytest

from graphwright.array import NDArray, bfloat16, float32, from_numpy
from graphwright.array.vm import vector
from graphwright.plan import CompileOptions, Executable, Plan, make_plan
from graphwright.plan.planning import lowering as executor
from graphwright.program import Builder, Program

RNG = np.random.default_rng(0)
X = {"x": RNG.normal(size=(3, 6)).astype("f4")}


def weight(rows: int = 5, columns: int = 6) -> NDArray:
    """Normal numbers as bfloat16, cut off."""
    bits = RNG.normal(size=(rows, columns)).astype("f4").view("u4") >> 16
    return from_numpy(bits.astype("u2"), bits=bfloat16)


def product() -> Program:
    b = Builder()
    w = b.cast(b.param("w", weight()), dtype=float32, name="wide")
    b.output(b.linear(b.input("x", ("B", 6)), w, name="y"), "y")
    return b.build()


def plan_of(p: Program, before: Plan | None = None, **options: object) -> Plan:
    specs = {name: from_numpy(x).spec for name, x in X.items()}
    return make_plan(p, specs, options=CompileOptions(**{"freeze": True, "executor": "vm", **options}), before=before)


def agrees(plan: Plan) -> Plan:
    """The plan, after it gave what the program gives on ATen."""
    truth = plan.program.run(X)
    for name, value in Executable(plan, poison=True).run(X).items():
        np.testing.assert_allclose(value.to_numpy(), truth[name].to_numpy(), rtol=1e-5, atol=1e-5)
    return plan


def narrow(plan: Plan) -> int:
    return [use.rule for use in plan.rewrites].count("narrow weight")


@pytest.mark.parametrize("rows", [1, 3, 4, 5, 40])
def test_no_widened_copy_is_made(rows: int) -> None:
    p = product()
    plan = p.compile(x=(rows, 6), freeze=True, executor="vm")
    assert narrow(plan) == 1
    assert not plan.folds
    assert [i.op for i in plan.instrs] == ["linear"]
    x = RNG.normal(size=(rows, 6)).astype("f4")
    truth = p.run({"x": x})["y"].to_numpy()
    np.testing.assert_allclose(Executable(plan).run({"x": x})["y"].to_numpy(), truth, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("options", [{"freeze": False}, {"executor": "aten"}, {"rewrites": "none"}])
def test_narrow_weights_need_a_frozen_vm_plan_with_rewrites(options: dict) -> None:
    assert not narrow(agrees(plan_of(product(), **options)))


def test_a_new_weight_is_read_without_a_new_plan() -> None:
    p = product()
    space = Executable(agrees(plan_of(p)))
    space.run(X)
    with p.edit("other") as e:
        e.set_weight("w", weight())
    np.testing.assert_allclose(space.run(X)["y"].to_numpy(), p.run(X)["y"].to_numpy(), rtol=1e-5, atol=1e-5)


def test_a_widened_copy_remains_for_other_readers() -> None:
    b = Builder()
    w = b.cast(b.param("w", weight()), dtype=float32)
    x = b.input("x", (3, 6))
    b.output(b.linear(x, w), "y")
    b.output(b.add(x, b.slice(w, axis=0, start=0, size=3)), "z")
    plan = agrees(plan_of(b.build()))
    assert narrow(plan) == 1
    assert plan.folds


def test_values_computed_from_weights_alone_are_still_folded() -> None:
    b = Builder()
    w = b.cast(b.param("w", weight()), dtype=float32)
    made = b.linear(b.param("v", RNG.normal(size=(3, 6)).astype("f4")), w)
    b.output(b.add(made, b.linear(b.input("x", (3, 6)), w)), "y")
    plan = agrees(plan_of(b.build()))
    assert narrow(plan) == 1
    assert len(plan.folds) == 1


def test_non_contiguous_operands_are_copied() -> None:
    b = Builder()
    w = b.cast(b.param("w", weight(4, 3)), dtype=float32)
    transposed = b.permute(b.input("x", (3, 6)), axes=(1, 0))
    b.output(
        b.linear(transposed, w, b.slice(b.param("b", np.arange(8, dtype="f4")), axis=0, start=0, size=4, step=2)), "y"
    )
    plan = agrees(plan_of(b.build()))
    assert narrow(plan) == 1
    assert "copy" in [i.op for i in plan.instrs]


def test_a_weight_written_by_the_step_is_read_before_the_write() -> None:
    b = Builder()
    w = b.param("w", weight())
    b.output(b.linear(b.input("x", (3, 6)), b.cast(w, dtype=float32)), "y")
    b.assign(w, b.neg(w))
    plan = plan_of(b.build())
    assert narrow(plan) == 1
    space = Executable(plan)
    first, second = (space.run(X)["y"].to_numpy().copy() for _ in range(2))
    assert np.abs(first).min() > 0
    np.testing.assert_array_equal(second, -first)


def test_patched_plans_follow_an_edited_conversion() -> None:
    p = product()
    first = agrees(plan_of(p))
    with p.edit("through a function") as e:
        e.insert(p.in_edges("wide")[0], "tanh", name="bent")
    second = agrees(plan_of(p, first))
    assert not narrow(second)
    p.undo()
    third = agrees(plan_of(p, second))
    assert narrow(third) == 1
    assert not third.folds


def test_narrow_weight_of_any_size_runs_on_the_vm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(executor, "FLOPS_LIMIT", 0)
    monkeypatch.setattr(executor, "_DENSE", 0)
    monkeypatch.setattr(vector, "WIDE", False)
    p = product()
    x = RNG.normal(size=(40, 6)).astype("f4")
    for freeze, kind in ((True, "vm"), (False, "aten")):
        plan = p.compile(x=(40, 6), freeze=freeze, executor="auto")
        assert [s.kind for s in plan.segments][-1] == kind
        np.testing.assert_allclose(plan(x=x)["y"].to_numpy(), p.run({"x": x})["y"].to_numpy(), rtol=1e-5, atol=1e-5)
