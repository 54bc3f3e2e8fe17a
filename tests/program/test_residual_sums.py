"""Residual sums of recorded code are junctions: which sums, their names and terms, results, gradients and edits."""

from __future__ import annotations

import numpy as np
import pytest

import graphwright as gw
from graphwright import nn
from graphwright.models.onnx import run_onnx
from values import grad_of

pytestmark = pytest.mark.usefixtures("young_heap")

RNG = np.random.default_rng(0)
X = RNG.normal(size=(3, 4)).astype("f4")


class Block(nn.Module):
    def __init__(self) -> None:
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        x = x + self.first(x).tanh()
        return x + self.second(x).tanh()


class Net(nn.Module):
    def __init__(self, layers: int = 2) -> None:
        self.blocks = nn.ModuleList([Block() for _ in range(layers)])

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


def numbers(value) -> np.ndarray:
    """The numbers of a tensor or an array."""
    return np.asarray(value.numpy() if isinstance(value, gw.Tensor) else value.to_numpy())


def terms(p: gw.Program) -> dict[str, list[str]]:
    return {p.path(j): [p.path(v.node) for v in p.operands(j)] for j in p.junctions()}


def test_each_residual_of_a_chain_is_a_junction_named_by_its_module():
    net = Net()
    p = gw.trace(net, X)
    assert terms(p) == {
        "blocks.0.mid": ["x", "blocks.0.tanh"],
        "blocks.0.out": ["blocks.0.mid", "blocks.0.tanh_2"],
        "blocks.1.mid": ["blocks.0.out", "blocks.1.tanh"],
        "blocks.1.out": ["blocks.1.mid", "blocks.1.tanh_2"],
    }
    assert p.validate().ok
    assert not p.of_kind("add")
    expected = numbers(net(gw.tensor(X)))
    assert np.array_equal(numbers(p.run(x=X)["out"]), expected)
    np.testing.assert_allclose(numbers(p.compile(x=X.shape)(x=X)["out"]), expected, rtol=1e-5, atol=1e-6)


def test_several_sums_of_one_module_are_numbered_in_order():
    class Three(nn.Module):
        def forward(self, x):
            for _ in range(3):
                x = x + x.tanh()
            return x

    p = gw.trace(nn.Sequential(Three()), X)
    assert list(terms(p)) == ["0.mid", "0.mid_2", "0.out"]


def test_gradients_through_junctions_equal_those_of_the_code():
    net = Net()
    net(gw.tensor(X)).exp().sum().backward()
    expected = {name: numbers(grad_of(q)) for name, q in net.named_parameters()}
    for q in net.parameters():
        q.grad = None
    p = gw.trace(net, X)
    p(x=X)["out"].exp().sum().backward()
    for name, q in net.named_parameters():
        np.testing.assert_allclose(numbers(grad_of(q)), expected[name], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        (lambda x: x + x.tanh() + x.exp(), ["x", "tanh", "exp"]),
        (lambda x: x.exp() + (x + x.tanh()), ["x", "tanh", "exp"]),
        (lambda x: x + (x.tanh() + x.exp()), ["tanh", "exp", "x"]),
        (lambda x: x.tanh() + x, ["tanh", "x"]),
        (lambda x: (x + x.tanh()) + (x.exp() + x.sin()), ["x", "tanh", "add_2"]),
    ],
)
def test_partial_sums_without_other_readers_are_terms_of_one_junction(code, expected):
    p = gw.trace(code, X)
    assert terms(p) == {"junction": expected}
    assert np.array_equal(numbers(p.run(x=X)["out"]), numbers(code(gw.tensor(X))))


def test_a_partial_sum_with_another_reader_or_output_stays_a_junction_of_its_own():
    def inner_read(x):
        y = x + x.tanh()
        return y + y.exp()

    def inner_output(x):
        y = x + x.tanh()
        return y + x.exp(), y

    assert terms(gw.trace(inner_read, X)) == {"junction": ["x", "tanh"], "junction_2": ["junction", "exp"]}
    both = gw.trace(inner_output, X)
    assert terms(both) == {"junction": ["x", "tanh"]}
    assert np.array_equal(numbers(both.run(x=X)["out_1"]), numbers(gw.tensor(X) + gw.tensor(X).tanh()))


def test_a_sum_that_is_the_result_of_an_inner_module_stays_a_node_of_it():
    class Both(nn.Module):
        def __init__(self) -> None:
            self.left, self.right = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x):
            return self.left(x) + self.right(x)

    class Outer(nn.Module):
        def __init__(self) -> None:
            self.both = Both()

        def forward(self, x):
            return x + self.both(x)

    assert terms(gw.trace(nn.Sequential(Outer()), X)) == {"0.out": ["x", "0.both.add"]}


@pytest.mark.parametrize(
    "code",
    [
        lambda x: x.tanh() + x.exp(),
        lambda x: x + x,
        lambda x: x + x.sum(1, keepdims=True),
        lambda x: x + x.to(gw.float64),
        lambda x: x.to(gw.int64) + x.to(gw.int64).abs(),
        lambda x: x - x.tanh(),
        lambda x: x + gw.full_like(x, 2.0),
    ],
    ids=["siblings", "doubled", "broadcast", "promoted", "integers", "difference", "shape only"],
)
def test_other_sums_are_not_junctions(code):
    assert not gw.trace(code, X).junctions()


