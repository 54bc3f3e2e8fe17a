"""Poison: dead memory filled with NaN, so that a value freed too early shows in the result."""

from __future__ import annotations

import numpy as np

from graphwright.array import CPU, NDArray, Storage, backend, from_numpy, uint8

_PATTERN = np.array([0xF8, 0x7F], np.uint8)
"""NaN in float16, bfloat16, float32 and float64 alike when repeated."""


class PoisonCall:
    """A call that fills dead bytes with NaN."""

    def __init__(self, storage: Storage | None, offset: int, nbytes: int) -> None:
        assert storage is not None
        self.target = NDArray(storage, uint8, (nbytes,), offset=offset)
        self.source = from_numpy(np.resize(_PATTERN, nbytes))

    def __call__(self) -> None:  # noqa: D102  # a bound call, as its class says
        device = self.target.device
        if device == CPU:
            np.copyto(self.target.to_numpy(), self.source.to_numpy())
        else:
            backend(device).copy(self.target, self.source)


def fill(storage: Storage) -> None:
    """Fill a block with NaN."""
    PoisonCall(storage, 0, storage.nbytes)()
