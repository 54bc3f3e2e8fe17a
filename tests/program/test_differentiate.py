"""The gradient program against finite differences in float64, against the eager tape, and after an edit."""

from __future__ import annotations

import numpy as np
import pytest

import graphwright as gw
from graphwright.array import UnboundDim
from graphwright.autograd import NoTape
from graphwright.errors import UsageError
from graphwright.program import Builder
from graphwright.testing.oracle import assert_bits

RNG = np.random.default_rng(0)


@pytest.fixture
def program():
    b = Builder()
    x = b.input("x", ("B", 3), "float64")
    w = b.param("w", RNG.normal(size=(3, 3)))
    h = b.tanh(b.matmul(x, w), name="act")
    j = b.junction(x, h, b.mul(h, h, name="square"), name="out")
    b.output(b.mean(b.mul(j, j), axes=None), "loss")
    b.output(b.input("spare", (2,)), "other")
    return b.build()


def differences(p, x, node=None, step=1e-6):
    """d loss / d w (or x) by central differences."""
    target = p.weights["w"].data.to_numpy() if node == "w" else x
    found = np.zeros_like(target)
    for i in np.ndindex(*target.shape):
        held = target[i]
        values = []
        for sign in (1, -1):
            target[i] = held + sign * step
            values.append(p.run(x=x, spare=np.zeros(2, "f4"))["loss"].item())
        target[i] = held
        found[i] = (values[0] - values[1]) / (2 * step)
    return found


def test_gradient_program_equals_finite_differences(program):
    x = RNG.normal(size=(4, 3))
    g = program.grad("loss", ["w", "x"], {"B": 4})
    run = g.run(x=x, spare=np.zeros(2, "f4"))
    np.testing.assert_allclose(run["grad.w"].to_numpy(), differences(program, x, "w"), rtol=1e-6, atol=1e-9)
    np.testing.assert_allclose(run["grad.x"].to_numpy(), differences(program, x), rtol=1e-6, atol=1e-9)


def test_gradient_program_equals_the_tape_bit_for_bit_and_by_plan(program):
    x, spare = RNG.normal(size=(4, 3)), np.zeros(2, "f4")
    g = program.grad("loss", ["w"], {"B": 4})
    program(x=x, spare=spare)["loss"].backward()
    tape = program.weights["w"].grad.numpy()
    assert np.array_equal(g.run(x=x, spare=spare)["grad.w"].to_numpy(), tape)
    assert np.array_equal(gw.compile(g)(x=x, spare=spare)["grad.w"].numpy(), tape)


def test_the_gradient_with_respect_to_an_inner_value_is_correct(program):
    x = RNG.normal(size=(4, 3))
    run = program.run(x=x, spare=np.zeros(2, "f4"))
    g = program.grad("loss", ["out"], {"B": 4}).run(x=x, spare=np.zeros(2, "f4"))["grad.out"].to_numpy()
    out = run.value("out").to_numpy()
    np.testing.assert_allclose(g, 2 * out / out.size, rtol=1e-12)


def test_gradients_flow_through_an_edit(program):
    x = RNG.normal(size=(4, 3))
    with program.edit("skip") as e:
        e.link("x", "out", np.zeros((3, 3)), name="skip")
    g = program.grad("loss", ["skip.weight", "w"], {"B": 4}).run(x=x, spare=np.zeros(2, "f4"))
    assert np.abs(g["grad.skip.weight"].to_numpy()).max() > 0
    np.testing.assert_allclose(g["grad.w"].to_numpy(), differences(program, x, "w"), rtol=1e-6, atol=1e-9)


def test_backward_nodes_are_named_after_the_forward_ones(program):
    names = program.grad("loss", ["w"], {"B": 4}).select("grad.act").names()
    assert names
    assert "act" in {n.split(".")[1] for n in names}


def test_unbound_sizes_and_invalid_step_counts_are_refused(program):
    with pytest.raises(UnboundDim, match="x"):
        program.grad("loss", ["w"])
    with pytest.raises(UsageError, match="steps"):
        program.grad("loss", ["w"], {"B": 4}, steps=0)


