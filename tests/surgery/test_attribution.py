"""Attributions against numerical integration in float64, and their completeness."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from scipy.integrate import quad

import graphwright as gw
from graphwright import surgery
from graphwright.errors import DTypeError, ShapeError, UsageError
from graphwright.program.errors import FeedError

RNG = np.random.default_rng(3)
W, V = RNG.standard_normal((5, 3)), RNG.standard_normal((2, 5))
X, BASE = RNG.standard_normal((4, 3)), RNG.standard_normal((4, 3))


def network() -> gw.Program:
    """y = V·tanh(W·x)², in float64, with named inner values."""
    b = gw.Builder("net")
    x = b.input("x", ("B", 3), gw.float64)
    hidden = b.tanh(b.linear(x, b.param("w", W), name="pre"), name="hidden")
    b.output(b.linear(b.mul(hidden, hidden, name="squared"), b.param("v", V), name="y"), name="y")
    return b.build()


def y(x: np.ndarray, k: int) -> float:
    return float((V @ np.tanh(W @ x) ** 2)[k])


def integrated(f, x: np.ndarray, base: np.ndarray) -> np.ndarray:
    """Integrate central differences of f along the straight path, entry by entry."""
    found = np.empty_like(x)
    for i in range(x.size):
        step = 1e-6 * np.eye(x.size)[i]

        def slope(alpha, step=step):
            at = base + alpha * (x - base)
            return (f(at + step) - f(at - step)) / 2e-6

        found[i] = (x - base)[i] * quad(slope, 0, 1, epsabs=1e-10)[0]
    return found


def test_integrated_gradients_match_numerical_integration():
    a = gw.attribute(network(), {"x": X}, 1, baseline={"x": BASE})
    expected = [integrated(lambda v: y(v, 1), x, base) for x, base in zip(X, BASE, strict=True)]
    np.testing.assert_allclose(a["x"], expected, atol=1e-8)
    differences = [y(x, 1) - y(base, 1) for x, base in zip(X, BASE, strict=True)]
    np.testing.assert_allclose(a.difference, differences, rtol=1e-12)
    np.testing.assert_allclose(a["x"].sum(1), differences, atol=1e-10)  # completeness, for each example
    assert a.gap < 1e-9


def test_inner_values_match_numerical_integration():
    a = gw.attribute(network(), X, 0, of="hidden", baseline=0.25)
    hidden = np.tanh(X @ W.T)
    expected = [integrated(lambda h: float((V @ h**2)[0]), h, np.full(5, 0.25)) for h in hidden]
    np.testing.assert_allclose(a["hidden"], expected, atol=1e-8)
    assert a.gap < 1e-9


def test_inputs_give_inner_values_their_baseline():
    a = gw.attribute(network(), X, 0, of=["hidden"], baseline={"x": BASE})
    before = np.tanh(BASE @ W.T)
    b = gw.attribute(network(), X, 0, of=["hidden"], baseline={"hidden": before})
    np.testing.assert_allclose(a["hidden"], b["hidden"], rtol=1e-12)
    np.testing.assert_allclose(a.difference, [y(x, 0) - y(base, 0) for x, base in zip(X, BASE, strict=True)], rtol=1e-9)


def test_several_values_share_one_path():
    model = gw.open("bundled")
    ids, positions = np.array([[84, 104, 101, 32]]), np.arange(4)[None]
    feeds, nodes = {"ids": ids, "positions": positions}, ["layers.1.mlp.down", "layers.1.attn.o"]
    a = gw.attribute(
        model.program, feeds, lambda out: out["logits"][:, -1, 101], of=nodes, baseline={"ids": ids * 0 + 32}
    )
    run = model.program.run(feeds)
    other = model.program.run({**feeds, "ids": ids * 0 + 32})
    patch: dict = {n: other.value(n) for n in nodes}
    moved = model.program.run(feeds, patch=patch)["logits"].to_numpy()[0, -1, 101]
    difference = run["logits"].to_numpy()[0, -1, 101] - moved
    np.testing.assert_allclose(a.difference, [difference], atol=1e-5)
    assert abs(sum(a.sums.values()) - difference) < 1e-4
    assert a.values.keys() == set(nodes)


def test_gradient_x_input_and_occlusion():
    p = network()
    a = gw.attribute(p, X, 1, method="gradient_x_input")
    slopes = [[(y(x + d, 1) - y(x - d, 1)) / 2e-6 for d in 1e-6 * np.eye(3)] for x in X]
    np.testing.assert_allclose(a["x"], X * slopes, atol=1e-7)
    b = gw.attribute(p, X, 1, method="occlusion", baseline={"x": BASE})
    expected = [
        [y(x, 1) - y(np.where(np.eye(3)[i], base, x), 1) for i in range(3)] for x, base in zip(X, BASE, strict=True)
    ]
    np.testing.assert_allclose(b["x"], expected, atol=1e-12)


def test_a_linear_function_has_equal_attributions_by_all_methods():
    module = gw.nn.Linear(3, 2)
    x = X.astype(np.float32)
    expected = x * module.weight.numpy()[1]
    for method in ("integrated_gradients", "gradient_x_input", "occlusion"):
        np.testing.assert_allclose(gw.attribute(module, x, 1, method=method)["x"], expected, atol=1e-5)


def test_params_are_attributed_too():
    a = gw.attribute(network(), X, lambda out: out["y"].sum(), of="v")
    np.testing.assert_allclose(a["v"], V * (np.tanh(X @ W.T) ** 2).sum(0), rtol=1e-10)


def test_the_report_leaves_arrays_out():
    a = gw.attribute(network(), X, 1)
    assert a.to_json().keys() == {"method", "total", "gap", "sums"}
    assert "integrated_gradients" in str(a)


WRONG: Any = 1.5, np.tanh, ["a"]


def norm_in_training():
    return gw.nn.Sequential(gw.nn.Linear(3, 2), gw.nn.BatchNorm1d(2))


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: gw.attribute(network(), X, 0, method="saliency"), UsageError, "method"),
        (lambda: gw.attribute(network(), X, 0, method=WRONG[2]), UsageError, "method"),
        (lambda: gw.attribute(network(), X, 0, of=[]), UsageError, "no values"),
        (lambda: gw.attribute(network(), X, 0, baseline=float("nan")), UsageError, "baseline"),
        (lambda: gw.attribute(network(), X, 0, baseline=WRONG[2]), UsageError, "baseline"),
        (lambda: gw.attribute(network(), X, 0, steps=0), UsageError, "steps"),
        (lambda: gw.attribute(network(), X, "z"), UsageError, "no output"),
        (lambda: gw.attribute(network(), X, WRONG[0]), UsageError, "invalid target"),
        (lambda: gw.attribute(network(), X, "y"), ShapeError, "one number per example"),
        (lambda: gw.attribute(network(), X, 0, of="hiden"), UsageError, "hidden"),
        (lambda: gw.attribute(network(), X, 0, baseline={"z": 0}), UsageError, "unknown value"),
        (lambda: gw.attribute(network(), X, 0, baseline={"x": BASE[:2]}), ShapeError, "another shape"),
        (lambda: gw.attribute(network(), [X, X], 0), UsageError, "wrong number of inputs"),
        (lambda: gw.attribute(network(), X[:, :2], 0), FeedError, "x: expected"),
        (lambda: gw.attribute(WRONG[1], X, 0), UsageError, "Program or a Module"),
        (lambda: gw.attribute(norm_in_training(), X.astype("f"), 0), UsageError, r"module\.eval"),
        (lambda: gw.attribute(gw.open("bundled").program, {}, 0), DTypeError, "no floating inputs"),
        (lambda: gw.attribute(gw.open("bundled").program, {}, 0, of="ids"), DTypeError, "integers"),
    ],
)
def test_invalid_calls_are_refused(call, error, message):
    with pytest.raises(error, match=message):
        call()


def test_the_program_is_unchanged():
    p = network()
    before = p.hash(), p.version
    gw.attribute(p, X, 0)
    assert (p.hash(), p.version) == before
    assert all(v.grad is None for v in p.weights.values())
    assert surgery.attribute is gw.attribute


def test_occlusion_of_a_weight_with_as_many_rows_as_examples():
    x = X[:2]
    a = gw.attribute(network(), x, 1, of="v", method="occlusion")
    b = gw.attribute(network(), x, 1, of="v", method="gradient_x_input")  # the target is linear in v
    np.testing.assert_allclose(a["v"], b["v"], atol=1e-12)
    assert not a["v"][0].any()
    assert a.gap < 1e-12


def test_occlusion_of_an_input_that_all_examples_share():
    b = gw.Builder("net")
    x, shared = b.input("x", ("B", 3), gw.float64), b.input("shared", (4, 3), gw.float64)
    b.output(b.linear(x, shared), "y")
    feeds = {"x": X, "shared": BASE}
    a = gw.attribute(b.build(), feeds, 0, method="occlusion", of="shared")
    np.testing.assert_allclose(a["shared"][0], X.sum(0) * BASE[0], atol=1e-12)
    assert not a["shared"][1:].any()


def test_a_second_result_has_its_path():
    b = gw.Builder("net")
    _, order = b.sort(b.input("x", ("B", 3), gw.float64), axis=1, descending=False, name="sort")
    b.output(b.mul(b.cast(order, dtype=gw.float64), b.param("w", np.ones(3))), "y")
    p = b.build()
    with pytest.raises(DTypeError, match=r"sort\.indices"):
        gw.attribute(p, X, 0, of="sort.indices")
    b = gw.Builder("net")
    cos, sin = b.rope_table(b.input("at", ("B", "T"), gw.int64), b.param("f", np.ones(2, "f")), name="table", scale=1.0)
    b.output(b.add(cos, sin), "y")
    a = gw.attribute(b.build(), np.arange(6).reshape(2, 3), lambda out: out["y"].sum(), of=["table.sin", "table"],
                     baseline={"table.sin": 0.5})  # fmt: skip
    np.testing.assert_allclose(a["table.sin"], np.repeat(np.sin(np.arange(6)), 2).reshape(2, 3, 2) - 0.5, atol=1e-6)
