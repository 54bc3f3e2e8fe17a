"""Lanes of one group: in which column each child stands. The trunk has lane 0, its branches the lanes beside it.

Branches are cut into chains; a chain keeps one lane from its first row to its last, so its edges are straight.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable
from itertools import chain as chain_of
from itertools import pairwise


class Occupancy:
    """Which rows of which lane are taken: one integer per lane, a bit per row. Row -1 is the group's top edge."""

    def __init__(self) -> None:
        self._rows: dict[int, int] = {0: 0}

    def free(self, lane: int, first: int, last: int) -> bool:
        """True if no row from `first` to `last` is taken."""
        return last < first or not self._rows.get(lane, 0) & _span(first, last)

    def take(self, lane: int, first: int, last: int) -> None:
        """Take rows `first` to `last`."""
        if last >= first:
            self._rows[lane] = self._rows.get(lane, 0) | _span(first, last)

    def used(self, first: int, last: int) -> list[int]:
        """Lanes with a row taken between `first` and `last`, ascending."""
        return [lane for lane in sorted(self._rows) if not self.free(lane, first, last)]


def _span(first: int, last: int) -> int:
    return ((1 << (last - first + 1)) - 1) << (first + 1)


def lanes(
    rank: list[int], before: list[list[int]], after: list[list[int]], spine: list[int], inlet: bool, outlet: bool
) -> tuple[list[int], Occupancy, set[tuple[int, int]]]:
    """Lane of each child, what is taken, and the edges that rows were taken for: they run straight down a lane.

    Args:
        rank, before, after: rows and neighbours.
        spine: the trunk, in order.
        inlet, outlet: whether the main entry leads straight to the first trunk child, and the last one straight out.
    """
    lane = [0] * len(rank)
    taken = Occupancy()
    links: set[tuple[int, int]] = set()
    for i in spine:
        taken.take(0, rank[i], rank[i])
    for a, b in pairwise(spine):
        if b in after[a]:
            taken.take(0, rank[a], rank[b])
            links.add((a, b))
    if spine and inlet:
        taken.take(0, -1, rank[spine[0]])
    if spine and outlet:
        taken.take(0, rank[spine[-1]], max(rank) + 1)
    sections: dict[int, list[list[int]]] = {}
    crossing: list[list[int]] = []
    rows = [rank[i] for i in spine]
    for chain in _chains(rank, before, after, set(spine)):
        links.update(pairwise(chain))
        first, last = rank[chain[0]], rank[chain[-1]]
        section = bisect_left(rows, first)
        if section == len(rows) or last < rows[section]:
            sections.setdefault(section, []).append(chain)
        else:
            crossing.append(chain)
    for section in sorted(sections):
        _place(sections[section], rank, lane, taken)
    for chain in crossing:
        _place([chain], rank, lane, taken)
    return lane, taken, links


def _chains(rank: list[int], before: list[list[int]], after: list[list[int]], spine: set[int]) -> list[list[int]]:
    """Paths that cover all children but the trunk's, by creation of their first child.

    Two children are linked if each is the other's first choice: the reader with the longest way to go, the source that
    stands lowest. What is left is linked wherever it can be.
    """
    n = len(rank)
    height = [0] * n
    for i in sorted(range(n), key=rank.__getitem__, reverse=True):
        height[i] = max((height[j] + 1 for j in after[i]), default=0)
    follower: dict[int, int] = {}
    leader: dict[int, int] = {}
    branch = [i for i in sorted(range(n), key=lambda i: (rank[i], i)) if i not in spine]
    choice = {j: min((i for i in before[j] if i not in spine), key=lambda i: (-rank[i], i), default=-1) for j in branch}
    for i in branch:
        readers = [j for j in after[i] if j not in spine]
        best = min(readers, key=lambda j: (-height[j], j), default=-1)
        if best >= 0 and choice[best] == i:
            follower[i], leader[best] = best, i
    for j in branch:
        if j not in leader:
            i = min(
                (i for i in before[j] if i not in spine and i not in follower), key=lambda i: (-rank[i], i), default=-1
            )
            if i >= 0:
                follower[i], leader[j] = j, i
    found = []
    for i in branch:
        if i not in leader:
            chain = [i]
            while chain[-1] in follower:
                chain.append(follower[chain[-1]])
            found.append(chain)
    return sorted(found, key=lambda c: c[0])


def _place(chains: list[list[int]], rank: list[int], lane: list[int], taken: Occupancy) -> None:
    """Give chains of one section their lanes: left to right by creation, around lane 0 if that is free."""
    first, last = min(rank[c[0]] for c in chains), max(rank[c[-1]] for c in chains)
    width = _most_at_once([(rank[c[0]], rank[c[-1]]) for c in chains])
    if taken.free(0, first, last):
        allowed = list(range(-((width - 1) // 2), width // 2 + 1))
    else:
        allowed = sorted([k // 2 + 1 if k % 2 == 0 else -(k // 2 + 1) for k in range(width)])
    for chain in chains:
        a, b = rank[chain[0]], rank[chain[-1]]
        found = next(k for k in chain_of(allowed, _outward(allowed)) if taken.free(k, a, b))
        taken.take(found, a, b)
        for i in chain:
            lane[i] = found


def _outward(allowed: list[int]) -> Iterable[int]:
    right, left = max(allowed), min(allowed)
    while True:
        right, left = right + 1, left - 1
        yield right
        yield left


def _most_at_once(spans: list[tuple[int, int]]) -> int:
    """The largest number of spans that share a row."""
    steps = sorted([(a, 1) for a, _ in spans] + [(b + 1, -1) for _, b in spans])
    most = now = 0
    for _, step in steps:
        now += step
        most = max(most, now)
    return most
