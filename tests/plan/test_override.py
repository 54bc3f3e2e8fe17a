"""Functions that stand for a plan or a segment: inside the block only, checked against what they stand for."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from random_programs import programs

from graphwright.array import NDArray, from_numpy
from graphwright.errors import ComputeError, UsageError
from graphwright.plan import Executable, OverrideFailed, OverrideMismatch, ParallelExecutable, Plan, StepTorn
from graphwright.program import Builder, Program
from graphwright.testing.oracle import assert_bits

Slots = Mapping[int, NDArray]


def mlp() -> tuple[Program, dict[str, np.ndarray]]:
    rng = np.random.default_rng(0)
    b = Builder("mlp")
    x, w = b.input("x", (3, 4)), b.param("w", rng.normal(size=(4, 4)).astype("f4"))
    total = b.state("total", np.zeros((3, 4), np.float32))
    h = b.tanh(b.matmul(x, w))
    b.assign(total, b.add(total, h))
    b.output(b.mul(h, h), "y")
    return b.build(), {"x": rng.normal(size=(3, 4)).astype("f4")}


def manual_kernel(plan: Plan, wrong: float = 1.0) -> Any:
    """The whole of `mlp` in numpy."""
    x, w = (next(s.index for s in plan.slots if plan.buffers[s.buffer].key == k) for k in "xw")
    (y,) = plan.output_slots

    def kernel(ins: Slots, outs: Slots) -> None:
        h = np.tanh(ins[x].to_numpy() @ ins[w].to_numpy())
        (total,) = [s for s in outs if s != y]
        before = next(s for s in ins if plan.buffers[plan.slots[s].buffer].key == "total")
        outs[y].copy_from(from_numpy(wrong * h * h))
        outs[total].copy_from(from_numpy(ins[before].to_numpy() + h))

    return kernel


def test_an_override_is_active_inside_its_block_only() -> None:
    p, feeds = mlp()
    plan = p.compile(x=(3, 4))
    calls: list[int] = []
    kernel = manual_kernel(plan)

    def counted(ins: Slots, outs: Slots) -> None:
        calls.append(1)
        kernel(ins, outs)

    other = p.fork()
    for step in range(6):
        expected = other.run(feeds)["y"].to_numpy()
        if step in (2, 4):
            with plan.override(counted):
                got = plan(feeds)["y"].to_numpy()
        else:
            got = plan(feeds)["y"].to_numpy()
        assert len(calls) == (0, 0, 1, 1, 2, 2)[step]
        np.testing.assert_allclose(got, expected, rtol=1e-6)
        np.testing.assert_allclose(
            p.weights["total"].data.to_numpy(), other.weights["total"].data.to_numpy(), rtol=1e-6
        )


def test_error_in_an_override_restores_the_plan_and_reports_torn_states() -> None:
    p, feeds = mlp()
    plan = p.compile(x=(3, 4))

    def broken(ins: Slots, outs: Slots) -> None:
        raise ValueError("no such kernel")

    with pytest.raises(StepTorn, match="no such kernel") as caught, plan.override(broken):
        plan(feeds)
    assert caught.value.keys == ("total",)
    b = Builder()
    b.output(b.tanh(b.input("x", (2,))), "y")
    plain = b.build().compile(x=(2,))
    with pytest.raises(OverrideFailed, match="broken failed"), plain.override(broken):
        plain(x=np.ones(2, np.float32))
    assert_bits(plain(x=np.ones(2, np.float32))["y"], from_numpy(np.tanh(np.ones(2, np.float32))))
    assert not plain.overrides
    with pytest.raises(UsageError, match="segment"), plan.override(broken, 7):
        pass


def test_the_check_catches_a_wrong_function_and_changes_nothing() -> None:
    p, feeds = mlp()
    plan = p.compile(x=(3, 4))
    before = p.weights["total"].data.tobytes()
    with plan.override(manual_kernel(plan)):
        plan.check_override(feeds, rtol=1e-5)
    with plan.override(manual_kernel(plan, wrong=1.001)), pytest.raises(OverrideMismatch, match="y: off by") as caught:
        plan.check_override(feeds, rtol=1e-5)
    assert "total" not in str(caught.value)
    with plan.override(lambda ins, outs: None), pytest.raises(OverrideMismatch, match="total"):
        plan.check_override(feeds)
    with pytest.raises(UsageError, match="no override"):
        plan.check_override(feeds)
    assert p.weights["total"].data.tobytes() == before


def expanded_over() -> tuple[Program, dict[str, np.ndarray]]:
    """What the segment reads is an expansion, in whose memory its result is stored."""
    b = Builder()
    x = b.expand(b.input("x", (4, 4)), shape=(2, 4, 4))
    b.output(b.sum(b.matmul(x, x), axes=(0,), keepdims=False), "y")
    return b.build(), {"x": np.linspace(-1, 1, 16, dtype=np.float32).reshape(4, 4)}


@given(programs(most=20))
@example(expanded_over())
def test_any_segment_can_be_replaced_by_itself(case) -> None:
    """The function runs the segment's own instructions in another executable: it gets all that it needs, no more."""
    p, feeds = case
    plan = p.compile({n: a.shape for n, a in feeds.items()}, executor="vm")
    truth = Executable(plan).run(feeds)
    outer: list[Executable] = []
    for k, segment in enumerate(plan.segments):
        inner = Executable(plan)
        inner.feed({n: np.zeros_like(a) for n, a in feeds.items()})

        def itself(ins: Slots, outs: Slots, inner: Executable = inner, segment: Any = segment) -> None:
            for s, array in ins.items():
                slot = plan.slots[s]
                if plan.buffers[slot.buffer].kind not in ("temp", "input"):
                    continue
                if 0 in slot.layout.strides:  # what it was handed may be a copy, with strides of its own
                    inner.set(slot.base, outer[0].value(slot.base))
                else:
                    inner.set(s, array)
            inner.run(plan[segment.start : segment.stop])
            for s, array in outs.items():
                array.copy_from(inner.value(s))

        with plan.override(itself, k):
            for kind in (Executable, ParallelExecutable):
                outer[:] = [kind(plan)]
                for name, value in outer[0].run(feeds).items():
                    assert_bits(value, truth[name], what=name)


