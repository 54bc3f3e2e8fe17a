"""Plans within a budget of bytes: the bits of a plan without one in an arena that fits, or an error that says why."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from random_programs import programs

import graphwright as gw
from graphwright import nn, optim
from graphwright.ops import get
from graphwright.plan import BudgetImpossible, Executable, Plan
from graphwright.program import Builder, Program
from graphwright.testing.oracle import assert_bits


def tower(layers: int = 12, width: int = 64) -> Program:
    """Layers of equal cost: backward reads the result of each."""
    rng = np.random.default_rng(0)
    b = Builder("tower")
    h = b.input("x", ("B", width))
    for k in range(layers):
        h = b.tanh(b.linear(h, b.param(f"w{k}", (rng.normal(size=(width, width)) / 8).astype("f4"))), name=f"h{k}")
    b.output(b.mean(h, axes=(0, 1), name="loss"), "loss")
    return b.build().grad("loss", ["x"], {"B": 256})


def flops(plan: Plan) -> int:
    specs = [tuple([plan.slots[s].spec for s in side] for side in (i.ins, i.outs)) for i in plan.instrs]
    return sum(get(i.op).cost(ins, outs, i.attrs).flops for i, (ins, outs) in zip(plan.instrs, specs, strict=True))


@given(programs(most=30), st.floats(0.3, 1.0))
def test_every_memory_budget_is_met_with_equal_bits_or_refused(case, share: float) -> None:
    p, feeds = case
    shapes = {name: a.shape for name, a in feeds.items()}
    plain = p.compile(shapes, deterministic=True)
    budget = int(share * plain.arena_bytes)
    truth = plain(feeds)
    plan = best = None
    try:
        plan = p.compile(shapes, remat=budget, deterministic=True)
    except BudgetImpossible as error:
        best = error.best
    if plan is None:
        assert best is not None
        assert budget < best <= plain.arena_bytes
        return
    assert plan.arena_bytes <= budget
    space = Executable(plan, poison=True)
    for name, value in space.run(feeds).items():
        assert_bits(value, truth[name], what=name)


def test_half_the_memory_of_a_tower_costs_less_than_a_second_forward() -> None:
    g = tower()
    plain = g.compile(x=(256, 64), deterministic=True)
    x = np.random.default_rng(1).normal(size=(256, 64)).astype("f4")
    truth = plain(x=x)["grad.x"].tobytes()
    sizes = []
    for share in (0.8, 0.6, 0.5):
        plan = g.compile(x=(256, 64), remat=int(share * plain.arena_bytes), deterministic=True)
        assert plan.arena_bytes <= share * plain.arena_bytes
        assert plan(x=x)["grad.x"].tobytes() == truth
        again = [f for f in plan.rewrites if f.rule == "recomputed"]
        assert again
        assert len(plan.instrs) > len(plain.instrs)
        sizes.append(flops(plan))
    assert flops(plain) < sizes[0] <= sizes[1] <= sizes[2] < 1.5 * flops(plain)
    assert g.compile(x=(256, 64), remat=plain.arena_bytes, deterministic=True).hash == plain.hash


def test_impossible_budget_reports_the_best_arena() -> None:
    g = tower(4)
    with pytest.raises(BudgetImpossible, match="bytes at best") as caught:
        g.compile(x=(256, 64), remat=1000, deterministic=True)
    assert 0 < caught.value.best < g.compile(x=(256, 64), deterministic=True).arena_bytes


def test_a_training_step_within_a_budget_gives_equal_weights() -> None:
    found: list[Any] = []
    x = np.random.default_rng(0).normal(size=(256, 16)).astype("f4")
    for share in (None, 0.7):
        gw.manual_seed(0)
        model = nn.Sequential(*(m for _ in range(8) for m in (nn.Linear(16, 16), nn.Tanh(), nn.Dropout(0.1))))
        opt = optim.AdamW(model, lr=0.01)

        def step(x: Any, model: Any = model, opt: Any = opt) -> Any:
            opt.zero_grad()
            loss = (model(x) ** 2.0).mean()
            loss.backward()
            opt.step()
            return loss

        run = gw.compile(step, executor="aten", remat=None if share is None else int(share * found[0]))
        losses = [run(x).numpy().tobytes() for _ in range(3)]
        arena = run.plan(x).arena_bytes
        found += [arena, [*losses, *(v.data.tobytes() for v in model.variables().values())]]
    assert found[2] <= 0.7 * found[0]
    assert found[3] == found[1]


def test_a_budgeted_plan_follows_edits_and_new_weights() -> None:
    """The program that is planned is a derived one, over the same variables."""
    b = Builder("edited")
    h = b.input("x", (256, 64))
    for k in range(8):
        h = b.tanh(b.linear(h, b.param(f"w{k}", np.eye(64, dtype=np.float32))), name=f"h{k}")
    b.output(b.mean(b.mul(h, h), axes=(0, 1), name="loss"), "loss")
    p = b.build().grad("loss", ["x"]).fork()
    x = np.random.default_rng(1).normal(size=(256, 64)).astype("f4")
    budget = int(0.7 * p.compile(x=(256, 64), deterministic=True).arena_bytes)
    plan = p.compile(x=(256, 64), remat=budget, deterministic=True)
    before = plan(x=x)["grad.x"].tobytes()
    assert before == p.run(x=x)["grad.x"].tobytes()
    p.weights["w3"].data = gw.array.from_numpy(2 * np.eye(64, dtype=np.float32))
    assert plan(x=x)["grad.x"].tobytes() == p.run(x=x)["grad.x"].tobytes() != before
    with p.edit("another activation") as e:
        e.insert(p.out_edges(p.node("h4"))[0], "neg")
    assert not plan.fresh
    new = p.compile(x=(256, 64), remat=budget, deterministic=True)
    assert new is not plan
    assert new.arena_bytes <= budget
    assert new(x=x)["grad.x"].tobytes() == p.run(x=x)["grad.x"].tobytes()
