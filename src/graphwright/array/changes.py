"""A count of what may make a plan stale: a variable that gets another array or is frozen, a program that is edited, a
write to a watched block of memory.

While it stands still, whatever was checked still holds; so a loop checks one number instead of every variable.
"""

from __future__ import annotations

from array import array


class Changes:
    """The one counter of a process; it only rises.

    Attributes:
        count: changes so far.
        address: where native code reads the count.
    """

    __slots__ = ("_cell", "address", "count")

    def __init__(self) -> None:
        self.count, self._cell = 0, array("q", [0])
        self.address = self._cell.buffer_info()[0]

    def rise(self) -> None:
        """Count a change."""
        self.count += 1
        self._cell[0] = self.count


changes = Changes()
