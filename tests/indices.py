"""Shapes, and indices of every kind for them, as hypothesis draws them for the tests of arrays and tensors."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import strategies as st

SIDES = st.lists(st.sampled_from([0, 1, 2, 3, 5]), max_size=4).map(tuple)


@st.composite
def indices(draw: Any, shape: tuple[int, ...], *, arrays: bool = True) -> tuple[Any, ...]:
    """An index of numbers, slices of any step, new axes, `...`, index arrays, masks, True and False."""
    items: list[Any] = []
    axis = 0
    index_shape = draw(st.sampled_from([(), (1,), (2,), (2, 1), (3,), (0,)]))
    while axis < len(shape) and draw(st.integers(0, 9)) > 0:
        n = shape[axis]
        kind = draw(st.sampled_from(["int", "slice", "slice", "new", *(["array", "mask", "flag"] if arrays else [])]))
        if kind in ("new", "flag"):
            items.append(None if kind == "new" else draw(st.booleans()))
            continue
        if kind == "int" and n:
            items.append(draw(st.integers(-n, n - 1)))
        elif kind == "array" and n:
            ids = np.array(draw(st.lists(st.integers(-n, n - 1), min_size=3, max_size=3)))
            one = draw(st.booleans()) and 0 not in index_shape
            items.append(
                ids[:1].reshape((1,) * len(index_shape)) if one else np.resize(ids, index_shape).astype(np.int64)
            )
        elif kind == "mask":
            rank = draw(st.integers(1, min(2, len(shape) - axis)))
            size = int(np.prod(shape[axis : axis + rank]))
            bits = draw(st.lists(st.booleans(), min_size=size, max_size=size))
            items.append(np.array(bits, bool).reshape(shape[axis : axis + rank]))
            axis += rank
            continue
        else:
            start, stop = (draw(st.none() | st.integers(-6, 6)) for _ in range(2))
            items.append(slice(start, stop, draw(st.sampled_from([None, 1, 2, 3, -1, -2]))))
        axis += 1
    if axis == len(shape) and draw(st.booleans()):
        items.insert(draw(st.integers(0, len(items))), Ellipsis)  # it spans no axis
    elif draw(st.booleans()):
        items.append(Ellipsis)
        rest = len(shape) - axis
        if rest and draw(st.booleans()):
            items.append(slice(None, None, -1))
    return tuple(items)
