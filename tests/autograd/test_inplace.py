"""In-place writes: numpy's values and torch's gradients where allowed, else a named error."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import graphwright as gw
from graphwright.array import from_numpy
from graphwright.autograd import (
    LeafModified,
    ModifiedSinceForward,
    Parameter,
    Tensor,
    TraceMutation,
    Variable,
    ViewModified,
    grad,
    no_grad,
    tensor,
)
from graphwright.errors import AliasError, ShapeError
from graphwright.ops import call
from values import array_of, grad_of

RNG = np.random.default_rng(0)
A, B = RNG.uniform(0.5, 2, (2, 3)), RNG.uniform(0.5, 2, 3)
MAKERS: tuple[Callable[..., Any], ...] = (tensor, torch.tensor)


@pytest.mark.parametrize("method", ["add_", "sub_", "mul_", "div_", "copy_"])
@pytest.mark.parametrize("mask", [(True, True), (True, False), (False, True), (False, False)])
def test_values_and_gradients_match_torch(method: str, mask: tuple[bool, bool]) -> None:
    a, b = (tensor(v, requires_grad=m) for v, m in zip((A, B), mask, strict=True))
    p, q = (torch.tensor(v, requires_grad=m) for v, m in zip((A, B), mask, strict=True))
    h, t = a * 1.5, p * 1.5
    memory = h.data
    assert getattr(h, method)(b) is h
    getattr(t, method)(q)
    assert h.data is memory
    assert array_of(h).storage.version == 1
    assert h.requires_grad == (t.requires_grad if method != "copy_" else mask[1])  # what is overwritten is forgotten
    np.testing.assert_allclose(h.numpy(), t.detach().numpy())
    if h.requires_grad:
        (h.tanh() * h).sum().backward()
        (t.tanh() * t).sum().backward()
        for ours, theirs in ((a, p), (b, q)):
            if ours.grad is None:
                assert theirs.grad is None or not theirs.grad.any()
            else:
                np.testing.assert_allclose(ours.grad.numpy(), grad_of(theirs).numpy(), rtol=1e-12)


def test_fill_stops_the_gradient() -> None:
    x = tensor(A, requires_grad=True)
    h = x * 2.0
    h.fill_(3.0)
    assert (h.node, h.requires_grad, h.numpy().max()) == (None, False, 3.0)
    assert not tensor(A).zero_().numpy().any()


def test_a_leaf_that_requires_grad_is_written_only_under_no_grad() -> None:
    x, w = tensor(A, requires_grad=True), Parameter(from_numpy(A.copy()), name="layer.weight")
    for t in (x, w):
        with pytest.raises(LeafModified):
            t.add_(1.0)
        assert np.array_equal(t.numpy(), A)
        with no_grad():
            t.add_(1.0)
        assert np.array_equal(t.numpy(), A + 1)
        assert t.requires_grad
        assert t.is_leaf
    with pytest.raises(LeafModified, match=r"layer\.weight"):
        gw.trace(lambda y: w.add_(y), A)


def test_backward_detects_an_overwritten_operand() -> None:
    x = tensor(A, requires_grad=True)
    h = x * 1.0
    y = h.exp()  # saves its result
    y.mul_(2.0)
    with pytest.raises(ModifiedSinceForward) as caught:
        y.sum().backward()
    assert (caught.value.op, caught.value.value) == ("exp", "result 0")
    h = x * 1.0
    y = h + 1.0  # saves nothing
    h.mul_(2.0)
    assert np.array_equal(grad(y.sum(), x)[0].numpy(), np.ones((2, 3)))


def test_a_taped_write_to_shared_memory_is_refused() -> None:
    x = tensor(A, requires_grad=True)
    h = x * 1.0
    row = h[0]
    for target in (h, row):
        with pytest.raises(ViewModified):
            target.mul_(2.0)
        with pytest.raises(ViewModified):
            target.fill_(2.0)
    assert array_of(h).storage.version == 0
    del row, target
    h.mul_(2.0)  # the view is gone
    plain = tensor(A.copy())
    part = plain[0]
    part.fill_(7.0)  # no tape, no harm
    assert plain.numpy()[0].tolist() == [7.0] * 3
    with pytest.raises(ViewModified):
        plain.mul_(x)


def test_a_mismatched_result_is_refused_before_any_write() -> None:
    x = tensor(A.astype("f4"))
    for other in (tensor(A), tensor(np.ones((4, 2, 3), "f4"))):
        with pytest.raises(ShapeError):
            x.add_(other)
    with pytest.raises(AliasError):
        call("matmul", x[:, :2], x[:, :2], out=x[:, :2])
    assert array_of(x).storage.version == 0
    assert np.array_equal(x.numpy(), A.astype("f4"))


def test_call_returns_out() -> None:
    x, out = tensor(A, requires_grad=True), tensor(np.full((2, 3), np.nan))
    memory = out.data
    assert call("mul", x, x, out=out) is out
    assert out.data is memory
    out.sum().backward()
    assert np.array_equal(grad_of(x).numpy(), 2 * A)
    array = from_numpy(np.zeros((2, 3)))
    assert call("exp", from_numpy(A), out=array) is array
    np.testing.assert_allclose(array.to_numpy(), np.exp(A))


def test_a_traced_write_rebinds_the_tensor() -> None:
    def work(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        h = x * 2.0
        before = h + 0.0
        h.add_(y)
        h.mul_(h.tanh())
        return h, before

    feeds = [tensor(A.astype("f4")), tensor(B.astype("f4"))]
    eager = work(*feeds)
    for mine, other in zip(gw.compile(work, executor="aten")(*feeds), eager, strict=True):
        assert np.array_equal(mine.numpy(), other.numpy())


def test_the_gradient_of_a_traced_write() -> None:
    def work(x: Tensor) -> Tensor:
        x.requires_grad = True
        h = x * 2.0
        h.mul_(x)
        return grad(h.sum(), x)[0]

    assert np.allclose(gw.compile(work)(A).numpy(), 4 * A)


@pytest.mark.parametrize(
    "broken",
    [
        lambda h: (h[0], h.add_(1.0)),
        lambda h: (h.reshape(6), h.fill_(1.0)),
        lambda h: (h.detach(), h.add_(1.0)),
        lambda h: (h, h[0].add_(1.0)),
    ],
)
def test_a_traced_write_is_refused_while_a_view_exists(broken) -> None:
    with pytest.raises(TraceMutation):
        gw.trace(lambda x: broken(x * 1.0)[0], A)


def test_a_traced_write_is_allowed_after_the_view_is_gone() -> None:
    def work(x: Tensor) -> Tensor:
        h = x * 1.0
        total = h.reshape(6).sum()
        return h.add_(total)

    assert np.array_equal(gw.compile(work)(A).numpy(), A + A.sum())


def test_a_trace_cannot_write_a_tensor_from_outside() -> None:
    outside = tensor(A)
    with pytest.raises(TraceMutation, match="Variable"):
        gw.trace(lambda x: outside.add_(x), A)
    total = Variable(from_numpy(A.copy()), name="total")
    step = gw.compile(lambda x: total.add_(x) * 1.0)
    for k in (2, 3):
        assert np.array_equal(step(A).numpy(), k * A)
    assert np.array_equal(total.numpy(), 3 * A)


UPDATES = {
    "+=": [3.0, -4.0], "-=": [3.0, -4.0], "*=": [3.0, -4.0], "/=": [3.0, -4.0], "//=": [3.0, -4.0], "%=": [3.0, -4.0],
    "**=": [3.0, 4.0], "&=": [3, 4], "|=": [3, 4], "^=": [3, 4], "<<=": [3, 4], ">>=": [3, 4],
}  # fmt: skip


@pytest.mark.parametrize("operator", UPDATES)
def test_updating_operators_write_into_the_tensor_as_in_torch(operator: str) -> None:
    values, names = UPDATES[operator], {"x": None}
    found = []
    for make in MAKERS:
        x = make(values)
        names = {"x": x, "y": 2 if isinstance(values[0], int) else 2.0}
        exec(f"x {operator} y", names)
        assert names["x"] is x
        found.append(x.tolist())
    assert found[0] == found[1]


def test_updates_of_entries_and_of_taped_tensors_have_torchs_gradients() -> None:
    grads = []
    for make in MAKERS:
        x = make([[1.0, 2.0], [3.0, 4.0]], requires_grad=True)
        h = x * 2.0
        h[0] += x[1] * x[0]  # a view is read, and the sum is written to h
        h[:, 1] *= 3.0
        h += h.sum()
        h.sum().backward()
        grads.append(x.grad.tolist())
    assert grads[0] == grads[1]
    leaf = tensor([1.0], requires_grad=True)
    with pytest.raises(LeafModified):
        leaf += 1.0


def test_hand_written_sgd_trains_eagerly_and_compiled() -> None:
    def run(compiled: bool) -> list[float]:
        weight = gw.nn.Parameter(np.ones(3, np.float32))

        def step(x: Tensor) -> Tensor:
            loss = ((weight * x) ** 2).sum()
            loss.backward()
            with no_grad():
                for p in [weight]:
                    p -= 0.1 * grad_of(p)
                    p.grad = None
            return loss

        step = gw.compile(step) if compiled else step
        return [step(tensor([1.0, 2.0, 0.5])).item() for _ in range(4)]

    assert run(False)[-1] < 0.1 * run(False)[0]
    assert np.allclose(run(True), run(False))


def test_a_trace_adds_to_tensors_that_it_made() -> None:
    def work(x: Tensor) -> dict[str, Tensor]:
        total, rows = gw.tensor(0.0), gw.zeros(2, 3)
        for k in range(3):
            total += k * x.sum()
        rows[0] = x
        rows[1] += 2.0 * x
        return {"total": total, "rows": rows}

    x = np.array([1.0, 2.0, 3.0], np.float32)
    made, eager = gw.compile(work)(x), work(tensor(x))
    assert made["total"].item() == eager["total"].item() == 18
    assert made["rows"].tolist() == eager["rows"].tolist() == [[1, 2, 3], [2, 4, 6]]


def test_a_tensor_from_outside_a_trace_is_as_before_the_refused_write() -> None:
    outside, held = gw.zeros(3), gw.zeros(3)

    class Sums:
        total = held

    def work(x: Tensor) -> Tensor:
        Sums.total += x
        return outside.add_(x)

    with pytest.raises(TraceMutation, match="Variable"):
        gw.trace(work, np.ones(3, np.float32))
    assert outside.tolist() == held.tolist() == [0, 0, 0]
    assert Sums.total is held


def test_an_operand_may_be_overwritten_if_no_gradient_reads_it() -> None:
    grads = []
    for make in MAKERS:
        x = make([1.0, 2.0, 3.0], requires_grad=True)
        y = x * 2.0
        y[1] = y[0] * 4.0  # the gradient of a product with a number reads the number
        y /= make([1.0, 2.0, 4.0])
        y.sum().backward()
        grads.append(x.grad.tolist())
    assert grads[0] == grads[1]


def test_updates_by_other_entries_of_the_same_tensor() -> None:
    x = tensor(np.arange(12.0).reshape(3, 4))
    truth = np.arange(12.0).reshape(3, 4)
    for a in (x, truth):
        a[:, 1] += a[:, 0]
        a[1:] -= a[:-1]
        a[0, ::2] *= a[0, 1::2]
    assert np.array_equal(x, truth)
