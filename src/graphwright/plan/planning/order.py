"""The order in which the instructions of a ledger run, kept while some go and others come."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from graphwright.graph import NodeId

Key = tuple[int, ...]


class InstructionOrder:
    """Instructions in the order of their keys.

    Attributes:
        now: [instructions], int32, as of the last `settle`.
    """

    def __init__(self) -> None:
        self.now = np.zeros(0, np.int32)
        self._gone: set[int] = set()
        self._came: list[int] = []

    def goes(self, instr: int) -> None:
        """An instruction, or -1 for none, runs no more, or elsewhere."""
        self._gone.add(instr)

    def comes(self, instr: int) -> None:
        """An instruction runs, at the place that its key says at the next `settle`."""
        self._came.append(instr)

    def are(self, instrs: list[int]) -> None:
        """These instructions are all that run, in this order."""
        self.now = np.array(instrs, np.int32)

    def settle(self, key: Callable[[int], Key], instructions: int) -> None:
        """Take out what went and put in what came.

        Args:
            key: of an instruction, by which they run.
            instructions: how many there are, of all times.
        """
        gone, came, order = self._gone - {-1}, self._came, self.now
        if gone:
            out = np.zeros(instructions, np.bool_)
            out[list(gone)] = True
            order = order[~out.take(order)]
        if len(came) * 8 > len(order):
            order = np.array(sorted([*order.tolist(), *came], key=key), np.int32)
        elif came:
            came.sort(key=key)
            order = _with(order, came, [bisect_left(order, key(q), key=key) for q in came])
        self.now, self._gone, self._came = order, set(), []


def _with(order: np.ndarray, came: list[int], places: list[int]) -> np.ndarray:
    """Numbers put in at ascending places; `np.insert` takes longer for a few."""
    pieces: list[Any] = []
    for start, stop, q in zip([0, *places], places, came, strict=False):
        pieces += (order[start:stop], [q])
    return np.concatenate([*pieces, order[places[-1] :]], dtype=np.int32)


class CseTable:
    """Nodes by what they compute.

    Args:
        order: what nodes are ordered by.
        look: has a node looked at again, as another one may stand for it now.
    """

    def __init__(self, order: Callable[[NodeId], Any], look: Callable[[NodeId], None]) -> None:
        self._order, self._look = order, look
        self._members: dict[Any, dict[NodeId, None]] = {}
        self._first: dict[Any, NodeId] = {}

    def enter(self, node: NodeId, key: Any) -> NodeId:
        """The node that stands for what this one, looked at now, computes: itself or an earlier one."""
        members, known = self._members.setdefault(key, {}), self._first.get(key)
        members[node] = None
        there = members if known is None or known == node else (known, node)  # the first one left, or may have moved
        first = min(there, key=self._order)
        if first != known:
            self._first[key] = first
            self._look_at_others(node, key)
        return first

    def leave(self, node: NodeId, key: Any) -> None:
        """A node is gone, or computes something else."""
        members = self._members[key]
        del members[node]
        if self._first.get(key) == node:
            del self._first[key]
            self._look_at_others(node, key)
        if not members:
            del self._members[key]

    def changed(self, node: NodeId, key: Any) -> None:
        """Other slots than before hold a node's results, or it moved."""
        if self._first.get(key) == node:
            self._look_at_others(node, key)

    def _look_at_others(self, node: NodeId, key: Any) -> None:
        for other in self._members[key]:
            if other != node:
                self._look(other)
