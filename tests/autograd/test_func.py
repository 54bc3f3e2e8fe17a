"""`gw.func` and `autograd.functional` against torch in float64."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import graphwright as gw
from graphwright.errors import ShapeError, UsageError

RNG = np.random.default_rng(0)
X, Y, W = RNG.normal(size=3), RNG.normal(size=3), RNG.normal(size=(3, 2))


def cube(x: Any, y: Any) -> Any:
    return (x**3 * y).sum()


def vector(x: Any, y: Any) -> Any:
    return (x * y).sin()[:2]


def several(x: Any, y: Any) -> Any:
    return x * x, (x * y).sum()


def tree(p: Any, y: Any) -> Any:
    return ((y @ p["w"]).tanh() * p["b"][0]).sum()


CASES = {
    "grad": "F.grad(cube)(x, y)",
    "grad of several": "F.grad(cube, (0, 1))(x, y)",
    "grad of a grad": "F.grad(lambda x: F.grad(cube)(x, y).sum())(x)",
    "third": "F.grad(lambda x: F.grad(lambda z: F.grad(cube)(z, y).sum())(x).sum())(x)",
    "aux": "F.grad(lambda x: ((x * x).sum(), x + 1), has_aux=True)(x)",
    "value": "F.grad_and_value(cube, 1)(x, y)",
    "tree": "F.grad(tree)({'w': w, 'b': [y[:2]]}, x)",
    "vjp": "F.vjp(vector, x, y)[1](x[:2])",
    "vjp result": "F.vjp(several, x, y)[0]",
    "vjp of several": "F.vjp(several, x, y)[1]((x, y[0]))",
    "jvp": "F.jvp(vector, (x, y), (y, x))",
    "jvp of several": "F.jvp(several, (x, y), (y, x))",
    "jacrev": "F.jacrev(vector)(x, y)",
    "jacrev of several": "F.jacrev(several, (0, 1))(x, y)",
    "jacrev of a matrix": "F.jacrev(lambda w: w @ w.mT)(w)",
    "jacfwd": "F.jacfwd(vector, 1)(x, y)",
    "jacfwd of several": "F.jacfwd(several, (0, 1))(x, y)",
    "hessian": "F.hessian(cube)(x, y)",
    "hessian of several": "F.hessian(cube, (0, 1))(x, y)",
    "vmap": "F.vmap(lambda a, b: a @ b)(w, w)",
    "vmap over axes": "F.vmap(lambda a, b: a * b, in_dims=(1, None), out_dims=1)(w, x)",
    "vmap of grad": "F.vmap(F.grad(lambda a: (a**3).sum()))(w)",
    "vmap of a tuple": "F.vmap(lambda a: (a, a.sum()))(w)",
    "A.jacobian": "A.jacobian(lambda x: (x * y).sin(), x)",
    "A.jacobian of several": "A.jacobian(several, (x, y))",
    "A.jacobian of results": "A.jacobian(lambda x: (x, x.sum()), x)",
    "A.hessian": "A.hessian(lambda x: cube(x, y), x)",
    "A.hessian of several": "A.hessian(cube, (x, y))",
    "A.vjp": "A.vjp(vector, (x, y), x[:2])",
    "A.vjp of one": "A.vjp(lambda x: cube(x, y), x)",
    "A.jvp": "A.jvp(vector, (x, y), (y, x))",
    "A.hvp": "A.hvp(lambda x: cube(x, y), x, y)",
    "A.vhp": "A.vhp(cube, (x, y), (y, x))",
}


def flat(value: Any) -> list[np.ndarray]:
    if isinstance(value, dict):
        value = [value[k] for k in sorted(value)]
    if isinstance(value, tuple | list):
        return [np.array(len(value)), *(a for part in value for a in flat(part))]
    return [value.detach().numpy()]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", CASES)
def test_derivatives_match_torch(name: str) -> None:
    results = []
    for lib, func in ((gw, gw.func), (torch, torch.func)):
        names = {"x": lib.tensor(X), "y": lib.tensor(Y), "w": lib.tensor(W), "cube": cube, "vector": vector}
        names |= {"several": several, "tree": tree, "F": func, "A": lib.autograd.functional}
        results.append(flat(eval(CASES[name], names)))
    assert len(results[0]) == len(results[1])
    for a, b in zip(*results, strict=True):
        assert a.shape == b.shape
        np.testing.assert_allclose(a, b, rtol=1e-10, atol=1e-12)


def test_results_are_on_the_tape_only_if_an_argument_is() -> None:
    x, y = gw.tensor(X), gw.tensor(Y)
    assert not gw.func.grad(cube)(x, y).requires_grad
    assert not gw.func.vjp(vector, x, y)[0].requires_grad
    x.requires_grad_()
    gw.func.grad(cube)(x, y).sum().backward()
    assert x.grad is not None
    np.testing.assert_allclose(x.grad.numpy(), 6 * X * Y)
    assert not gw.autograd.functional.jacobian(lambda x: x * x, x).requires_grad
    assert gw.autograd.functional.jacobian(lambda x: x * x, x, create_graph=True).requires_grad


def test_wrong_arguments_are_refused() -> None:
    x = gw.tensor(X)
    with pytest.raises(ShapeError, match="number"):
        gw.func.grad(lambda x: x)(x)
    with pytest.raises(UsageError, match="argnums"):
        gw.func.grad(cube, 2)(x, x)
    with pytest.raises(ShapeError, match="cotangents"):
        gw.func.vjp(vector, x, x)[1](x)
    with pytest.raises(ShapeError, match="tangents"):
        gw.func.jvp(vector, (x, x), (x,))
    with pytest.raises(UsageError, match="size"):
        gw.vmap(lambda a, b: a + b)(x, gw.zeros(2))
    with pytest.raises(UsageError, match="left out"):
        gw.autograd.functional.vjp(lambda x: x, x)


def test_a_gradient_in_a_trace_is_recorded() -> None:
    p = gw.trace(lambda x: {"y": gw.func.grad(lambda x: (x**3).sum())(x)}, gw.ones(3))
    x = np.array([0.5, 1.0, 2.0], "f4")
    np.testing.assert_allclose(np.asarray(p.run({"x": x})["y"]), 3 * x * x, rtol=1e-6)
