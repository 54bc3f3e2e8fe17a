"""Plans that run in parts: any cut gives the bits of the whole, on both executors, also under poison."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from random_programs import programs

from graphwright.errors import ComputeError, UsageError
from graphwright.plan import Executable, Plan
from graphwright.program import Builder, FeedError
from graphwright.testing.oracle import assert_bits


def inputs_of(plan: Plan) -> dict[str, int]:
    return {plan.buffers[plan.slots[s].buffer].key: s for s in plan.input_slots}


@settings(max_examples=20, deadline=None)
@given(programs())
def test_running_a_plan_in_two_parts_equals_running_it_whole(given_program) -> None:
    p, feeds = given_program
    shapes = {name: a.shape for name, a in feeds.items()}
    for executor in ("aten", "vm"):
        plan = p.compile(shapes, executor=executor)
        whole = Executable(plan).run(feeds)
        for poison in (False, True):
            space = Executable(plan, poison=poison)
            for cut in range(len(plan.instrs) + 1):
                for name, slot in inputs_of(plan).items():
                    space.set(slot, feeds[name])
                assert space.run(plan[:cut]) == {}
                space.run(plan[cut:])
                for name, slot in plan.outputs.items():
                    assert_bits(space.value(slot), whole[name])


def net():
    b = Builder("net")
    x = b.input("x", (3,))
    b.output(b.exp(b.tanh(x, name="t"), name="e"), "y")
    return b.build()


def test_a_value_set_between_two_parts_is_read_by_the_second() -> None:
    plan = net().compile(x=(3,), rewrites="none")
    space = Executable(plan)
    space.set(plan.input_slots[0], np.ones(3, np.float32))
    space.run(plan[:1])
    (slot,) = plan.instrs[0].outs
    np.testing.assert_allclose(space.value(slot).to_numpy(), np.tanh(np.ones(3)), rtol=1e-6)
    space.set(slot, np.zeros(3, np.float32))
    space.run(plan[1:2])
    assert space.value(plan.outputs["y"]).to_numpy().tolist() == [1, 1, 1]


@pytest.mark.parametrize("bad", [slice(0, 3), slice(2, 1), slice(-1, 2), slice(0, 2, 2), slice(0, "1"), 0])
def test_instruction_ranges_out_of_bounds_are_refused(bad: Any) -> None:
    with pytest.raises(UsageError, match="invalid slice"):
        net().compile(x=(3,))[bad]


def test_invalid_slots_and_values_are_refused() -> None:
    plan = net().compile(x=(3,))
    space = Executable(plan)
    for slot in (-1, len(plan.slots)):
        with pytest.raises(UsageError, match="slot"):
            space.set(slot, np.ones(3, np.float32))
    for value in (np.ones(4, np.float32), np.ones(3)):
        with pytest.raises(FeedError, match="slot 0"):
            space.set(0, value)
    b = Builder()
    b.output(b.neg(b.expand(b.input("x", (3,)), shape=(2, 3))), "y")
    wide = b.build().compile(x=(3,))
    with pytest.raises(UsageError, match="share memory"):
        Executable(wide).set(wide.instrs[0].ins[0], np.ones((2, 3), np.float32))
    with pytest.raises(UsageError, match="different plan"):
        space.run(net().compile(x=(3,))[:])


def test_an_error_in_a_part_names_its_node() -> None:
    b = Builder("loss")
    loss, _ = b.cross_entropy(b.input("z", (1, 3)), b.const("t", np.array([7])), name="ce")
    b.output(loss, "y")
    plan = b.build().compile(z=(1, 3))
    space = Executable(plan)
    space.set(plan.input_slots[0], np.zeros((1, 3), np.float32))
    with pytest.raises(ComputeError, match="ce"):
        space.run(plan[:])
