"""`out=` on every op: which memory it may share, and which operands an operation keeps alive."""

from __future__ import annotations

import gc
import weakref

import numpy as np
import pytest
from op_cases import differentiable, draws

from graphwright.array import (
    CPU,
    DType,
    NDArray,
    Spec,
    backend,
    bfloat16,
    dtype,
    empty,
    float32,
    float64,
    from_numpy,
)
from graphwright.autograd import Tensor, tensor
from graphwright.errors import AliasError, DTypeError
from graphwright.ops import OPS, call, compute
from graphwright.testing.oracle import assert_bits
from seeds import deep

pytestmark = pytest.mark.usefixtures("young_heap")
COMPUTED = [name for name, row in OPS.items() if row.view is None]


def beside(first: NDArray, second: Spec, at: int) -> tuple[NDArray, NDArray]:
    """A copy of an array, and an array of a spec that begins `at` elements into the same block."""
    size = first.dtype.itemsize
    storage = backend(CPU).allocate(first.nbytes + second.nbytes + at * size)
    copy = NDArray(storage, first.dtype, first.shape).copy_from(first)
    return copy, NDArray(storage, second.dtype, second.sizes, None, at)


@pytest.mark.parametrize("name", COMPUTED)
def test_a_result_may_overwrite_an_operand_only_if_the_op_allows_it(name: str) -> None:
    row = OPS[name]
    inputs, attrs = draws(name, 1)[0]
    arrays = [from_numpy(x) for x in inputs]
    fresh = compute(row, arrays, attrs)
    for o, result in enumerate(fresh):
        for i, operand in enumerate(arrays):
            if operand.dtype is not result.dtype or not operand.size or not result.size:
                continue
            for at in (0, operand.size - 1, operand.size):
                mine, out = beside(operand, result.spec, at)
                ins = [mine if k == i else a for k, a in enumerate(arrays)]
                outs = tuple(out if k == o else r.copy() for k, r in enumerate(fresh))
                before, version = mine.tobytes(), out.storage.version
                if at == operand.size or (mine.layout == out.layout and row.overwrites(o, i, len(arrays), len(fresh))):
                    given = call(name, *ins, out=outs, **attrs)
                    results = given if isinstance(given, tuple) else (given,)
                    for made, r in zip(results, fresh, strict=True):
                        assert_bits(made, r, what=f"{name}, result {o} over operand {i}")
                    assert results[o] is out
                    assert out.storage.version == version + 1
                else:
                    with pytest.raises(AliasError):
                        compute(row, ins, attrs, outs)
                    assert mine.tobytes() == before


@pytest.mark.parametrize("kind", [float64, float32, bfloat16], ids=str)
@pytest.mark.parametrize("name", COMPUTED)
def test_allocating_kernels_equal_kernels_that_write_to_out(name: str, kind: DType) -> None:
    """Where the backend allocates and computes in one call, with operands in row-major order and transposed."""
    row = OPS[name]
    for inputs, attrs in draws(name, deep(3, 1)):
        arrays = [call("cast", from_numpy(x), dtype=kind) if x.dtype == np.float64 else from_numpy(x) for x in inputs]
        transposed = [a.permute(*reversed(range(len(a.shape)))).copy() for a in arrays]
        for given in (arrays, [a.permute(*reversed(range(len(a.shape)))) for a in transposed]):
            try:
                specs = row.specs([a.spec for a in given], attrs)
            except DTypeError:  # this row takes other dtypes
                continue
            outs = [empty(s.sizes, s.dtype) for s in specs]
            for made, out in zip(compute(row, given, attrs), compute(row, given, attrs, outs), strict=True):
                assert_bits(made, out, what=name)
                handle = made.impl
                assert made.spec == out.spec == Spec(tuple(handle.shape), dtype(str(handle.dtype).split(".")[1]))
                assert made.contiguous
                assert handle.is_contiguous()
                assert made.storage.nbytes == made.nbytes


@pytest.mark.parametrize("name", differentiable())
def test_operands_unused_by_the_vjp_are_freed_after_forward(name: str) -> None:
    row = OPS[name]
    inputs, attrs = draws(name, 1)[0]
    gc.collect()
    gc.disable()
    try:
        leaves = [tensor(x, requires_grad=x.dtype == np.float64) for x in inputs]
        inner: list[Tensor] = [t.clone() for t in leaves]
        held = [weakref.ref(t.data) for t in inner]
        kept = call(name, *inner, **attrs)
        del inner
        alive = {i for i, r in enumerate(held) if r() is not None}
        reads = set(row.saves.reads(len(inputs)))
        assert alive <= reads, f"{name} keeps operands {alive - reads}"
        del kept
        assert [r() for r in held] == [None] * len(held)
    finally:
        gc.enable()


@pytest.mark.parametrize("name", ["neg", "add", "softmax", "sort", "matmul", "sum"])
def test_a_result_is_written_through_a_view_with_negative_strides(name: str) -> None:
    inputs, attrs = draws(name, 1)[0]
    arrays = [from_numpy(x) for x in inputs]
    fresh = compute(OPS[name], arrays, attrs)
    reverse = (slice(None, None, -1),)
    outs = tuple(empty(r.shape, r.dtype)[reverse * len(r.shape)] for r in fresh)
    call(name, *arrays, out=outs, **attrs)
    for made, right in zip(outs, fresh, strict=True):
        assert np.array_equal(made.to_numpy(), right.to_numpy())
    x = from_numpy(np.arange(3.0))
    call("neg", x[::-1], out=x[::-1])  # over the operand
    assert x.to_numpy().tolist() == [0.0, -1.0, -2.0]
    with pytest.raises(AliasError):
        call("neg", x, out=x[::-1])
