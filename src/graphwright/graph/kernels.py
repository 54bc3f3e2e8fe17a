"""Edits of bucket lists, each stated once: run as plain Python for single edits, and compiled for large batches.

`tables` are the buffers of a `Buckets`: head, tail, degree, position, items, next, prev, free. `state` is [blocks ever
used, top of the free list], `block` the number of edges per block. Room is reserved before an edit runs, so none
allocates or fails. `compiled` loads numba.
"""

from __future__ import annotations

from functools import cache
from types import FunctionType, SimpleNamespace
from typing import Any

Cells = Any
"""A memoryview, or an array in compiled code."""


@cache
def compiled() -> Any:
    """Return the functions of this module compiled; they call each other's compiled forms."""
    from graphwright.native import njit

    # _nrt=False: these loops own no array, and reference counts of ten of them cost 20 times the work (measured).
    wrap: Any = njit(cache=True, error_model="numpy", _nrt=False)
    space = dict(globals())
    for name, function in globals().items():
        if isinstance(function, FunctionType) and function.__module__ == __name__ and name != "compiled":
            space[name] = wrap(FunctionType(function.__code__, space, name))
    return SimpleNamespace(**space)


def append(tables: Cells, state: Cells, block: int, node: int, edge: int) -> None:
    """Append an edge to a node's list."""
    _, tail, degree, position_of, items, _, _, _ = tables
    count = degree[node]
    if count % block:
        position = tail[node] * block + count % block
        degree[node] = count + 1
    else:
        position = open_last(tables, state, block, node)
    items[position] = edge
    position_of[edge] = position


def open_last(tables: Cells, state: Cells, block: int, node: int) -> int:
    """Lengthen a node's list by one entry, opening a block if the last one is full; return its index in `items`."""
    head, tail, degree, _, _, after, before, free = tables
    count = degree[node]
    degree[node] = count + 1
    old = tail[node]
    if count % block:
        return old * block + count % block
    if state[1]:
        state[1] -= 1
        new = free[state[1]]
    else:
        new = state[0]
        state[0] += 1
    before[new] = old
    after[new] = -1
    if old == -1:
        head[node] = new
    else:
        after[old] = new
    tail[node] = new
    return new * block


def remove(tables: Cells, state: Cells, block: int, node: int, edge: int) -> int:
    """Remove an edge from a node's list by moving the last entry into its index; return that index."""
    head, tail, degree, position_of, items, after, before, free = tables
    position = position_of[edge]
    count = degree[node] - 1
    end = tail[node]
    last = end * block + count % block
    if position != last:
        moved = items[last]
        items[position] = moved
        position_of[moved] = position
    items[last] = -1
    degree[node] = count
    if count % block == 0:
        old = before[end]
        tail[node] = old
        if old == -1:
            head[node] = -1
        else:
            after[old] = -1
        free[state[1]] = end
        state[1] += 1
    return position


def restore(tables: Cells, state: Cells, block: int, node: int, edge: int, position: int) -> None:
    """Undo `remove`: put the edge back at `position` and its present entry back at the end of the list."""
    items, position_of = tables[4], tables[3]
    last = open_last(tables, state, block, node)
    if position != last:
        moved = items[position]
        items[last] = moved
        position_of[moved] = last
    items[position] = edge
    position_of[edge] = position


def fits(tables: Cells, state: Cells, block: int, node: int, position: int, owner: Cells) -> bool:
    """Return True if `restore` at `position` is a valid inverse now: the next index, or one in use."""
    count = tables[2][node]
    if count % block:
        at = tables[1][node]
    elif state[1]:
        at = tables[7][state[1] - 1]
    else:
        at = state[0]
    if position == at * block + count % block:
        return True
    if position < 0 or position >= state[0] * block:
        return False
    edge = tables[4][position]
    return edge != -1 and owner[edge] == node


def last_edge(tables: Cells, block: int, node: int) -> int:
    """Return the edge at the end of a non-empty list."""
    return tables[4][tables[1][node] * block + (tables[2][node] - 1) % block]


# -- many: `left` receives the old indices ----------------------------------------------------------------------------
def blocks_needed(tables: Cells, state: Cells, block: int, nodes: Cells) -> int:
    """Return the number of blocks that appending one edge at each of `nodes` opens."""
    degree = tables[2]
    needed = 0
    for node in nodes:  # counts up in the degrees themselves, then back down: needs no scratch buffer
        needed += degree[node] % block == 0
        degree[node] += 1
    for node in nodes:
        degree[node] -= 1
    return needed


def append_many(tables: Cells, state: Cells, block: int, nodes: Cells, edges: Cells) -> None:
    """Append each edge to its node's list."""
    for i in range(len(edges)):
        append(tables, state, block, nodes[i], edges[i])


def remove_many(tables: Cells, state: Cells, block: int, nodes: Cells, edges: Cells, left: Cells) -> None:
    """Remove each edge from its node's list."""
    for i in range(len(edges)):
        left[i] = remove(tables, state, block, nodes[i], edges[i])


def restore_many(
    tables: Cells, state: Cells, block: int, nodes: Cells, edges: Cells, positions: Cells, owner: Cells
) -> int:
    """Restore each edge at its index while it fits; return how many did."""
    for i in range(len(edges)):
        if not fits(tables, state, block, nodes[i], positions[i], owner):
            return i
        restore(tables, state, block, nodes[i], edges[i], positions[i])
    return len(edges)


def move_many(tables: Cells, state: Cells, block: int, old: Cells, new: Cells, edges: Cells, left: Cells) -> None:
    """Move each edge whose node changes to the end of the new node's list."""
    for i in range(len(edges)):
        if old[i] != new[i]:
            left[i] = remove(tables, state, block, old[i], edges[i])
            append(tables, state, block, new[i], edges[i])


def unmove_many(
    tables: Cells, state: Cells, block: int, nodes: Cells, edges: Cells, positions: Cells, left: Cells, owner: Cells
) -> int:
    """Put each edge back to a node and index (-1: it did not move) and set its owner, while it fits.

    Returns the number of rows done.
    """
    for i in range(len(edges)):
        if positions[i] == -1:
            continue
        now = owner[edges[i]]
        here = remove(tables, state, block, now, edges[i])
        left[i] = here
        if not fits(tables, state, block, nodes[i], positions[i], owner):
            restore(tables, state, block, now, edges[i], here)
            return i
        restore(tables, state, block, nodes[i], edges[i], positions[i])
        owner[edges[i]] = nodes[i]
    return len(edges)


def drain(
    out: Cells, out_state: Cells, block: int, into: Cells, into_state: Cells, nodes: Cells, ends: Cells, rows: Cells
) -> int:
    """Remove all edges of each node, out-list first, from the end; fill `rows` with edge, out index, in index.

    `ends` are the source and target slots by edge slot. Returns the number of edges removed.
    """
    done = 0
    for node in nodes:
        while out[2][node] or into[2][node]:
            edge = last_edge(out, block, node) if out[2][node] else last_edge(into, block, node)
            rows[0, done] = edge
            rows[1, done] = remove(out, out_state, block, ends[0][edge], edge)
            rows[2, done] = remove(into, into_state, block, ends[1][edge], edge)
            done += 1
    return done
