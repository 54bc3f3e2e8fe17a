"""Function: a user's own gradient, eager, in traces and in plans; saved tensors are checked and freed."""

from __future__ import annotations

import gc
import weakref
from typing import Any, cast

import numpy as np
import pytest
import torch

import graphwright as gw
from graphwright.autograd import (
    Function,
    GraphFreed,
    ModifiedSinceForward,
    NotDifferentiable,
    Tensor,
    ViewModified,
    grad,
    tensor,
)
from graphwright.errors import ComputeError, UsageError
from graphwright.ops import call
from graphwright.testing.gradcheck import gradcheck, gradgradcheck
from values import array_of, grad_of

pytestmark = pytest.mark.usefixtures("young_heap")


class Silu(Function):
    """x·σ(x), its sigmoid kept on the way."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        s = x.sigmoid()
        ctx.save(x, s)
        return x * s

    @staticmethod
    def vjp(ctx: Any, g: Tensor, needs: tuple[bool, ...]) -> Tensor:
        x, s = ctx.saved
        return g * s * (1.0 + x * (1.0 - s))


class ScaledProduct(Function):
    """a·b·factor; the factor is a number. It records its `needs`."""

    wanted: list[tuple[bool, ...]] = []  # noqa: RUF012

    @staticmethod
    def forward(ctx: Any, a: Tensor, factor: float, b: Tensor) -> Tensor:
        ctx.save(a, b)
        ctx.factor = factor
        return a * b * factor

    @staticmethod
    def vjp(ctx: Any, g: Tensor, needs: tuple[bool, ...]) -> tuple[Tensor | None, None, Tensor | None]:
        ScaledProduct.wanted.append(needs)
        a, b = ctx.saved
        return (g * b * ctx.factor if needs[0] else None), None, (g * a * ctx.factor if needs[2] else None)


class ExpAndSquare(Function):
    """Two results, the first of them saved."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        y = x.exp()
        ctx.save(x, y)
        return y, x * x

    @staticmethod
    def vjp(ctx: Any, g: tuple[Tensor | None, Tensor | None], needs: tuple[bool, ...]) -> tuple[Tensor]:
        x, y = ctx.saved
        parts = [] if g[0] is None else [g[0] * y]
        parts += [] if g[1] is None else [g[1] * x * 2.0]
        return (call("junction", *parts),)