def test_values_that_the_output_does_not_read_have_a_zero_gradient(program):
    x, spare = RNG.normal(size=(4, 3)), np.zeros(2, "f4")
    found = program.grad("loss", ["spare", "w"], {"B": 4}).run(x=x, spare=spare)
    assert_bits(found["grad.spare"], np.zeros(2, "f4"))
    assert np.abs(found["grad.w"].to_numpy()).min() > 0


def test_sources_cut_from_a_junction_have_a_zero_gradient(program):
    x, spare = RNG.normal(size=(4, 3)), np.zeros(2, "f4")
    with program.edit("empty") as e:
        for edge in program.in_edges("out"):
            e.cut(edge)
    run = program.run(x=x, spare=spare)
    assert_bits(run["loss"], np.float64(0))
    for found, like in zip(run.grad("loss", ["w", "x", "act"]), (np.zeros((3, 3)), x, x), strict=True):
        assert_bits(found, np.zeros_like(like))


def test_a_path_through_a_nondifferentiable_op_raises():
    b = Builder()
    x = b.input("x", (2, 3))
    b.output(b.cast(b.argmax(x), dtype="float32", name="at"), "y")
    with pytest.raises(NoTape):
        b.build().grad("at", ["x"])


def recurrent():
    """h = a·h + x, s = h₀ + a·s with h₀ the value before: s is dh/da along the steps."""
    b = Builder("recurrent")
    x, a = b.input("x", (2,), "float64"), b.param("a", np.array([0.7, -0.4]))
    h = b.state("h", np.array([0.3, 0.5]))
    grown = b.add(b.mul(a, h, name="scaled"), x, name="grown")
    b.output(grown, "y")
    b.assign(h, grown)
    return b.build()


@pytest.mark.parametrize("steps", [1, 2, 5])
def test_gradients_through_state_stop_at_the_last_step_or_go_to_the_first(steps):
    p, x = recurrent(), RNG.normal(size=(steps, 2))
    a, h, s = p.weights["a"].numpy(), np.array([0.3, 0.5]), np.zeros(2)
    before = h
    for row in x:
        before, s = h, h + a * s
        h = a * h + row
    feed = {"x": x if steps > 1 else x[0]}
    one, full = (p.grad("y", ["a", "h", "x"], mode=mode, steps=steps).run(feed) for mode in ("one_step", "full"))
    np.testing.assert_allclose(one["grad.a"].to_numpy(), before, rtol=1e-14)
    np.testing.assert_allclose(full["grad.a"].to_numpy(), s, rtol=1e-14)
    np.testing.assert_allclose(one["grad.h"].to_numpy(), a, rtol=1e-14)
    np.testing.assert_allclose(full["grad.h"].to_numpy(), a**steps, rtol=1e-14)
    powers = np.stack([a**k for k in range(steps)][::-1])
    np.testing.assert_allclose(full["grad.x"].to_numpy(), powers if steps > 1 else powers[0], rtol=1e-14)
    last = np.zeros_like(powers)
    last[-1] = 1
    np.testing.assert_allclose(one["grad.x"].to_numpy(), last if steps > 1 else last[0])
    assert_bits(p.weights.array("h"), np.array([0.3, 0.5]))


def test_a_gradient_through_a_state_needs_the_number_of_steps():
    b = Builder("late")
    x, w = b.input("x", (2,), "float64"), b.param("w", np.array([2.0, 3.0]))
    kept = b.state("kept", np.zeros(2))
    b.output(b.mul(kept, b.const("two", np.full(2, 2.0)), name="y"), "y")
    b.assign(kept, b.mul(x, w, name="new"))
    p, x = b.build(), RNG.normal(size=(2, 2))
    assert_bits(p.grad("y", ["w"]).run(x=x[0])["grad.w"], np.zeros(2))
    np.testing.assert_allclose(p.grad("y", ["w"], steps=2).run(x=x)["grad.w"].to_numpy(), 2 * x[0])
    assert_bits(p.grad("y", ["w"], mode="one_step", steps=2).run(x=x)["grad.w"], np.zeros(2))
