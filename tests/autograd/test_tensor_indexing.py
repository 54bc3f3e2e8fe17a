"""`tensor[...]`, `tensor[...] = v` and functions of indices: values as in numpy, gradients counted per entry."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import graphwright as gw
from graphwright.autograd import (
    LeafModified,
    Tensor,
    TraceError,
    TraceMutation,
    Variable,
    ViewModified,
    bincount,
    cat,
    grad,
    index_put,
    no_grad,
    nonzero,
    one_hot,
    pad,
    scatter,
    tensor,
)
from graphwright.errors import DTypeError, IndexOutOfRange, ShapeError, UsageError
from indices import SIDES, indices
from values import array_of


def entries(shape: tuple[int, ...], index: Any) -> np.ndarray | None:
    """Which entries, counted row by row, an index picks; None for an index that numpy refuses."""
    try:
        return np.arange(np.prod(shape), dtype=np.int64).reshape(shape)[index]
    except IndexError:
        return None


@given(shape=SIDES, data=st.data())
def test_reading_by_index_and_its_gradient_match_torch(shape: tuple[int, ...], data: st.DataObject) -> None:
    index = data.draw(indices(shape))
    picked = entries(shape, index)
    if picked is None:
        return
    values = np.random.default_rng(0).normal(size=shape)
    x = tensor(values, requires_grad=True)
    given_as_tensors = data.draw(st.booleans())
    y = x[tuple(tensor(i) if given_as_tensors and isinstance(i, np.ndarray) else i for i in index)]
    assert np.array_equal(y.numpy(), values.ravel()[picked])
    seed = np.random.default_rng(1).normal(size=y.shape)
    found = grad(y, x, [tensor(seed)])[0].numpy()
    counted = np.bincount(picked.ravel(), seed.ravel(), minlength=values.size).reshape(shape)
    np.testing.assert_allclose(found, counted, rtol=1e-12, atol=1e-12)


@given(shape=SIDES, data=st.data())
def test_writing_by_index_and_its_gradients_match_torch(shape: tuple[int, ...], data: st.DataObject) -> None:
    index = data.draw(indices(shape))
    picked = entries(shape, index)
    if picked is None or len(np.unique(picked)) < picked.size:
        return  # each of several values for one entry gets its gradient, as in torch
    values = np.random.default_rng(0).normal(size=shape)
    cut = data.draw(st.integers(0, picked.ndim))
    v = np.random.default_rng(2).normal(size=picked.shape[cut:])
    taped, traced = data.draw(st.booleans()), data.draw(st.booleans())
    leaf, written = tensor(values, requires_grad=taped), tensor(v, requires_grad=taped)

    def put(a: Tensor, b: Tensor) -> Tensor:
        y = a * 1.0
        y[index] = b
        return y

    theirs = values.copy()
    theirs.ravel()[picked] = v
    if traced:
        run = gw.trace(put, leaf, written).run({"a": leaf, "b": written})
        assert np.array_equal(run["out"].to_numpy(), theirs)
        return
    y = put(leaf, written)
    assert np.array_equal(y.numpy(), theirs)
    if taped:
        seed = np.random.default_rng(1).normal(size=shape)
        dx, dv = grad(y, [leaf, written], [tensor(seed)], allow_unused=True)
        kept = seed.copy()
        kept.ravel()[picked] = 0.0
        assert dv is not None
        if dx is None:  # all of it was written over
            assert not kept.any()
        else:
            np.testing.assert_allclose(dx.numpy(), kept, rtol=1e-12)
        arrived = seed.ravel()[picked].sum(tuple(range(cut)))
        np.testing.assert_allclose(dv.numpy(), arrived, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("part", [slice(None, None, -1), slice(None, None, -2), slice(3, 0, -1), slice(-2, None, -3)])
def test_negative_steps_match_numpy(part: slice) -> None:
    x = np.arange(10.0).reshape(2, 5)
    assert np.array_equal(tensor(x)[:, part].numpy(), x[:, part])
    assert np.array_equal(tensor(x)[::-1, part].numpy(), x[::-1, part])


def test_an_untaped_write_is_in_place() -> None:
    x = tensor(np.zeros((2, 3)))
    memory, row = array_of(x), x[1]
    x[1, ::2] = [0.1, 0.2]
    assert array_of(x) is memory
    assert row.tolist() == [0.1, 0.0, 0.2]
    x[x < 0.15] += 1.0
    assert x.tolist() == [[1.0, 1.0, 1.0], [1.1, 1.0, 0.2]]


def test_indexed_writes_follow_the_rules_of_the_tape() -> None:
    leaf = tensor([1.0, 2.0], requires_grad=True)
    with pytest.raises(LeafModified):
        leaf[0] = 3.0
    with no_grad():
        leaf[0] = 3.0
    assert leaf.tolist() == [3.0, 2.0]
    y = leaf * 2.0
    view = y[:1]
    with pytest.raises(ViewModified):
        y[0] = 0.0
    assert view.tolist() == [6.0]
    with pytest.raises(TraceMutation):
        gw.trace(lambda a: _overwrite(a, a[0]), leaf)


def _overwrite(a: Tensor, row: Tensor) -> Tensor:
    b = a * 1.0
    part = b[0]
    b[0] = 1.0
    return b + part + row


def test_a_variable_can_be_written_by_index_in_a_compiled_step() -> None:
    table = Variable(tensor(np.zeros((3, 2))).data.copy(), name="table")  # pyright: ignore[reportAttributeAccessIssue]

    def step(i: Tensor, v: Tensor) -> Tensor:
        table[i] = v
        return table * 1.0

    run = gw.compile(step)
    for i in (2, 0, 2):
        run(tensor([i]), tensor([[float(i), 1.0]], "float64"))
    assert table.tolist() == [[0.0, 1.0], [0.0, 0.0], [2.0, 1.0]]


def test_index_arrays_are_inputs_of_a_trace_and_masks_are_refused() -> None:
    x = tensor(np.arange(12.0).reshape(3, 4))
    p = gw.trace(lambda x, i: x[1:, i], x, tensor([0, 1]))
    assert p.run({"x": x, "i": tensor([3, -4])})["out"].to_numpy().tolist() == [[7, 4], [11, 8]]
    with pytest.raises(TraceError):
        gw.trace(lambda x: x[x < 2.0], x)
    with pytest.raises(TraceError):
        gw.trace(nonzero, x)


# -- functions ---------------------------------------------------------------------------------------------------------
def test_bincount_and_one_hot_match_torch() -> None:
    ids = [[0, 2], [2, 1]]
    theirs = torch.tensor(ids)
    assert one_hot(ids).tolist() == torch.nn.functional.one_hot(theirs).tolist()
    assert one_hot(tensor([], "int64")).shape == (0, 0)
    assert bincount(ids).tolist() == [1, 1, 2]
    assert bincount(ids, minlength=5).tolist() == [1, 1, 2, 0, 0]
    assert nonzero(tensor([[0.0, 2.0], [-1.0, 0.0]])).tolist() == [[0, 1], [1, 0]]
    with pytest.raises(IndexOutOfRange):
        one_hot(ids, 2)


def test_cat_and_pad_match_torch() -> None:
    a, b = tensor([[1.0]]), tensor([[2]])
    assert cat([a, b], -1).tolist() == [[1.0, 2.0]]
    assert pad(a, [(1, 0), (0, 2)], value=9.0).tolist() == [[9, 9, 9], [1, 9, 9]]
    with pytest.raises(UsageError):
        cat([])


@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize(
    "index", [([True, False, True],), ([True, False, True], [3, 0]), (np.eye(3, 4) > 0,), ([2, 0, 2],)], ids=str
)
def test_index_put_reads_masks_as_torch(index: tuple[Any, ...], accumulate: bool) -> None:
    arrays = [np.asarray(i) for i in index]
    expected = torch.zeros(3, 4).index_put([torch.tensor(a) for a in arrays], torch.tensor(5.0), accumulate)
    found = index_put(gw.zeros(3, 4), [gw.tensor(a) for a in arrays], 5.0, accumulate)
    np.testing.assert_array_equal(found.numpy(), expected.numpy())


MASK, HALF, THREE = gw.tensor([True, False, True]), gw.tensor([0.0, 1.0, 0.5]), gw.zeros(3)


@pytest.mark.parametrize("index", [MASK, HALF], ids=["mask", "floats"])
@pytest.mark.parametrize(
    "function",
    [
        lambda i: THREE.gather(0, i),
        lambda i: THREE.scatter(0, i, 1.0),
        lambda i: THREE.scatter_add(0, i, THREE),
        lambda i: THREE.index_select(0, i),
        lambda i: THREE.index_add(0, i, THREE),
        lambda i: THREE.repeat_interleave(i),
    ],
    ids=["gather", "scatter", "scatter_add", "index_select", "index_add", "repeat_interleave"],
)
def test_masks_and_floats_are_refused_as_indices(function: Callable[[Any], object], index: Any) -> None:
    with pytest.raises(DTypeError, match="integers"):
        function(index)


def test_index_put_refuses_floats() -> None:
    with pytest.raises(DTypeError):
        index_put(THREE, [HALF], 1.0)


def test_written_numbers_keep_full_precision() -> None:
    x = tensor(np.zeros(2))
    assert scatter(x, 0, [1], 0.1).tolist() == [0.0, 0.1]
    assert index_put(x, [[0, 0]], 0.1, accumulate=True).tolist() == [0.2, 0.0]
    x[0] = 0.1
    assert x.tolist() == [0.1, 0.0]


@pytest.mark.parametrize(
    "how", [lambda x: x.split(0), lambda x: x.split([1, 1]), lambda x: x.chunk(0), lambda x: x.repeat(2)]
)
def test_split_sizes_must_sum_to_the_axis(how: Any) -> None:
    with pytest.raises(ShapeError):
        how(tensor(np.zeros((3, 2))))


def test_ranges_and_tuples_are_index_arrays_as_in_torch() -> None:
    for make in (tensor, torch.tensor):
        x = make([[0.0, 1.0, 2.0], [3.0, 4.0, 5.0], [6.0, 7.0, 8.0]])
        x[range(3), range(3)] = -1.0
        assert x[(0, 1), (1, 0)].tolist() == [1, 3]
        assert x[range(2), 1].tolist() == [1, -1]
        assert x.tolist() == [[-1, 1, 2], [3, -1, 5], [6, 7, -1]]


def test_index_add_of_integers_keeps_their_dtype() -> None:
    x, ids = tensor([1, 2, 3]), tensor([0, 2])
    assert gw.index_add(x, 0, ids, tensor([5, 5]), alpha=2).tolist() == [11, 2, 13]
    with pytest.raises(DTypeError, match="alpha"):
        gw.index_add(x, 0, ids, tensor([5, 5]), alpha=0.5)


@pytest.mark.parametrize("mask", [True, False, np.array(True), (None, True), (..., False)])
def test_a_taped_0_d_tensor_is_written_under_a_mask(mask) -> None:
    found = []
    theirs = torch.tensor(bool(mask)) if isinstance(mask, np.ndarray) else mask
    makers: list[tuple[Callable[..., Any], Any]] = [(tensor, mask), (torch.tensor, theirs)]
    for make, index in makers:
        x, v = make(2.0, requires_grad=True), make(5.0, requires_grad=True)
        y = x * 3.0
        y[index] = v
        (y * y).backward()
        found.append((y.item(), *(0.0 if t.grad is None else t.grad.item() for t in (x, v))))
    assert found[0] == found[1]
    with pytest.raises(ShapeError):
        (tensor(2.0, requires_grad=True) * 3.0)[True] = tensor([1.0, 2.0])


@pytest.mark.parametrize("shape", [(3, 4), [2, 3, 5], 7])
def test_unravelled_indices_are_numpys(shape) -> None:
    size = int(np.prod(shape))
    found = gw.unravel_index(tensor(np.arange(size)), shape)
    assert all(np.array_equal(a, b) for a, b in zip(found, np.unravel_index(np.arange(size), shape), strict=True))


def test_an_output_size_that_is_not_the_sum_of_the_counts_is_refused() -> None:
    assert gw.repeat_interleave(tensor([1, 2]), tensor([2, 1]), output_size=3).tolist() == [1, 1, 2]
    with pytest.raises(UsageError):
        gw.repeat_interleave(tensor([1, 2]), tensor([2, 1]), output_size=4)