def test_a_second_thread_waits_for_the_executable() -> None:
    p, feeds = mlp()
    plan = p.compile(x=(3, 4))
    inside, leave = threading.Event(), threading.Event()

    def waits(ins: Slots, outs: Slots) -> None:
        inside.set()
        leave.wait(5)

    space = Executable(plan)
    with plan.override(waits):
        thread = threading.Thread(target=space.run, args=(feeds,))
        thread.start()
        assert inside.wait(5)
        second = threading.Thread(target=space.run, args=(feeds,))
        second.start()
        second.join(0.1)
        assert second.is_alive()
        leave.set()
        thread.join()
        second.join()
    assert space.run(feeds)["y"].shape == (3, 4)


def test_error_of_an_instruction_outside_the_override_names_its_node() -> None:
    b = Builder("lookup")
    b.output(b.neg(b.embedding(b.param("table", np.ones((3, 2), np.float32)), b.input("ids", (1,), "int64"))), "y")
    plan = b.build().compile(ids=(1,), executor="aten")
    with pytest.raises(ComputeError, match="embedding"):
        plan(ids=np.array([5]))


def test_an_override_stays_with_its_plan_after_an_edit() -> None:
    b = Builder("edited")
    b.output(b.tanh(b.neg(b.input("x", (5,)), name="first"), name="second"), "y")
    p = b.build()
    x = np.linspace(-1, 1, 5, dtype=np.float32)
    old = p.compile(x=(5,))
    (y,) = old.output_slots
    with old.override(lambda ins, outs: outs[y].copy_from(from_numpy(np.zeros(5, np.float32)))):
        old(x=x)
        with p.edit("one more") as e:
            e.insert(p.out_edges(p.node("first"))[0], "neg")
        new = p.compile(x=(5,))
        assert new.buffer_layout.builder is old.buffer_layout.builder  # it has the executable, but not the override
        assert new(x=x)["y"].tobytes() == p.run(x=x)["y"].tobytes()
        assert not old(x=x)["y"].to_numpy().any()
    assert old(x=x)["y"].to_numpy().any()
    assert new(x=x)["y"].tobytes() == p.run(x=x)["y"].tobytes()