def test_sums_of_backward_and_new_weights_are_not_junctions():
    net = Net(1)

    def step(x):
        loss = net(x).exp().sum()
        loss.backward()
        for q in net.parameters():
            q.assign(q + (q + q * grad_of(q)))
            q.grad = None
        return loss

    p = gw.trace(step, X)
    assert list(terms(p)) == ["blocks.0.mid", "blocks.0.out"]
    assert len(p.assigns()) == 4


def test_sums_of_gradients_are_not_terms_of_a_junction():
    w = nn.Parameter(np.ones(4, "f4"))

    def step(x):
        y = x * w
        total = y + y.tanh() + y.exp()
        (total * total).sum().backward(retain_graph=True)
        (y * w).sum().backward()
        grad, w.grad = grad_of(w), None
        return total, y.sum(0) + grad

    p = gw.trace(step, X)
    assert terms(p) == {"junction": ["mul", "tanh", "exp"]}
    expected, got = step(gw.tensor(X)), p.run(x=X)
    for value, name in zip(expected, ("out", "out_1"), strict=True):
        np.testing.assert_allclose(numbers(got[name]), numbers(value.detach()), rtol=1e-5)


def test_a_module_named_out_keeps_its_scope():
    class Mixer(nn.Module):
        def __init__(self) -> None:
            self.out = nn.Linear(4, 4)

        def forward(self, x):
            return x + self.out(x)

    p = gw.trace(nn.Sequential(Mixer()), X)
    assert terms(p) == {"0.junction": ["x", "0.out.linear"]}


def test_a_sum_of_a_program_inside_the_code_keeps_its_name():
    b = gw.Builder()
    x = b.input("x", (3, 4))
    b.output(b.add(x, b.tanh(x), name="stream"), "y")
    inner = b.build()
    assert terms(gw.trace(lambda x: inner(x=x)["y"], X)) == {"stream": ["x", "tanh"]}


def test_branches_of_code_can_be_cut_and_undone():
    p = gw.trace(Net(1), X)
    before = p.hash(), numbers(p.run(x=X)["out"])
    with p.edit("identity only") as e:
        for j in p.junctions():
            e.cut(p.in_edges(j)[1])
    assert np.array_equal(numbers(p.run(x=X)["out"]), X)
    p.undo()
    assert p.hash() == before[0]
    assert np.array_equal(numbers(p.run(x=X)["out"]), before[1])


def test_named_sizes_pass_through_junctions():
    p = gw.trace(Net(), X, sizes={"x": ("B", None)})
    assert len(p.junctions()) == 4
    assert p.run(x=np.ones((7, 4), "f4"))["out"].shape == (7, 4)


def test_a_sum_that_broadcasts_for_other_sizes_is_no_junction():
    p = gw.trace(lambda x: x + x.sum(0, keepdims=True), X[:1], sizes={"x": ("B", None)})
    assert not p.junctions()
    np.testing.assert_allclose(numbers(p.run(x=X)["out"]), X + X.sum(0, keepdims=True), rtol=1e-6)


def test_the_junctions_of_a_tape_are_those_of_the_trace():
    net = Net()
    x = gw.tensor(X)
    x.requires_grad = True
    taped, traced = gw.tape(net(x)), gw.trace(net, X)
    assert list(terms(taped)) == list(terms(traced))


def test_a_low_precision_sum_of_three_terms_is_rounded_once():
    code = lambda x: x + x.tanh() + x.exp()  # noqa: E731
    x = gw.tensor(X).to(gw.bfloat16)
    got = gw.trace(code, x).run(x=x)["out"].to_numpy("float64")
    exact = sum(numbers(t.to(gw.float64)) for t in (x, x.tanh(), x.exp()))
    assert (np.abs(got - exact) <= np.abs(exact) * 2.0**-8).all()  # half a unit in the last of 8 bits


def test_a_long_recurrence_is_searched_step_by_step():
    def walk(x):
        h = x[0]
        for t in range(1, 200):
            h = h + (x[t] + h.tanh())
        return h

    p = gw.trace(walk, RNG.normal(size=(200, 2)).astype("f4"))
    assert len(p.junctions()) == 199


def test_junctions_of_code_are_saved_exported_and_coupled(tmp_path):
    net = Net()
    p = gw.trace(net, X, sizes={"x": ("B", None)})
    p.save(tmp_path / "saved")
    assert gw.load(tmp_path / "saved").hash() == p.hash()
    (found,) = run_onnx(p.to_onnx(tmp_path / "net.onnx"), [{"x": X}])
    np.testing.assert_allclose(found["out"], numbers(net(gw.tensor(X))), rtol=1e-5, atol=1e-6)
    groups = [g for g in p.axes().values() if any("blocks.0.second.weight" in str(m) for m in g.members)]
    assert any("blocks.1.first.weight" in str(m) for g in groups for m in g.members)
