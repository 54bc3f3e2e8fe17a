"""Layouts against numpy's stride tricks: ranks 0 to 6, empty axes, steps of either sign."""

from __future__ import annotations

import numpy as np
from hypothesis import example, given
from hypothesis import strategies as st

from graphwright.array.layout import Layout, expand, is_row_major, narrow, permute, reshape, row_major, span

BLOCK = np.arange(20_000, dtype=np.int64)
SHAPES = st.lists(st.sampled_from([0, 1, 1, 2, 3, 4, 5]), max_size=6).map(tuple)


def shown(layout: Layout, base: np.ndarray = BLOCK) -> np.ndarray:
    """The elements a layout names, by numpy."""
    return np.lib.stride_tricks.as_strided(base[layout.offset :], layout.shape, [8 * s for s in layout.strides])


def of(view: np.ndarray) -> Layout:
    """The layout that numpy gives a view of BLOCK."""
    offset = (view.__array_interface__["data"][0] - BLOCK.__array_interface__["data"][0]) // 8
    return Layout(view.shape, tuple(s // 8 for s in view.strides), offset)


@st.composite
def views(draw) -> tuple[Layout, np.ndarray]:
    """A layout reached by a few steps, and numpy's view that took the same."""
    shape = draw(SHAPES)
    size = int(np.prod(shape, dtype=np.int64))
    start = draw(st.integers(0, 7))
    host = BLOCK[start : start + size].reshape(shape)
    layout = Layout(shape, row_major(shape), start)
    for _ in range(draw(st.integers(0, 3))):
        kind = draw(st.sampled_from(["permute", "narrow", "narrow", "expand"]))
        if kind == "permute":
            axes = tuple(draw(st.permutations(range(host.ndim))))
            layout, host = permute(layout, axes), host.transpose(axes)
        elif kind == "narrow" and host.ndim:
            axis = draw(st.integers(0, host.ndim - 1))
            step = draw(st.sampled_from([1, 2, 3, -1, -2]))
            n = host.shape[axis]
            picks = range(n)[::step]
            if n == 0:
                continue
            first = draw(st.integers(0, len(picks) - 1))
            count = draw(st.integers(0, len(picks) - first))
            index = [slice(None)] * host.ndim
            stop = picks[first] + step * count
            index[axis] = slice(picks[first], None if stop < 0 else stop, step)
            layout, host = narrow(layout, axis, picks[first], count, step), host[tuple(index)]
        elif kind == "expand" and host.ndim < 6:
            lead = draw(st.integers(0, 1))
            wanted = (3,) * lead + tuple(draw(st.sampled_from([1, 4])) if n == 1 else n for n in host.shape)
            layout, host = expand(layout, wanted), np.broadcast_to(host, wanted)
    return layout, host


@given(views())
def test_layouts_address_the_same_elements_as_numpy(pair: tuple[Layout, np.ndarray]) -> None:
    layout, host = pair
    assert layout.shape == host.shape
    assert np.array_equal(shown(layout), host)
    assert layout.contiguous == is_row_major(layout.shape, layout.strides) == bool(host.flags.c_contiguous)


@given(views())
def test_the_span_runs_from_the_first_element_past_the_last(pair: tuple[Layout, np.ndarray]) -> None:
    layout, host = pair
    low, high = span(layout)
    assert (low, high) == ((layout.offset, layout.offset) if host.size == 0 else (int(host.min()), int(host.max()) + 1))


def _splits(size: int, draw) -> tuple[int, ...]:
    parts = []
    for prime in (2, 2, 2, 2, 3, 3, 5):
        if size % prime == 0 and size:
            parts.append(prime)
            size //= prime
    parts.append(size)
    joined: list[int] = [1]
    for part in draw(st.permutations(parts)):
        if draw(st.booleans()):
            joined.append(part)
        else:
            joined[-1] *= part
    return tuple(joined)


@given(pair=views(), data=st.data())
@example(pair=(Layout((2, 3), (1, 2)), BLOCK[:6].reshape(3, 2).T), data=None)
def test_reshape_is_a_view_exactly_when_numpy_can_make_one(pair: tuple[Layout, np.ndarray], data) -> None:
    layout, host = pair
    shape = (6,) if data is None else _splits(host.size, data.draw)
    ours = reshape(layout, shape)
    view = np.ndarray.view(host)
    try:
        view.shape = shape
    except AttributeError:
        if ours is not None:  # a view where numpy is too careful must still show the elements
            assert np.array_equal(shown(ours), host.reshape(shape))
        return
    assert ours is not None
    assert ours.shape == shape
    assert np.array_equal(shown(ours), host.reshape(shape))


@given(SHAPES)
def test_row_major_strides_match_numpy(shape: tuple[int, ...]) -> None:
    if 0 not in shape:
        assert row_major(shape) == tuple(s // 8 for s in np.empty(shape).strides)
    assert is_row_major(shape, row_major(shape))
