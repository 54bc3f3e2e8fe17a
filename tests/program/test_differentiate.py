"""The gradient program against finite differences in float64, against the eager tape, and after an edit."""

from __future__ import annotations

import numpy as np
import pytest

import graphwright as gw
from graphwright.array import UnboundDim
from graphwright.autograd import NoTape
from graphwright.program import Builder

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
    assert np.array_equal(gw.compile(g)(x=x, spare=spare).numpy(), tape)


def test_gradient_by_an_inner_value(program):
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


def test_sizes_and_dependence_are_checked(program):
    with pytest.raises(UnboundDim, match="x"):
        program.grad("loss", ["w"])
    with pytest.raises(NoTape):
        program.grad("loss", ["spare"], {"B": 4})
