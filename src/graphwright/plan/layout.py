"""Placing buffers in one arena: best fit in the order of the program, with dead space joined and used again."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence

from graphwright.plan.table import ARENA, Buffer

ALIGN = 64


def aligned(nbytes: int) -> int:
    """Bytes a buffer takes: a multiple of 64; scalars 8, so that graphs of scalars stay small."""
    return 8 if nbytes <= 8 else -(-nbytes // ALIGN) * ALIGN


def place(buffers: Sequence[Buffer], steps: int) -> int:
    """Give every arena buffer its offset; returns the arena's bytes.

    Walks the instructions once: a buffer takes the smallest hole that holds it, else the end; after its last use its
    bytes are a hole again, joined with its neighbours. Near-linear; on layered graphs within a few percent of the
    lower bound.
    """
    born: list[list[Buffer]] = [[] for _ in range(steps + 1)]
    dying: list[list[Buffer]] = [[] for _ in range(steps + 1)]
    for buffer in buffers:
        if buffer.kind in ARENA:
            born[max(buffer.first, 0)].append(buffer)
            dying[min(max(buffer.last, buffer.first, 0), steps)].append(buffer)
    holes = _Holes()
    for step in range(steps + 1):
        for buffer in sorted(born[step], key=lambda b: (-b.nbytes, b.index)):
            buffer.offset = holes.take(aligned(buffer.nbytes))
        for buffer in dying[step]:
            holes.give(buffer.offset, aligned(buffer.nbytes))
    return holes.top


def place_naive(buffers: Sequence[Buffer], steps: int) -> int:
    """Every buffer a place of its own, in order: what the reuse is measured against."""
    top = 0
    for buffer in buffers:
        if buffer.kind in ARENA:
            buffer.offset = -(-top // ALIGN) * ALIGN
            top = buffer.offset + aligned(buffer.nbytes)
    return top


class _Holes:
    """Free stretches below `top`: starts in order, and (size, start) in order for the best fit."""

    def __init__(self) -> None:
        self.top = 0
        self.starts: list[int] = []
        self.sizes: dict[int, int] = {}
        self.by_size: list[tuple[int, int]] = []

    def take(self, size: int) -> int:
        """Offset of `size` free bytes."""
        grain = min(ALIGN, size) or 1
        at = bisect_left(self.by_size, (size, 0))
        while at < len(self.by_size):
            have, start = self.by_size[at]
            shift = -start % grain
            if have >= size + shift:
                self._drop(start)
                if shift:
                    self._put(start, shift)
                if have > size + shift:
                    self._put(start + shift + size, have - size - shift)
                return start + shift
            at += 1
        if self.starts and self.starts[-1] + self.sizes[self.starts[-1]] == self.top:  # a hole at the end grows
            start = self.starts[-1]
            self._drop(start)
            self.top = start
        start = self.top + (-self.top % grain)
        if start > self.top:
            self._put(self.top, start - self.top)
        self.top = start + size
        return start

    def give(self, start: int, size: int) -> None:
        """Free a stretch and join it with free neighbours."""
        if size == 0:
            return
        at = bisect_left(self.starts, start)
        if at < len(self.starts) and self.starts[at] == start + size:
            size += self._drop(self.starts[at])
        if at > 0 and self.starts[at - 1] + self.sizes[self.starts[at - 1]] == start:
            before = self.starts[at - 1]
            size += self._drop(before)
            start = before
        self._put(start, size)

    def _put(self, start: int, size: int) -> None:
        insort(self.starts, start)
        self.sizes[start] = size
        insort(self.by_size, (size, start))

    def _drop(self, start: int) -> int:
        size = self.sizes.pop(start)
        del self.starts[bisect_left(self.starts, start)]
        del self.by_size[bisect_left(self.by_size, (size, start))]
        return size


def lower_bound(buffers: Sequence[Buffer], steps: int) -> int:
    """Bytes live at the fullest instruction: no layout can take less."""
    change = [0] * (steps + 2)
    for buffer in buffers:
        if buffer.kind in ARENA:
            first = max(buffer.first, 0)
            change[first] += aligned(buffer.nbytes)
            change[min(max(buffer.last, first), steps) + 1] -= aligned(buffer.nbytes)
    live = most = 0
    for step in change:
        live += step
        most = max(most, live)
    return most
