"""The numbers of one plan: instruction order, lifetimes and arena offsets, as native loops compute them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import compress
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from graphwright.autograd import Variable
from graphwright.graph import NodeId
from graphwright.plan.planning.passes import ALIGN
from graphwright.plan.table import Instr

if TYPE_CHECKING:
    from graphwright.plan.planning.fusion import Fusion
    from graphwright.plan.planning.plan_builder import PlanBuilder
    from graphwright.plan.planning.plan_tables import NodeRecord, PlanTables


class Patched(NamedTuple):
    """How a plan was made: `kind` "full" or "patched", the reason, nodes visited, buffers placed again."""

    kind: str
    why: str
    nodes: int = 0
    buffers: int = 0

    def __str__(self) -> str:
        return f"{self.kind}: {self.why} ({self.nodes} nodes visited)"


@dataclass(eq=False)
class BufferLayout:
    """Instruction order, lifetimes and offsets of one plan.

    Attributes:
        builder: the builder, whose tables only grow, so that the numbers stay valid.
        order: instructions as they run.
        home, first, last, offsets: per buffer, the buffer whose memory it uses, the first and last instruction that
            needs it, and its offset in the arena (or -1).
        used: mask of the buffers that the plan touches.
        total, bound: bytes of the arena, and bytes live at the fullest instruction.
        ends: ends of the arena's chunks; each buffer is in one chunk.
        roots: nodes that outputs, watches and writes need.
        fusion: the fusion groups.
        turn, slot_count: turn of the builder, and its number of slots, when the plan was made.
        sources: slots of the inputs, params, consts and states that the plan uses, in order.
        read, written: keys of the variables that the plan reads, and of the states that it writes.
        variables: the variables of all params, consts and states, by key.
        folds: folded buffer that the plan uses -> the instruction that computes it.
    """

    builder: PlanBuilder
    order: np.ndarray
    home: np.ndarray
    first: np.ndarray
    last: np.ndarray
    offsets: np.ndarray
    used: np.ndarray
    total: int
    bound: int
    ends: tuple[int, ...]
    roots: tuple[NodeId, ...]
    fusion: Fusion

    def __post_init__(self) -> None:
        builder, tables, used = self.builder, self.builder.tables, self.used
        self.tables: PlanTables = tables
        self.turn, self.slot_count = builder.turn, len(tables.slots)
        known, weights = builder.sources(), builder.program.weights
        read = used[known.holders].tolist()
        self.sources = tuple(compress(known.slots, read))
        self.read = [key for key in compress(known.keys, read) if key is not None]
        self.variables: dict[str, Variable] = {key: weights[key] for key in known.keys if key is not None}
        folded = np.fromiter(tables.folds, np.int64, len(tables.folds))
        self.folds: dict[int, Instr] = {b: tables.folds[b] for b in folded[used[folded]].tolist()}
        self.written = [tables.buffers[tables.slots[state].buffer][2] for state, _ in builder.writes().values()]

    @cached_property
    def records(self) -> dict[NodeId, NodeRecord]:
        """The node records as they were when the plan was made."""
        return self.builder.records_at(self.turn)

    def moved_since(self, before: BufferLayout) -> np.ndarray:
        """Mask of the buffers of an earlier plan of the builder that have another address now."""
        count = len(before.home)
        home, moved = self.home[:count], np.zeros(len(self.home), np.bool_)
        moved[:count] = before.offsets != self.offsets[:count]
        return (home != before.home) | moved[home]

    def home_of(self, buffer: int) -> int:
        """The buffer whose memory a buffer uses."""
        return int(self.home[buffer])


def aligned(nbytes: int) -> int:
    """Bytes that a buffer takes: a multiple of 64; scalars take 8, which keeps graphs of scalars small."""
    return 8 if nbytes <= 8 else -(-nbytes // ALIGN) * ALIGN


def place_naive(sizes: np.ndarray, last: np.ndarray) -> tuple[np.ndarray, int]:
    """Give every used buffer (last >= 0) its own memory, in order; returns offsets and the total bytes."""
    offsets, top = np.full(len(sizes), -1, np.int64), 0
    for b in np.flatnonzero(last >= 0):
        offsets[b] = -(-top // ALIGN) * ALIGN
        top = int(offsets[b] + sizes[b])
    return offsets, top
