"""Sort the entries of all adjacency lists, and restore earlier orders. The functions are methods of `Graph`."""

# pyright: reportPrivateUsage=false
# The files of this folder share private attributes of a graph.
from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from graphwright.graph.slots import Array, Column

from .buckets import Buckets
from .errors import NotUndoable

if TYPE_CHECKING:
    from graphwright.graph.graph import Graph


@dataclass(frozen=True, slots=True)
class SavedLists:
    """The order of all lists of a graph: (edges, blocks, free blocks) of the out-lists and of the in-lists."""

    outgoing: tuple[Array, Array, Array]
    incoming: tuple[Array, Array, Array]


def save_lists(self: Graph) -> SavedLists:
    """Return the order of all lists. O(edges)."""
    with self._lock:
        return SavedLists(_order(self._out, self._node_table.size), _order(self._in, self._node_table.size))


def sort_lists(self: Graph, outgoing: Array, incoming: Array) -> SavedLists:
    """Sort each out-list by `outgoing`, and each in-list by `incoming`: keys by edge slot; return the earlier order.

    Blocks of lists are numbered in the order of nodes, without gaps. O(E log E).
    """
    with self._lock:
        before = save_lists(self)
        live = self._edge_table.live_slots()
        for side, owner, keys in ((self._out, self._source, outgoing), (self._in, self._target, incoming)):
            slots = live[np.lexsort((keys[live], owner.data[live]))]
            count = int((-(-side.degrees[: self._node_table.size] // side.block)).sum())
            side.relist(slots, np.arange(count), np.empty(0, np.int64), self._node_table.size)
        self.version += 1
        return before


def restore_lists(self: Graph, lists: SavedLists) -> None:
    """Restore an order that `save_lists` or `sort_lists` returned; the edges must be those of that time.

    Raises: NotUndoable if edges were added or removed since; then nothing changes.
    """
    with self._lock:
        size = self._node_table.size
        live = self._edge_table.live_slots()
        sides = (self._out, self._source, lists.outgoing), (self._in, self._target, lists.incoming)
        for side, owner, (items, _, _) in sides:
            if not _fits(side, owner, items, live, size):
                raise NotUndoable("the edges are not those of the saved lists", fix="undo later edits first")
        for side, _, (items, blocks, free) in sides:
            side.relist(items, blocks, free, size)
        self.version += 1


def _fits(side: Buckets, owner: Column, items: Array, live: Array, size: int) -> bool:
    if len(items) != len(live) or not np.array_equal(np.sort(items), live):
        return False
    return np.array_equal(owner.data[items], np.repeat(np.arange(size), side.degrees[:size]))


def _order(side: Buckets, size: int) -> tuple[Array, Array, Array]:
    """Return the edges of all lists in node order, the numbers of their blocks, and the free blocks."""
    head, _, degree, _, items, after, _, free = side.tables()
    count = -(-degree[:size].astype(np.int64) // side.block)
    blocks = np.empty(int(count.sum()), np.int64)
    at, left = np.cumsum(count) - count, count.copy()
    now: Any = head[:size].astype(np.int64)
    nodes = np.flatnonzero(left)
    while len(nodes):  # once per block of the longest list
        blocks[at[nodes]] = now[nodes]
        now[nodes] = after[now[nodes]]
        at[nodes] += 1
        left[nodes] -= 1
        nodes = nodes[left[nodes] > 0]
    entries = items[: side.state[0] * side.block].reshape(-1, side.block)[blocks]
    return entries[entries >= 0].astype(np.int64), blocks, free[: side.state[1]].astype(np.int64)
