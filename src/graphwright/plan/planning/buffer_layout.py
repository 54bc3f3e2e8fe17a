"""What native loops make of a ledger: the numbers of one plan, and how it came about."""

from __future__ import annotations

from itertools import compress
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from graphwright.plan.planning.passes import ALIGN

if TYPE_CHECKING:
    from graphwright.graph import NodeId
    from graphwright.plan.planning.fusion import Fusion
    from graphwright.plan.planning.plan_builder import PlanBuilder
    from graphwright.plan.planning.records import NodeRecord


class Patched(NamedTuple):
    """How a plan came about: `kind` "full" or "patched", why, rows looked at, buffers placed."""

    kind: str
    why: str
    rows: int = 0
    buffers: int = 0

    def __str__(self) -> str:
        return f"{self.kind}: {self.why} ({self.rows} rows looked at)"


class BufferLayout:
    """What native loops made of a ledger: numbers of instructions and buffers, see `graphwright.plan.planning.passes`.

    Attributes:
        ledger: rows, slots and instructions; it only grows, so that what is said here stays true.
        slots, turn: number of slots, and turn of the ledger, when the plan was made.
        roots: nodes that outputs, watches and writes need.
        order: instructions as they run.
        home, first, last, offsets: of each buffer, whose memory it lies in, its times, its place in the arena (or -1).
        used: of each buffer, whether the plan touches it.
        total, bound: bytes of the arena, and at the fullest time.
        ends: of the arena's chunks, with room behind what is used; each buffer lies in one chunk.
        sources: slots of inputs, params, consts and states that the plan uses, in order.
        variables: by key, those behind params, consts and states.
        read: keys of the variables that the plan uses.
        folds: buffer computed once from frozen weights -> what makes it, of those that instructions or outputs read.
        written: keys of the states that the plan writes.
        fusion: the fusion groups.
    """

    __slots__ = (
        "_rows",
        "bound",
        "ends",
        "first",
        "folds",
        "fusion",
        "home",
        "last",
        "ledger",
        "offsets",
        "order",
        "read",
        "roots",
        "slots",
        "sources",
        "total",
        "turn",
        "used",
        "variables",
        "written",
    )

    def __init__(
        self,
        ledger: PlanBuilder,
        order: np.ndarray,
        home: np.ndarray,
        first: np.ndarray,
        last: np.ndarray,
        offsets: np.ndarray,
        used: np.ndarray,
        total: int,
        bound: int,
        ends: tuple[int, ...],
        roots: tuple[NodeId, ...],
        fusion: Fusion,
    ) -> None:
        self.ledger, self.order, self.home, self.first, self.last = ledger, order, home, first, last
        self.offsets, self.used, self.total, self.bound = offsets, used, total, bound
        self.ends = ends
        self._rows: dict[NodeId, NodeRecord] | None = None
        self.fusion = fusion
        self.turn, self.slots, self.roots = ledger.turn, len(ledger.slots), roots
        slots, buffers, weights = ledger.slots, ledger.buffers, ledger.program.weights
        known = ledger.sources()
        read = used[known.holders].tolist()
        self.sources = tuple(compress(known.slots, read))
        self.read = [key for key in compress(known.keys, read) if key is not None]
        self.variables = {key: weights[key] for key in known.keys if key is not None}
        folded = np.fromiter(ledger.folds, np.int64, len(ledger.folds))
        self.folds = {b: ledger.folds[b] for b in folded[used[folded]].tolist()}
        self.written = [buffers[slots[state].buffer][2] for state, _ in ledger.writes().values()]

    @property
    def rows(self) -> dict[NodeId, NodeRecord]:
        """Rows of the ledger when the plan was made; put together when first asked for."""
        if self._rows is None:
            self._rows = self.ledger.rows_at(self.turn)
        return self._rows

    def moved_since(self, before: BufferLayout) -> np.ndarray:
        """Marks the buffers of an earlier plan of the ledger that lie elsewhere now."""
        count = len(before.home)
        home, elsewhere = self.home[:count], np.zeros(len(self.home), np.bool_)
        elsewhere[:count] = before.offsets != self.offsets[:count]
        return (home != before.home) | elsewhere[home]

    def place(self, buffer: int) -> int:
        """The buffer in whose memory a buffer lies."""
        return int(self.home[buffer])


def aligned(nbytes: int) -> int:
    """Bytes a buffer takes: a multiple of 64; scalars 8, so that graphs of scalars stay small."""
    return 8 if nbytes <= 8 else -(-nbytes // ALIGN) * ALIGN


def place_naive(sizes: np.ndarray, last: np.ndarray) -> tuple[np.ndarray, int]:
    """Give every living buffer (last >= 0) a place of its own, in order; returns offsets and the bytes."""
    offsets, top = np.full(len(sizes), -1, np.int64), 0
    for b in np.flatnonzero(last >= 0):
        offsets[b] = -(-top // ALIGN) * ALIGN
        top = int(offsets[b] + sizes[b])
    return offsets, top
