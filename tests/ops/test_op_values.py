"""Values of every op against torch: dtypes, empty and unit sizes, broadcasting, strided operands."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from op_cases import draws
from torch_blocks import BLOCKS
from torch_ops import TORCH

from graphwright.array import NDArray, bfloat16, dtype, float16, float32, float64, from_numpy
from graphwright.array.cpu.kernel import TORCH_DTYPE
from graphwright.ops import OPS, call, compute
from graphwright.testing.oracle import as_numpy, assert_bits, assert_close, strided

FLOATS = (float64, float32, bfloat16, float16)
RTOL = {float64: 1e-12, float32: 2e-5, bfloat16: 2e-2, float16: 4e-3}
"""Two roundings of the dtype on results of a few operations; sums of the samples stay below 100 terms."""

OWN_DTYPE = {"rope_table", "rope_dynamic", "rope_longer", "expert_probe"}
"""Ops whose dtypes are fixed or checked together in a test of their own."""


def _as(x: np.ndarray, kind) -> NDArray:
    array = from_numpy(x)
    return compute(OPS["cast"], [array], {"dtype": kind})[0] if x.dtype == np.float64 else array


def _reference(name: str, arrays: list[NDArray], attrs: dict) -> tuple[torch.Tensor, ...]:
    result = TORCH[name]([a.impl.clone() for a in arrays], attrs)
    return tuple(result) if isinstance(result, tuple | list) else (result,)


def _check(name: str, arrays: list[NDArray], attrs: dict[str, Any], kind) -> None:
    ours = compute(OPS[name], arrays, attrs)
    for mine, other in zip(ours, _reference(name, arrays, attrs), strict=True):
        assert TORCH_DTYPE[mine.dtype] == other.dtype
        theirs = (other.float() if other.dtype == torch.bfloat16 else other).detach().numpy()
        largest = float(np.abs(theirs[np.isfinite(theirs)]).max(initial=0.0)) if theirs.dtype.kind == "f" else 0.0
        assert_close(mine, theirs, rtol=RTOL[kind], atol=RTOL[kind] * largest, what=f"{name} {kind}")


@pytest.mark.parametrize("kind", FLOATS, ids=str)
@pytest.mark.parametrize("name", [n for n in OPS if n not in OWN_DTYPE])
def test_values_match_torch_in_every_float_dtype(name: str, kind) -> None:
    for inputs, attrs in draws(name):
        if name == "cross_entropy_backward":  # lse and gradient keep their wide dtype
            wide = float64 if kind is float64 else float32
            arrays = [_as(x, kind if i == 0 else wide) for i, x in enumerate(inputs)]
            if kind.is_low:
                continue
        elif OPS[name].traits.updates_states:  # its scalars keep their dtypes; moments and weights are never in 16 bits
            if kind.is_low and name.endswith("_step"):
                continue
            arrays = [_as(x, kind) if x.ndim else from_numpy(x) for x in inputs]
        else:
            arrays = [_as(x, kind) for x in inputs]
        _check(name, arrays, attrs, kind)


@pytest.mark.parametrize("name", sorted(OWN_DTYPE))
def test_ops_with_their_own_dtypes_match_torch(name: str) -> None:
    for inputs, attrs in draws(name, 6):
        inputs = [x.astype(np.float32) if x.dtype == np.float64 else x for x in inputs]
        _check(name, [from_numpy(x) for x in inputs], attrs, float32)


@pytest.mark.parametrize("how", ["permuted", "sliced", "expanded"])
@pytest.mark.parametrize("name", OPS)
def test_strided_operands_give_equal_results(name: str, how: str) -> None:
    """The values that row-major memory gives, within rounding where ATen sums in another order."""
    for inputs, attrs in draws(name, 2):
        tables = [name in BLOCKS and x.dtype == np.int64 for x in inputs]  # the addresses of a pattern stay as they are
        arrays = [from_numpy(x) if table else strided(x, how) for x, table in zip(inputs, tables, strict=True)]
        plain = [from_numpy(np.array(a.to_numpy(), order="C")) for a in arrays]
        for mine, other in zip(compute(OPS[name], arrays, attrs), compute(OPS[name], plain, attrs), strict=True):
            tolerance = 1e-6 if mine.dtype is float32 else 1e-12
            assert_close(mine, as_numpy(other), rtol=tolerance, atol=tolerance, what=f"{name} {how}")


SHAPES = st.lists(st.sampled_from([0, 1, 2, 3]), max_size=4).map(tuple)
UNARY = [n for n, row in OPS.items() if row.arity == 1 and row.traits.elementwise]
BITS = "bitwise_"  # of integers, which are not drawn here
BINARY = [n for n, row in OPS.items() if row.arity == 2 and row.traits.elementwise and not n.startswith(("bce", BITS))]


@given(shape=SHAPES, data=st.data())
def test_elementwise_ops_on_empty_and_unit_shapes(shape: tuple[int, ...], data: st.DataObject) -> None:
    name = data.draw(st.sampled_from(UNARY))
    x = np.random.default_rng(len(shape)).uniform(0.2, 2, shape).astype(np.float32)
    how = data.draw(st.sampled_from(["plain", "permuted", "sliced"]))
    attrs = draws(name, 1)[0][1]
    theirs = TORCH[name]([torch.from_numpy(x)], attrs).numpy()
    assert_close(call(name, strided(x, how), **attrs), theirs, rtol=1e-5, what=name)


@given(shape=SHAPES, data=st.data())
def test_broadcasting_matches_torch(shape: tuple[int, ...], data: st.DataObject) -> None:
    name = data.draw(st.sampled_from(BINARY))
    rng = np.random.default_rng(7)
    other = tuple(1 if data.draw(st.booleans()) else n for n in shape)[data.draw(st.integers(0, len(shape))) :]
    a, b = (rng.uniform(0.5, 2, s).astype(np.float32) for s in data.draw(st.permutations([shape, other])))
    assert_bits(
        call(name, from_numpy(a), from_numpy(b)),
        TORCH[name]([torch.from_numpy(a), torch.from_numpy(b)], {}).numpy(),
        what=name,
    )


@given(data=st.data())
def test_matmul_of_any_rank_matches_torch(data: st.DataObject) -> None:
    size = st.integers(0, 3)
    m, k, n = data.draw(size), data.draw(size), data.draw(size)
    batch = data.draw(st.lists(st.integers(1, 3), max_size=2).map(tuple))
    rng = np.random.default_rng(0)
    left = [*(1 if data.draw(st.booleans()) else d for d in batch)][data.draw(st.integers(0, len(batch))) :]
    a = rng.normal(size=(k,) if data.draw(st.booleans()) else (*left, m, k))
    b = rng.normal(size=(k,) if data.draw(st.booleans()) else (*batch, k, n))
    how = data.draw(st.sampled_from(["plain", "permuted", "sliced"]))
    ours = call("matmul", strided(a, how), strided(b, how))
    assert_close(ours, np.asarray(torch.matmul(torch.from_numpy(a), torch.from_numpy(b))), rtol=1e-12, atol=1e-12)


@given(data=st.data())
def test_reductions_over_any_axes_match_torch(data: st.DataObject) -> None:
    name = data.draw(st.sampled_from(["sum", "mean", "prod", "any", "all", "logsumexp", "amax", "amin"]))
    shape = data.draw(st.lists(st.integers(1 if name in ("amax", "amin") else 0, 4), max_size=4).map(tuple))
    axes = tuple(sorted(data.draw(st.sets(st.integers(0, len(shape) - 1))) if shape else ()))
    keep = data.draw(st.booleans())
    axes = tuple(a - len(shape) if data.draw(st.booleans()) else a for a in axes)
    x = np.random.default_rng(1).normal(size=shape)
    ours = call(name, strided(x, data.draw(st.sampled_from(["plain", "permuted", "sliced"]))), axes=axes, keepdims=keep)
    theirs = TORCH[name]([torch.from_numpy(x)], {"axes": axes, "keepdims": keep}).numpy()
    assert_close(ours, theirs, rtol=1e-12, atol=1e-12, what=name)


@pytest.mark.parametrize("kind", ["int64", "int32", "int16", "int8", "uint8", "bool"])
@pytest.mark.parametrize("name", ["sum", "prod"])
def test_sums_and_products_of_integers_are_int64(name: str, kind: str) -> None:
    x = np.random.default_rng(0).integers(0, 2 if kind == "bool" else 100, (5, 40)).astype(dtype(kind).numpy)
    for axes in ((0, 1), (1,), ()):
        theirs = getattr(x.astype(np.int64), name)(axes) if axes else x.astype(np.int64)
        assert_bits(call(name, from_numpy(x), axes=axes), theirs)
    assert_bits(call("cumsum", from_numpy(x), axis=1), x.cumsum(1, dtype=np.int64))


@pytest.mark.parametrize("kind", [float16, bfloat16], ids=str)
@pytest.mark.parametrize("count", [1, 999, 4097])
def test_a_mean_of_low_precision_neither_overflows_nor_rounds_twice(kind, count: int) -> None:
    x = torch.full((2, count), 1000.0) + torch.arange(count) % 7
    low = _as(x.double().numpy(), kind)
    wide = low.impl.double().mean(1)
    assert_bits(call("mean", low, axes=(1,)), _rounded(wide, kind))
    assert_bits(call("mean", low, axes=(0, 1)), _rounded(wide.mean(), kind))


def _rounded(wide: torch.Tensor, kind) -> np.ndarray:
    low = wide.float().to(TORCH_DTYPE[kind])
    return low.float().numpy() if kind is bfloat16 else low.numpy()


@pytest.mark.parametrize("count", [4095, 4096, 4097, 2**21 - 1, 2**21 + 1])
def test_a_sum_of_ones_is_exact(count: int) -> None:
    ones = from_numpy(np.ones(count, np.float32))
    assert call("sum", ones, axes=(0,)).item() == count
    assert call("mean", ones, axes=(0,)).item() == 1.0


def test_division_of_integers_is_float32() -> None:
    a, b = np.array([1, 2, 7]), np.array([2, 0, -2])
    assert_bits(call("div", from_numpy(a), from_numpy(b)), torch.div(torch.from_numpy(a), torch.from_numpy(b)).numpy())


def test_argmax_returns_the_first_of_equal_entries() -> None:
    x = np.array([[1.0, 3.0, 3.0, 2.0], [5.0, 5.0, 5.0, 5.0]])
    assert call("argmax", from_numpy(x), axis=-1).to_numpy().tolist() == [1, 0]
    assert call("argmax", from_numpy(np.tile(x[1], 50)), axis=0).item() == 0


@pytest.mark.parametrize("count", [1, 2, 3, 5])
@pytest.mark.parametrize("kind", [float32, bfloat16, float16], ids=str)
def test_a_junction_sums_in_port_order_and_rounds_once(count: int, kind) -> None:
    parts = [_as(np.random.default_rng(i).normal(size=(3, 4)) * 10, kind) for i in range(count)]
    wide = parts[0].impl.float()
    for p in parts[1:]:
        wide = wide + p.impl.float()
    ours = call("junction", *parts)
    theirs = wide.to(TORCH_DTYPE[kind])
    assert_bits(ours, theirs.float().numpy() if kind is bfloat16 else theirs.numpy())


@pytest.mark.parametrize("kind", ["f8", "f4", "f2", "i8", "i4", "i2", "i1", "u1", "?"])
@pytest.mark.parametrize("shapes", [((70, 50), (70, 50), (50,)), ((70, 1), (), (70, 50)), ((50,), (70, 50), ())])
def test_where_copies_the_bits_of_the_chosen_elements(kind: str, shapes: tuple[tuple[int, ...], ...]) -> None:
    """The branch not taken may be infinite or NaN of any payload."""
    rng = np.random.default_rng(0)
    condition = rng.random(shapes[0]) < 0.5
    size = np.dtype(kind).itemsize
    a, b = (np.asarray(rng.integers(0, 2 if kind == "?" else 256, (*s, size), np.uint8)) for s in shapes[1:])
    a, b = ((x[..., :1] if kind == "?" else x).view(kind)[..., 0] for x in (a, b))
    chosen = call("where", *map(from_numpy, (condition, a, b))).to_numpy()
    assert chosen.dtype == a.dtype
    assert chosen.tobytes() == np.where(condition, a, b).tobytes()
