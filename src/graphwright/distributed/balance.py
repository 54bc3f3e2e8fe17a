"""Which rank owns what, so that all ranks have about the same number of bytes."""

from __future__ import annotations

from collections.abc import Sequence


def owners(sizes: Sequence[int], loads: Sequence[int]) -> list[int]:
    """Return the rank of each item: the largest first, each to the rank with the fewest bytes so far (Graham 1969).

    Args:
        sizes: bytes of the items; items of equal size are given out in order.
        loads: bytes that each rank has already.
    """
    held, found = [*loads], [0] * len(sizes)
    for i in sorted(range(len(sizes)), key=lambda i: -sizes[i]):
        rank = found[i] = held.index(min(held))
        held[rank] += sizes[i]
    return found
