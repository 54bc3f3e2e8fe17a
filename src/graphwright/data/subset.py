"""`Subset`: some items of a dataset; `ConcatDataset`: those of several; `random_split`: disjoint random subsets."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from itertools import accumulate, pairwise
from math import floor
from typing import Any

import numpy as np

from graphwright.autograd import Generator, randperm
from graphwright.data.loader import Dataset, Indexed, stack
from graphwright.errors import IndexOutOfRange, UsageError


class Subset(Dataset):
    """The items of a dataset at some indices: item i is that at `indices[i]`.

    Raises: IndexOutOfRange for an index outside the dataset; UsageError for indices that are not integers.
    """

    def __init__(self, dataset: Indexed, indices: Sequence[int] | np.ndarray) -> None:
        given = np.asarray(indices)
        if given.ndim != 1 or (given.size and given.dtype.kind not in "iu"):
            raise UsageError("the indices are not integers", where="Subset", expected="ints [n]", got=indices)
        n = len(dataset)
        if given.size and not (-n <= given.min() and given.max() < n):
            wrong = given[(given < -n) | (given >= n)][0]
            raise IndexOutOfRange("an index is out of range", where="Subset", expected=f"{-n}..{n - 1}", got=wrong)
        self.dataset, self.indices = dataset, given.astype(np.int64) % max(n, 1)

    def __len__(self) -> int:
        """Return the number of items."""
        return len(self.indices)

    def __getitem__(self, index: int) -> Any:
        """Return the item of the dataset at `indices[index]`."""
        return self.dataset[int(self.indices[index])]

    def batch(self, indices: np.ndarray) -> Any:
        """Return several items, by the dataset's own `batch` if it has one."""
        chosen = self.indices[indices]
        return self.dataset.batch(chosen) if isinstance(self.dataset, Dataset) else stack([self[i] for i in indices])


class ConcatDataset(Dataset):
    """The items of several datasets, one after another. Raises: UsageError for none."""

    def __init__(self, datasets: Iterable[Indexed]) -> None:
        self.datasets = list(datasets)
        if not self.datasets:
            raise UsageError("there is no dataset", where="ConcatDataset", expected="one or more")
        self.cumulative_sizes = list(accumulate(map(len, self.datasets)))

    def __len__(self) -> int:
        """Return the number of items."""
        return self.cumulative_sizes[-1]

    def __getitem__(self, index: int) -> Any:
        """Return an item; negative indices count from the end. Raises: IndexOutOfRange."""
        n = len(self)
        if not -n <= index < n:
            expected = f"{-n}..{n - 1}"
            raise IndexOutOfRange("an index is out of range", where="ConcatDataset", expected=expected, got=index)
        at = bisect_right(self.cumulative_sizes, index % n)
        return self.datasets[at][index % n - (self.cumulative_sizes[at - 1] if at else 0)]


def random_split(
    dataset: Indexed, lengths: Sequence[int | float], generator: Generator | None = None
) -> list[Subset]:  # fmt: skip
    """Split a dataset at random into disjoint subsets of these lengths, or of these shares if they sum to 1.

    What shares leave over by rounding down goes to the first subsets, one item each, as in torch.
    Raises: UsageError if the lengths do not sum to the number of items.
    """
    n, sizes = len(dataset), list(lengths)
    if any(isinstance(x, float) for x in sizes) and abs(sum(sizes) - 1) < 1e-6 and min(sizes) >= 0:
        sizes = [floor(n * share) for share in sizes]
        for i in range(n - sum(sizes)):
            sizes[i % len(sizes)] += 1
    if any(not isinstance(x, int | np.integer) or x < 0 for x in sizes) or sum(sizes) != n:
        expected = f"lengths that sum to {n}, or shares that sum to 1"
        raise UsageError("invalid lengths", where="random_split", expected=expected, got=list(lengths))
    order, ends = randperm(n, generator=generator).numpy(), np.cumsum([0, *sizes])
    return [Subset(dataset, order[a:b]) for a, b in pairwise(ends)]
