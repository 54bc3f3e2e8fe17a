"""Poisoned plans: dead memory is filled with NaN, so that a value freed too early shows in the result."""

from __future__ import annotations

from graphwright.array import Storage, poison


class PoisonCall:
    """A call that fills dead bytes with NaN."""

    def __init__(self, arena: Storage | None, offset: int, nbytes: int) -> None:
        assert arena is not None
        self.bytes = arena.memory[offset : offset + nbytes]

    def __call__(self) -> None:  # noqa: D102  # a bound call, as its class says
        poison.fill(self.bytes)


def fill(storage: Storage) -> None:
    """Fill a block with NaN."""
    poison.fill(storage.memory)
