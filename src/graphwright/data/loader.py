"""Datasets, and DataLoader: batches in an order that depends only on seed and epoch, resumable at any batch.

Invariant: in one epoch, over all ranks together, each index occurs exactly once (with `drop_last` at most once). A
loader that loads the `state_dict` of a second one continues with the same batches as the second.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

import numpy as np

from graphwright.array import from_numpy, random
from graphwright.array.world import joined
from graphwright.autograd import Tensor, as_tensor
from graphwright.data.workers import batches_of_workers
from graphwright.errors import ShapeError, UsageError


class Dataset:
    """A dataset of indexed items: subclasses define `__len__` and `__getitem__`, and may override `batch` for speed."""

    def __len__(self) -> int:
        """Return the number of items."""
        raise NotImplementedError(f"{type(self).__name__} does not define __len__")

    def __getitem__(self, index: int) -> Any:
        """Return one item: a number, an array, or a tuple or dict of them."""
        raise NotImplementedError(f"{type(self).__name__} does not define __getitem__")

    def batch(self, indices: np.ndarray) -> Any:
        """Return the items at several indices, stacked along a new first axis."""
        return stack([self[int(i)] for i in indices])


Indexed = Dataset | Sequence[Any] | np.ndarray
"""What has a length and items at the indices 0, 1, ...; the items of an array are its rows."""


class IterableDataset:
    """A stream of items; subclasses define `__iter__`, which starts again at each call."""

    def __iter__(self) -> Iterator[Any]:
        """Iterate over all items."""
        raise NotImplementedError(f"{type(self).__name__} does not define __iter__")


class TensorDataset(Dataset):
    """A dataset of arrays of equal length: item i is the tuple of their i-th rows; bfloat16 becomes float32.

    Raises: ShapeError if the lengths differ or an array is 0-d; UsageError if no array is given.
    """

    def __init__(self, *arrays: Any) -> None:
        if not arrays:
            raise UsageError("no arrays were given", where="TensorDataset", expected="at least one array")
        self.arrays = [as_tensor(a).numpy() for a in arrays]
        shapes, lengths = ", ".join(str(a.shape) for a in self.arrays), {a.shape[:1] for a in self.arrays}
        if () in lengths:
            raise ShapeError("an array is 0-d, so it has no rows", where="TensorDataset", got=f"shapes {shapes}")
        if len(lengths) > 1:
            raise ShapeError("the arrays have different lengths", where="TensorDataset", got=f"shapes {shapes}")

    def __len__(self) -> int:
        """Return the number of rows."""
        return len(self.arrays[0])

    def __getitem__(self, index: int) -> tuple[np.ndarray, ...]:
        """Return the row of each array at an index."""
        return tuple(a[index] for a in self.arrays)

    def batch(self, indices: np.ndarray) -> tuple[Tensor, ...]:
        """Return the rows at several indices of each array, gathered in one operation per array."""
        return tuple(Tensor(from_numpy(np.ascontiguousarray(a[indices]))) for a in self.arrays)


def stack(items: Sequence[Any]) -> Any:
    """Stack items to tensors along a new first axis; the default `collate_fn`.

    Items that are tuples or dicts are stacked entry by entry.
    Raises: ShapeError if shapes or numbers of entries differ; UsageError for dicts of different keys.
    """
    first = items[0]
    if isinstance(first, dict):
        if any(item.keys() != first.keys() for item in items):
            raise UsageError("the items of a batch have different keys", expected=", ".join(map(str, first)))
        return {key: stack([item[key] for item in items]) for key in first}
    if isinstance(first, tuple | list):
        if sizes := {len(item) for item in items} - {len(first)}:
            raise ShapeError("the items of a batch have different numbers of entries", expected=len(first), got=sizes)
        return tuple(stack(column) for column in zip(*items, strict=True))
    tensors = [as_tensor(item) for item in items]
    kind = tensors[0].dtype if len({t.dtype for t in tensors}) == 1 else None
    arrays = [t.concrete("stack").to_numpy(bits=kind is not None) for t in tensors]
    shapes = sorted({a.shape for a in arrays})
    if len(shapes) > 1:
        fix = "pass DataLoader(collate_fn=data.pad), or another function that pads them"
        raise ShapeError("the items of a batch differ in shape", got=f"shapes {', '.join(map(str, shapes))}", fix=fix)
    return Tensor(from_numpy(np.stack(arrays), bits=kind))


def pad(items: Sequence[Any], value: float = 0) -> tuple[Tensor, Tensor]:
    """Stack arrays that differ in their first axis, such as rows of token ids, to the length of the longest.

    Args:
        items: B arrays [T_i, ...] with equal further axes.
        value: entry after the end of an item.
    Returns: [B, T, ...] in the dtype of the items, and a bool mask [B, T], true inside the items.
    Raises: ShapeError for other shapes, UsageError for no items.
    """
    if not items:
        raise UsageError("there are no items to pad", where="pad", expected="at least one")
    arrays = [as_tensor(item).numpy() for item in items]
    if any(a.ndim == 0 or a.shape[1:] != arrays[0].shape[1:] for a in arrays):
        shapes = ", ".join(map(str, sorted({a.shape for a in arrays})))
        raise ShapeError(
            "only the first axis can be padded", got=f"shapes {shapes}", expected="[T, ...], equal after T"
        )
    lengths = np.array([len(a) for a in arrays])
    mask = np.arange(lengths.max()) < lengths[:, None]
    made = np.full((*mask.shape, *arrays[0].shape[1:]), value, np.result_type(*arrays))
    made[mask] = np.concatenate(arrays)
    return Tensor(from_numpy(made)), Tensor(from_numpy(mask))


_GROUP = 50
"""Number of batches within which items are sorted by length."""


class DataLoader:
    """Batches of a dataset; each loop over it is one epoch.

    A loop that ends early is not continued: the next loop is the next epoch, except after `load_state_dict`.

    Args:
        dataset: a Dataset, or anything with a length and items at the indices 0, 1, ..., such as a list, a tuple or an
            array, whose rows are its items; or an IterableDataset, which cannot be shuffled.
        batch_size: items per batch; the last batch may be smaller.
        shuffle: whether each epoch has its own random order.
        seed: seed of the orders.
        drop_last: drop an incomplete last batch; all ranks of a Dataset then have the same number of batches.
        collate_fn: function from a list of items to a batch; by default it stacks the items to tensors.
        pin_memory: accepted as in torch, without an effect.
        rank, ranks: this loader reads every `ranks`-th item of the order, starting at item `rank`. Without both, they
            are those of the run that `distributed.setup` joined, else UsageError: all items in one process, and the
            same ones on the ranks that have a copy of a divided model together.
        num_workers: number of processes that make batches, each one batch ahead; 0 makes them in the loop. Batches and
            their order are the same. Processes start as `multiprocessing` is set to start them. At most 1 for an
            IterableDataset.
        lengths: length of each item; items of similar length then come into one batch, so that padding is short. With
            `shuffle` the order of batches is random, and who shares a batch changes with the epoch.

    Attributes:
        epoch: number of the running or next epoch.
        done: number of batches yielded in that epoch.
    """

    def __init__(
        self, dataset: Indexed | IterableDataset, batch_size: int = 1, shuffle: bool = False, *, num_workers: int = 0,
        collate_fn: Callable[[list[Any]], Any] | None = None, pin_memory: bool = False, drop_last: bool = False,
        seed: int = 0, rank: int | None = None, ranks: int | None = None, lengths: Any = None,
    ) -> None:  # fmt: skip
        if rank is None and ranks is None:
            here = joined("DataLoader")
            rank, ranks = here.copy, here.copies
        rank, ranks = 0 if rank is None else rank, 1 if ranks is None else ranks
        counts = {"batch_size": batch_size, "rank": rank, "ranks": ranks, "num_workers": num_workers}
        for name, count in counts.items():
            if not isinstance(count, int | np.integer):
                raise UsageError(
                    "a count is not an integer", where=f"DataLoader, {name}", expected="int", got=repr(count)
                )
        if batch_size < 1 or not 0 <= rank < ranks or num_workers < 0:
            expected = "batch_size >= 1, 0 <= rank < ranks, num_workers >= 0"
            got = f"batch_size {batch_size}, rank {rank} of {ranks}, num_workers {num_workers}"
            raise UsageError("an argument is out of range", where="DataLoader", expected=expected, got=got)
        indexed = hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__") and not isinstance(dataset, Mapping)
        if not indexed and not isinstance(dataset, IterableDataset):
            raise UsageError("the dataset has no items by index", where="DataLoader",
                             expected="a Dataset, a list, a tuple, an array, or an IterableDataset",
                             got=type(dataset).__name__, fix="DataLoader(list(items), ...)")  # fmt: skip
        if isinstance(dataset, np.ndarray) and not dataset.ndim:
            raise ShapeError("the array is 0-d, so it has no rows", where="DataLoader", got="shape ()")
        if shuffle and isinstance(dataset, IterableDataset):
            raise UsageError("an iterable dataset cannot be shuffled", fix="pass shuffle=False, or a Dataset")
        if isinstance(dataset, IterableDataset) and (num_workers > 1 or lengths is not None):
            what = "an iterable dataset has no items by index, which several workers and lengths need"
            raise UsageError(what, where="DataLoader", fix="pass num_workers=1 without lengths, or a Dataset")
        self.lengths = None if lengths is None else np.asarray(lengths)
        if self.lengths is not None and self.lengths.shape != (len(dataset),):  # pyright: ignore[reportArgumentType]  # not a stream
            raise ShapeError("there is not one length per item", where="DataLoader", got=list(self.lengths.shape),
                             expected=[len(dataset)])  # pyright: ignore[reportArgumentType]  # fmt: skip
        self.dataset, self.batch_size, self.shuffle, self.seed = dataset, batch_size, shuffle, seed
        self.drop_last, self.collate_fn, self.rank, self.ranks = drop_last, collate_fn, rank, ranks
        self.num_workers = num_workers
        self.epoch = self.done = 0
        self._first = 0  # items of the epoch before the first batch, of a state that was loaded
        self._continues = True

    def __len__(self) -> int:
        """Return the number of batches of one epoch on this rank. Raises: UsageError for an IterableDataset."""
        if isinstance(self.dataset, IterableDataset):
            raise UsageError("an iterable dataset has no length", fix="loop over the loader, or pass a Dataset")
        return self._count(len(self.dataset))

    def _count(self, total: int) -> int:
        """Return the number of batches of this rank for `total` items of the order."""
        if self.drop_last:
            return total // (self.batch_size * self.ranks)
        own = (total - self.rank + self.ranks - 1) // self.ranks
        return -(-own // self.batch_size)

    def __iter__(self) -> Iterator[Any]:
        """Iterate over the batches of one epoch, or the rest of the epoch whose state was loaded."""
        if self.done and not self._continues:
            self._next_epoch()
        self._continues = False
        batches = batches_of_workers(self._batches, self.num_workers) if self.num_workers else self._batches(0, 1)
        for batch in batches:
            self.done += 1
            yield batch
        self._next_epoch()

    def _next_epoch(self) -> None:
        self.epoch, self.done, self._first = self.epoch + 1, 0, 0

    def order(self, epoch: int) -> np.ndarray:
        """Return all indices of the dataset, int64, in the order of an epoch; none for an IterableDataset."""
        total = 0 if isinstance(self.dataset, IterableDataset) else len(self.dataset)
        order = self._permutation(total, "data.loader", epoch)
        return order if self.lengths is None else self._grouped(order, self.lengths, epoch)

    def _permutation(self, count: int, stream: str, epoch: int) -> np.ndarray:
        if not self.shuffle:
            return np.arange(count)
        words = random.bits(count, seed=self.seed, stream=random.stream_of(stream), step=epoch)
        return np.argsort(words, kind="stable")

    def _grouped(self, order: np.ndarray, lengths: np.ndarray, epoch: int) -> np.ndarray:
        """Sort spans of the order by length, and shuffle the batches of all ranks together."""
        size = self.batch_size * self.ranks
        spans = [order[at : at + _GROUP * size] for at in range(0, len(order), _GROUP * size)]
        order = np.concatenate([span[np.argsort(lengths[span], kind="stable")] for span in spans] or [order])
        full = len(order) // size
        batches = order[: full * size].reshape(full, size)[self._permutation(full, "data.loader.batches", epoch)]
        return np.concatenate([batches.reshape(-1), order[full * size :]])

    def _batches(self, first: int, step: int) -> Iterator[Any]:
        """Yield every `step`-th batch of the rest of the epoch, from batch number `first` on."""
        if isinstance(self.dataset, IterableDataset):
            return self._stream()
        count = self._count(max(0, len(self.dataset) - self._first))
        return self._indexed(self.dataset, range(self.done + first, count, step))

    def _indexed(self, dataset: Indexed, numbers: range) -> Iterator[Any]:
        whole = dataset.batch if isinstance(dataset, Dataset) and self.collate_fn is None else None
        collate = self.collate_fn or stack
        own = self.order(self.epoch)[self._first + self.rank :: self.ranks]
        for k in numbers:
            ids = own[k * self.batch_size : (k + 1) * self.batch_size]
            yield collate([dataset[int(i)] for i in ids]) if whole is None else whole(ids)

    def _stream(self) -> Iterator[Any]:
        assert isinstance(self.dataset, IterableDataset)
        start = self._first + self.rank + self.ranks * self.batch_size * self.done
        items = islice(self.dataset, start, None, self.ranks)
        while batch := list(islice(items, self.batch_size)):
            if self.drop_last and len(batch) < self.batch_size:
                return
            yield (self.collate_fn or stack)(batch)

    def state_dict(self) -> dict[str, Any]:
        """Return `epoch`, `done` and `first`, and the `seed`, `batch_size` and `ranks` with which they were counted.

        `first` is the number of items of the epoch before batch 0, which other numbers of ranks have read.
        """
        state = {"epoch": self.epoch, "done": self.done, "seed": self.seed, "batch_size": self.batch_size}
        return {**state, "first": self._first, "ranks": self.ranks}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume at a saved position: the next loop yields the remaining items of that epoch.

        The state may be of another number of ranks, also with another batch size: what all of them had read together is
        not read again. Raises: UsageError if the state is invalid, or was saved with a different seed or, by as many
        ranks, batch size; or with `lengths` by ranks whose batches have another size together.
        """
        mine = self.state_dict()
        state = {"first": 0, "ranks": self.ranks, **state}
        wrong = state.keys() != mine.keys() or any(type(v) is not int for v in state.values())
        if wrong or min(state["epoch"], state["done"], state["first"], state["ranks"] - 1) < 0:
            expected = f"a dict with the keys {', '.join(mine)} and integer values, epoch and done >= 0"
            raise UsageError("the state of the DataLoader is invalid", expected=expected, got=dict(state))
        together = (state["batch_size"] * state["ranks"], self.batch_size * self.ranks)
        other = state["ranks"] != self.ranks
        if state["seed"] != self.seed or (state["batch_size"] != self.batch_size and not other):
            expected, got = (f"seed {s['seed']}, batch_size {s['batch_size']}" for s in (mine, state))
            what = "the state was saved with a different seed or batch size"
            raise UsageError(what, where="DataLoader", expected=expected, got=got)
        if other and self.lengths is not None and together[0] != together[1]:
            expected, got = (f"{n} items in the batches of all ranks" for n in reversed(together))
            what = "the state was saved by ranks whose batches have another size together, which decides the order"
            raise UsageError(what, where="DataLoader", expected=expected, got=got)
        self.epoch, self.done, self._first, self._continues = state["epoch"], state["done"], state["first"], True
        if together[0] != together[1]:
            self.done, self._first = 0, state["first"] + state["done"] * together[0]
