"""Results that are views of the arena: good until the next run, refused afterwards."""

from __future__ import annotations

from typing import Any

from graphwright.array import CPU, Storage
from graphwright.errors import ComputeError


class StaleLease(ComputeError):
    """A leased result was read after the next run had begun."""


class Lease(Storage):
    """An arena as one run's results see it."""

    __slots__ = ()

    def __init__(self, arena: Storage) -> None:
        super().__init__(arena.memory, arena.nbytes, CPU)

    @property
    def memory(self) -> Any:
        """The arena. Raises: StaleLease once it was used again."""
        if self.closed:
            raise StaleLease("this result was leased, and its memory was used again", fix="copy() it, or lease=False")
        return super().memory
