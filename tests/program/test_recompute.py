"""Gradient checkpoints: the same bits, each inner operation once more, less memory; masks and statistics as before."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import graphwright as gw
from graphwright import nn, optim
from graphwright.errors import UsageError
from graphwright.program import Builder, Program
from graphwright.testing.oracle import assert_bits


def deep(blocks: int = 8, width: int = 32) -> tuple[Program, dict[str, np.ndarray]]:
    """Residual blocks whose input is read twice."""
    rng = np.random.default_rng(0)
    b = Builder("deep")
    h = b.input("x", ("B", width))
    for k in range(blocks):
        up = b.param(f"b{k}.up.w", (rng.normal(size=(4 * width, width)) / width).astype("f4"))
        down = b.param(f"b{k}.down.w", (rng.normal(size=(width, 4 * width)) / width).astype("f4"))
        u = b.linear(h, up, name=f"b{k}.up")
        act = b.mul(b.tanh(u, name=f"b{k}.tanh"), b.sigmoid(u, name=f"b{k}.gate"), name=f"b{k}.mul")
        h = b.add(h, b.linear(act, down, name=f"b{k}.down"), name=f"b{k}.out")
    b.output(b.mean(h, axes=(0, 1), keepdims=False, name="loss"), "loss")
    return b.build(), {"x": rng.normal(size=(64, width)).astype("f4")}


def blocks_of(p: Program, blocks: int = 8) -> list[list[Any]]:
    return [[n for n in p.nodes() if p.path(n).startswith(f"b{k}.") and p.op(n) != "param"] for k in range(blocks)]


def gradients(p: Program, feeds: dict[str, np.ndarray]) -> tuple[dict[str, Any], Any, Program]:
    g = p.grad("loss", ["x", *(p.path(n) for n in p.params())], {"B": len(feeds["x"])})
    plan = g.compile({n: a.shape for n, a in feeds.items()}, deterministic=True)
    return plan(feeds), plan, g


def test_recomputation_keeps_the_bits_and_lowers_the_peak() -> None:
    p, feeds = deep()
    truth, plain, _ = gradients(p, feeds)
    for group in blocks_of(p):
        p.checkpoint(group)
    found, plan, g = gradients(p, feeds)
    for name, value in truth.items():
        assert_bits(found[name], value, what=name)
        assert_bits(g.run(feeds)[name], value, what=name)
    assert plan.arena_bytes < 0.55 * plain.arena_bytes
    assert plan.lower_bound < 0.5 * plain.lower_bound
    ran, before = (Counter(i.op for i in q.instrs) for q in (plan, plain))
    assert ran - before == {"linear": 8, "tanh": 8, "sigmoid": 8, "mul": 8}  # each up and its activation once more
    assert not before - ran
    p.checkpoint(None)
    assert gradients(p, feeds)[1].hash == plain.hash


def test_without_the_barrier_clones_are_merged_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """The red twin: clones that are merged with what they are clones of."""
    from dataclasses import replace

    from graphwright.ops import OPS, Traits

    p, feeds = deep()
    plain = gradients(p, feeds)[1]
    for group in blocks_of(p):
        p.checkpoint(group)
    monkeypatch.setitem(OPS, "recall", replace(OPS["recall"], traits=Traits()))
    assert gradients(p, feeds)[1].arena_bytes == plain.arena_bytes


@settings(max_examples=30)
@given(st.data())
def test_any_checkpoint_marks_keep_the_bits(data) -> None:
    p, feeds = deep(4, 8)
    truth = gradients(p, feeds)[0]
    ops = [n for n in p.nodes() if p.op(n) not in ("param", "input")]
    group_of = data.draw(st.lists(st.integers(0, 3), min_size=len(ops), max_size=len(ops)))
    for k in range(3):
        nodes = [n for n, g in zip(ops, group_of, strict=True) if g == k]
        if nodes:
            p.checkpoint(nodes)
    found, plan, _ = gradients(p, feeds)
    for name, value in truth.items():
        assert_bits(found[name], value, what=name)
    names = [plan.program.path(n) for n in plan.program.nodes()]
    assert len(names) == len({*names})
    clones = [n for n in names if n.startswith("recompute.") and plan.program.op(plan.program.node(n)) != "recall"]
    assert len(clones) <= len(ops)  # each at most once


class Block(nn.Module):
    """Statistics, a mask and a parameter that two layers share."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(6, 6)
        self.norm = nn.BatchNorm1d(6)
        self.drop = nn.Dropout(0.5)

    def forward(self, x: Any) -> Any:
        return self.drop(self.norm(self.fc(self.fc(x).tanh())))


def trained(marked: bool) -> tuple[list[bytes], Any]:
    gw.manual_seed(0)
    block = Block()
    x = np.random.default_rng(0).normal(size=(16, 6)).astype("f4")
    p = gw.trace(block, x)
    if marked:
        p.checkpoint([n for n in p.nodes() if p.op(n) not in ("input", "param", "const", "state", "assign")])
    gw.manual_seed(5)
    opt = optim.SGD(p.parameters(), lr=0.1)

    def step(x: Any) -> Any:
        opt.zero_grad()
        loss = (p(x=x)["out"] ** 2.0).mean()
        loss.backward()
        opt.step()
        return loss

    run = gw.compile(step, executor="aten")
    found = [run(x).numpy().tobytes() for _ in range(3)]
    return found + [v.data.tobytes() for v in p.weights.values()], run.plan(x)


def test_recomputation_keeps_dropout_masks_and_statistics() -> None:
    (truth, plain), (found, plan) = trained(False), trained(True)
    assert found == truth
    ran, before = (Counter(i.op for i in q.instrs) for q in (plan, plain))
    assert ran["linear"] > before["linear"]
    assert len(plan.program.assigns()) == len(plain.program.assigns())
    streams = [plan.program.attrs(n)["stream"] for n in plan.program.nodes() if plan.program.op(n) == "dropout"]
    assert len({*streams}) == 1


def test_two_calls_in_one_trace_have_separate_marks() -> None:
    p, feeds = deep(2, 8)
    x = feeds["x"]
    params = list(p.parameters())

    def step(x: Any) -> Any:
        for v in params:
            v.grad = None
        for half in (x[:32], x[32:]):
            p(x=half)["loss"].backward()
        return [v.grad for v in params]

    truth = [g.numpy().tobytes() for g in gw.compile(step, executor="aten")(x)]
    run = gw.compile(step, executor="aten")
    run(x)
    for group in blocks_of(p, 2):
        p.checkpoint(group)
    assert [g.numpy().tobytes() for g in run(x)] == truth
    assert run.traces == 2  # a mark is noticed
    assert any(n.startswith("recompute.") for n in map(run.plan(x).program.path, run.plan(x).program.nodes()))


def test_invalid_checkpoint_marks_are_refused() -> None:
    p, _ = deep(2, 8)
    group = blocks_of(p, 2)[0]
    p.checkpoint(group)
    for wrong in (group[:1], ["x"], ["b0.up.w"], []):
        with pytest.raises(UsageError, match="checkpoint"):
            p.checkpoint(wrong)
    assert p.fork().checkpoints == p.checkpoints
    p.checkpoint(p.select("b1.*", op="linear"))
    assert len(p.checkpoints) == 2
