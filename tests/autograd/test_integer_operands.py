"""Integers and scalars are treated as in torch: functions of floats promote integers, other functions keep them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import graphwright as gw
from graphwright.errors import DTypeError, OutOfMemory, ShapeError, UsageError
from graphwright.ops import OPS, call
from graphwright.testing.oracle import assert_close

PROMOTING = [name for name, row in OPS.items() if row.traits.promotes]
INTEGERS = {"int64": [1, 2, 3], "int32": [3, 0, 1], "uint8": [0, 7, 2], "bool": [True, False, True]}


def test_the_functions_of_floats_are_known() -> None:
    expected = """acos acosh asin asinh atan atan2 atanh cos cosh digamma erf erfc erfinv exp exp2 expm1 lgamma log
    log10 log1p log2 reciprocal rsqrt sigmoid sin sinh sqrt tan tanh"""
    assert sorted(PROMOTING) == expected.split()


@pytest.mark.parametrize("kind", INTEGERS)
@pytest.mark.parametrize("name", PROMOTING)
def test_functions_of_floats_promote_integers_as_torch(name: str, kind: str) -> None:
    for host in (np.array(INTEGERS[kind], kind), np.array(INTEGERS[kind][0], kind)):
        count = 2 if OPS[name].arity == 2 else 1
        ours, theirs = call(name, *[gw.tensor(host)] * count), getattr(torch, name)(*[torch.tensor(host)] * count)
        assert ours.dtype.name == str(theirs.dtype).removeprefix("torch.")
        assert_close(ours, theirs, rtol=1e-6)


@pytest.mark.parametrize("name", ["relu", "abs", "neg", "sign"])
@pytest.mark.parametrize("kind", ["int64", "int32"])
def test_other_functions_keep_integers_as_torch(name: str, kind: str) -> None:
    host = np.array([-3, 0, 2], kind)
    ours, theirs = call(name, gw.tensor(host)), getattr(torch, name)(torch.tensor(host))
    assert ours.dtype.name == kind
    assert ours.numpy().tolist() == theirs.tolist()
    b = gw.Builder()
    b.output(b.op(name, b.input("x", (3,), kind)), "y")
    p = b.build()
    for executor in ("aten", "vm"):
        found = p.compile(x=host, executor=executor)({"x": host})["y"]
        assert found.to_numpy().tolist() == theirs.tolist()


def test_a_promoted_function_is_traced_with_its_cast() -> None:
    p = gw.trace(lambda x: x.exp(), gw.tensor([1, 2]))
    assert_close(p.run(x=np.array([1, 2]))["out"], torch.tensor([1, 2]).exp(), rtol=1e-6)


@pytest.mark.parametrize("axis", [0, -1])
@pytest.mark.parametrize("name", ["sum", "mean", "prod", "amax", "amin", "logsumexp", "any", "all"])
def test_reductions_of_a_scalar_take_axis_0_and_minus_1(name: str, axis: int) -> None:
    x = gw.tensor(2.5, requires_grad=True)
    ours, theirs = getattr(x, name)(axis), getattr(torch, name)(torch.tensor(2.5), axis)
    assert ours.shape == ()
    assert_close(ours, theirs, rtol=1e-6)
    b = gw.Builder()
    b.output(b.op(name, b.input("x", ()), axes=(axis,)), "y")
    p = b.build()
    for executor in ("aten", "vm"):
        assert_close(p.compile(x=np.float32(2.5), executor=executor)({"x": np.float32(2.5)})["y"], theirs, rtol=1e-6)
    if ours.dtype.is_float:
        ours.backward()
        assert_close(x.grad, np.float32(1), rtol=1e-6)
    with pytest.raises(ShapeError):
        getattr(x, name)(1)


@pytest.mark.parametrize(
    ("make", "error"),
    [
        (lambda: gw.tensor([1]) + 2**70, UsageError),
        (lambda: gw.tensor([1]).clamp(0, 2**70), UsageError),
        (lambda: gw.full((2,), np.inf, "int64"), DTypeError),
        (lambda: gw.full((2,), np.nan, "int32"), DTypeError),
        (lambda: gw.zeros((1,) * 65), ShapeError),
        (lambda: call("concat", *[gw.zeros((1,)).expand(2**62)] * 3, axis=0), OutOfMemory),
    ],
)
def test_numbers_and_sizes_out_of_range_are_refused(make: Any, error: type[Exception]) -> None:
    with pytest.raises(error):
        make()


def test_logcumsumexp_refuses_bool_as_torch_does() -> None:
    with pytest.raises(DTypeError, match="logcumsumexp"):
        gw.logcumsumexp(gw.tensor([True, False]), 0)
