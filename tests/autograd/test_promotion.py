"""Promotion equals `torch.result_type` for every pair of dtypes and categories; its casts are on the tape."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
import torch

import graphwright as gw
from graphwright.array import DTYPES, DType, dtype, result_type
from graphwright.array.cpu.kernel import TORCH_DTYPE
from graphwright.autograd import Tensor, arange, tensor
from graphwright.errors import DTypeError
from graphwright.ops import OPS, call
from values import grad_of

PYTHON = {"bool": True, "int64": 3, "float64": 0.5}
COMPUTED = [d for d in DTYPES.values() if d.kind != "float8"]
PROMOTING = [
    n for n, row in OPS.items() if row.traits.amp in ("promote", "f32") and row.arity == 2 and row.traits.elementwise
]


def _torch(kind: DType, category: str):
    return (
        PYTHON[kind.name]
        if category == "python"
        else torch.ones((2,) if category == "array" else (), dtype=TORCH_DTYPE[kind])
    )


@pytest.mark.parametrize("first", DTYPES)
def test_the_promotion_table_equals_torch(first: str) -> None:
    kinds = [(k, c) for k in DTYPES.values() for c in ("array", "scalar0d")] + [(dtype(n), "python") for n in PYTHON]
    for mine in ("array", "scalar0d"):
        for kind, category in kinds:
            pair = [(dtype(first), mine), (kind, category)]
            try:
                theirs = torch.result_type(_torch(dtype(first), mine), _torch(kind, category))
            except RuntimeError:  # floats of 8 bits
                theirs = None
            for order in (pair, pair[::-1]):
                if theirs is not None:
                    assert TORCH_DTYPE[result_type(order)] == theirs, order
                    continue
                with pytest.raises(DTypeError, match="8-bit"):
                    result_type(order)


def _ours(kind: DType, category: str) -> Tensor | float:
    if category == "python":
        return PYTHON[kind.name]
    return tensor(np.ones((2,) if category == "array" else (), np.float32)).to(kind)


@pytest.mark.parametrize("name", ["add", "mul", "maximum", "eq", "where", "concat"])
def test_ops_promote_their_operands_in_either_order(name: str) -> None:
    for (a, b), category in product(product(COMPUTED, repeat=2), ("array", "scalar0d")):
        if name == "concat" and category == "scalar0d":
            continue
        pair = [_ours(a, "array"), _ours(b, category)]
        wanted = result_type([(a, "array"), (b, category)])
        if name == "where":
            out = call("where", tensor([True, False]), *pair)
        else:
            out = call(name, *pair, **({"axis": 0} if name == "concat" else {}))
        assert out.dtype is (dtype("bool") if name == "eq" else wanted), (name, a, b, category)


def test_python_numbers_promote_on_either_side() -> None:
    x = tensor([1, 2])
    assert (x + 0.5).dtype is dtype("float32")
    assert (0.5 - x).tolist() == [-0.5, -1.5]
    assert (x + True).dtype is dtype("int64")
    h = tensor([1.0]).to("bfloat16")
    assert (h * 0.1).dtype is dtype("bfloat16")
    assert (2 * h).dtype is dtype("bfloat16")
    assert (x / 2).dtype is dtype("float32")
    assert np.signbit((tensor([0.0]) * -0.0).numpy()).tolist() == [True]


def test_promotion_records_casts_as_separate_operations() -> None:
    x, y = tensor(np.ones(2, np.float32), requires_grad=True), tensor(np.ones(2))
    z = x * y
    assert z.dtype is dtype("float64")
    assert z.node.edges[0][0].op.name == "cast"
    z.sum().backward()
    assert grad_of(x).dtype is dtype("float32")


def test_dtype_inference_from_data_matches_torch() -> None:
    for value in (
        1,
        1.5,
        True,
        [1, 2],
        [1.0, 2],
        [True, False],
        [[1, 2.5]],
        np.float64(1),
        np.ones(2, np.float16),
        np.arange(3),
    ):
        ours, theirs = tensor(value), torch.tensor(value)
        assert TORCH_DTYPE[ours.dtype] == theirs.dtype, value
        assert ours.shape == tuple(theirs.shape)
    assert arange(3).dtype is dtype("int64")
    assert arange(0.0, 3.0).dtype is dtype("float32")
    assert arange(1, 7, 2).tolist() == [1, 3, 5]
    assert call("embedding", tensor(np.eye(3)), arange(3)).numpy().tolist() == np.eye(3).tolist()


def test_promoting_ops_have_several_castable_operands() -> None:
    assert set(PROMOTING) == {
        *("add", "sub", "mul", "div", "floor_divide", "remainder", "pow", "minimum", "maximum", "swiglu"),
        *("bce", "bce_with_logits", "atan2", "fmod"),
        *("bitwise_and", "bitwise_or", "bitwise_xor", "bitwise_left_shift", "bitwise_right_shift"),
        *("eq", "ne", "lt", "le", "gt", "ge", "logical_and", "logical_or", "logical_xor"),
    }


@pytest.mark.parametrize("scalar", [np.float64(2), np.float32(2), np.int64(2), np.float16(2)], ids=repr)
@pytest.mark.parametrize("shape", [(), (2,)])
@pytest.mark.parametrize("kind", ["float32", "float64", "int64"])
def test_numpy_scalars_are_numbers_on_either_side_and_keep_the_tape(scalar, shape, kind) -> None:
    host = np.full(shape, 3, kind)
    trained = kind != "int64"
    x, t = tensor(host, requires_grad=trained), torch.tensor(host, requires_grad=trained)
    for operate in (lambda a, b: a * b, lambda a, b: a / b, lambda a, b: a + b, lambda a, b: a > b):
        for swap in (False, True):
            ours, theirs = (operate(*((scalar, v) if swap else (v, scalar))) for v in (x, t))
            assert isinstance(ours, Tensor)
            assert TORCH_DTYPE[ours.dtype] == theirs.dtype
            assert ours.requires_grad == theirs.requires_grad
            assert np.array_equal(ours.numpy(), theirs.detach().numpy())


def test_a_numpy_array_on_the_left_keeps_the_tape() -> None:
    x = tensor([1.0, 2.0], requires_grad=True)
    y = np.array([3.0, 4.0], np.float32) * x - np.ones(2, np.float32) @ x
    assert isinstance(y, Tensor)
    y.sum().backward()
    assert grad_of(x).tolist() == [1, 2]


FUNCTIONS = {
    **dict.fromkeys(["add", "copysign", "fmax", "fmin", "rsub", "xlogy", "float_power"], lambda a, b: True),
    "heaviside": lambda a, b: a is b,
    "hypot": lambda a, b: a.is_float or b.is_float,
    "ldexp": lambda a, b: not b.is_float,  # torch computes 2ⁿ in the dtype of n
    "logaddexp": lambda a, b: a is b and a.is_float,
}
"""Functions of two tensors that are several ops -> pairs of dtypes for which torch's result is exact."""


