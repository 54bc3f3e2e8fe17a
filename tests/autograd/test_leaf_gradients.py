"""Gradients of leaves: own memory, added to in place, in float32 for 16-bit parameters."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from graphwright.array import float32
from graphwright.autograd import Function, Parameter, grad, tensor
from graphwright.ops import call
from values import array_of, grad_of

MAKERS: tuple[Callable[..., Any], ...] = (tensor, torch.tensor)
ALIASES = {
    "the seed": lambda a, b: a + b,
    "a view of the seed": lambda a, b: a.reshape(2, 3) + b,
    "both operands": lambda a, b: a + b + a,
    "slices of one gradient": lambda a, b: call("concat", a, b, axis=0),
    "an expanded gradient": lambda a, b: (a + b).sum(),
    "a copy": lambda a, b: a.clone() + b.clone(),
}


@pytest.mark.parametrize("how", ALIASES)
def test_leaf_gradients_have_their_own_memory(how: str) -> None:
    a, b = (tensor(np.ones((2, 3)), requires_grad=True) for _ in range(2))
    out = ALIASES[how](a, b)
    seed = tensor(np.full(out.shape, 2.0))
    out.backward(seed)
    stores = [array_of(t).storage for t in (a, b, out, seed, grad_of(a), grad_of(b))]
    assert len({id(s) for s in stores}) == len(stores)
    assert array_of(grad_of(a)).contiguous
    assert array_of(grad_of(b)).contiguous
    before = grad_of(b).numpy().copy()
    grad_of(a).numpy()[:] = 77
    assert np.array_equal(grad_of(b).numpy(), before)
    assert np.array_equal(seed.numpy(), np.full(out.shape, 2.0))
    assert not np.isin(77, out.numpy())


class Constant(Function):
    """Its gradient is a tensor that outlives backward."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, *grads):
        KEPT.extend(grads)
        return KEPT[0]


KEPT = []


def hooked(x, call):
    x.register_hook(call)
    return x


KEEPERS = {
    "a hook of the leaf sees it": lambda x: hooked(x, KEPT.append),
    "a hook of the leaf returns it": lambda x: hooked(x, lambda g: KEPT[0]),
    "a hook of a result sees it": lambda x: hooked(x + 0.0, KEPT.append),
    "a hook of a result returns it": lambda x: hooked(x + 0.0, lambda g: KEPT[0]),
    "a Function returns it": lambda x: Constant.apply(x),
    "a hook returns a view of it": lambda x: hooked(x, lambda g: KEPT[0].reshape(2)),
}


@pytest.mark.parametrize("how", KEEPERS)
def test_sums_of_gradients_leave_tensors_of_the_user_alone(how: str) -> None:
    KEPT[:] = [tensor([3.0, 3.0])]
    x = tensor([1.0, 2.0], requires_grad=True)
    y = KEEPERS[how](x)
    for _ in range(2):
        (y * 3.0).sum().backward(retain_graph=True)
    assert grad_of(x).tolist() == [6.0, 6.0]
    assert all(g.tolist() == [3.0, 3.0] for g in KEPT)


def test_gradients_accumulate_in_place() -> None:
    x = tensor([1.0, 2.0], requires_grad=True)
    (x * 3.0).sum().backward()
    first, memory = x.grad, grad_of(x).data
    (x * x).sum().backward()
    assert x.grad is first
    assert grad_of(x).data is memory
    assert grad_of(x).tolist() == [5.0, 7.0]


TAPED = {
    "strided": lambda x, z: [(x.T**3).sum()],
    "of two leaves": lambda x, z: [((x + z) ** 3).sum()],
    "summed over two backwards": lambda x, z: [(x**3).sum(), (x * x * z).sum()],
}


@pytest.mark.filterwarnings("ignore:Using backward")  # torch's, of a reference cycle
@pytest.mark.parametrize("how", TAPED)
def test_stored_gradients_stay_on_the_tape_of_a_taped_backward(how: str) -> None:
    found: list[list] = []
    for make in MAKERS:
        x, z = (make([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]], requires_grad=True) for _ in range(2))
        for loss in TAPED[how](x, z):
            loss.backward(create_graph=True)
        first = [t.grad for t in (x, z) if t.grad is not None]
        for t in (x, z):
            t.grad = None
        total: Any = sum((g * g).sum() for g in first)
        total.backward()
        found.append([*(g.tolist() for g in first), x.grad.tolist()])
    assert found[0] == found[1]


