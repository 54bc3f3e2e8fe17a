"""`x[...]` and `x[...] = v` against numpy: every kind of index, mixed, on arrays of any memory layout."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from graphwright.array import ReadOnlyArray, empty, from_numpy
from graphwright.array import dtype as named
from graphwright.array.layout import permute, reshape, row_major
from graphwright.errors import DTypeError, GraphwrightError, IndexOutOfRange, ShapeError, UsageError
from graphwright.ops import call
from graphwright.testing.oracle import strided
from indices import SIDES, indices


def expected(x: np.ndarray, index: Any) -> np.ndarray | None:
    try:
        return x[index]
    except IndexError:
        return None


@given(shape=SIDES, data=st.data())
def test_reading_matches_numpy(shape: tuple[int, ...], data: st.DataObject) -> None:
    x = np.arange(np.prod(shape), dtype=np.float64).reshape(shape)
    index = data.draw(indices(shape))
    ours = strided(x, data.draw(st.sampled_from(["plain", "permuted", "sliced"])))
    theirs = expected(x, index)
    if theirs is None:
        with pytest.raises(GraphwrightError):
            ours[index]
        return
    found = ours[index]
    assert found.shape == theirs.shape
    assert np.array_equal(found.to_numpy(), theirs)
    if not any(isinstance(i, np.ndarray | bool) for i in index):
        assert found.storage is ours.storage


@given(shape=SIDES, data=st.data())
def test_views_of_views_match_numpy(shape: tuple[int, ...], data: st.DataObject) -> None:
    x = np.arange(np.prod(shape), dtype=np.float64).reshape(shape)
    ours = from_numpy(x)
    for _ in range(3):
        index = data.draw(indices(x.shape, arrays=False))
        x, ours = x[index], ours[index]
        assert np.array_equal(ours.to_numpy(), x)
        assert np.array_equal(ours.copy().to_numpy(), x)


@given(shape=SIDES, data=st.data())
def test_writing_matches_numpy_and_changes_no_other_element(shape: tuple[int, ...], data: st.DataObject) -> None:
    block = np.full(int(np.prod(shape)) * 2 + 3, -7.0)
    size = int(np.prod(shape))
    index = data.draw(indices(shape))
    ours_block = from_numpy(block.copy())
    start, step = data.draw(st.sampled_from([(1, 1), (1, 2), (2, 2)]))
    flat = block[start : start + size * step : step]
    theirs = np.lib.stride_tricks.as_strided(flat, shape, tuple(8 * step * s for s in row_major(shape)))
    ours = ours_block[start : start + size * step : step]
    layout = reshape(ours.layout, shape)
    assert layout is not None
    ours = ours.view(layout)
    part = expected(theirs, index)
    if part is None:
        return
    value = data.draw(st.sampled_from(["number", "full", "last"]))
    values: Any = 2.5
    if value != "number" and part.shape:
        values = np.arange(np.prod(part.shape)).reshape(part.shape) if value == "full" else np.arange(part.shape[-1])
    theirs[index] = values
    version = ours.storage.version
    ours[index] = values
    assert np.array_equal(ours_block.to_numpy(), block)
    assert ours.storage.version == version + 1


@pytest.mark.parametrize("size", [1, 1024, 5000])
def test_reading_by_mask_is_row_major_and_deterministic(size: int) -> None:
    rng = np.random.default_rng(size)
    x, mask = rng.normal(size=(size, 3)), rng.random((size, 3)) < 0.4
    found = {from_numpy(x)[from_numpy(mask)].tobytes() for _ in range(20)}
    assert found == {x[mask].tobytes()}


def test_the_last_of_repeated_indices_is_written() -> None:
    x = from_numpy(np.zeros(3))
    x[[1, 1, -2, 0]] = np.array([1.0, 2.0, 3.0, 4.0])
    assert x.to_numpy().tolist() == [4.0, 3.0, 0.0]


def test_overlapping_views_may_be_assigned() -> None:
    x, y = from_numpy(np.arange(5.0)), np.arange(5.0)
    x[1:] = x[:-1]
    y[1:] = y[:-1].copy()
    assert x.to_numpy().tolist() == y.tolist()
    x[::-1] = x
    assert x.to_numpy().tolist() == y[::-1].tolist()


@pytest.mark.parametrize("kind", ["bfloat16", "float16", "int32", "bool", "uint8"])
def test_reversed_views_can_be_read_and_written_in_every_dtype(kind: str) -> None:
    host = np.arange(6).reshape(2, 3) % 2
    x = empty((2, 3), named(kind)).copy_from(from_numpy(host))
    wide = empty((3, 2), named("float32")).copy_from(x.view(permute(x[::-1, ::-1].layout, (1, 0))))
    assert wide.to_numpy().tolist() == host[::-1, ::-1].T.tolist()
    x[::-1] = from_numpy(host.astype(np.float64))
    assert x.to_numpy("float32").tolist() == host[::-1].tolist()


def test_ops_accept_reversed_arrays() -> None:
    x = from_numpy(np.arange(4.0))
    assert call("add", x[::-1], x).to_numpy().tolist() == [3.0] * 4
    assert call("reshape", x[::-1], shape=(2, 2)).to_numpy().tolist() == [[3, 2], [1, 0]]


X = np.zeros((2, 3))
REFUSED: list[tuple[Any, type[GraphwrightError]]] = [
    ((0, 0, 0), ShapeError),
    ((..., ...), ShapeError),
    (2, ShapeError),
    ((0, -4), ShapeError),
    ([2], IndexOutOfRange),
    ((slice(None), [-4]), IndexOutOfRange),
    ([0.5], DTypeError),
    ("a", UsageError),
    (slice(None, None, 0), UsageError),
    ([[0, 1], [1]], ShapeError),
    (np.ones(3, bool), ShapeError),
    (([0, 1], [0, 1, 2]), ShapeError),
]


@pytest.mark.parametrize(("index", "error"), REFUSED, ids=str)
def test_invalid_indices_are_refused_and_nothing_is_written(index: Any, error: type[GraphwrightError]) -> None:
    x = from_numpy(X.copy())
    with pytest.raises(error):
        x[index]
    with pytest.raises(error):
        x[index] = 1.0
    assert not x.to_numpy().any()


def test_mismatched_values_and_read_only_arrays_are_refused() -> None:
    x = from_numpy(X.copy())
    with pytest.raises(ShapeError):
        x[0] = np.ones(2)
    x.storage.readonly = True
    with pytest.raises(ReadOnlyArray):
        x[0] = 1.0
    assert not x.to_numpy().any()
