"""The number of steps of a training, known on the host without a read of memory in each step."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from graphwright.array import Storage
    from graphwright.autograd import Variable


class StepCount:
    """A number that every run of a plan increases by one.

    It is read once; then the writes of a state that each run assigns are counted. After any other write of that state,
    as when a training is resumed, or by another plan, it is read again.

    Args:
        written: the state.
        read: reads the number.
    """

    def __init__(self, written: Variable, read: Callable[[], int]) -> None:
        self._written, self._read = written, read
        self._known: tuple[Storage, int] | None = None
        self._offset = 0

    def value(self) -> int:
        """Return the number."""
        block = self._written.data.storage
        if self._known != (block, block.own_writes):
            self.note(self._read())
        return self._offset + block.version

    def note(self, value: int) -> None:
        """Note the present number, which was read."""
        block = self._written.data.storage
        self._known, self._offset = (block, block.own_writes), value - block.version
