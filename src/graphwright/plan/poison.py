"""Poison: dead memory filled with NaN, so that a value freed too early shows in the result."""

from __future__ import annotations

from typing import Any

import numpy as np

from graphwright.array import Storage

_POISON = 0x7FF8  # NaN in float16, bfloat16, float32 and float64 alike when repeated


class PoisonCall:
    """A call that fills dead bytes with NaN."""

    def __init__(self, arena: Storage | None, offset: int, nbytes: int) -> None:
        assert arena is not None
        self.bytes = arena.memory[offset : offset + nbytes]

    def __call__(self) -> None:  # noqa: D102  # a bound call, as its class says
        _fill_bytes(self.bytes)


def fill(storage: Storage) -> None:
    """Fill a block with NaN."""
    _fill_bytes(storage.memory)


def _fill_bytes(memory: Any) -> None:
    host = np.asarray(memory)
    host[0::2], host[1::2] = _POISON & 0xFF, _POISON >> 8
