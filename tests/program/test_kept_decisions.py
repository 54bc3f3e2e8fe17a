"""Choices, runs and masks made from floats are kept by checkpoints and budgets: backward goes the way of forward."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import graphwright as gw
from graphwright.autograd import scoped
from graphwright.program import Program, Value
from graphwright.program.derived.recompute import Decisions
from graphwright.program.kinds import KINDS
from graphwright.testing.oracle import assert_bits

N, DIM, EXPERTS, K, HIDDEN = 192, 16, 8, 2, 24
FLOAT = "float32"
SHAPES = {"x": (N, DIM), "positions": (N,)}


def routed(dtype: str = FLOAT, layers: int = 4) -> tuple[Program, dict[str, np.ndarray]]:
    """Layers of experts, chosen by the largest scores, and a mask of positions."""
    rng = np.random.default_rng(0)
    draw = lambda *size: gw.nn.Parameter(gw.tensor((rng.normal(size=size) / size[-2] ** 0.5).astype("f4")).to(dtype))  # noqa: E731
    weights = [[draw(DIM, EXPERTS), draw(EXPERTS, DIM, HIDDEN), draw(EXPERTS, HIDDEN, DIM)] for _ in range(layers)]

    def mixed(h: gw.Tensor, positions: gw.Tensor, router: Any, up: Any, down: Any) -> gw.Tensor:
        chosen, ids = (h @ router).to(FLOAT).softmax(-1).topk(K)
        order = ids.reshape(-1).argsort()
        hits = gw.nn.functional.one_hot(ids.reshape(-1), EXPERTS).sum(0)
        offsets = gw.cat([gw.zeros(1, dtype="int64"), hits.cumsum(0)])
        call = gw.ops.call
        inner = call("tanh", call("grouped_matmul", call("embedding", h, order // K), up, offsets))
        made = call("grouped_matmul", inner, down, offsets)
        made = made * call("embedding", chosen.reshape(-1, 1), order).to(dtype)
        even = (positions % 2 == 0).reshape(N, 1)
        total = call("index_add", gw.zeros(N, DIM, dtype=dtype), made, order // K, axis=0)
        h = h + call("where", even, total, total * call("tanh", h))
        return call("where", h > 0.0, h, 0.1 * h)

    def forward(x: gw.Tensor, positions: gw.Tensor) -> gw.Tensor:
        h = x
        for k, layer in enumerate(weights):
            with scoped(f"layer.{k}"):
                h = mixed(h, positions, *layer)
        return (h.to(FLOAT) ** 2.0).mean()

    x = gw.tensor(rng.normal(size=(N, DIM)).astype("f4")).to(dtype)
    feeds = {"x": x, "positions": np.arange(N)}
    return gw.trace(forward, *feeds.values()), feeds


def marked(dtype: str = FLOAT) -> tuple[Program, dict[str, Any]]:
    p, feeds = routed(dtype)
    for k in range(4):
        p.checkpoint([n for n in p.nodes() if p.op(n) not in KINDS and p.path(n).startswith(f"layer.{k}.")])
    return p, feeds


def gradient(p: Program) -> Program:
    return p.grad("out", ["x", *(p.path(n) for n in p.params())])


def clones(g: Program) -> Iterator[Any]:
    """The nodes that are computed again, without the views by which they read."""
    return (n for n in g.nodes() if g.path(n).startswith("recompute.") and g.op(n) != "recall")


def original(g: Program, v: Value) -> Value:
    """The value of the forward pass that a value is a clone or a view of."""
    while g.op(v.node) == "recall":
        v = g.operands(v.node)[0]
    return Value(g.node(g.path(v.node).removeprefix("recompute.")), v.port)


def test_what_decides_depends_on_floats() -> None:
    p, _ = routed(layers=1)
    found = Decisions(p)
    ops = {p.op(n) for n in p.nodes() if n in found}
    assert ops >= {"topk", "sort", "one_hot", "cumsum", "gt"}
    assert not any(p.op(n) in ("arange", "remainder", "eq", "softmax", "tanh") for n in p.nodes() if n in found)

    def drops(x: gw.Tensor) -> gw.Tensor:
        past = gw.ops.call("iota", x, axis=0) > 1
        return gw.nn.functional.dropout(gw.nn.functional.dropout(x, 0.5), 0.5) * past.to(FLOAT)

    q = gw.trace(drops, np.ones((4, 4), "f4"))
    assert not [q.path(n) for n in q.nodes() if n in Decisions(q)]


@pytest.mark.parametrize("dtype", [FLOAT, "bfloat16"])
def test_checkpoints_clone_no_decision_and_keep_the_bits(dtype: str) -> None:
    p, feeds = routed(dtype)
    truth, whole = gradient(p).run(feeds), gradient(p).compile(SHAPES, deterministic=True)
    p, _ = marked(dtype)
    g = gradient(p)
    again = {g.op(n) for n in clones(g)}
    assert not again & {"topk", "sort", "gt", "one_hot", "cumsum"}
    assert again >= {"softmax", "tanh", "grouped_matmul"}
    assert "eq" in again  # a mask of positions
    found, plan = g.run(feeds), g.compile(SHAPES, deterministic=True)
    for name in truth:
        assert_bits(found[name], truth[name], what=name)
        assert_bits(plan(feeds)[name], truth[name], what=name)
    print(f"arena {whole.arena_bytes:,} -> {plan.arena_bytes:,} bytes")
    assert plan.arena_bytes < 0.8 * whole.arena_bytes, (plan.arena_bytes, whole.arena_bytes)


def ways(g: Program, feeds: dict[str, Any]) -> list[tuple[np.ndarray, np.ndarray]]:
    """Of each integer or mask that backward reads, if it depends on a float: (its value, that of the forward pass).

    Every float that is computed again differs by up to a hundredth.
    """
    rng = np.random.default_rng(1)
    with g.edit("round in another way") as e:
        for node in list(clones(g)):
            for port, spec in enumerate(g.specs(node)):
                if spec.dtype.is_float:
                    edges = [edge for edge in g.out_edges(node) if g.edge_value(edge) == (node, port)]
                    noise = (1 + 0.01 * rng.uniform(-1, 1, spec.sizes)).astype("f4")
                    other = e.add("mul", Value(node, port), e.const(f"noise.{g.path(node)}.{port}", noise))
                    for edge in edges:
                        e.rewire(edge, other)
    run = g.run(feeds)
    read = {v for n in g.nodes() if g.path(n).startswith("grad.") for v in g.operands(n)}
    decided = Decisions(g)
    read = {v for v in read if not g.specs(v.node)[v.port].dtype.is_float and original(g, v).node in decided}
    assert len(read) > 4
    return [(run.value(v).to_numpy(), run.value(original(g, v)).to_numpy()) for v in read]


def test_backward_goes_the_way_of_forward_though_floats_differ_the_second_time() -> None:
    p, feeds = marked()
    for used, forward in ways(gradient(p).fork(), feeds):
        np.testing.assert_array_equal(used, forward)


def test_without_the_rule_backward_goes_another_way(monkeypatch: pytest.MonkeyPatch) -> None:
    p, feeds = marked()
    with monkeypatch.context() as m:
        m.setattr(Decisions, "__contains__", lambda self, node: False)
        g = gradient(p).fork()
    assert any((used != forward).any() for used, forward in ways(g, feeds))


def test_a_budget_computes_no_decision_again() -> None:
    p, feeds = routed()
    g = gradient(p)
    whole = g.compile(SHAPES, deterministic=True)
    truth = whole(feeds)
    plan = g.compile(SHAPES, remat=int(0.75 * whole.arena_bytes), deterministic=True)
    q = plan.program
    again = [n for n in q.nodes() if q.path(n).startswith("again.")]
    assert again
    decided = Decisions(q)
    assert not [q.path(n) for n in again if n in decided]
    found = plan(feeds)
    for name in truth:
        assert_bits(found[name], truth[name], what=name)
