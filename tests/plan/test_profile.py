"""A profile has a row per instruction, the costs of the op table, and sums that add up."""

from __future__ import annotations

import numpy as np
import pytest

from graphwright import Builder
from graphwright.errors import UsageError
from graphwright.testing.simulated_device import SimBackend, SimDriver


def net():
    b = Builder("net")
    x = b.input("x", (8, 16))
    h = b.linear(x, b.param("a.w", np.ones((32, 16), np.float32)), name="a.linear")
    count = b.state("count", np.zeros(1, np.float32))
    b.assign(count, b.add(count, b.const("one", np.ones(1, np.float32)), name="b.grown"))
    b.output(b.tanh(h, name="a.tanh"), name="y")
    return b.build()


@pytest.mark.parametrize("executor", ["aten", "vm"])
def test_the_profile_has_a_row_per_instruction_with_its_costs(executor: str) -> None:
    p = net()
    plan = p.compile(x=(8, 16), executor=executor)
    found = plan.profile({"x": np.ones((8, 16), np.float32)}, n=3)
    assert [t.index for t in found.timings] == list(range(len(plan.instrs)))
    linear = next(t for t in found.timings if t.op == "linear")
    assert linear.path == "a.linear"
    assert linear.executor == executor
    assert linear.cost.flops == 2 * 8 * 32 * 16
    assert linear.cost.write == 4 * 8 * 32
    assert linear.cost.read == 4 * (8 * 16 + 32 * 16)
    paths = found.by_path(1)
    assert sorted(paths) == ["a", "b"]
    assert sum(seconds for seconds, _, _ in paths.values()) == pytest.approx(found.seconds)
    assert sum(flops for _, flops, _ in paths.values()) == sum(t.cost.flops for t in found.timings)
    assert min(t.seconds for t in found.timings) > 0
    assert found.wall > 0
    assert "a.linear" in str(found)
    assert "1 more" in found.text(most=len(plan.instrs) - 1)
    assert p.weights.array("count").item() == 7  # 1 to bind, 3 whole, 3 in parts


def test_profiled_runs_of_a_captured_plan_launch_its_graphs(sim: SimBackend) -> None:
    b = Builder("chain")
    x = b.input("x", (4,))
    for i in range(12):
        x = b.tanh(x, name=f"act{i}")
    b.output(x, "y")
    plan = b.build().compile(x=(4,), device="sim", executor="capture")
    assert isinstance(sim.driver, SimDriver)
    before = sim.driver.replays
    assert len(plan.profile({"x": np.ones(4, np.float32)}, n=4).timings) == len(plan.instrs)
    assert sim.driver.replays > before


def test_profiling_zero_runs_is_refused() -> None:
    with pytest.raises(UsageError, match="run"):
        net().compile(x=(8, 16)).profile({"x": np.ones((8, 16), np.float32)}, n=0)