@pytest.mark.filterwarnings("ignore:Using backward")  # torch's, of a reference cycle
def test_a_stored_gradient_depends_on_an_initial_gradient_that_requires_one() -> None:
    found = []
    for make in MAKERS:
        x, seed = make([1.0, 2.0], requires_grad=True), make([3.0, 4.0], requires_grad=True)
        (x + 1.0).backward(seed, create_graph=True)
        first = x.grad
        (first * first).sum().backward()
        found.append((first.tolist(), seed.grad.tolist()))
    assert found[0] == found[1]


def test_an_untaped_backward_adds_to_a_taped_gradient() -> None:
    x = tensor([1.0, 2.0], requires_grad=True)
    (x * x).sum().backward(create_graph=True)
    first = grad_of(x)
    (x * x * x).sum().backward()
    assert (grad_of(x).tolist(), grad_of(x).requires_grad, first.tolist()) == ([5.0, 16.0], False, [2.0, 4.0])


@pytest.mark.parametrize("kind", ["bfloat16", "float16"])
def test_gradients_of_16_bit_parameters_are_summed_in_float32(kind: str) -> None:
    rng = np.random.default_rng(4)
    start, batches = rng.normal(size=(3, 5)), rng.normal(size=(100, 7, 5))
    w = Parameter(array_of(tensor(start).to(kind)))
    theirs = torch.tensor(start).to(getattr(torch, kind)).requires_grad_()
    expected = torch.zeros(3, 5)  # the oracle sums torch's own 16-bit gradients in float32
    memory = None
    for batch in batches:
        x = tensor(batch).to(kind)
        (call("linear", x, w) * call("linear", x, w)).sum().backward()  # w is read twice: its fan-in is summed too
        t = torch.tensor(batch).to(theirs.dtype)
        a, b = (theirs.detach().requires_grad_() for _ in range(2))
        (torch.nn.functional.linear(t, a) * torch.nn.functional.linear(t, b)).sum().backward()
        expected += grad_of(b).float() + grad_of(a).float()
        assert memory in (None, grad_of(w).data)
        memory = grad_of(w).data
    assert (w.dtype.name, w.grad_dtype, grad_of(w).dtype) == (kind, float32, float32)
    np.testing.assert_allclose(grad_of(w).numpy(), expected.numpy(), rtol=1e-6)
    low = torch.zeros(3, 5, dtype=theirs.dtype)
    for _ in range(300):
        low += 1
    for _ in range(300):
        w.sum().backward()
    np.testing.assert_allclose(grad_of(w).numpy(), (expected + 300).numpy(), rtol=1e-5)
    assert low.max() == (256 if kind == "bfloat16" else 300)  # what the sum in the parameter's dtype would be


def test_two_micro_batches_equal_one_batch_for_a_16_bit_parameter() -> None:
    rng = np.random.default_rng(5)
    x = tensor(rng.normal(size=(8, 5))).to("bfloat16")
    whole, parts = (Parameter(array_of(tensor(np.ones((3, 5))).to("bfloat16"))) for _ in range(2))
    call("linear", x, whole).sum().backward()
    for half in (x[:4], x[4:]):
        call("linear", half, parts).sum().backward()
    np.testing.assert_allclose(grad_of(parts).numpy(), grad_of(whole).numpy(), rtol=2**-7, atol=2**-7)


def test_a_16_bit_gradient_set_by_the_user_is_widened_before_summing() -> None:
    w = Parameter(array_of(tensor(np.ones(2)).to("bfloat16")))
    w.grad = tensor([256.0, 256.0]).to("bfloat16")
    w.sum().backward()
    assert w.grad.dtype is float32
    assert w.grad.tolist() == [257.0, 257.0]


def test_only_backward_widens_gradients() -> None:
    w = Parameter(array_of(tensor(np.ones(2)).to("bfloat16")))
    plain = tensor(np.ones(2)).to("bfloat16").detach()
    plain.requires_grad = True
    (w * plain).sum().backward()
    assert grad_of(plain).dtype.name == "bfloat16"  # as in torch: only what is trained has a float32 gradient
    assert grad((w * w).sum(), w)[0].dtype.name == "bfloat16"  # `grad` gives the spec of the input
