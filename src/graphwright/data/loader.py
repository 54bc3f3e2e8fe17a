"""DataLoader: batches in an order that depends only on seed and epoch, resumable at any batch.

Invariant: over the ranks of one epoch each index occurs exactly once (with `drop_last` at most once), and a loader that
loaded another's `state_dict` yields the batches that the other would have.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from itertools import islice
from typing import Any

import numpy as np

from graphwright.array import random
from graphwright.data.dataset import Dataset, IterableDataset, stack
from graphwright.errors import UsageError


class DataLoader:
    """Iterates over a dataset in batches, once per epoch.

    Args:
        dataset: a Dataset, or an IterableDataset, which cannot be shuffled.
        batch_size: items per batch; the last may be smaller.
        shuffle: whether each epoch has another order.
        seed: seed of the orders.
        drop_last: drop an incomplete last batch; all ranks then have the same number of batches.
        collate: makes a batch of a list of items; stacks them to tensors by default.
        rank, ranks: this loader reads every `ranks`-th item of the order, from the `rank`-th on.

    Attributes:
        epoch: number of the running or next epoch.
        done: batches yielded in it.
    A loop that ends early is not continued: the next loop is the next epoch, except after `load_state_dict`.
    """

    def __init__(
        self,
        dataset: Dataset | IterableDataset,
        batch_size: int = 1,
        *,
        shuffle: bool = False,
        seed: int = 0,
        drop_last: bool = False,
        collate: Callable[[list[Any]], Any] | None = None,
        rank: int = 0,
        ranks: int = 1,
    ) -> None:
        if batch_size < 1 or not 0 <= rank < ranks:
            raise UsageError(
                "an argument of DataLoader is out of range",
                expected="batch_size >= 1, 0 <= rank < ranks",
                got=f"batch_size {batch_size}, rank {rank} of {ranks}",
            )
        if shuffle and isinstance(dataset, IterableDataset):
            raise UsageError("an iterable dataset cannot be shuffled", fix="pass shuffle=False, or a Dataset")
        self.dataset, self.batch_size, self.shuffle, self.seed = dataset, batch_size, shuffle, seed
        self.drop_last, self.collate, self.rank, self.ranks = drop_last, collate, rank, ranks
        self.epoch = self.done = 0
        self._continues = True

    def __len__(self) -> int:
        """Number of batches of one epoch on this rank. Raises: UsageError for an IterableDataset."""
        if isinstance(self.dataset, IterableDataset):
            raise UsageError("an iterable dataset has no length")
        total = len(self.dataset)
        if self.drop_last:
            return total // (self.batch_size * self.ranks)
        own = (total - self.rank + self.ranks - 1) // self.ranks
        return -(-own // self.batch_size)

    def __iter__(self) -> Iterator[Any]:
        """Iterate over the batches of one epoch, or the rest of the epoch whose state was loaded."""
        if self.done and not self._continues:
            self.epoch, self.done = self.epoch + 1, 0
        self._continues = False
        batches = self._stream() if isinstance(self.dataset, IterableDataset) else self._indexed(self.dataset)
        for batch in batches:
            self.done += 1
            yield batch
        self.epoch, self.done = self.epoch + 1, 0

    def order(self, epoch: int) -> np.ndarray:
        """Return the indices of an epoch for all ranks, int64."""
        total = len(self.dataset) if isinstance(self.dataset, Dataset) else 0
        if not self.shuffle:
            return np.arange(total)
        words = random.bits(total, seed=self.seed, stream=random.stream_of("data.loader"), step=epoch)
        return np.argsort(words, kind="stable")

    def _indexed(self, dataset: Dataset) -> Iterator[Any]:
        own = self.order(self.epoch)[self.rank :: self.ranks]
        for k in range(self.done, len(self)):
            indices = own[k * self.batch_size : (k + 1) * self.batch_size]
            if self.collate is None:
                yield dataset.batch(indices)
            else:
                yield self.collate([dataset[int(i)] for i in indices])

    def _stream(self) -> Iterator[Any]:
        assert isinstance(self.dataset, IterableDataset)
        items = islice(self.dataset, self.rank + self.ranks * self.batch_size * self.done, None, self.ranks)
        while batch := list(islice(items, self.batch_size)):
            if self.drop_last and len(batch) < self.batch_size:
                return
            yield (self.collate or stack)(batch)

    def state_dict(self) -> dict[str, Any]:
        """Return the position in the data."""
        return {"epoch": self.epoch, "done": self.done, "seed": self.seed, "batch_size": self.batch_size}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume at a position: the next loop yields the batch after it.

        Raises: UsageError if the state is invalid, or of a loader with another seed or batch size.
        """
        mine = self.state_dict()
        wrong = state.keys() != mine.keys() or any(type(v) is not int for v in state.values())
        if wrong or state["epoch"] < 0 or state["done"] < 0:
            raise UsageError("invalid state of a DataLoader", expected=", ".join(mine), got=dict(state))
        if any(state[name] != mine[name] for name in ("seed", "batch_size")):
            raise UsageError(
                "the state is of a loader with another seed or batch size",
                where="DataLoader",
                expected=mine,
                got=dict(state),
            )
        self.epoch, self.done, self._continues = state["epoch"], state["done"], True
