"""Compiled bulk edits of buckets: each kernel is the loop of the single edit in `buckets.py`, cell for cell.

`tables` are the buffers of `Buckets.tables()`, `state` is [blocks ever used, top of the free list]. Room is reserved
before a kernel runs, so no kernel allocates or fails. Importing this module loads numba.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np

from graphwright.native import njit

Array = Any
F = TypeVar("F", bound=Callable[..., Any])
# _nrt=False: these loops own no array, and reference counts of ten of them cost 20 times the work (measured).
_njit: Any = njit(cache=True, error_model="numpy", _nrt=False)


def _compiled(loop: F) -> F:
    return _njit(loop)


@_compiled
def _open_last(tables: Array, state: Array, block: int, node: int) -> Any:
    _, tail, degree, _, _, after, before, free = tables
    count = degree[node]
    offset = count % block
    degree[node] = count + 1
    if offset:
        return tail[node] * block + offset
    if state[1]:
        state[1] -= 1
        new = np.int64(free[state[1]])
    else:
        new = state[0]
        state[0] += 1
    old = tail[node]
    before[new] = old
    after[new] = -1
    if old == -1:
        tables[0][node] = new
    else:
        after[old] = new
    tail[node] = new
    return new * block


@_compiled
def _append(tables: Array, state: Array, block: int, node: int, edge: int) -> None:
    position = _open_last(tables, state, block, node)
    tables[4][position] = edge
    tables[3][edge] = position


@_compiled
def _remove(tables: Array, state: Array, block: int, node: int, edge: int) -> Any:
    head, tail, degree, place_of, items, after, before, free = tables
    position = np.int64(place_of[edge])
    count = degree[node] - 1
    end = np.int64(tail[node])
    last = end * block + count % block
    if position != last:
        moved = items[last]
        items[position] = moved
        place_of[moved] = position
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


@_compiled
def _restore(tables: Array, state: Array, block: int, node: int, edge: int, position: int) -> None:
    items, place_of = tables[4], tables[3]
    last = _open_last(tables, state, block, node)
    if position != last:
        moved = items[position]
        items[last] = moved
        place_of[moved] = last
    items[position] = edge
    place_of[edge] = position


@_compiled
def _fits(tables: Array, state: Array, block: int, node: int, position: int, owner: Array) -> bool:
    count = tables[2][node]
    if count % block:
        at = np.int64(tables[1][node])
    elif state[1]:
        at = np.int64(tables[7][state[1] - 1])
    else:
        at = state[0]
    if position == at * block + count % block:
        return True
    if position < 0 or position >= state[0] * block:
        return False
    edge = tables[4][position]
    return edge != -1 and owner[edge] == node


@_compiled
def _blocks_needed(degree: Array, nodes: Array, block: int) -> int:
    needed = 0
    for node in nodes:  # counts up in the degrees themselves, then back down: needs no scratch buffer
        needed += degree[node] % block == 0
        degree[node] += 1
    for node in nodes:
        degree[node] -= 1
    return needed


def blocks_needed(degree: Array, nodes: Array, block: int) -> int:
    """Return the number of blocks that appending one edge at each of `nodes` opens."""
    return int(_blocks_needed(degree, nodes, block))


@_compiled
def append_many(tables: Array, state: Array, block: int, nodes: Array, edges: Array) -> None:
    """Append each edge to its node's list."""
    for i in range(len(edges)):
        _append(tables, state, block, nodes[i], edges[i])


@_compiled
def remove_many(tables: Array, state: Array, block: int, nodes: Array, edges: Array, left: Array) -> None:
    """Remove each edge from its node's list; `left` receives the old indices."""
    for i in range(len(edges)):
        left[i] = _remove(tables, state, block, nodes[i], edges[i])


@_compiled
def restore_many(
    tables: Array, state: Array, block: int, nodes: Array, edges: Array, positions: Array, owner: Array
) -> int:
    """Restore each edge at its index while it fits; return how many did."""
    for i in range(len(edges)):
        if not _fits(tables, state, block, nodes[i], positions[i], owner):
            return i
        _restore(tables, state, block, nodes[i], edges[i], positions[i])
    return len(edges)


@_compiled
def move_many(tables: Array, state: Array, block: int, old: Array, new: Array, edges: Array, left: Array) -> None:
    """Move each edge whose node changes to the end of the new node's list; `left` receives the old indices or -1."""
    for i in range(len(edges)):
        if old[i] != new[i]:
            left[i] = _remove(tables, state, block, old[i], edges[i])
            _append(tables, state, block, new[i], edges[i])


@_compiled
def unmove_many(
    tables: Array, state: Array, block: int, nodes: Array, edges: Array, positions: Array, left: Array, owner: Array
) -> int:
    """Put each edge back to a node and index and fix its owner; `left` receives the indices. Return the count."""
    for i in range(len(edges)):
        if positions[i] == -1:
            continue
        now = owner[edges[i]]
        left[i] = _remove(tables, state, block, now, edges[i])
        if not _fits(tables, state, block, nodes[i], positions[i], owner):
            _restore(tables, state, block, now, edges[i], left[i])
            return i
        _restore(tables, state, block, nodes[i], edges[i], positions[i])
        owner[edges[i]] = nodes[i]
    return len(edges)


@_compiled
def drain(
    out: Array, out_state: Array, into: Array, into_state: Array, block: int, nodes: Array, ends: Array, rows: Array
) -> int:
    """Remove all edges of each node, out-list first, from the end; fill `rows` with edge, out index, in index.

    `ends` are the source and target slots by edge slot. Returns the number of edges removed.
    """
    done = 0
    for node in nodes:
        while out[2][node]:
            edge = out[4][out[1][node] * block + (out[2][node] - 1) % block]
            rows[0, done] = edge
            rows[1, done] = _remove(out, out_state, block, node, edge)
            rows[2, done] = _remove(into, into_state, block, ends[1][edge], edge)
            done += 1
        while into[2][node]:
            edge = into[4][into[1][node] * block + (into[2][node] - 1) % block]
            rows[0, done] = edge
            rows[1, done] = _remove(out, out_state, block, ends[0][edge], edge)
            rows[2, done] = _remove(into, into_state, block, node, edge)
            done += 1
    return done
