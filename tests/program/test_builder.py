"""Building: names, operands and specs are checked at the call, and the builder gives up what it built."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import numpy as np
import pytest

import graphwright as gw
from graphwright.errors import CycleError, DTypeError, ShapeError, UsageError
from graphwright.program import Builder, FeedError, ForeignNode, NameTaken, Program

X = np.arange(6, dtype=np.float32).reshape(2, 3)


def branches() -> Program:
    """Two results of one node, an operand read twice, two named outputs."""
    b = Builder("branches")
    x = b.input("x", ("B", 4))
    best, indices = b.topk(x, k=2, name="best")
    b.output(b.mul(best, best, name="square"), "squares")
    b.output(indices, "indices")
    return b.build()


def test_nodes_may_read_any_port_and_one_value_twice() -> None:
    p = branches()
    fed = np.array([[3, 1, 2, 5]], np.float32)
    run = p.run(x=fed)
    assert run["squares"].to_numpy().tolist() == [[25, 9]]
    assert run["indices"].to_numpy().tolist() == [[3, 0]]
    best = p.node("best")
    assert [v.port for v in p.operands(p.node("square"))] == [0, 0]
    assert [v.node for v in p.operands(p.node("square"))] == [best, best]
    assert p.producers("square") == (best,)
    assert p.consumers(best) == (p.node("square"),)
    assert (p.output("indices").node, p.output("indices").port) == (best, 1)


def test_building_twice_gives_equal_and_independent_programs() -> None:
    b = Builder("two")

    def write(name: str) -> Program:
        x = b.input("x", ("B", 3))
        b.output(b.tanh(b.matmul(x, b.param("w", X.T)), name=name), "y")
        return b.build()

    first = write("act")
    held, nodes = first.hash(), first.nodes()
    again = write("act")
    assert again.hash() == held
    assert again is not first
    left = b.input("x", ("B", 3))
    b.relu(left, name="act")
    assert (first.hash(), first.nodes()) == (held, nodes)
    assert again.hash() == held


def test_a_builder_error_leaves_the_builder_unchanged() -> None:
    b, other = Builder(), Builder()
    x, foreign = b.input("x", ("B", 3)), other.input("x", ("B", 3))
    w = b.param("w", X)
    before = [b._program.path(n) for n in b._program.nodes()]
    refused = [
        (ForeignNode, lambda: b.tanh(foreign)),
        (ForeignNode, lambda: b.tanh("x")),
        (NameTaken, lambda: b.input("x", (1,))),
        (NameTaken, lambda: b.param("x", X)),
        (NameTaken, lambda: b.tanh(x, name="w")),
        (ShapeError, lambda: b.matmul(x, w, name="product")),
        (DTypeError, lambda: b.add(x, b.const("n", np.array([1])), name="sum")),
        (UsageError, lambda: b.tanh(x, w)),
        (UsageError, lambda: b.matmul(x)),
        (AttributeError, lambda: b.tanhh(x)),
        (UsageError, b.build),
    ]
    for error, call in refused:
        with pytest.raises(error):
            call()
        assert [n for n in map(b._program.path, b._program.nodes()) if n != "n"] == before
    with pytest.raises(ShapeError, match="product"):
        b.matmul(x, w, name="product")
    b.output(b.tanh(x), "y")
    with pytest.raises(NameTaken):
        b.output(x, "y")
    stale = b.build() and x
    with pytest.raises(ForeignNode):
        b.tanh(stale)  # a node of what was built


def test_a_cycle_raises_with_its_path() -> None:
    b = Builder()
    h = b.junction(b.input("x", (3,)), name="sum")
    for i in range(3):
        h = b.tanh(h, name=f"t{i}")
    b.output(h, "y")
    p = b.build()
    held = p.hash()
    with pytest.raises(CycleError) as caught, p.edit("round") as e:
        e.connect("t2", "sum")
    names = [n if isinstance(n, str) else p.path(n) for n in caught.value.path]
    assert set(names) == {"sum", "t0", "t1", "t2"}
    assert p.hash() == held


def test_attributes_are_read_only_and_long_chains_do_not_recurse() -> None:
    b = Builder("long")
    h = b.input("x", (2,))
    for i in range(10_000):
        h = b.neg(h, name=f"n{i}")
    b.output(h, "y")
    p = b.build()
    order = p.order()
    assert [p.path(n) for n in order] == ["x", *(f"n{i}" for i in range(10_000))]
    assert p.run(x=np.ones(2, "f4"), keep="outputs")["y"].to_numpy().tolist() == [1, 1]
    for views in (p.nodes(), p.inputs(), p.outputs(), p.params(), p.states(), p.consumers("n3"), p.producers("n3")):
        assert isinstance(views, tuple)
    with pytest.raises(TypeError):
        p.meta("n3")["op"] = "tanh"  # pyright: ignore[reportIndexIssue]  # wrong on purpose
    with pytest.raises(TypeError):
        p.attrs(p.node("n3"))["a"] = 1  # pyright: ignore[reportIndexIssue]  # wrong on purpose
    order.clear()
    assert len(p.order()) == 10_001


PLANNED = """
from graphwright.program import Builder
b = Builder()
b.output(b.tanh(b.input("x", (2,))), "y")
print(b.build().compile(x=(2,)).instrs[0].op)
"""
CODE = """
import sys
sys.path.insert(0, "tests/program")
from program_samples import random_program
for seed in range(3):
    p = random_program(seed)
    print([p.path(n) for n in p.order()], p.hash(), list(p.constants()))
    feeds = {p.path(n): p.spec(n).bind({"B": 2}).sizes for n in p.inputs()}
    for executor in ("aten", "vm"):
        plan = p.compile(feeds, executor=executor)
        print(plan.hash, [p.path(plan.slots[s].value.node) for s in plan.frozen])
