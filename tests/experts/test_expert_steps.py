"""Compiled steps after edits of experts: equal to a fresh compile bit for bit, with work for the edited expert only."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import graphwright as gw
from graphwright import experts as ex
from graphwright import nn
from graphwright.autograd import Tensor
from graphwright.optim import SGD, AdamW
from graphwright.plan.running.kernels import BoundKernels

DIM, TOKENS = 16, 24


class Net(nn.Module):
    """x + mixture(x)."""

    def __init__(self, experts: int) -> None:
        self.mlp = nn.MoE(DIM, 4, experts, 2, seed=0)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {"out": x + self.mlp(x)}


def loss(out: Tensor, target: Tensor) -> Tensor:
    return nn.functional.mse_loss(out, target)


def data() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    return {name: rng.normal(size=(TOKENS, DIM)).astype("f4") for name in ("x", "target")}


def mixture(experts: int) -> gw.Program:
    return gw.trace(Net(experts), data()["x"])


def cut(p: gw.Program, e: Any, unit: int) -> None:
    (layer,) = ex.routed_layers(p)
    e.cut_units(p.axes()[f"{layer}.experts"].units([unit]))


def add(p: gw.Program, e: Any, unit: int) -> None:
    (layer,) = ex.routed_layers(p)
    ex.add(e, layer, birth="open", seed=unit)


def clone(p: gw.Program, e: Any, unit: int) -> None:
    (layer,) = ex.routed_layers(p)
    ex.clone(e, layer, unit)


def nodes(step: Any) -> list[tuple[str, list[Any], list[Any]]]:
    p = step.program
    return sorted((p.op(n), list(map(repr, p.specs(n))), [p.spec(v).shape for v in p.operands(n)]) for n in p.nodes())


@pytest.mark.parametrize(("executor", "clip"), [("auto", None), ("aten", 0.1)])
def test_steps_after_edits_of_experts_equal_a_fresh_compile(executor: str, clip: float | None) -> None:
    p, feeds = mixture(20), data()
    options: dict[str, Any] = {"executor": executor, "clip": clip, "deterministic": True}
    step = gw.compile_step(p, loss, SGD(p, lr=0.1), feeds, **options)
    edits = [("cut", cut, 5), ("add", add, 0), ("cut the first", cut, 0), None, ("clone", clone, 7), None, None,
             ("cut the last", cut, 18), ("cut again", cut, 9), None]  # fmt: skip
    for edit in edits:
        if edit is None:
            p.undo()
        else:
            with p.edit(edit[0]) as e:
                edit[1](p, e, edit[2])
        twin = p.fork()
        fresh = gw.compile_step(twin, loss, SGD(twin, lr=0.1), feeds, **options)
        for _ in range(2):
            assert step(feeds).numpy().tobytes() == fresh(feeds).numpy().tobytes()
        held = [{key: v.data.tobytes() for key, v in q.weights.items()} for q in (p, twin)]
        assert held[0] == held[1]
        assert nodes(step) == nodes(fresh)


@pytest.mark.parametrize("do", [add, cut])
def test_a_step_after_an_edit_of_an_expert_updates_few_nodes(do: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []
    plain = BoundKernels._make_view
    monkeypatch.setattr(BoundKernels, "_make_view", lambda self, slot: made.append(slot) or plain(self, slot))
    for count in (64, 128):  # 193 and 385 params, and 772 and 1540 nodes that assign params and moments
        p, feeds = mixture(count), data()
        step: Any = gw.compile_step(p, loss, AdamW(p, lr=1e-3), feeds)
        step(feeds)
        before = step._made.mirror.visited
        with p.edit("one expert") as e:
            do(p, e, 5)
        made.clear()
        step(feeds)
        looked = step._made.mirror.visited - before
        assert looked < (30 if do is add else 4 * count)  # a cut shifts the gradients of later experts by one operand
        assert step.plan.patched.nodes < 250
        assert len(made) < 220


def test_an_edit_of_one_expert_leaves_the_updates_of_most_params_alone() -> None:
    p, feeds = mixture(64), data()
    step: Any = gw.compile_step(p, loss, AdamW(p, lr=1e-3), feeds)
    step(feeds)
    before = set(step.program.of_kind("adamw_step"))
    with p.edit("cut") as e:
        cut(p, e, 5)
    step(feeds)
    after = set(step.program.of_kind("adamw_step"))
    assert len(before) > 6
    assert len(before - after) <= 2
    assert len(after - before) <= 2
    sizes = [len(step.program.specs(n)) // 4 for n in after]
    assert sum(sizes) == len(list(p.parameters()))


@pytest.mark.parametrize("lazy", [False, True])
def test_moments_of_the_other_experts_stay_after_an_edit(lazy: bool) -> None:
    p, feeds = mixture(12), data()
    optimizer = AdamW(p, lr=1e-3, lazy=lazy)
    step = gw.compile_step(p, loss, optimizer, feeds)
    for _ in range(3):
        step(feeds)
    before = {v.name: optimizer.state_of(v).moments["m"].numpy().copy() for v in p.parameters()}
    with p.edit("cut") as e:
        cut(p, e, 5)
    assert step.plan is not None
    for v in p.parameters():
        kept = np.delete(before[v.name], 5, axis=0) if "router" in v.name else before[v.name]
        assert np.array_equal(optimizer.state_of(v).moments["m"].numpy(), kept)
