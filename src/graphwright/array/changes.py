"""A count of what may make a plan stale: a variable that gets another array or is frozen, a program that is edited, a
write to a watched block of memory.

While it stands still, whatever was checked still holds; so a loop checks one number instead of every variable.
"""

from __future__ import annotations


class Changes:
    """The one counter of a process; it only rises."""

    __slots__ = ("count",)

    def __init__(self) -> None:
        self.count = 0


changes = Changes()
