"""Rows, lanes and tracks of one group: the row of each child, the trunk, and where wires bend.

Children are numbered 0..n-1 in order of creation; edges join children. All functions are pure and iterative.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from itertools import chain as chain_of
from itertools import pairwise
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from graphwright.program.draw.arrange import Wire, X


def topological(count: int, edges: Sequence[tuple[int, int]]) -> tuple[list[int], list[list[int]]]:
    """Sort 0..count-1 along edges; also return the successors of each. What is on a cycle is left out of the order."""
    after: list[list[int]] = [[] for _ in range(count)]
    waiting = [0] * count
    for a, b in edges:
        after[a].append(b)
        waiting[b] += 1
    order = [i for i in range(count) if not waiting[i]]
    for i in order:  # grows during the walk
        for j in after[i]:
            waiting[j] -= 1
            if not waiting[j]:
                order.append(j)
    return order, after


def return_arcs(n: int, edges: Sequence[tuple[int, int]]) -> set[tuple[int, int]]:
    """Find the edges that close cycles: within each strongly connected component, those to an older child.

    Modules can form a cycle where the program has none: two modules that read each other.
    """
    order, after = topological(n, edges)
    if len(order) == n:
        return set()
    part = _components(n, after)
    return {(a, b) for a, b in edges if part[a] == part[b] and a >= b}


def _components(n: int, after: list[list[int]]) -> list[int]:
    """Number the strongly connected component of each child (Tarjan 1972, with an explicit stack)."""
    number, low, part = [-1] * n, [0] * n, [-1] * n
    stack: list[int] = []
    clock = parts = 0
    for root in range(n):
        if number[root] >= 0:
            continue
        number[root] = low[root] = clock
        clock += 1
        stack.append(root)
        calls = [(root, iter(after[root]))]
        while calls:
            i, rest = calls[-1]
            for j in rest:
                if number[j] < 0:
                    number[j] = low[j] = clock
                    clock += 1
                    stack.append(j)
                    calls.append((j, iter(after[j])))
                    break
                if part[j] < 0:
                    low[i] = min(low[i], number[j])
            else:
                calls.pop()
                if calls:
                    low[calls[-1][0]] = min(low[calls[-1][0]], low[i])
                if low[i] == number[i]:
                    while True:
                        j = stack.pop()
                        part[j] = parts
                        if j == i:
                            break
                    parts += 1
    return part


def ranks(n: int, before: list[list[int]], after: list[list[int]], fed: set[int]) -> tuple[list[int], list[int]]:
    """Compute the row of each child, the length of the longest path to it, and a topological order.

    A source moves to the row above its first reader, unless it is in `fed`: those read something outside the group.
    """
    order, _ = topological(n, [(i, j) for i, readers in enumerate(after) for j in readers])
    rank = [0] * n
    for i in order:
        for j in after[i]:
            rank[j] = max(rank[j], rank[i] + 1)
    for i in range(n):
        if not before[i] and after[i] and i not in fed:
            rank[i] = min(rank[j] for j in after[i]) - 1
    return rank, order


def trunk(
    rank: list[int],
    order: list[int],
    after: list[list[int]],
    entries: list[list[int]],
    exits: list[int],
) -> tuple[int, list[int]]:
    """Find the main entry (-1 for none) and the trunk: the children on every path from there to the main exit.

    The main exit is the lowest child that is read outside (else the lowest of all); the main entry starts the longest
    path to it. In a residual network the trunk consists of the junctions.

    Args:
        rank, order, after: rows, a topological order, and the readers of each child.
        entries: per entry, the children that read it.
        exits: children that are read outside, in order.
    """
    if not order:
        return (0 if entries else -1), []
    last = max(exits or range(len(rank)), key=lambda i: (rank[i], -i))
    far = {last: 0}  # edges on the longest path to `last`
    for i in reversed(order):
        best = max((far[j] for j in after[i] if j in far), default=-1)
        if best >= 0:
            far[i] = best + 1
    entry_far = [max((far[j] for j in readers if j in far), default=-1) for readers in entries]
    entry = max(range(len(entries)), key=lambda e: (entry_far[e], -e), default=-1)
    if entry >= 0 and entry_far[entry] >= 0:
        start = [j for j in entries[entry] if j in far]
    else:
        read = {j for i in order for j in after[i]}
        start = [max((i for i in far if i not in read), key=lambda i: (far[i], -i))]
    return entry, _on_every_path(order, after, start, far)


def _on_every_path(order: list[int], after: list[list[int]], start: list[int], useful: dict[int, int]) -> list[int]:
    """Find the children on all paths from `start` in one sweep: those that no edge bypasses."""
    reached = set(start)
    for i in order:
        if i in reached:
            reached.update(j for j in after[i] if j in useful)
    line = [i for i in order if i in reached]
    position = {i: k for k, i in enumerate(line)}
    furthest = max(position[i] for i in start)
    found = []
    for k, i in enumerate(line):
        if furthest <= k:
            found.append(i)
        furthest = max(furthest, max((position[j] for j in after[i] if j in position), default=0))
    return found


class Occupancy:
    """The rows in use of each lane: one integer per lane, one bit per row. Row -1 is the top edge of the group."""

    def __init__(self) -> None:
        self._rows: dict[int, int] = {0: 0}

    def free(self, lane: int, first: int, last: int) -> bool:
        """Whether no row from `first` to `last` is in use."""
        return last < first or not self._rows.get(lane, 0) & _span(first, last)

    def take(self, lane: int, first: int, last: int) -> None:
        """Reserve rows `first` to `last`."""
        if last >= first:
            self._rows[lane] = self._rows.get(lane, 0) | _span(first, last)

    def used(self, first: int, last: int) -> list[int]:
        """The lanes with a row in use between `first` and `last`, ascending."""
        return [lane for lane in sorted(self._rows) if not self.free(lane, first, last)]


def _span(first: int, last: int) -> int:
    return ((1 << (last - first + 1)) - 1) << (first + 1)


def lanes(
    rank: list[int], before: list[list[int]], after: list[list[int]], spine: list[int], inlet: bool, outlet: bool
) -> tuple[list[int], Occupancy, set[tuple[int, int]]]:
    """Assign a lane to each child; also return the rows in use and the edges that run straight down a lane.

    Args:
        rank, before, after: rows and neighbours.
        spine: the trunk, in order.
        inlet, outlet: whether the main entry feeds the first trunk child, and the last one feeds the exit.
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
    """Cover all children outside the trunk by paths, in order of their first child.

    Two children are linked if each is the other's first choice: the reader with the longest path below it, and the
    source in the lowest row. The remaining children are linked where they can be.
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
    """Assign lanes to the chains of one section, from left to right, around lane 0 if that is free."""
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
    """Count the most spans that share a row."""
    steps = sorted([(a, 1) for a, _ in spans] + [(b + 1, -1) for _, b in spans])
    most = now = 0
    for _, step in steps:
        now += step
        most = max(most, now)
    return most


class _TrackSegment:
    """The part of one net in one gutter: its extent, its ends above and its ends below."""

    __slots__ = ("above", "below", "high", "low", "net")

    def __init__(self, net: int) -> None:
        self.net = net
        self.above: set[int] = set()
        self.below: set[int] = set()
        self.low = self.high = 0

    def close(self) -> None:
        """Compute the extent from the ends."""
        ends = self.above | self.below
        self.low, self.high = min(ends), max(ends)


def gutter_tracks(wires: Sequence[Wire], rows: int, position: Callable[[X], int]) -> list[int]:
    """Assign a track to every bend; wires of one net share their track.

    Two nets share a track if their segments do not touch. Where one net arrives at the position from which another
    leaves, it turns above the other, so that their vertical parts do not overlap. Cyclic constraints are cut.
    Returns: the number of tracks per gutter, from the one above row 0 on.
    """
    pieces: list[dict[int, _TrackSegment]] = [{} for _ in range(rows + 1)]
    for wire in wires:
        for k, (gutter, _) in enumerate(wire.bends):
            piece = pieces[gutter + 1].setdefault(wire.net, _TrackSegment(wire.net))
            piece.above.add(position(wire.xs[k]))
            piece.below.add(position(wire.xs[k + 1]))
    counts, track = [], {}
    for gutter, found in enumerate(pieces):
        counts.append(_assign(list(found.values()), gutter - 1, track))
    for wire in wires:
        wire.bends = [(gutter, track[gutter, wire.net]) for gutter, _ in wire.bends]
    return counts


def _assign(pieces: list[_TrackSegment], gutter: int, track: dict[tuple[int, int], int]) -> int:
    for piece in pieces:
        piece.close()
    leaving: dict[int, list[_TrackSegment]] = {}
    for piece in pieces:
        for x in piece.below:
            leaving.setdefault(x, []).append(piece)
    under: dict[int, list[int]] = {}
    waiting = {piece.net: 0 for piece in pieces}
    for piece in pieces:
        for x in sorted(piece.above):
            for other in leaving.get(x, ()):
                if other is not piece:
                    under.setdefault(piece.net, []).append(other.net)
                    waiting[other.net] += 1
    lines: list[list[tuple[int, int]]] = []
    left = sorted(pieces, key=lambda p: (p.low, p.high, p.net))
    floor = dict.fromkeys(waiting, 0)
    while left:
        ready = [p for p in left if waiting[p.net] <= 0] or left[:1]  # a cycle is cut at its leftmost segment
        for piece in ready:
            t = floor[piece.net]
            while t < len(lines) and any(a <= piece.high and piece.low <= b for a, b in lines[t]):
                t += 1
            while t >= len(lines):
                lines.append([])
            lines[t].append((piece.low, piece.high))
            track[gutter, piece.net] = t
            for other in under.get(piece.net, ()):
                waiting[other] -= 1
                floor[other] = max(floor[other], t + 1)
            waiting[piece.net] = -1
        gone = {p.net for p in ready}
        left = [p for p in left if p.net not in gone]
    return len(lines)
