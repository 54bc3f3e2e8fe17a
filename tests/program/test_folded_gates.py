"""Gates before products multiply the trained weight: the same numbers and gradients, on fewer elements."""

from __future__ import annotations

import numpy as np
import pytest

import graphwright as gw
from graphwright.array.formulas.gates import MODES
from graphwright.array.spec import Dim
from graphwright.program import Program

HEADS, DIM, NEURONS, OUT, TOKENS = 3, 4, 8, 5, 7


def block() -> Program:
    """Two products that read units: heads with a flattened dimension, and neurons; rows are not mixed."""
    rng = np.random.default_rng(0)
    b = gw.Builder("block")
    x = b.input("x", ("B", "T", OUT), gw.float64)

    def weight(name: str, *shape: int) -> object:
        return b.param(f"{name}.weight", rng.normal(size=shape))

    apart = b.unflatten(b.linear(x, weight("q", HEADS * DIM, OUT), name="q"), axis=-1, sizes=(HEADS, DIM), name="rows")
    joined = b.linear(b.flatten(b.tanh(apart), start=2, end=3), weight("o", OUT, HEADS * DIM), name="o")
    inner = b.tanh(b.linear(joined, weight("up", NEURONS, OUT), name="up"))
    b.output(b.linear(inner, weight("down", OUT, NEURONS), name="down"), "y")
    p = b.build()
    for axis in [a for a in p.axes().values() if a.kind != "channels" and not a.frozen and a.size in (HEADS, NEURONS)]:
        axis.units().gate("sigmoid")
    p.weights["gates.logits"].data = gw.array.from_numpy(rng.normal(size=HEADS + NEURONS))
    p.weights["gates.run"].data = gw.array.from_numpy(np.array([0, 0, MODES.index("train")]))
    return p


def slopes(p: Program, x: np.ndarray) -> dict[str, np.ndarray]:
    """Gradients of Σ y² by all that is trained."""
    wanted = {k: w for k, w in p.weights.items() if w.requires_grad}
    y = p(x=gw.tensor(x))["y"]
    found = gw.autograd.grad((y * y).sum(), list(wanted.values()))
    return {k: g.numpy() for k, g in zip(wanted, found, strict=True)}


def products(p: Program, x: np.ndarray) -> list[tuple[Dim, ...]]:
    """Shapes of what gates multiply, in a trace."""
    traced = gw.trace(lambda x: p(x=x), gw.tensor(x))
    return [traced.spec(n).shape for n in traced.nodes() if traced.op(n) == "mul"]


def test_folded_gates_have_the_gradients_of_unfolded_ones():
    """A sample has fewer rows than the weights, so that its gates multiply activations; a batch is the sum of them."""
    p, x = block(), np.random.default_rng(1).normal(size=(3, TOKENS, OUT))
    assert products(p, x) == [(OUT, HEADS, DIM), (OUT, NEURONS)]
    found = slopes(p, x)
    assert set(found) == {"q.weight", "o.weight", "up.weight", "down.weight", "gates.logits"}
    few = [x[i : i + 1, t : t + 4] for i in range(3) for t in range(0, TOKENS, 4)]
    for key, value in found.items():
        assert np.abs(value).min() > 0
        np.testing.assert_allclose(value, sum(slopes(p, part)[key] for part in few), rtol=1e-11, err_msg=key)


@pytest.mark.parametrize("why", ["few rows", "frozen weights", "no gradients"])
def test_gates_are_not_folded_if_the_weight_is_larger(why):
    p, x = block(), np.random.default_rng(1).normal(size=(3, TOKENS, OUT))
    if why == "few rows":
        x = x[:1, :4]
    if why == "frozen weights":
        for key in ("o.weight", "down.weight"):
            p.weights[key].requires_grad = False
    with gw.no_grad() if why == "no gradients" else gw.enable_grad():
        assert products(p, x) == [(*x.shape[:2], HEADS, DIM), (*x.shape[:2], NEURONS)]


def test_values_with_other_readers_are_not_folded():
    p = block()
    with p.edit("look at the neurons") as e:
        e.set_outputs(y=p.outputs()[0], seen=next(g.handle for g in p.gates().values() if g.length == NEURONS))
    x = np.random.default_rng(1).normal(size=(3, TOKENS, OUT))
    assert products(p, x) == [(OUT, HEADS, DIM), (3, TOKENS, NEURONS)]
