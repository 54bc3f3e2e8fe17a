"""The memory that a plan's offsets point into: chunks, of which more are added behind, so that no address moves."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable

from graphwright.array import Storage


class Arena:
    """Chunks, one behind the other in a plan's offsets, anywhere in memory.

    Attributes:
        chunks: their memory.
        ends: where each ends in the plan's offsets.
    """

    __slots__ = ("chunks", "ends")

    def __init__(self) -> None:
        self.chunks: list[Storage] = []
        self.ends: tuple[int, ...] = ()

    @property
    def nbytes(self) -> int:
        """Of all chunks."""
        return sum(chunk.nbytes for chunk in self.chunks)

    def grow(self, ends: tuple[int, ...], chunk: Callable[[int, int], Storage]) -> None:
        """Add chunks up to these ends, of which those that it has are the first.

        Args:
            chunk: the memory of the i-th chunk, of so many bytes.
        """
        begin = self.ends[-1] if self.ends else 0
        for i, end in enumerate(ends[len(self.ends) :], len(self.ends)):
            self.chunks.append(chunk(i, end - begin))
            self.ends, begin = (*self.ends, end), end

    def holds(self, ends: tuple[int, ...]) -> bool:
        """True if a plan with these chunks can go on in it; what it has beyond them is let go."""
        count = min(len(ends), len(self.ends))
        if self.ends[:count] != ends[:count]:
            return False
        self.ends = self.ends[:count]
        del self.chunks[count:]
        return True

    def at(self, offset: int) -> tuple[Storage, int]:
        """The chunk that an offset lies in, and the place in it; the end of all lies in the last."""
        i = min(bisect_right(self.ends, offset), len(self.chunks) - 1)
        return self.chunks[i], offset - (self.ends[i - 1] if i else 0)
