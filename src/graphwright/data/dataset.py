"""Datasets: items by index, or a stream of items."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from graphwright.array import from_numpy
from graphwright.autograd import Tensor, as_tensor
from graphwright.errors import ShapeError, UsageError


class Dataset:
    """Items by index; subclasses define `__len__` and `__getitem__`, and may override `batch` with a faster one."""

    def __len__(self) -> int:
        """Number of items."""
        raise NotImplementedError(f"{type(self).__name__} does not define __len__")

    def __getitem__(self, index: int) -> Any:
        """Return one item: a number, an array, or a tuple or dict of them."""
        raise NotImplementedError(f"{type(self).__name__} does not define __getitem__")

    def batch(self, indices: np.ndarray) -> Any:
        """Return several items, stacked along a new first axis."""
        return stack([self[int(i)] for i in indices])


class IterableDataset:
    """A stream of items; subclasses define `__iter__`, which starts again at each call."""

    def __iter__(self) -> Iterator[Any]:
        """Iterate over all items."""
        raise NotImplementedError(f"{type(self).__name__} does not define __iter__")


class TensorDataset(Dataset):
    """Rows of arrays of equal length: item i is the tuple of their i-th rows.

    Raises: ShapeError if the lengths differ, UsageError for no arrays.
    """

    def __init__(self, *arrays: Any) -> None:
        if not arrays:
            raise UsageError("TensorDataset got no arrays")
        self.arrays = [as_tensor(a).numpy() for a in arrays]
        lengths = {a.shape[:1] for a in self.arrays}
        if len(lengths) > 1 or () in lengths:
            raise ShapeError("arrays have different lengths", got=", ".join(str(a.shape) for a in self.arrays))

    def __len__(self) -> int:
        """Number of rows."""
        return len(self.arrays[0])

    def __getitem__(self, index: int) -> tuple[np.ndarray, ...]:
        """Return the rows at an index."""
        return tuple(a[index] for a in self.arrays)

    def batch(self, indices: np.ndarray) -> tuple[Tensor, ...]:
        """Gather rows at once."""
        return tuple(Tensor(from_numpy(np.ascontiguousarray(a[indices]))) for a in self.arrays)


def stack(items: Sequence[Any]) -> Any:
    """Stack items to tensors along a new first axis, tuples and dicts entry by entry. The default `collate`.

    Raises: ShapeError if shapes differ.
    """
    first = items[0]
    if isinstance(first, dict):
        return {key: stack([item[key] for item in items]) for key in first}
    if isinstance(first, tuple | list):
        return tuple(stack(column) for column in zip(*items, strict=True))
    arrays = [as_tensor(item).numpy() for item in items]
    shapes = sorted({a.shape for a in arrays})
    if len(shapes) > 1:
        raise ShapeError("items of a batch differ in shape", got=", ".join(map(str, shapes)), fix="pass a collate")
    return Tensor(from_numpy(np.stack(arrays)))
