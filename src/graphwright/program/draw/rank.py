"""Ranks and the trunk of one group: which row each child stands in, and which children every path passes.

Children are numbered 0..n-1 by creation; edges join children. Pure and iterative.
"""

from __future__ import annotations

from collections.abc import Sequence


def return_arcs(n: int, edges: Sequence[tuple[int, int]]) -> set[tuple[int, int]]:
    """Edges to leave out so that no cycle is left: inside each cycle, those that lead back to an older child.

    A drawing of modules can have cycles where the program has none: two modules that read each other.
    """
    after: list[list[int]] = [[] for _ in range(n)]
    waiting = [0] * n
    for a, b in edges:
        after[a].append(b)
        waiting[b] += 1
    ready = [i for i in range(n) if not waiting[i]]
    for i in ready:  # grows while it is walked
        for j in after[i]:
            waiting[j] -= 1
            if not waiting[j]:
                ready.append(j)
    if len(ready) == n:
        return set()
    part = _components(n, after)
    return {(a, b) for a, b in edges if part[a] == part[b] and a >= b}


def _components(n: int, after: list[list[int]]) -> list[int]:
    """Number of the strongly connected component of each child (Tarjan 1972, with an explicit stack)."""
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
    """Row of each child: edges on the longest path to it; and the children in an order along the edges.

    A source stands right above its first reader, unless it is in `fed`: those read something from outside the group.
    """
    waiting = [len(b) for b in before]
    order = [i for i in range(n) if not waiting[i]]
    rank = [0] * n
    for i in order:  # grows while it is walked
        for j in after[i]:
            rank[j] = max(rank[j], rank[i] + 1)
            waiting[j] -= 1
            if not waiting[j]:
                order.append(j)
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
    """The main entry (-1: none) and the children that lie on every path from there to the main exit, in order.

    The main exit is the lowest child that something outside reads (else the lowest of all); the main entry is what
    starts the longest path to it. In a residual network the trunk are the junctions.

    Args:
        rank, order, after: rows, an order along the edges, and what reads each child.
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
    """Children that all paths from `start` pass, by one sweep: none that no edge jumps over."""
    reached = set(start)
    for i in order:
        if i in reached:
            reached.update(j for j in after[i] if j in useful)
    line = [i for i in order if i in reached]
    place = {i: k for k, i in enumerate(line)}
    furthest = max(place[i] for i in start)
    found = []
    for k, i in enumerate(line):
        if furthest <= k:
            found.append(i)
        furthest = max(furthest, max((place[j] for j in after[i] if j in place), default=0))
    return found
