"""Hashes of an attention pattern that follow its edits: the work of an edit does not depend on the number of edges.

An edge has one digest for its blocks, kind and mask, one for its gate and one for its pin. The hash of a pattern is
that of their sums and of the shape and base rule; a query block has the sum of its own. Handles, positions in lists,
scores and birth steps are left out, so patterns with equal edges have equal hashes, whatever their history.
"""

from __future__ import annotations

from hashlib import sha256
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from graphwright.patterns.changes import ADD, CUT, MASK, SCALARS
from graphwright.patterns.table import MASKED

if TYPE_CHECKING:
    from graphwright.patterns import Pattern, PatternChange

Words = npt.NDArray[np.uint64]
_LANES = (0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9, 0xD6E8FEB86659FD93)
_NAMES = tuple(SCALARS)
_COUNTED = {name: _NAMES.index(name) for name in ("gate", "pinned")}
"""Columns that are hashed besides the mask -> their numbers in a change."""


class PatternDigest:
    """Sums of digests of the edges of a pattern, brought up to date by `follow`.

    Attributes:
        rows: uint64 [query blocks], the sums of each query block over all planes. The sum of a block that gets more
            tokens by an extension stays, if the tokens that it had see the same keys as before.
    """

    def __init__(self, pattern: Pattern) -> None:
        self._pattern = pattern
        self._sums = np.zeros(len(_LANES), np.uint64)
        self.rows: Words = np.zeros(pattern.blocks[0], np.uint64)
        slots = pattern.edges().index
        pairs, columns = pattern.pairs(), pattern.graph.buffers().edge_columns
        blocks = pattern.held(slots)
        self._count(pairs, _mask_words(blocks.kind, blocks.bits), 1)
        for name, number in _COUNTED.items():
            self._count(pairs, _column_words(number, columns[name][slots]), 1)

    @property
    def text(self) -> str:
        """The hash of the pattern: sha256 of shape, base rule, segments and sums, in hexadecimal digits."""
        p = self._pattern
        base, frame = p.base, p.frame
        facts = (
            frame.queries,
            frame.keys,
            frame.block,
            frame.q_start,
            p.planes,
            base.causal,
            base.window,
            base.symmetric,
        )
        state = sha256(repr(facts).encode() + self._sums.tobytes())
        if base.segments is not None:
            state.update(base.segments.q.tobytes() + base.segments.k.tobytes())
        return state.hexdigest()

    def follow(self, change: PatternChange) -> bool:
        """Count a change that was applied to the pattern; return False if the sums have to be made again."""
        if change.tokens is not None:
            before, after = change.tokens
            if after < before:
                return False  # the nodes of the removed edges are gone
            p, known = self._pattern, self.rows
            self.rows = np.concatenate([known, np.zeros(p.blocks[0] - len(known), np.uint64)])
            self._count_rows(change)
            if p.causal and before[1] >= p.q_start + before[0]:  # all new keys come after the queries that were there
                self.rows[: len(known)] = known
        else:
            self._count_rows(change)
        return True

    def _count_rows(self, change: PatternChange) -> None:
        """Count the edges that a change added, removed or wrote."""
        rows = change.rows
        pairs, op = self._pairs(rows["source"], rows["target"]), rows["op"]
        for sign, kind in ((1, ADD), (-1, CUT)):
            at = op == kind
            if at.any():
                masks = change.bits[rows["new_mask"][at][rows["kind"][at] == MASKED]]
                self._count(pairs[at], _mask_words(rows["kind"][at], masks), sign)
                for name, number in _COUNTED.items():
                    self._count(pairs[at], _column_words(number, rows[name][at]), sign)
        written = (op != ADD) & (op != CUT)
        for sign, side in ((-1, "old"), (1, "new")) if written.any() else ():
            at = written & (rows["column"] == MASK)
            kinds = rows[side][at].astype(np.uint8)
            masks = change.bits[rows[f"{side}_mask"][at][kinds == MASKED]]
            self._count(pairs[at], _mask_words(kinds, masks), sign)
            for number in _COUNTED.values():
                at = written & (rows["column"] == number)
                self._count(pairs[at], _column_words(number, rows[side][at]), sign)

    def _pairs(self, source: Any, target: Any) -> npt.NDArray[np.int64]:
        """Return (plane, query block, key block) of pairs of nodes."""
        p = self._pattern
        index = p.graph.buffers().node_columns["number"]
        q, k = index[target].astype(np.int64), index[source].astype(np.int64)
        plane = np.zeros(len(q), np.int64) if p.planes == 1 else (p.query_nodes[:, q] == target).argmax(axis=0)
        return np.stack([plane, q, k], axis=1)

    def _count(self, pairs: npt.NDArray[Any], words: Words, sign: int) -> None:
        if not len(pairs):
            return
        plane, q, k = (pairs[:, i].astype(np.uint64) for i in range(3))
        with np.errstate(over="ignore"):
            seed = _mixed(_mixed(_mixed(plane) ^ q) ^ k) ^ words
            each = [_mixed(seed ^ np.uint64(lane)) for lane in _LANES]
            sums = np.array([np.add.reduce(lane, dtype=np.uint64) for lane in each])
            self._sums = self._sums + sums if sign > 0 else self._sums - sums
            (np.add if sign > 0 else np.subtract).at(self.rows, pairs[:, 1], each[0])


def _mixed(x: Words) -> Words:
    """Return the values of the finaliser of splitmix64, a bijection that spreads each bit over the word."""
    x = x + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def _mask_words(kind: npt.NDArray[Any], masks: Words) -> Words:
    """Return a word per edge for its kind and mask; `masks` are those of the edges of kind MASKED, in order."""
    words = _mixed(kind.astype(np.uint64))
    with np.errstate(over="ignore"):
        if len(masks):
            flat = masks.reshape(len(masks), -1)
            spread = _mixed(flat ^ _mixed(np.arange(flat.shape[1], dtype=np.uint64)))
            words[kind == MASKED] ^= np.add.reduce(spread, axis=1, dtype=np.uint64)
    return words


def _column_words(number: int, values: npt.NDArray[Any]) -> Words:
    """Return a word per edge for the value of a column."""
    with np.errstate(over="ignore"):
        return _mixed(values.astype(np.int64).astype(np.uint64) ^ np.uint64(0xA5A5_0000 + number << 32))
