"""A process-wide count of events that can make a plan stale: a variable gets another array or is frozen, a program is
edited, a watched block of memory is written.

While the count is unchanged, earlier checks still hold, so a training loop compares one number, not every variable.
"""

from __future__ import annotations

from array import array


class Changes:
    """The counter; it only increases.

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
