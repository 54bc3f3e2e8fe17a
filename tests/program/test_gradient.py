"""A gradient that follows edits equals a new one bit for bit, and only visits what the edits touched."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import graphwright as gw
import graphwright.plan
from graphwright.errors import GraphwrightError
from graphwright.program import Builder, Program
from graphwright.testing.oracle import assert_bits
from values import array_of, grad_of

UNARY = ["tanh", "neg", "sigmoid", "copy", "stop_gradient", "relu"]
X = np.random.default_rng(0).normal(size=(3, 4))


def net(depth: int = 4) -> Program:
    """Blocks of product, activation, branch and junction over float64."""
    b, rng = Builder("net"), np.random.default_rng(1)
    h = b.input("x", ("B", 4), "float64")
    for i in range(depth):
        w = b.param(f"w{i}", rng.normal(size=(4, 4)))
        m = b.tanh(b.linear(h, w, name=f"linear{i}"), name=f"act{i}")
        h = b.junction(h, m, b.mul(m, h, name=f"mul{i}"), name=f"out{i}")
    b.output(b.mean(b.mul(h, h, name="square"), axes=None, name="mean"), "loss")
    return b.build()


def edit_at_random(p: Program, draw) -> None:
    edges = sorted(p.graph.edges())
    kind = draw(st.sampled_from(["insert", "cut", "skip", "rewire", "undo", "redo", "rename", "empty", "weight"]))
    try:
        if kind in ("undo", "redo"):
            getattr(p, kind)()
            return
        with p.edit(kind) as e:
            if kind == "insert":
                e.insert(draw(st.sampled_from(edges)), draw(st.sampled_from(UNARY)))
            elif kind == "cut":
                e.cut(draw(st.sampled_from(edges)))
            elif kind == "skip":
                like = [n for n in p.nodes() if p.specs(n) and p.spec(n).shape == ("B", 4)]
                e.connect(draw(st.sampled_from(like)), draw(st.sampled_from(p.junctions())))
            elif kind == "rewire":
                edge = draw(st.sampled_from(edges))
                like = [n for n in p.nodes() if p.specs(n) and p.spec(n) == p.spec(p.edge_value(edge))]
                e.rewire(edge, draw(st.sampled_from(like)))
            elif kind == "rename":
                e.rename(draw(st.sampled_from([n for n in p.nodes() if p.op(n) == "tanh"])), f"t{len(p.journal)}")
            elif kind == "empty":
                for edge in p.in_edges(draw(st.sampled_from(p.junctions()))):
                    e.cut(edge)
            elif kind == "weight":
                e.set_weight("w1", np.full((4, 4), len(p.journal) / 8))
    except GraphwrightError:
        pass


def form(p: Program) -> dict[str, tuple]:
    """Nodes by name with what they read; constants, whose names count up as they come, by their values."""

    def name(n) -> str:
        return f"{p.weights.array(p.key(n)).tobytes()!r}" if p.op(n) == "const" else p.path(n)

    nodes = [n for n in p.nodes() if p.op(n) != "const"]
    made = {
        p.path(n): (p.op(n), p.attrs(n), p.specs(n), [(name(v.node), v.port) for v in p.operands(n)]) for n in nodes
    }
    return {**made, "outputs": tuple(name(v.node) for v in p.outputs())}


def gradients(p: Program, wrt: list[str]) -> Program | type[Exception]:
    try:
        return p.grad("loss", wrt, {"B": 3})
    except GraphwrightError as error:
        return type(error)


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_gradient_programs_follow_random_edits_bit_for_bit(data) -> None:
    p = net()
    wrt = data.draw(st.sampled_from([["w0", "w1", "w2", "w3"], ["w1"], ["x", "w2", "out1"], ["out2"]]))
    gradients(p, wrt)
    for _ in range(data.draw(st.integers(1, 6))):
        edit_at_random(p, data.draw)
        followed = gradients(p, wrt)
        fresh = gradients(p.fork(), wrt)
        if isinstance(followed, type):
            assert followed is fresh
            continue
        assert isinstance(fresh, Program)
        assert followed.output_names() == fresh.output_names()
        assert form(followed) == form(fresh)
        mine, truth = followed.run(x=X), fresh.run(x=X)
        planned = followed.compile(x=X.shape)(x=X)
        for name in fresh.output_names():
            assert_bits(mine[name], truth[name], what=name)
            assert_bits(planned[name], truth[name], what=name)


def test_a_gradient_program_follows_edits_and_its_plan_is_patched() -> None:
    p = net(40)
    g = p.grad("loss", ["w0", "w39"], {"B": 3})
    plan = g.compile(x=X.shape)
    before = plan(x=X)
    with p.edit("insert") as e:
        e.insert(p.edge("linear20 -> act20"), "sigmoid")
    again = p.grad("loss", ["w0", "w39"], {"B": 3})
    assert again is g
    patched = g.compile(x=X.shape)
    assert patched.patched.kind == "patched"
    assert patched.patched.nodes < 40
    after = patched(x=X)
    truth = p.fork().grad("loss", ["w0", "w39"], {"B": 3}).run(x=X)
    assert_bits(after["grad.w0"], truth["grad.w0"])
    assert_bits(plan(x=X)["grad.w0"], before["grad.w0"])
    own = g.fork()
    p.undo()
    p.grad("loss", ["w0", "w39"], {"B": 3})
    assert_bits(g.compile(x=X.shape)(x=X)["grad.w0"], before["grad.w0"])
    assert_bits(own.run(x=X)["grad.w0"], truth["grad.w0"])


@pytest.mark.parametrize("depth", [10, 100, pytest.param(1000, marks=pytest.mark.deep)])
def test_visited_nodes_are_proportional_to_the_cone(depth: int) -> None:
    p = net(depth)
    p.grad("loss", ["w0"], {"B": 3})
    (known,) = p.derived["gradients"].values()
    for k in (depth - 2, depth // 2, 1):
        before, visited = known.mirror.visited, known.program.order_labels.visited
        with p.edit("insert") as e:
            e.insert(p.edge(f"linear{k} -> act{k}"), "sigmoid")
        p.grad("loss", ["w0"], {"B": 3})
        assert known.mirror.visited - before <= 12
        assert known.program.order_labels.visited - visited <= 40


def test_a_gradient_sum_is_renamed_with_its_value() -> None:
    """Also where it adds up the gradients of its reader, as before a junction."""
    b = Builder()
    h = b.linear(b.input("x", ("B", 4), "float64"), b.param("w", np.ones((4, 4))), name="h")
    act = b.tanh(h, name="act")
    b.output(b.mean(b.junction(act, act, name="twice"), axes=None, name="mean"), "loss")
    p = b.build()
    g = p.grad("loss", ["w"], {"B": 3})
    with p.edit("rename") as e:
        e.rename("act", "other")
    assert p.grad("loss", ["w"], {"B": 3}) is g
    assert form(g) == form(p.fork().grad("loss", ["w"], {"B": 3}))


@pytest.mark.parametrize("depth", [10, 40])
def test_an_edit_in_the_middle_rebuilds_no_gradient_upstream(depth: int) -> None:
    """The gradient of a value is rewired to another source, so nothing upstream of it is written or visited again."""
    p = net(depth)
    wrt = [f"w{i}" for i in range(depth)]
    g = p.grad("loss", wrt, {"B": 3})
    (known,) = p.derived["gradients"].values()
    for at in (4, depth - 2):
        known_before, before = set(g.nodes()), known.mirror.visited
        with p.edit("remove a block") as e:
            for edge in p.out_edges(f"out{at}"):
                e.rewire(edge, f"out{at - 1}")
            e.remove([f"{name}{at}" for name in ("linear", "act", "mul", "out")])
        assert p.grad("loss", wrt, {"B": 3}) is g
        assert known.mirror.visited - before <= 16
        assert len(set(g.nodes()) - known_before) <= 12
        before = known.mirror.visited
        with p.edit("skip") as e:
            e.connect(f"out{at - 2}", f"out{at + 1}")
        p.grad("loss", wrt, {"B": 3})
        assert known.mirror.visited - before <= 12
        assert form(g) == form(p.fork().grad("loss", wrt, {"B": 3}))


def test_a_gradient_program_edited_by_the_user_is_not_updated() -> None:
    p = net()
    g = p.grad("loss", ["w0"], {"B": 3})
    with g.edit("mine") as e:
        e.insert(g.in_edges("grad.act3.mul")[0], "neg")
    with p.edit("insert") as e:
        e.insert(p.edge("linear2 -> act2"), "sigmoid")
    other = p.grad("loss", ["w0"], {"B": 3})
    assert other is not g
    assert_bits(other.run(x=X)["grad.w0"], p.fork().grad("loss", ["w0"], {"B": 3}).run(x=X)["grad.w0"])


def test_the_gradient_equals_the_tape_after_an_edit() -> None:
    p = net()
    p.grad("loss", ["w0", "w3"], {"B": 3})
    with p.edit("skip") as e:
        e.connect("act0", "out2")
        e.insert(p.edge("mul1 -> out1"), "tanh")
    found = p.grad("loss", ["w0", "w3"], {"B": 3}).run(x=X)
    p(x=gw.tensor(X))["loss"].backward()
    for name in ("w0", "w3"):
        assert_bits(found[f"grad.{name}"], array_of(grad_of(p.weights[name])))


def scaled() -> Program:
    """tanh(x·w) times a const, whose key is a name that gradients give to their own constants."""
    b = Builder("scaled")
    h = b.tanh(b.linear(b.input("x", (3, 4), "float64"), b.param("w", np.eye(4)), name="h"), name="act")
    b.output(b.mul(h, b.const("const", np.arange(2.0, 6.0)), name="product"), "y")
    return b.build()


def test_constants_of_the_gradient_leave_a_weight_with_their_name_alone() -> None:
    p = scaled()
    truth = p.grad("y", ["w"]).run(x=X)["grad.w"].to_numpy()
    with p.edit("a name is free, its key is not") as e:
        e.rename("const", "factors")
    p.derived.clear()
    g = p.grad("y", ["w"])
    assert_bits(g.run(x=X)["grad.w"], truth)
    assert_bits(g.compile(x=X.shape)(x=X)["grad.w"], truth)


def test_weights_that_an_edit_adds_leave_constants_of_the_gradient_alone() -> None:
    p = scaled()
    with p.edit("free the name and the key") as e:
        e.rename("const", "factors", key="factors")
    g = p.grad("y", ["w"])
    g.compile(x=X.shape)(x=X)
    with p.edit("a const with the name of one of the gradient's") as e:
        e.rewire(p.in_edges("product")[1], e.const("const", np.arange(6.0, 10.0)))
    assert p.grad("y", ["w"]) is g
    slope = 1 - np.tanh(X) ** 2  # w is the identity
    np.testing.assert_allclose(g.run(x=X)["grad.w"], (slope * np.arange(6.0, 10.0)).T @ X, rtol=1e-12)
    assert_bits(g.compile(x=X.shape)(x=X)["grad.w"], g.run(x=X)["grad.w"])


def test_a_gradient_sum_is_recorded_again_if_its_value_is_resized() -> None:
    b = Builder("resized")
    x = b.input("x", (3, 4), "float64")
    h = b.linear(x, b.param("w", np.eye(4)), name="h")  # read twice, so its gradient is a sum
    b.output(b.mul(b.tanh(h, name="left"), b.sigmoid(h, name="right"), name="y"), "y")
    p = b.build()
    g = p.grad("y", ["w"])
    g.run(x=X)
    with p.edit("two rows more") as e:
        e.set_weight("w", np.vstack([np.eye(4), np.ones((2, 4))]))
    assert p.grad("y", ["w"]) is g
    assert g.validate().ok
    truth = p.fork().grad("y", ["w"]).run(x=X)["grad.w"]
    assert_bits(g.run(x=X)["grad.w"], truth)
    assert_bits(g.compile(x=X.shape)(x=X)["grad.w"], truth)


def test_the_seed_of_a_resized_value_has_its_new_shape() -> None:
    p = scaled()
    with p.edit("a sum over the rows") as e:
        e.add("sum", "product", name="total", axes=(0,), keepdims=False)
    p.grad("total", ["w"], seeded=True)
    with p.edit("a matrix of ones, and a vector with one entry more") as e:
        e.set_weight("w", np.ones((5, 4)))
        e.set_weight("const", np.arange(2.0, 7.0))
    g = p.grad("total", ["w"], seeded=True)
    seed = np.linspace(-1, 1, 5)
    found = g.run({"x": X, "seed.total": seed})["grad.w"]
    slope = 1 - np.tanh(X @ np.ones((4, 5))) ** 2
    np.testing.assert_allclose(found, (slope * np.arange(2.0, 7.0) * seed).T @ X, rtol=1e-12)


def test_the_zero_gradient_of_a_resized_value_has_its_new_shape() -> None:
    p = scaled()
    with p.edit("a value that no output depends on") as e:
        e.param("v", np.ones((2, 4)))
        e.add("linear", "x", "v", name="aside")
    g = p.grad("y", ["w", "aside"])
    with p.edit("another size") as e:
        e.set_weight("v", np.ones((5, 4)))
    assert p.grad("y", ["w", "aside"]) is g
    assert np.array_equal(g.run(x=X)["grad.aside"], np.zeros((3, 5)))
    assert g.validate().ok


def test_the_seed_of_a_renamed_value_is_renamed() -> None:
    p = scaled()
    p.grad("product", ["w"], seeded=True)
    with p.edit("rename") as e:
        e.rename("product", "scaled")
    assert p.grad("scaled", ["w"], seeded=True).input_names() == ("x", "seed.scaled")
