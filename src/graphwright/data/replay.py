"""A replay buffer: the last transitions of an agent, from which batches are sampled.

Invariant: which rows a sample has depends only on the seed, the number of samples before it and the number of rows.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from graphwright.arguments import checked
from graphwright.array import from_numpy, random
from graphwright.autograd import Tensor
from graphwright.errors import DTypeError, ShapeError, UsageError


@checked
class ReplayBuffer:
    """The last `capacity` rows that were added, in named columns; a new row replaces the oldest one.

    >>> buffer = ReplayBuffer(100_000)
    >>> buffer.add(state=states, action=actions, reward=rewards)      # each [N, ...]
    >>> batch = buffer.sample(256)                                    # the same names, each [256, ...]

    Args:
        capacity: largest number of rows, >= 1.
        seed: seed of the samples.

    Attributes:
        added: number of rows added so far.
        sampled: number of samples so far.
    """

    def __init__(self, capacity: int, *, seed: int = 0) -> None:
        if not isinstance(capacity, int) or capacity < 1:
            expected = "an int >= 1"
            raise UsageError("the capacity is out of range", where="ReplayBuffer", expected=expected, got=capacity)
        self.capacity, self.seed, self.added, self.sampled = capacity, seed, 0, 0
        self._columns: dict[str, np.ndarray] = {}

    def __len__(self) -> int:
        """Return the number of rows."""
        return min(self.added, self.capacity)

    def add(self, **columns: Any) -> None:
        """Add N rows, given as one array [N, ...] per column; the first call determines names, shapes and dtypes.

        Raises: UsageError for other names; ShapeError for other shapes or different N; DTypeError for floats in a
            column of integers, or entries that are not numbers. Then no row is added.
        """
        rows = {name: np.asarray(value) for name, value in columns.items()}
        known = self._columns or {name: row[:0] for name, row in rows.items() if row.ndim}
        if not rows or rows.keys() != known.keys():
            names = ", ".join(known) or "[N, ...] each"
            raise UsageError("the columns of a replay buffer do not change", expected=names, got=", ".join(rows))
        count = next((len(row) for row in rows.values() if row.ndim), 0)
        wrong = [n for n, row in rows.items() if row.shape != (count, *known[n].shape[1:])]
        if wrong:
            raise ShapeError("the rows do not fit their columns", where=", ".join(wrong),
                             expected=[[count, *known[n].shape[1:]] for n in wrong],
                             got=[list(rows[n].shape) for n in wrong])  # fmt: skip
        for name, row in rows.items():
            if row.dtype.kind not in "biuf" or not np.can_cast(row.dtype, known[name].dtype, "same_kind"):
                raise DTypeError("a column cannot store these rows", where=name, expected=known[name].dtype,
                                 got=row.dtype)  # fmt: skip
        if not self._columns:
            self._columns = {n: np.zeros((self.capacity, *row.shape[1:]), row.dtype) for n, row in rows.items()}
        kept = min(count, self.capacity)
        at = (self.added + np.arange(count - kept, count)) % self.capacity
        for name, row in rows.items():
            self._columns[name][at] = row[count - kept :]
        self.added += count

    def sample(self, count: int) -> dict[str, Tensor]:
        """Return `count` rows, each drawn from all rows with equal probability, by column: [count, ...].

        Raises: UsageError for an empty buffer or a negative count.
        """
        if count < 0:
            raise UsageError("the count is negative", where="ReplayBuffer", expected=">= 0", got=count)
        if not len(self):
            raise UsageError("the replay buffer is empty", fix="buffer.add(...) before sample")
        stream = random.stream_of("data.replay")
        words = random.bits(count, seed=self.seed, stream=stream, step=self.sampled % 2**32)
        self.sampled += 1
        rows = words.astype(np.uint64) % np.uint64(len(self))
        return {name: Tensor(from_numpy(column[rows])) for name, column in self._columns.items()}

    def state_dict(self) -> dict[str, Any]:
        """Return the rows, oldest first, and the position of the samples."""
        order = np.arange(self.added - len(self), self.added) % self.capacity
        columns = {name: column[order] for name, column in self._columns.items()}
        return {"columns": columns, "added": self.added, "sampled": self.sampled, "seed": self.seed}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a result of `state_dict`: the samples that follow are those of the saved buffer.

        Raises: UsageError for another dict.
        """
        if state.keys() != self.state_dict().keys():
            expected = ", ".join(self.state_dict())
            raise UsageError("invalid state of a replay buffer", expected=expected, got=", ".join(state))
        self._columns, self.added = {}, state["added"] - len(next(iter(state["columns"].values()), ()))
        if state["columns"]:
            self.add(**state["columns"])
        self.added, self.sampled, self.seed = state["added"], state["sampled"], state["seed"]
