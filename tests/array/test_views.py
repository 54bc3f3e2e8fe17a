"""Arrays as views of memory: numpy's elements and numpy's sharing, for layouts of any stride sign."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from graphwright.array import NDArray, empty, float32, from_numpy
from graphwright.autograd import tensor
from graphwright.errors import AliasError, ShapeError, UsageError
from graphwright.ops import call
from values import array_of

SHAPES = st.lists(st.sampled_from([0, 1, 1, 2, 3, 4]), max_size=6).map(tuple)


def _index(rank: int) -> st.SearchStrategy[Any]:
    one = st.one_of(
        st.builds(
            slice,
            st.none() | st.integers(-5, 5),
            st.none() | st.integers(-5, 5),
            st.none() | st.integers(1, 3) | st.integers(-3, -1),
        ),
        st.none(),
        st.just(Ellipsis),
        st.integers(-4, 3),
    )
    return st.lists(one, max_size=rank + 2).map(tuple)


STEPS = ["permute", "squeeze", "unsqueeze", "diagonal", "expand", "reshape"]


@st.composite
def pairs(draw: Any) -> tuple[NDArray, np.ndarray]:
    """An array and numpy's view of the same memory, reached by the same steps."""
    host = np.random.default_rng(0).normal(size=draw(SHAPES)).astype(np.float32)
    array = from_numpy(host)
    for _ in range(draw(st.integers(1, 4))):
        kind = draw(
            st.sampled_from(["index", "index", "permute", "squeeze", "unsqueeze", "diagonal", "expand", "reshape"])
        )
        if kind == "index":
            index = draw(_index(host.ndim))
            try:
                theirs = host[index]
            except IndexError:
                with pytest.raises(ShapeError):
                    array[index]
                continue
            full = index if any(i is Ellipsis for i in index) else (*index, ...)  # else no axes would be no view
            array, host = array[index], host[full] if np.ndim(theirs) == 0 else theirs
        elif kind == "permute":
            axes = tuple(draw(st.permutations(range(host.ndim))))
            array, host = array.permute(*axes), host.transpose(axes)
        elif kind == "squeeze":
            array, host = array.squeeze(), host.squeeze()
        elif kind == "unsqueeze" and host.ndim < 7:
            axis = draw(st.integers(-host.ndim - 1, host.ndim))
            array, host = array.unsqueeze(axis), np.expand_dims(host, axis)
        elif kind == "diagonal" and host.ndim > 1:
            first, second = draw(st.permutations(range(host.ndim)))[:2]
            shift = draw(st.integers(-4, 4))
            array, host = array.diagonal(first, second, shift), host.diagonal(shift, first, second)
        elif kind == "expand":
            shape = tuple(3 if n == 1 else n for n in host.shape)
            array, host = array.expand(2, *shape), np.broadcast_to(host, (2, *shape))
        elif kind == "reshape":
            copies = host.size and not np.shares_memory(host.reshape(-1), host)
            if not copies:
                array, host = array.reshape(host.size, copy=False), host.reshape(-1)
    return array, host


@settings(max_examples=settings().max_examples * 10)
@given(pairs())
def test_views_match_numpy_and_share_memory(pair: tuple[NDArray, np.ndarray]) -> None:
    array, host = pair
    assert array.shape == host.shape
    assert np.array_equal(array.to_numpy(), host)
    if host.size:
        assert np.shares_memory(array.to_numpy(), host)
    own = array.copy()
    assert own.contiguous
    assert own.tobytes() == host.tobytes()
    assert np.array_equal(call("neg", array).to_numpy(), -host)  # kernels read any layout


@given(pairs(), st.data())
def test_device_memory_has_the_same_views(pair: tuple[NDArray, np.ndarray], data: st.DataObject) -> None:
    """Allocated memory, not numpy's: reversed and written through."""
    shape = data.draw(SHAPES)
    array, host = empty(shape, float32), np.zeros(shape, np.float32)
    array.copy_from(from_numpy(host))
    index = tuple(slice(None, None, data.draw(st.sampled_from([1, -1, 2, -2]))) for _ in shape)
    values = np.random.default_rng(1).normal(size=host[index].shape).astype(np.float32)
    array[index].copy_from(from_numpy(values))
    host[index] = values
    assert np.array_equal(array.to_numpy(), host)
    assert np.array_equal(array[index].to_numpy(), values)
    array[index].copy_from(from_numpy(2 * values.astype(np.float64)))  # with a cast
    host[index] = 2 * values.astype(np.float64)
    assert np.array_equal(array.to_numpy(), host)


@given(SHAPES.filter(lambda s: len(s) > 0), st.data())
def test_split_matches_numpy(shape: tuple[int, ...], data: st.DataObject) -> None:
    host = np.arange(int(np.prod(shape))).reshape(shape)
    axis = data.draw(st.integers(0, len(shape) - 1))
    cuts = sorted(data.draw(st.lists(st.integers(0, shape[axis]), max_size=3)))
    sizes = np.diff([0, *cuts, shape[axis]]).tolist()
    for piece, theirs in zip(from_numpy(host).split(sizes, axis), np.split(host, cuts, axis), strict=True):
        assert np.array_equal(piece.to_numpy(), theirs)
        assert not theirs.size or np.shares_memory(piece.to_numpy(), host)
    with pytest.raises(ShapeError):
        from_numpy(host).split([shape[axis] + 1], axis)


def test_reshape_copies_only_if_needed_and_copy_false_raises() -> None:
    host = np.arange(12).reshape(3, 4)
    array = from_numpy(host)
    assert array.reshape(2, 6).storage is array.storage
    permuted = array.permute(1, 0)
    copied = permuted.reshape(12)
    assert copied.storage is not array.storage
    assert np.array_equal(copied.to_numpy(), host.T.reshape(12))
    assert array.reshape(12, copy=True).storage is not array.storage
    with pytest.raises(ShapeError, match="needs a copy"):
        permuted.reshape(12, copy=False)
    with pytest.raises(ShapeError):
        array.reshape(5)


def test_view_of_a_tensor_never_copies() -> None:
    x = tensor(np.arange(12.0).reshape(3, 4), requires_grad=True)
    flat = x.view(-1)
    assert array_of(flat).storage is array_of(x).storage
    assert flat.requires_grad
    with pytest.raises(ShapeError):
        x.T.view(12)
    assert x.T.reshape(12).shape == (12,)


def test_invalid_indices_and_shapes_are_refused() -> None:
    array = from_numpy(np.zeros((2, 3)))
    for index in ((0, 0, 0), (..., ...), 2, -3):
        with pytest.raises(ShapeError):
            array[index]
    for index in (1.0, "a"):
        with pytest.raises(UsageError):
            array[index]
    assert array[True].shape == (1, 2, 3)
    with pytest.raises(ShapeError):
        array.squeeze(0)


def test_writing_to_an_expanded_array_is_refused() -> None:
    array = from_numpy(np.zeros((2, 1)))
    for write in (
        lambda: array.expand(2, 3).copy_from(from_numpy(np.ones((2, 3)))),
        lambda: call("exp", from_numpy(np.ones((2, 3))), out=array.expand(2, 3)),
    ):
        with pytest.raises(AliasError):
            write()
    assert (array.to_numpy().max(), array.storage.version) == (0, 0)
    array.expand(2, 1).copy_from(from_numpy(np.ones((2, 1))))
