"""The tape of an eager tensor as a program: the same ops, the same values to the bit, the same gradients."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

import graphwright as gw
from graphwright.errors import UsageError
from graphwright.program import Program
from graphwright.program.draw import layout
from values import array_of, grad_of

RNG = np.random.default_rng(0)


class Net(gw.nn.Module):
    def __init__(self) -> None:
        self.first, self.last = gw.nn.Linear(3, 4), gw.nn.Linear(4, 2)

    def forward(self, x):
        return self.last(self.first(x).tanh())


def feeds(p: Program, *arrays: np.ndarray) -> dict[str, np.ndarray]:
    """Unknown operands in the order in which they were read."""
    return dict(zip(p.input_names(), arrays, strict=True))


def test_a_loss_runs_again_with_the_same_bits_and_gradients():
    net, x, target = Net(), RNG.normal(size=(5, 3)).astype("f4"), RNG.normal(size=(5, 2)).astype("f4")
    loss = ((net(gw.tensor(x)) - gw.tensor(target)) * 0.5).exp().mean()
    p = gw.tape(loss)
    assert p.validate().ok
    assert p.select("first", kind="op").names() == ["first.linear"]
    assert {p.path(n): p.key(n) for n in p.params()} == {k: k for k, _ in net.named_parameters()}
    assert all(p.weights[k] is v for k, v in net.named_parameters())
    assert Counter(p.op(n) for n in p.select(kind="op")) == Counter(
        {"linear": 2, "tanh": 1, "sub": 1, "mul": 1, "exp": 1, "mean": 1}
    )
    run = p.run(feeds(p, x, target))
    assert run["out"].tobytes() == loss.data.tobytes()
    planned = p.compile(feeds(p, x, target), deterministic=True)(feeds(p, x, target))
    assert planned["out"].tobytes() == loss.data.tobytes()
    names = [k for k, _ in net.named_parameters()]
    found = run.grad("out", names)
    loss.backward()
    for name, grad in zip(names, found, strict=True):
        np.testing.assert_array_equal(
            grad.to_numpy(), net.state_dict()[name].numpy() * 0 + grad_of(dict(net.named_parameters())[name]).numpy()
        )
    after = gw.tape(loss)  # the saved values are gone, what was computed is not
    assert Counter(after.op(n) for n in after.select(kind="op")) == Counter(p.op(n) for n in p.select(kind="op"))


def test_shared_leaves_and_common_ancestors_are_one_node():
    a = gw.tensor(np.ones(3, "f4"), requires_grad=True)
    b = a * a
    p = gw.tape(b.sum(), b.exp(), name="both")
    assert (p.name, len(p.inputs()), p.output_names()) == ("both", 1, ("out", "out_1"))
    assert Counter(p.op(n) for n in p.nodes()) == Counter({"input": 1, "mul": 1, "sum": 1, "exp": 1})
    run = p.run(feeds(p, np.full(3, 2, "f4")))
    assert run["out"].to_numpy() == 12
    np.testing.assert_allclose(run["out_1"].to_numpy(), np.exp(4), rtol=1e-6)


def test_detached_values_are_not_on_the_tape():
    a = gw.tensor(np.ones(3, "f4"), requires_grad=True)
    p = gw.tape(a * (a.exp() + 1).detach())
    assert sorted(p.op(n) for n in p.nodes()) == ["input", "input", "mul"]


@pytest.mark.deep
def test_tapes_of_twenty_thousand_steps_do_not_overflow_the_stack():
    h = gw.tensor(np.zeros(1, "f4"), requires_grad=True)
    for _ in range(20_000):
        h = -h
    p = gw.tape(h)
    assert len(p) == 20_001
    assert p.to_svg().count("<rect") < 2_000


def test_an_unregistered_op_is_drawn_and_reported():
    a = gw.tensor(np.ones(3, "f4"), requires_grad=True)
    b = a.exp()

    class Rule:
        name, saves, vjp = "MyFunction", b.node.op.saves, None

    b.node.op = Rule()
    p = gw.tape(b)
    assert "MyFunction" in p.to_svg()
    assert "MyFunction" in p.to_dot()
    assert "MyFunction" in p.to_html()
    assert [m.what for m in p.validate().mismatches] == ["unknown op"]


@pytest.mark.parametrize("wrong", [gw.tensor([1.0]), gw.Parameter(gw.tensor([1.0]).data), 3, None])
def test_values_without_a_tape_are_refused(wrong):
    with pytest.raises(UsageError, match="has no tape"):
        gw.tape(wrong)


def test_taping_inside_a_trace_is_refused():
    def f(x):
        return gw.tape(x * x)

    with pytest.raises(UsageError, match="has no tape"):
        gw.trace(f, np.ones(2, "f4"))


class Cell(gw.nn.Module):
    def __init__(self) -> None:
        self.inp, self.rec = gw.nn.Linear(3, 4), gw.nn.Linear(4, 4)

    def forward(self, x, h):
        return (self.inp(x) + self.rec(h)).tanh()


@pytest.mark.parametrize("steps", [2, 3, 200])
def test_a_loop_over_time_is_numbered_by_step_and_drawn_once(steps):
    cell, h = Cell(), gw.tensor(np.zeros((2, 4), "f4"))
    xs = RNG.normal(size=(steps, 2, 3)).astype("f4")
    for x in xs:
        h = cell(gw.tensor(x), h)
    p = gw.tape(h.sum())
    assert p.run(feeds(p, xs[0], np.zeros((2, 4), "f4"), *xs[1:]))["out"].tobytes() == array_of(h.sum()).tobytes()
    modules = {p.path(n).rpartition(".")[0] for n in p.of_kind("linear")}
    if steps == 2:
        assert modules == {"inp", "rec"}, "two uses are a tied weight"
        return
    assert modules == {f"step.{i}.{m}" for i in range(steps) for m in ("inp", "rec")}
    made = layout(p)
    if steps == 200:
        assert made.groups["step.[1-198]"].repeat == 198
        assert len(made.boxes) < 25
    assert layout(p, level=1).boxes.keys() == {"step"}


def test_a_tied_weight_is_not_a_loop_over_time():
    net = Net()
    net.name_children()
    h = net.last(net.first(gw.tensor(np.ones((1, 3), "f4"))))
    p = gw.tape(h @ net.last.weight + 1)
    assert {p.path(n) for n in p.select(kind="op")} == {"first.linear", "last.linear", "last.matmul", "add"}
