"""When gates begin to be trained, and what is held and priced from then on."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from joint_runs import joint

from graphwright import structure as st
from graphwright.structure.optimizer import WarmUp
from graphwright.testing.planted import Sources

pytestmark = pytest.mark.filterwarnings("ignore::graphwright.structure.NoTaskTerm")


def sources(**options: Any) -> tuple[Sources, st.JointOptimizer]:
    """Sigmoid gates on eight sources with weights of their own, three of which carry signal."""
    problem = Sources(1)
    with problem.program.edit("gates") as e:
        e.gate(list(problem.program.in_edges("total")), "sigmoid")
    view = st.DifferentiableGraph(problem.program)
    penalties = options.pop("penalties", [st.sparsity(5.0, relative=True)])
    return problem, st.JointOptimizer(view, "loss", penalties, **{"params": 0.01, "gates": 0.1, **options})


def test_warmup_trains_weights_alone() -> None:
    problem, opt = joint(warmup=3)
    before, w = problem.program.gates().logits(), problem.program.weights["w"].numpy().copy()
    for _ in range(3):
        opt.step(problem.batch())
    np.testing.assert_array_equal(problem.program.gates().logits(), before)
    assert not np.array_equal(problem.program.weights["w"].numpy(), w)
    opt.step(problem.batch())
    assert not np.array_equal(problem.program.gates().logits(), before)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, 0),
        ({"steps": 100}, 50),
        ({"steps": 25}, 5),  # the logits begin at 1 and need 20 steps at 0.1
        ({"steps": 100, "mode": "gates"}, 0),
        ({"steps": 100, "mode": "bilevel"}, 50),
        ({"steps": 100, "warmup": 7}, 7),
    ],
)
def test_the_warmup_takes_at_most_half_of_the_run(options: dict, expected: int) -> None:
    assert joint(**options)[1].warmup == expected


@pytest.mark.parametrize(("losses", "until"), [
    ([0.9**i for i in range(100)], 60),  # it falls by two thirds in a window of ten
    ([1.0] * 100, 20),
    ([0.9**i for i in range(15)] + [0.2] * 85, 33),  # windows from 13 on
    ([-(1.1**i) for i in range(100)], 60),
])  # fmt: skip
def test_gates_start_when_the_loss_has_levelled_off(losses: list[float], until: int) -> None:
    wait = WarmUp(60, True, 100)
    for step, loss in enumerate(losses):
        wait.saw(step, loss)
    assert wait.until == until
    assert not wait.losses


def test_a_budget_falls_from_the_end_of_the_warmup() -> None:
    limit = st.budget(0.5, steps=10)
    problem, opt = joint(penalties=[limit], warmup=4)
    found = [opt.step(problem.batch()).penalties["budget"] for _ in range(6)]
    assert found[:5] == pytest.approx([found[0]] * 5)  # the target is 1, and all gates are where they began
    assert found[5] < found[4]  # 0.73 of them are open, as long as the target is above


def test_a_run_can_be_resumed_in_the_warmup(tmp_path) -> None:
    first, opt = sources(steps=45)
    batches = [first.batch(8) for _ in range(45)]
    for step, batch in enumerate(batches):
        if step == 15:
            opt.save(tmp_path / "half")
        opt.step(batch)
    other, again = sources(steps=45)
    again.load(tmp_path / "half")
    for batch in batches[15:]:
        again.step(batch)
    assert again.warmup == opt.warmup > 15
    assert other.program.hash() == first.program.hash()
    for name, v in again.variables().items():
        np.testing.assert_array_equal(v.numpy(), opt.variables()[name].numpy(), err_msg=name)


def test_a_relative_penalty_is_measured_in_the_gain_of_gates() -> None:
    problem, opt = sources(warmup=1)
    p, batches = problem.program, [problem.batch(16) for _ in range(2)]
    with p.edit("weights that have learned") as e:
        for j in range(8):
            e.set_weight(f"w{j}", np.float32(problem.maps.get(j, np.zeros((4, 6)))))
    assert opt.step(batches[0]).penalties["sparsity"] == 0  # nothing has a price while gates wait
    w = np.stack([p.weights[f"w{j}"].numpy("float64") for j in range(8)])
    x, y = (batches[1][n].astype(float) for n in "xy")
    gained = (y**2).mean() - ((np.einsum("bjw,jow->bo", x, w) - y) ** 2).mean()
    assert gained > 0
    wanted = 5 * gained / (1 + np.exp(-1))
    assert opt.step(batches[1]).penalties["sparsity"] == pytest.approx(wanted, rel=1e-5)


def test_weights_before_a_sigmoid_gate_do_not_compensate_its_scale() -> None:
    problem, opt = sources(steps=40, penalties=[st.sparsity(1.0)])
    p = problem.program

    def norm(j: int) -> float:
        return float(np.linalg.norm(p.weights[f"w{j}"].numpy("float64")))

    while opt.steps < opt.warmup:
        opt.step(problem.batch())
    held = [norm(j) for j in range(8)]
    for _ in range(10):
        opt.step(problem.batch())
    assert all(norm(j) <= held[j] * (1 + 1e-6) for j in range(8))
    assert max(norm(j) / held[j] for j in problem.maps) > 1 - 1e-6, "a price makes weights grow that carry signal"