@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions_of_several_ops_have_torchs_dtypes_and_values(name: str) -> None:
    values = [1, 0, 3, 100], [2, 1, 5, 100]
    for a, b in product(COMPUTED, repeat=2):
        if not FUNCTIONS[name](a, b):
            continue
        for category in ("array", "scalar0d"):
            mine = [
                tensor(v if i == 0 or category == "array" else v[0]).to(k)
                for i, (v, k) in enumerate(zip(values, (a, b), strict=True))
            ]
            theirs = [torch.tensor(t.to("float64").numpy()).to(TORCH_DTYPE[t.dtype]) for t in mine]
            try:
                truth = getattr(torch, name)(*theirs)
            except RuntimeError:  # a pair of dtypes that torch lacks
                continue
            found = getattr(gw, name)(*mine)
            assert TORCH_DTYPE[found.dtype] == truth.dtype, (a, b, category)
            eps = torch.finfo(truth.dtype).eps if truth.dtype.is_floating_point else 0.0
            np.testing.assert_allclose(
                found.to("float64").numpy(), truth.double().numpy(), rtol=4 * eps, err_msg=f"{a}, {b}"
            )


def test_an_integer_operand_is_cast_to_the_dtype_of_the_floating_one() -> None:
    big = np.iinfo(np.int64).min
    assert gw.ldexp(tensor([7.0], dtype="float64"), tensor([169], dtype="uint8")).item() == 7.0 * 2.0**169
    assert gw.xlogy(tensor([3.0], dtype="float64"), tensor([5])).item() == 3.0 * np.log(5.0)
    assert gw.hypot(tensor([big]), tensor([0.5])).item() == 2.0**63
