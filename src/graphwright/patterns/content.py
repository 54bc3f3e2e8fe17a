"""What a pattern holds: its edges as arrays and tokens, hash, summary, differences, copies. Methods of `Pattern`."""

# pyright: reportPrivateUsage=false
# The files of this folder share private attributes of a pattern.
from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from graphwright.graph import EdgeId

from ..report import Report
from . import masks
from .errors import PatternShape
from .masks import Blocks
from .table import FULL, MASKED, RULE

if TYPE_CHECKING:
    from .pattern import Pattern

Array = npt.NDArray[Any]


def pairs(self: Pattern) -> npt.NDArray[np.int32]:
    """Return (plane, query block, key block) of each edge, int32 [edges, 3], in the order of `edges()`."""
    slots = self.edges().index
    found = np.empty((len(slots), 3), np.int32)
    target, source = self._target[slots], self._source[slots]
    found[:, 0] = _planes(self)[target]
    found[:, 1], found[:, 2] = self._numbers[target], self._numbers[source]
    return found


def ends(self: Pattern, edge: EdgeId) -> tuple[int, int, int]:
    """Return (plane, query block, key block) of an edge. Raises: StaleHandle."""
    key, query = self.graph.endpoints(edge)
    q, k = int(self._numbers[query.index]), int(self._numbers[key.index])
    return int(np.argmax(self.query_nodes[:, q] == query.index)), q, k


def held(self: Pattern, slots: Array) -> Blocks:
    """Return block numbers, kinds and masks of edges, given by their slots."""
    kind, rows = self._columns["kind"][slots], self._columns["bits"][slots]
    q, k = self._numbers[self._target[slots]], self._numbers[self._source[slots]]
    return Blocks(q.astype(np.int64), k.astype(np.int64), kind, self._pool.data[rows[kind == MASKED]])


def to_dense(self: Pattern) -> npt.NDArray[np.bool_]:
    """Return the mask of all tokens, bool [planes, queries, keys]."""
    frame, block = self.frame, self.block
    padded = np.zeros((self.planes, frame.rows, block, frame.columns, block), bool)
    slots = self.edges().index
    planes = _planes(self)[self._target[slots]]
    blocks = held(self, slots)
    for part in masks.chunks(len(slots), block):
        rows = np.arange(len(slots))[part]
        piece = blocks.take(rows)
        padded[planes[rows], piece.q, :, piece.k] = masks.tokens(piece, self.base, frame)
    flat = padded.reshape(self.planes, frame.rows * block, frame.columns * block)
    return flat[:, : frame.queries, : frame.keys].copy()


def empty_rows(self: Pattern) -> npt.NDArray[np.int64]:
    """Return (plane, query block) of the query blocks without an edge, int64 [n, 2]."""
    return np.argwhere(self.graph.buffers().incoming.degree[self.query_nodes[:, : self.frame.rows]] == 0)


def content_hash(self: Pattern, positions: bool = False) -> str:
    """Return the sha256 of shape, base rule and edges: their blocks, masks, gates and pins, not their scores.

    Patterns with equal edges have equal hashes, whatever their history. With `positions`, handles and the order of all
    lists count too.
    """
    with self.reading():
        digest = hashlib.sha256()
        base = self.base
        facts = (*self.tokens, self.block, self.q_start, self.planes, base.causal, base.window, base.symmetric)
        digest.update(repr(facts).encode())
        if base.segments is not None:
            digest.update(base.segments.q.tobytes() + base.segments.k.tobytes())
        slots, where = self.edges().index, pairs(self)
        if not positions:
            order = np.lexsort((where[:, 2], where[:, 1], where[:, 0]))
            slots, where = slots[order], where[order]
        digest.update(where.tobytes())
        for name in ("kind", "gate", "pinned"):
            digest.update(self._columns[name][slots].tobytes())
        digest.update(held(self, slots).bits.tobytes())
        if positions:
            for array in (self._edge_ids, self._out_at, self._in_at):
                digest.update(array[slots].tobytes())
        return digest.hexdigest()


@dataclass(frozen=True, slots=True)
class PatternSummary(Report):
    """Sizes of a pattern.

    Attributes:
        edges: number of edges; `full`, `rule` and `masked` count those of each kind.
        block_density: edges per pair of blocks of all planes.
        token_density: allowed pairs of tokens per pair of all planes.
        pairs: allowed pairs of tokens.
        empty_rows: query blocks without an edge.
        bytes: memory, unused capacity included.
    """

    tokens: tuple[int, int]
    block: int
    planes: int
    edges: int
    full: int
    rule: int
    masked: int
    block_density: float
    token_density: float
    pairs: int
    empty_rows: int
    bytes: int