class Through(Function):
    """The argument itself, with a gradient of its own: nothing passes."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x

    @staticmethod
    def vjp(ctx: Any, g: Tensor, needs: tuple[bool, ...]) -> Tensor:
        return g * 0.0


RNG = np.random.default_rng(0)
X, Y = RNG.normal(size=(2, 3)), RNG.normal(size=3)


def test_gradients_match_finite_differences() -> None:
    gradcheck(Silu.apply, [X])
    gradcheck(lambda a, b: ScaledProduct.apply(a, 1.5, b), [X, Y])  # broadcast: the engine sums back
    gradcheck(ExpAndSquare.apply, [X])
    gradcheck(lambda x: ExpAndSquare.apply(x)[1], [X])
    gradgradcheck(lambda a, b: ScaledProduct.apply(a, 1.5, b), [X, Y])
    gradgradcheck(ExpAndSquare.apply, [X])


def test_needs_are_per_argument() -> None:
    for mask in ((True, True), (True, False), (False, True)):
        ScaledProduct.wanted.clear()
        a, b = (tensor(v, requires_grad=m) for v, m in zip((X, Y), mask, strict=True))
        ScaledProduct.apply(a, 2.0, b).sum().backward()
        assert ScaledProduct.wanted == [(mask[0], False, mask[1])]
        assert [t.grad is not None for t in (a, b)] == list(mask)
    assert ScaledProduct.apply(tensor(X), 2.0, tensor(Y)).node is None


def test_a_saved_intermediate_value_has_no_second_derivative() -> None:
    x = tensor(X, requires_grad=True)
    with pytest.raises(NotDifferentiable, match="Silu"):
        grad(Silu.apply(x).sum(), x, create_graph=True)


def test_a_returned_argument_keeps_its_own_tape() -> None:
    x = tensor(X, requires_grad=True)
    y = Through.apply(x)
    assert y is not x
    assert x.is_leaf
    (y + x).sum().backward()
    assert np.array_equal(grad_of(x).numpy(), np.ones((2, 3)))


def test_a_returned_argument_is_not_overwritten_through_the_result() -> None:
    x = tensor([1.0, 2.0], requires_grad=True)
    for source in (x, x * 1.0):
        y = Through.apply(source)
        with pytest.raises(ViewModified):
            y.add_(1.0)
        assert source.tolist() == [1.0, 2.0]
    y = Through.apply(x * 1.0)  # the argument is gone
    y.add_(1.0).sum().backward()
    assert x.grad is not None


def test_saved_tensors_are_version_checked_freed_and_form_no_cycle() -> None:
    gc.collect()
    gc.disable()
    try:
        for function in (Silu, ExpAndSquare):
            x = tensor(X, requires_grad=True)
            made = function.apply(x)
            first = made[0] if isinstance(made, tuple) else made
            refs = [weakref.ref(t) for t in (x, first, first.node, array_of(first))]
            total = first.sum()
            total.backward()
            with pytest.raises(GraphFreed, match=function.__name__):
                first.backward(tensor(X))
            del x, made, first, total
            assert [r() for r in refs] == [None] * 4
    finally:
        gc.enable()
    x = tensor(X, requires_grad=True)
    y = Silu.apply(x)
    array_of(x).copy_from(array_of(tensor(X)))
    with pytest.raises(ModifiedSinceForward, match="Silu"):
        y.sum().backward()


def test_saved_tensors_are_freed_after_the_vjp_while_the_result_lives() -> None:
    held: list[weakref.ref[Any]] = []

    class Watched(Silu):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            y = Silu.forward(ctx, x)
            held.extend(weakref.ref(array_of(t)) for t in ctx._pending[1:])
            return y

    x = tensor(X, requires_grad=True)
    y = Watched.apply(x)
    assert [r() is not None for r in held] == [True]
    y.sum().backward()
    assert [r() for r in held] == [None]
    assert y.node is not None


def test_eager_traced_and_planned_give_the_same_bits() -> None:
    w = gw.Parameter(array_of(tensor(Y.astype("f4"))), name="w")

    def step(x: Tensor) -> tuple[Tensor, Tensor]:
        h = ScaledProduct.apply(Silu.apply(x), 3.0, w)
        first, second = ExpAndSquare.apply(h * 0.1)
        loss = (first + second).sum()
        return loss, grad(loss, w)[0]

    x = tensor(X.astype("f4"))
    eager = step(x)
    planned = gw.compile(step, executor="aten")(x)
    assert [t.numpy().tobytes() for t in eager] == [t.numpy().tobytes() for t in planned]
    program = gw.trace(step, x)
    assert "Silu.sigmoid" in [program.path(n) for n in program.nodes()]
    t, v = torch.tensor(X.astype("f4")), torch.tensor(Y.astype("f4"), requires_grad=True)
    h = torch.nn.functional.silu(t) * v * 3 * 0.1
    (h.exp() + h * h).sum().backward()
    np.testing.assert_allclose(eager[1].numpy(), grad_of(v).numpy(), rtol=1e-5)


@pytest.mark.parametrize(
    "gives", [lambda g: (g, g), lambda g: g.reshape(6), lambda g: g.float(), lambda g: None, lambda g: 1.0]
)
def test_an_invalid_gradient_is_named_in_the_error(gives: Any) -> None:
    wrong = type(
        "Wrong",
        (Function,),
        {"forward": staticmethod(lambda ctx, x: x * 1.0), "vjp": staticmethod(lambda c, g, n: gives(g))},
    )
    x = tensor(X, requires_grad=True)
    with pytest.raises(ComputeError, match="Wrong"):
        cast("Any", wrong).apply(x).sum().backward()
    assert x.grad is None


def test_a_forward_must_return_tensors() -> None:
    wrong = type("Wrong", (Function,), {"forward": staticmethod(lambda ctx, x: 1.0)})
    with pytest.raises(UsageError, match="Wrong"):
        cast("Any", wrong).apply(tensor(X))


def test_torchs_form_of_a_function() -> None:
    def made(base: Any) -> Any:
        class Halves(base):
            @staticmethod
            def forward(ctx: Any, x: Any, factor: float) -> tuple[Any, Any]:
                ctx.save_for_backward(x)
                ctx.factor = factor
                return x * factor, x * x

            @staticmethod
            def backward(ctx: Any, g: Any, h: Any) -> tuple[Any, None]:
                (x,) = ctx.saved_tensors
                assert ctx.needs_input_grad[0]
                return g * ctx.factor + 2.0 * h * x, None

        return Halves

    for used in (0, 1):
        grads = []
        for library, base in ((gw, Function), (torch, torch.autograd.Function)):
            x = library.tensor([1.0, 3.0], requires_grad=True)
            made(base).apply(x, 0.5)[used].sum().backward()
            grads.append(x.grad.tolist())
        assert grads[0] == grads[1]
    leaf = gw.nn.Parameter(np.array([1.0, 3.0], np.float32))
    assert gw.compile(lambda y: grad((made(Function).apply(leaf, 0.5)[1] * y).sum(), leaf)[0])(1.0).tolist() == [2, 6]


def test_a_function_without_a_gradient_raises_what_is_missing() -> None:
    class Nothing(Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x

    x = tensor([1.0], requires_grad=True)
    with pytest.raises(NotImplementedError, match="vjp nor backward"):
        Nothing.apply(x).sum().backward()
