"""Poisoned plans: dead memory is filled with NaN, so that a value freed too early shows in the result."""

from __future__ import annotations

import numpy as np

from graphwright.array import CPU, NDArray, Storage, backend, from_numpy, poison, uint8


class PoisonCall:
    """A call that fills dead bytes with NaN."""

    def __init__(self, storage: Storage, offset: int, nbytes: int) -> None:
        self.target = NDArray(storage, uint8, (nbytes,), offset=offset)
        made = np.empty(nbytes, np.uint8)
        poison.fill(made)
        self.source = from_numpy(made)

    def __call__(self) -> None:  # noqa: D102  # a bound call, as its class says
        device = self.target.device
        if device == CPU:
            np.copyto(self.target.to_numpy(), self.source.to_numpy())
        else:
            backend(device).copy(self.target, self.source)


def fill(storage: Storage) -> None:
    """Fill a block with NaN."""
    if storage.device == CPU:
        poison.fill(storage.memory)
    else:
        PoisonCall(storage, 0, storage.nbytes)()
