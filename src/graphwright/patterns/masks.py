"""Exact masks of edges: from a rule to kinds and bitmasks, and back to tokens.

A mask of a block is a bool array [block, block], or packed, uint64 [block, words]: bit j % 64 of word j // 64 of row i.
Pairs with a token that does not exist are never set.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from .rules import ALL, NONE, SOME, Frame, Pairs, Position, Rule
from .table import FULL, MASKED, RULE

Array = npt.NDArray[Any]
CHUNK = 1 << 22  # pairs of tokens whose mask is evaluated at a time


class Blocks(NamedTuple):
    """Edges to be: block numbers, kinds, and packed masks of those of kind MASKED, in their order."""

    q: Array  # int64 [n]
    k: Array
    kind: Array  # uint8 [n]
    bits: Array  # uint64 [m, block, words]

    def take(self, rows: Array) -> Blocks:
        """Return the blocks at `rows`, a bool array or indices."""
        at = np.cumsum(self.kind == MASKED) - 1
        kind = self.kind[rows]
        return Blocks(self.q[rows], self.k[rows], kind, self.bits[at[rows][kind == MASKED]])


def words(block: int) -> int:
    """Return the number of 64-bit words of a row of a packed mask."""
    return -(-block // 64)


def pack(masks: Array) -> Array:
    """Return bool masks [n, block, block] as uint64 [n, block, words]."""
    n, block, _ = masks.shape
    wide = np.zeros((n, block, words(block) * 8), np.uint8)
    packed = np.packbits(masks, axis=-1, bitorder="little")
    wide[:, :, : packed.shape[-1]] = packed
    return wide.view("<u8").astype(np.uint64, copy=False)


def unpack(bits: Array) -> Array:
    """Return packed masks [n, block, words] as bool [n, block, block]."""
    raw = np.ascontiguousarray(bits).astype("<u8", copy=False).view(np.uint8)
    return np.unpackbits(raw, axis=-1, bitorder="little")[:, :, : bits.shape[1]].astype(bool)


def chunks(count: int, block: int) -> Iterator[slice]:
    """Yield slices of `count` rows, each of at most CHUNK pairs of tokens."""
    step = max(CHUNK // block**2, 1)
    for start in range(0, count, step):
        yield slice(start, start + step)


def empty(block: int) -> Blocks:
    """Return no blocks."""
    none = np.empty(0, np.int64)
    return Blocks(none, none, none.astype(np.uint8), np.empty((0, block, words(block)), np.uint64))


def candidates(rule: Rule, frame: Frame, rows: Array) -> Pairs:
    """Return the candidates of a rule for the given rows: distinct, by row, then by key block."""
    pairs = rule.candidates(frame, rows)
    width = frame.columns
    keys = pairs.q * width + pairs.k
    if len(keys) > 1 and not (keys[1:] > keys[:-1]).all():
        keys = np.unique(keys)
    return Pairs(keys // max(width, 1), keys % max(width, 1))


def of_rule(rule: Rule, base: Position, frame: Frame, pairs: Pairs) -> Blocks:
    """Return the blocks among `pairs` in which the rule allows a pair of tokens, with their kinds."""
    q, k = pairs
    cover = rule.cover(frame, q, k)
    if rule == base and base.segments is None:  # its cover is exact, so that no mask needs to be evaluated
        keep = cover != NONE
        kind = np.where(cover == ALL, FULL, RULE).astype(np.uint8)[keep]
        return Blocks(q[keep], k[keep], kind, empty(frame.block).bits)
    kind = np.full(len(q), FULL, np.uint8)
    keep = cover != NONE
    open_ = np.flatnonzero(cover == SOME)
    bits: list[Array] = []
    for part in chunks(len(open_), frame.block):
        at = open_[part]
        i, j, exist = frame.positions(q[at], k[at])
        seen = rule.allowed(frame, i, j) & exist
        kinds, packed = classify(seen, base, frame, q[at], k[at])
        kind[at] = kinds
        keep[at] = seen.any((1, 2))
        bits.append(packed[keep[at][kinds == MASKED]])
    packed = np.concatenate(bits) if bits else empty(frame.block).bits
    return Blocks(q[keep], k[keep], kind[keep], packed)


def classify(seen: Array, base: Position, frame: Frame, q: Array, k: Array) -> tuple[Array, Array]:
    """Return the kinds of masks [n, block, block], and the packed masks of those of kind MASKED.

    FULL if all pairs are set, RULE if exactly those of the base rule are, else MASKED.
    """
    i, j, exist = frame.positions(q, k)
    full = (seen == exist).all((1, 2))
    kind = np.where(full, FULL, MASKED).astype(np.uint8)
    rest = np.flatnonzero(~full)
    ruled = base.allowed(frame, i[rest], j[rest]) & exist[rest]
    kind[rest[(seen[rest] == ruled).all((1, 2))]] = RULE
    return kind, pack(seen[kind == MASKED])


def tokens(blocks: Blocks, base: Position, frame: Frame) -> Array:
    """Return the masks of blocks, bool [n, block, block]."""
    i, j, exist = frame.positions(blocks.q, blocks.k)
    seen = exist.copy()
    ruled = blocks.kind == RULE
    seen[ruled] &= base.allowed(frame, i[ruled], j[ruled])
    masked = blocks.kind == MASKED
    seen[masked] &= unpack(blocks.bits)
    return seen