def summary(self: Pattern) -> PatternSummary:
    """Return edges by kind, density in blocks and tokens, empty rows, and bytes."""
    slots = self.edges().index
    kinds = np.bincount(self._columns["kind"][slots], minlength=3).tolist()
    blocks, total = held(self, slots), 0
    for part in masks.chunks(len(slots), self.block):
        total += int(np.count_nonzero(masks.tokens(blocks.take(np.arange(len(slots))[part]), self.base, self.frame)))
    (rows, columns), (queries, keys) = self.blocks, self.tokens
    size = self.graph.memory()["total"] + self._index.nbytes + self._pool.nbytes
    size += self.query_nodes.nbytes + self.key_nodes.nbytes + self.table.nbytes
    return PatternSummary(
        self.tokens, self.block, self.planes, len(slots), kinds[FULL], kinds[RULE], kinds[MASKED],
        len(slots) / (self.planes * rows * columns), total / (self.planes * queries * keys), total,
        len(empty_rows(self)), int(size),
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class PatternDiff(Report):
    """Edges in which a pattern differs from another: (plane, query block, key block), int32 [n, 3], sorted."""

    added: npt.NDArray[np.int32]
    removed: npt.NDArray[np.int32]
    changed: npt.NDArray[np.int32]
    """Edges of both patterns with different masks, gates or pins."""

    def __bool__(self) -> bool:
        return bool(len(self.added) or len(self.removed) or len(self.changed))

    def _text(self) -> str:
        return f"{len(self.added)} edges added, {len(self.removed)} removed, {len(self.changed)} changed"


def diff(self: Pattern, other: Pattern) -> PatternDiff:
    """Return the edges that `other` has and this pattern lacks (added), lacks (removed), or has changed.

    Raises: PatternShape if the patterns have different block sizes or planes.
    """
    if (self.block, self.planes) != (other.block, other.planes):
        expected, got = (f"block {p.block}, {p.planes} planes" for p in (self, other))
        raise PatternShape("patterns of different shapes have no difference", expected=expected, got=got, fix=None)
    ours, theirs = _rows(self), _rows(other)
    added = sorted(theirs.keys() - ours.keys())
    removed = sorted(ours.keys() - theirs.keys())
    changed = sorted(pair for pair in ours.keys() & theirs.keys() if ours[pair] != theirs[pair])
    return PatternDiff(*(np.array(each, np.int32).reshape(-1, 3) for each in (added, removed, changed)))


def _rows(self: Pattern) -> dict[tuple[int, ...], tuple[Any, ...]]:
    """Return the pair of each edge -> (kind, gate, pinned, packed mask)."""
    slots = self.edges().index
    columns = [self._columns[name][slots].tolist() for name in ("kind", "gate", "pinned", "bits")]
    pool = self._pool.data
    values = ((*rest, pool[row].tobytes() if row >= 0 else b"") for *rest, row in zip(*columns, strict=True))
    return dict(zip(map(tuple, pairs(self).tolist()), values, strict=True))


def copy(self: Pattern) -> Pattern:
    """Return an independent pattern with equal edges, handles and lists; its history is empty and it has no owner."""
    with self.reading():
        twin = type(self)(
            self.tokens, self.block, self.planes, self.causal, self.q_start, self.base.window, self.base.symmetric,
            self.base.segments, name=self.name, timeout=self.timeout, debug_counters=self.lookups is not None,
        )  # fmt: skip
        twin.cooling = dict(self.cooling)
        twin.rule, twin.version, twin.steps, twin.gates = self.rule, self.version, self.steps, self.gates
        twin.query_nodes, twin.key_nodes = self.query_nodes.copy(), self.key_nodes.copy()
        twin._pool = self._pool.copy()
        twin._bind(self.graph.copy())
        slots = twin.edges().index
        twin._index.insert_many(slots, twin._source, twin._target)
        return twin


def _planes(self: Pattern) -> Array:
    """Return the plane of each node slot."""
    planes = np.zeros(len(self._numbers), np.int32)
    for plane in range(self.planes):
        planes[self.query_nodes[plane, : self.frame.rows]] = plane
        planes[self.key_nodes[plane, : self.frame.columns]] = plane
    return planes
