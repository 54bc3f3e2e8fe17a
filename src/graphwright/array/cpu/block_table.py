"""What CPU kernels without compiled code read of a pattern: the edges of a row of blocks, and the pairs they allow."""

from __future__ import annotations

from collections.abc import Iterator
from ctypes import POINTER, c_int32, c_uint8, c_uint64, cast
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from graphwright.patterns import table as words


def _at(address: int, kind: Any) -> Any:
    return cast(address, POINTER(kind))


@dataclass(frozen=True, slots=True)
class BlockRow:
    """The edges of one query block, in the order of its list.

    Attributes:
        plane: of the query block.
        queries: its tokens among the operand's queries.
        keys: int64 [K], the tokens of all its key blocks.
        mask: bool [R, K], the allowed pairs; None if all are.
        edges: (edge slot, first index in `keys`, end) of each edge.
        gates: slot of each edge's gate, -1 for none.
        slots: int64 [R, K], the slot of each pair's gate, if the row is that of all queries of the plane; else None.
    """

    plane: int
    queries: slice
    keys: torch.Tensor
    mask: torch.Tensor | None
    edges: list[tuple[int, int, int]]
    gates: list[int]
    slots: torch.Tensor | None = None


class BlockTable:
    """The words of a pattern's table, read once per run.

    Args:
        table: int64 [WORDS].
        queries, keys: lengths of the operands.
        q_start: key position of the first query; None if it is the pattern's first query.
    Raises: IndexError if it is not a table, or the operands are longer than the pattern.
    """

    def __init__(self, table: torch.Tensor, queries: int, keys: int, q_start: int | None) -> None:
        w: list[int] = table.tolist()
        if len(w) != words.WORDS or w[words.MAGIC] != words.SIGNATURE:
            raise IndexError(f"not the table of a pattern: expected {words.WORDS} words of one, got {w[:4]}")
        self.words, self.block, self.planes, self.gates = w, w[words.BLOCK], w[words.PLANES], w[words.GATES]
        self.slots = w[words.EDGE_SLOTS]
        self.shift = 0 if q_start is None else q_start - w[words.QSTART]
        if self.shift < 0 or self.shift + queries > w[words.TQ] or (q_start is None and keys > w[words.TK]):
            expected = f"queries within 0 to {w[words.TQ]} and at most {w[words.TK]} keys"
            got = f"queries {self.shift} to {self.shift + queries}, {keys} keys"
            raise IndexError(f"the operands are longer than the pattern: expected {expected}, got {got}")
        self.queries, self.keys = queries, min(keys, w[words.TK])

    def rows(self, plane: int) -> Iterator[BlockRow]:
        """Yield the rows of blocks of a plane; rows without edges too."""
        for i in range(self.shift // self.block, -(-(self.shift + self.queries) // self.block)):
            yield self._row(plane, i)

    def planes_whole(self) -> Iterator[BlockRow]:
        """Yield for each plane one row of all queries and keys."""
        for plane in range(self.planes):
            mask = torch.zeros(self.queries, self.keys, dtype=torch.bool)
            slots = torch.full((self.queries, self.keys), -1)
            for row in self.rows(plane):
                mask[row.queries, row.keys] = True if row.mask is None else row.mask
                each = torch.tensor([b - a for _, a, b in row.edges], dtype=torch.int64)
                slots[row.queries, row.keys] = torch.tensor(row.gates, dtype=torch.int64).repeat_interleave(each)
            yield BlockRow(plane, slice(0, self.queries), torch.arange(self.keys), mask, [], [], slots)

    @property
    def density(self) -> float:
        """The part of all pairs of blocks that the pattern's rule may allow, as far as they are connected."""
        w = self.words
        pairs = self.planes * w[words.NQ] * w[words.NK]
        return w[words.EDGES] / (pairs / 2 if w[words.CAUSAL] else pairs)

    def edges(self, plane: int, i: int) -> Iterator[tuple[int, int]]:
        """Yield (edge slot, key block) for the edges of query block i."""
        w = self.words
        node = _at(w[words.ROWS], c_int32)[plane * w[words.ROW_STRIDE] + i]
        left, bucket = _at(w[words.IN_DEGREE], c_int32)[node], w[words.BUCKET]
        items, follow = _at(w[words.IN_ITEMS], c_int32), _at(w[words.IN_NEXT], c_int32)
        source, index = _at(w[words.SRC], c_int32), _at(w[words.INDEX], c_int32)
        b = _at(w[words.IN_HEAD], c_int32)[node] if left else 0
        while left > 0:
            for edge in items[b * bucket : b * bucket + min(left, bucket)]:
                yield edge, index[source[edge]]
            left -= bucket
            b = follow[b] if left > 0 else 0

    def span(self, i: int) -> slice:
        """Return the tokens of query block i among the operand's queries."""
        at = i * self.block - self.shift
        return slice(max(at, 0), min(at + self.block, self.queries))

    def key_span(self, j: int) -> tuple[int, int]:
        """Return the tokens of key block j that exist among the operand's keys."""
        return min(j * self.block, self.keys), min((j + 1) * self.block, self.keys)

    def allowed(self, queries: slice, begin: int, end: int) -> torch.Tensor:
        """Return the pairs that the pattern's rule allows, bool [R, K]."""
        w, token = self.words, torch.arange(queries.start, queries.stop).unsqueeze(1) + self.shift
        key = torch.arange(begin, end)
        away = token + w[words.QSTART] - key
        mask = torch.ones_like(away, dtype=torch.bool)
        if w[words.CAUSAL]:
            mask &= away >= 0
        if w[words.WINDOW]:
            mask &= (away.abs() if w[words.SYMMETRIC] else away) < w[words.WINDOW]
        if w[words.SEG_Q]:
            tokens = queries.start + self.shift, queries.stop + self.shift
            rows, columns = (
                torch.tensor(_at(w[name], c_int32)[a:b], dtype=torch.int32).view(-1)
                for name, (a, b) in ((words.SEG_Q, tokens), (words.SEG_K, (begin, end)))
            )
            mask &= rows.unsqueeze(1) == columns
        return mask

    def absent(self, plane: int, query: int, key: int) -> BlockRow:
        """Return the row of one pair of blocks, connected or not, with the pairs that the pattern's rule allows.

        Raises: IndexError if there are no such blocks.
        """
        w = self.words
        counts = (self.planes, w[words.NQ], w[words.NK])
        if not all(0 <= i < n for i, n in zip((plane, query, key), counts, strict=True)):
            raise IndexError(f"no such pair of blocks: expected (plane, query, key) below {counts}, "
                             f"got {(plane, query, key)}")  # fmt: skip
        queries, (begin, end) = self.span(query), self.key_span(key)
        queries = slice(queries.start, max(queries.start, queries.stop))
        mask = self.allowed(queries, begin, end)
        return BlockRow(plane, queries, torch.arange(begin, end), mask, [(-1, 0, end - begin)], [-1])

    def _masked(self, edge: int, i: int, queries: slice, begin: int, end: int) -> torch.Tensor | None:
        """Return the pairs that an edge allows, bool [R, K]; None for all."""
        w, kind = self.words, _at(self.words[words.KIND], c_uint8)[edge]
        if kind == words.FULL or end == begin:
            return None
        if kind == words.RULE:
            return self.allowed(queries, begin, end)
        each = -(-self.block // 64)
        first = queries.start + self.shift - i * self.block
        at = (_at(w[words.BITS], c_int32)[edge] * self.block + first) * each
        rows = queries.stop - queries.start
        stored = np.array(_at(w[words.POOL], c_uint64)[at : at + rows * each], np.uint64).reshape(rows, each)
        bits = np.unpackbits(stored.astype("<u8").view(np.uint8), axis=1, bitorder="little")
        return torch.from_numpy(bits[:, : end - begin].astype(bool))

    def _row(self, plane: int, i: int) -> BlockRow:
        queries, gate_of = self.span(i), _at(self.words[words.GATE], c_int32)
        at, edges, gates, keys, masks = 0, [], [], [torch.arange(0)], []
        for edge, j in self.edges(plane, i):
            begin, end = self.key_span(j)
            edges.append((edge, at, at + end - begin))
            gates.append(gate_of[edge])
            keys.append(torch.arange(begin, end))
            masks.append(self._masked(edge, i, queries, begin, end))
            at += end - begin
        whole = None
        if any(mask is not None for mask in masks):
            whole = torch.ones(queries.stop - queries.start, at, dtype=torch.bool)
            for (_, a, b), mask in zip(edges, masks, strict=True):
                if mask is not None:
                    whole[:, a:b] = mask
        return BlockRow(plane, queries, torch.cat(keys), whole, edges, gates)