"""


def test_order_constants_and_plans_are_the_same_in_every_process(capsys: pytest.CaptureFixture[str]) -> None:
    """In this one, whose strings have hashes of their own, and in one that names no planner before it plans."""
    env = {**os.environ, "PYTHONHASHSEED": "4242"}
    command = [sys.executable, "-c", PLANNED + CODE]
    run = subprocess.run(command, cwd=Path(__file__).parents[2], env=env, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    first, *there = run.stdout.splitlines()
    assert first == "tanh"
    exec(CODE, {})
    assert capsys.readouterr().out.splitlines() == there
    assert len(there) == 9


def test_all_input_mismatches_are_listed_before_the_first_op(monkeypatch: pytest.MonkeyPatch) -> None:
    b = Builder()
    x, y, n = b.input("x", ("B", 3)), b.input("y", ("B", 3)), b.input("n", ("B",), "int64")
    b.output(b.add(b.add(x, y), b.unsqueeze(b.cast(n, dtype="float32"), axes=(1,))), "z")
    b.output(b.tanh(b.input("unfed", (1,))), "t")
    p, ran = b.build(), []
    monkeypatch.setattr(import_module("graphwright.program.run"), "step", lambda *args: ran.append(args))
    feeds = {"x": X, "y": np.ones((4, 3), "f4"), "n": np.ones(2, "f4"), "more": X}
    for call in (lambda: p.run(feeds), lambda: p.run(**feeds)):
        with pytest.raises(FeedError) as caught:
            call()
        for name in ("more: not an input", "unfed: missing", "y: expected f32[2, 3]", "n: expected i64"):
            assert name in str(caught.value)
    assert not ran


def test_missing_sizes_are_named() -> None:
    p = branches()
    for call in (lambda: p.compile(), lambda: p.compile(x=("B", 4)), lambda: p.compile(x=(2, 4), z=(1,))):
        with pytest.raises(UsageError):
            call()
    assert gw.compile(p)(x=np.ones((3, 4), "f4"))["squares"].shape == (3, 2)


def test_a_transposed_weight_is_stored_contiguously() -> None:
    b = Builder()
    w = np.arange(6, dtype=np.float32).reshape(3, 2).T
    b.output(b.linear(b.input("x", ("B", 3)), b.param("w", w), name="fc"), "y")
    p = b.build()
    assert p.weights["w"].data.contiguous
    np.testing.assert_array_equal(p.compile(x=(2, 3))(x=X)["y"].to_numpy(), X @ w.T)
