"""What a loader reads: items by index, or a stream of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from graphwright.array import from_numpy
from graphwright.autograd import Tensor, as_tensor
from graphwright.errors import ShapeError, UsageError


class Dataset:
    """Items by index; subclasses define `__len__` and `__getitem__`, and may have a faster `batch`."""

    def __len__(self) -> int:
        """Number of items."""
        raise NotImplementedError(f"{type(self).__name__} has no length")

    def __getitem__(self, index: int) -> Any:
        """One item: a number, an array, or a tuple or dict of them."""
        raise NotImplementedError(f"{type(self).__name__} has no items")

    def batch(self, indices: np.ndarray) -> Any:
        """Several items, stacked along a new first axis."""
        return stack([self[int(i)] for i in indices])


class IterableDataset:
    """Items in an order of their own; subclasses define `__iter__`, which starts anew at each call."""

    def __iter__(self) -> Iterator[Any]:
        """All items."""
        raise NotImplementedError(f"{type(self).__name__} cannot be iterated")


class TensorDataset(Dataset):
    """Rows of arrays of equal length: item i is the tuple of their i-th rows.

    Raises: ShapeError for arrays of different lengths, UsageError for none.
    """

    def __init__(self, *arrays: Any) -> None:
        if not arrays:
            raise UsageError("a TensorDataset needs an array")
        self.arrays = [as_tensor(a).numpy() for a in arrays]
        lengths = {a.shape[:1] for a in self.arrays}
        if len(lengths) > 1 or () in lengths:
            raise ShapeError("arrays have one length", got=", ".join(str(a.shape) for a in self.arrays))

    def __len__(self) -> int:
        """Number of rows."""
        return len(self.arrays[0])

    def __getitem__(self, index: int) -> tuple[np.ndarray, ...]:
        """The rows at an index."""
        return tuple(a[index] for a in self.arrays)

    def batch(self, indices: np.ndarray) -> tuple[Tensor, ...]:
        """Rows gathered at once."""
        return tuple(Tensor(from_numpy(np.ascontiguousarray(a[indices]))) for a in self.arrays)


def stack(items: Sequence[Any]) -> Any:
    """Items stacked to tensors along a new first axis; tuples and dicts entry by entry. The default `collate`.

    Raises: ShapeError naming the shapes that differ.
    """
    first = items[0]
    if isinstance(first, dict):
        return {key: stack([item[key] for item in items]) for key in first}
    if isinstance(first, tuple | list):
        return tuple(stack(column) for column in zip(*items, strict=True))
    arrays = [as_tensor(item).numpy() for item in items]
    shapes = sorted({a.shape for a in arrays})
    if len(shapes) > 1:
        raise ShapeError("items of a batch have one shape", got=", ".join(map(str, shapes)), fix="give a collate")
    return Tensor(from_numpy(np.stack(arrays)))
