"""Operators, methods and reductions of tensors against torch's, with tensors and numbers on either side."""

from __future__ import annotations

import operator
from math import inf

import numpy as np
import pytest
import torch

from graphwright.array import bfloat16
from graphwright.autograd import (
    Tensor,
    argsort,
    grad,
    lerp,
    maximum,
    minimum,
    norm,
    outer,
    sort,
    stack,
    std,
    tensor,
    topk,
    var,
    where,
)
from graphwright.autograd.modes import autocast_to
from graphwright.errors import DTypeError, ShapeError, UsageError
from graphwright.testing.gradcheck import gradcheck, gradgradcheck
from graphwright.testing.oracle import assert_bits, assert_close

RNG = np.random.default_rng(3)
A, B = RNG.uniform(0.5, 3, (3, 1, 4)), RNG.uniform(0.5, 3, (2, 4))
ARITHMETIC = ["add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "eq", "ne", "lt", "le", "gt", "ge"]


@pytest.mark.parametrize("name", ARITHMETIC)
def test_operators_match_torch(name: str) -> None:
    apply = getattr(operator, name)
    a, b, s, t = tensor(A), tensor(B), torch.from_numpy(A), torch.from_numpy(B)
    assert_close(apply(a, b), apply(s, t), rtol=1e-14)
    assert_close(apply(a, 2.0), apply(s, 2.0), rtol=1e-14)
    assert_close(apply(2.0, a), apply(2.0, s), rtol=1e-14)
    whole, other = np.array([-7, 7, 5, -5, 3]), np.array([2, -2, 5, 3, 1])
    if name != "pow":
        assert_bits(apply(tensor(whole), tensor(other)), apply(torch.from_numpy(whole), torch.from_numpy(other)))
    assert_bits(apply(tensor(whole), 3), apply(torch.from_numpy(whole), 3))


BASES = [0.0, -0.0, 0.3, -0.3, 1.0, -2.0, 7.5, inf, -inf, np.nan, 1e-30, 3e12]


@pytest.mark.parametrize("kind", ["float64", "float32"])
@pytest.mark.parametrize("exponent", [-2, -1, -1.0, -0.5, 0, 0.5, 1, 1.0, 1.5, 2, 2.0, np.float64(2), 3, 4])
def test_numbers_as_exponents_match_torch(exponent: float, kind: str) -> None:
    unlike = {-0.5: (1, 8), 1.5: (8,)}.get(exponent, ())  # torch: no slope of rsqrt, and sqrt in place of pow
    base = np.array([x for i, x in enumerate(BASES) if i not in unlike], kind)
    mine, theirs = tensor(base, requires_grad=True), torch.tensor(base, requires_grad=True)
    y, expected = mine**exponent, theirs**exponent
    rtol = 1e-6 if kind == "float32" else 1e-14
    assert_close(y, expected.detach(), rtol=rtol)
    assert np.array_equal(np.signbit(y.numpy()), np.signbit(expected.detach().numpy()))
    (slope,) = torch.autograd.grad(expected.sum(), theirs)
    assert_close(grad(y.sum(), mine)[0], slope, rtol=rtol)


def test_powers_by_products_have_exact_higher_gradients() -> None:
    for exponent in (-1, -0.5, 0.5, 1, 2, 3):
        gradgradcheck(lambda x, p=exponent: x**p, [tensor(B)])


def test_power_of_a_tensor_is_computed_in_float32_under_autocast() -> None:
    x = np.array([1.0078125, 3.015625], np.float32)
    with autocast_to(bfloat16):
        found = [tensor(x).bfloat16() ** p for p in (2, 3, 0.5)]
    assert [y.dtype.name for y in found] == ["float32"] * 3
    assert_close(found[0], torch.tensor(x) ** 2, rtol=1e-6)
    assert (tensor([3, -2]) ** 2).tolist() == [9, 4]
    assert (tensor([4, 9]) ** 0.5).tolist() == [2, 3]


def test_operators_of_bits_take_bools_and_integers() -> None:
    p, q = tensor([True, True, False, False]), tensor([True, False, True, False])
    assert (p & q).tolist() == [True, False, False, False]
    assert (p | q).tolist() == [True, True, True, False]
    assert (p ^ q).tolist() == [False, True, True, False]
    assert (~p).tolist() == [False, False, True, True]
    assert (True & q).tolist() == (q | False).tolist() == (False ^ q).tolist() == q.tolist()
    for apply in (operator.and_, operator.or_, operator.xor):
        assert apply(tensor([6, 5]), tensor([3, 1])).tolist() == [apply(6, 3), apply(5, 1)]
        assert apply(tensor([6, 5]), 3).tolist() == apply(3, tensor([6, 5])).tolist() == [apply(6, 3), apply(5, 3)]
        with pytest.raises(DTypeError, match="neither bool nor an integer"):
            apply(tensor([1.0, 2.0]), q[:2])
    assert operator.invert(tensor([1, -2])).tolist() == [~1, 1]
    with pytest.raises(DTypeError):
        operator.invert(tensor([1.0, 2.0]))


UNARY = [
    "abs",
    "sign",
    "floor",
    "ceil",
    "round",
    "exp",
    "expm1",
    "log",
    "log1p",
    "sqrt",
    "rsqrt",
    "reciprocal",
    "sin",
    "cos",
    "tanh",
    "erf",
    "sigmoid",
    "relu",
]


@pytest.mark.parametrize("name", [*UNARY, "isnan", "isinf", "isfinite"])
def test_methods_match_torch(name: str) -> None:
    x = np.array([0.3, 1.0, 2.5, np.inf, np.nan])
    assert_close(getattr(tensor(x), name)(), getattr(torch.from_numpy(x), name)(), rtol=1e-14)


REDUCTIONS = ["sum", "mean", "prod", "amax", "amin", "any", "all", "logsumexp", "var", "std", "norm"]


@pytest.mark.parametrize("axis", [None, 0, -1, (0, 2), (-1, 1), ()])
@pytest.mark.parametrize("keepdims", [False, True])
@pytest.mark.parametrize("name", REDUCTIONS)
def test_reductions_match_torch(name: str, keepdims: bool, axis: int | tuple[int, ...] | None) -> None:
    x = RNG.normal(size=(3, 4, 2)) * (RNG.random((3, 4, 2)) < 0.8)
    ours = getattr(tensor(x), name)(axis=axis, keepdims=keepdims)
    axes = tuple(range(3)) if axis is None else (axis,) if isinstance(axis, int) else axis
    if not axes:  # over no axis: each entry is reduced alone; torch takes an empty tuple for all
        alone = getattr(tensor(x[..., None]), name)(axis=-1)
        assert_close(ours, alone.numpy(), rtol=1e-15)
        return
    s = torch.from_numpy(x)
    if name == "prod":
        theirs = torch.from_numpy(np.asarray(x.prod(axes, keepdims=keepdims)))
    elif name == "norm":
        theirs = torch.linalg.vector_norm(s, 2, axes, keepdims)
    else:
        theirs = getattr(s, name)(axes, keepdim=keepdims)
    assert_close(ours, theirs, rtol=1e-13, atol=1e-15)


def test_a_wrong_axis_is_refused() -> None:
    with pytest.raises(ShapeError, match="axis"):
        tensor(A).prod(3)


@pytest.mark.parametrize("axis", [0, 1, -1])
def test_softmax_and_cumsum_along_an_axis_match_torch(axis: int) -> None:
    x = RNG.normal(size=(3, 4))
    ours, theirs = tensor(x), torch.from_numpy(x)
    for name in ("cumsum", "softmax", "log_softmax", "argmax", "argmin"):
        assert_close(getattr(ours, name)(axis), getattr(theirs, name)(axis), rtol=1e-14, atol=1e-15)
    mask = tensor(x) > 0.0
    rows = ours.softmax(axis, mask).sum(axis).tolist()
    assert rows == pytest.approx(mask.any(axis).to("float64").tolist())


@pytest.mark.parametrize("correction", [0, 1, 2])
def test_var_and_std_match_torch(correction: int) -> None:
    x = RNG.normal(size=(3, 5))
    for ours, theirs in ((var, torch.var), (std, torch.std)):
        wanted = theirs(torch.from_numpy(x), 1, correction=correction)
        assert_close(ours(tensor(x), 1, correction=correction), wanted, rtol=1e-14)
        gradcheck(lambda t, f=ours: f(t, 1, correction=correction), [x])
        gradgradcheck(lambda t, f=ours: f(t, 1, correction=correction), [x])
    assert np.isnan(var(tensor([1.0]), 0).numpy())


@pytest.mark.parametrize("p", [0, 0.5, 1, 1.5, 2, 3, -1, -2.5, inf, -inf])
def test_norms_match_torch(p: float) -> None:
    x = RNG.normal(size=(3, 5))
    assert_close(norm(tensor(x), p, 1), torch.linalg.vector_norm(torch.from_numpy(x), p, 1), rtol=1e-14)
    if p:
        gradcheck(lambda t: norm(t, p, 1), [x])
    with pytest.raises(UsageError, match="order"):
        norm(tensor(x), "two")


@pytest.mark.parametrize("p", [0.5, 1, 1.5, 2, 3, inf])
def test_norm_and_std_have_gradient_zero_at_zero(p: float) -> None:
    x = tensor(np.zeros((2, 4)), requires_grad=True)
    assert not grad(norm(x, p, 1).sum(), x)[0].numpy().any()
    assert not grad(std(x, 1).sum(), x)[0].numpy().any()
    row = tensor([0.0, 3.0, 4.0], requires_grad=True)  # zero among others
    (g,) = grad(norm(row, p), row)
    assert np.isfinite(g.numpy()).all()
    assert g.tolist()[0] == 0.0


def test_16_bit_statistics_are_computed_in_float32() -> None:
    x = tensor(RNG.normal(size=(4, 300)) * 300).to("float16")
    wide = torch.from_numpy(x.numpy().astype(np.float64))
    assert_close(std(x, 1), wide.std(1).to(torch.float16), rtol=1e-3)
    assert_close(norm(x, 2, 1), wide.norm(dim=1).to(torch.float16), rtol=1e-3)


def test_outer_lerp_and_other_functions_match_torch() -> None:
    a, b = RNG.normal(size=4), RNG.normal(size=3)
    s, t = torch.from_numpy(a), torch.from_numpy(b)
    assert_close(outer(tensor(a), tensor(b)), torch.outer(s, t), rtol=1e-15)
    assert_close(lerp(tensor(a), 2.0, 0.25), torch.lerp(s, torch.full_like(s, 2.0), 0.25), rtol=1e-14)
    assert_bits(maximum(tensor(a), 0.0), s.clamp(min=0))
    assert_bits(minimum(tensor(a), 0.0), s.clamp(max=0))
    assert_bits(where(tensor(a) > 0.0, 1.0, tensor(a)), torch.where(s > 0, 1.0, s))
    gradcheck(lambda x, y: outer(x, y), [a, b])
    gradcheck(lambda x, y, w: lerp(x, y, w), [a, a[::-1].copy(), np.array(0.3)])
    with pytest.raises(ShapeError, match="not a vector"):
        outer(tensor(A), tensor(b))


@pytest.mark.parametrize("axis", [0, 1, 2, -1, -3])
def test_stack_matches_torch(axis: int) -> None:
    parts = [RNG.normal(size=(2, 3)) for _ in range(3)]
    assert_bits(stack([tensor(p) for p in parts], axis), np.stack(parts, axis))
    gradcheck(lambda *ts: stack(ts, axis), parts)


def test_stack_refuses_mismatched_tensors() -> None:
    with pytest.raises(UsageError, match="no tensors"):
        stack([])
    with pytest.raises(ShapeError, match="different shapes"):
        stack([tensor(A), tensor(B)])
    with pytest.raises(ShapeError, match="axis"):
        stack([tensor(B)], 3)


def test_comparison_of_tensors_is_elementwise_and_hash_by_identity() -> None:
    x = tensor([1.0, 2.0])
    assert isinstance(x != tensor([1.0, 3.0]), Tensor)
    assert len({x, tensor([1.0, 2.0])}) == 2


# -- order -------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("kind", ["float32", "float16", "int64", "int8", "bool"])
@pytest.mark.parametrize("descending", [False, True])
def test_sorting_is_stable(kind: str, descending: bool) -> None:
    x = RNG.integers(0, 2 if kind == "bool" else 4, (5, 200)).astype(kind)
    values, indices = sort(tensor(x), 1, descending)
    wanted = np.argsort(-x.astype(np.int64) if descending else x, 1, kind="stable")
    assert_bits(indices, wanted)
    assert_bits(argsort(tensor(x), 1, descending), wanted)
    assert_bits(values, np.take_along_axis(x, wanted, 1))


@pytest.mark.parametrize("k", [0, 1, 3, 6])
@pytest.mark.parametrize("largest", [True, False])
def test_topk_takes_the_lowest_index_on_ties(k: int, largest: bool) -> None:
    x = np.array([[1.0, 3.0, 3.0, 0.0, 1.0, 3.0], [2.0, 2.0, 2.0, 2.0, 2.0, 2.0]])
    values, indices = topk(tensor(x), k, largest=largest)
    order = np.argsort(-x if largest else x, 1, kind="stable")[:, :k]
    assert_bits(indices, order)
    assert_bits(values, np.take_along_axis(x, order, 1))


def test_topk_refuses_a_k_beyond_the_axis() -> None:
    with pytest.raises(ShapeError, match="k is out of range"):
        topk(tensor(A), 5)


def test_sorting_and_maxima_treat_nan_as_the_largest() -> None:
    x = tensor([1.0, float("nan"), 3.0])
    assert x.argsort().tolist() == [0, 2, 1]
    assert topk(x, 1)[1].tolist() == [1]


def test_max_and_min_give_the_gradient_to_the_lowest_index() -> None:
    x = tensor([[3.0, 1.0, 3.0], [1.0, 1.0, 2.0]], requires_grad=True)
    for name, indices, up, down in (
        ("max", [0, 2], [3, 2], [[1, 0, 0], [0, 0, 1]]),
        ("min", [1, 0], [1, 1], [[0, 1, 0], [1, 0, 0]]),
    ):
        values, found = getattr(x, name)(1)
        assert (values.tolist(), found.tolist()) == (up, indices)
        assert grad(values.sum(), x)[0].tolist() == down
        kept, column = getattr(x, name)(-1, keepdims=True)
        assert kept.shape == column.shape == (2, 1)
    assert x.max().item() == 3
    assert grad(x.max(), x)[0].tolist() == [[0.5, 0, 0.5], [0, 0, 0]]
    assert x.min().item() == 1
