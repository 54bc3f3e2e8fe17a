"""Read a pattern only through the memory that its table points to, as a kernel does: the oracle of the tests."""

from __future__ import annotations

import ctypes

import numpy as np

from graphwright.patterns import table as T


def words(table, address, count, dtype):
    """Return `count` elements at a word of the table, copied."""
    kind = np.dtype(dtype)
    if not count:
        return np.empty(0, kind)
    raw = (ctypes.c_uint8 * (count * kind.itemsize)).from_address(int(table[address]))
    return np.frombuffer(bytes(raw), kind)


def lists(table, side):
    """Return the edge slots of each node, walking the chains: {(plane, block): [slots]}."""
    rows = side == "in"
    count, stride = (int(table[w]) for w in ((T.NQ, T.ROW_STRIDE) if rows else (T.NK, T.COL_STRIDE)))
    nodes = words(table, T.ROWS if rows else T.COLS, int(table[T.PLANES]) * stride, np.int32)
    first = T.IN_HEAD if rows else T.OUT_HEAD
    found = {}
    for plane in range(int(table[T.PLANES])):
        for block in range(count):
            node = int(nodes[plane * stride + block])
            left = int(words(table, first + 1, node + 1, np.int32)[node])
            at = int(words(table, first, node + 1, np.int32)[node])
            entries = []
            while left:
                bucket = int(table[T.BUCKET])
                items = words(table, first + 3, (at + 1) * bucket, np.int32)[at * bucket :]
                entries += items[: min(left, bucket)].tolist()
                left -= min(left, bucket)
                if left:
                    at = int(words(table, first + 2, at + 1, np.int32)[at])
            found[plane, block] = entries
    return found


def dense(table):
    """Return the mask of all tokens, bool [planes, queries, keys], from the in-lists and again from the out-lists."""
    assert table[T.MAGIC] == T.SIGNATURE
    planes, queries, keys, block = (int(table[w]) for w in (T.PLANES, T.TQ, T.TK, T.BLOCK))
    slots = int(table[T.EDGE_SLOTS])
    source, target = (words(table, w, slots, np.int32) for w in (T.SRC, T.DST))
    kind = words(table, T.KIND, slots, np.uint8)
    row = words(table, T.BITS, slots, np.int32)
    index = words(table, T.INDEX, int(max(source.max(initial=0), target.max(initial=0))) + 1, np.int32)
    wide = -(-block // 64)
    pool = words(table, T.POOL, (int(row.max(initial=-1)) + 1) * block * wide, np.uint64).reshape(-1, block, wide)
    i, j = int(table[T.QSTART]) + np.arange(queries)[:, None], np.arange(keys)
    rule = np.ones((queries, keys), bool)
    if table[T.CAUSAL]:
        rule &= j <= i
    if table[T.WINDOW]:
        rule &= i - j < table[T.WINDOW]
        if table[T.SYMMETRIC]:
            rule &= j - i < table[T.WINDOW]
    if table[T.SEG_Q]:
        rule &= words(table, T.SEG_Q, queries, np.int32)[:, None] == words(table, T.SEG_K, keys, np.int32)
    found = []
    for side in ("in", "out"):
        mask = np.zeros((planes, queries, keys), bool)
        total = 0
        for (plane, number), entries in lists(table, side).items():
            total += len(entries)
            for slot in entries:
                q, k = int(index[target[slot]]), int(index[source[slot]])
                assert number == (q if side == "in" else k)
                part = mask[plane, q * block : (q + 1) * block, k * block : (k + 1) * block]
                assert not part.any(), "an edge is listed twice"
                own = np.ones(part.shape, bool)
                if kind[slot] == T.RULE:
                    own = rule[q * block : (q + 1) * block, k * block : (k + 1) * block]
                elif kind[slot] == T.MASKED:
                    bits = pool[row[slot]]
                    for a in range(part.shape[0]):
                        for b in range(part.shape[1]):
                            own[a, b] = bits[a, b // 64] >> np.uint64(b % 64) & np.uint64(1)
                assert own.any(), "an edge allows nothing"
                part |= own
        assert total == table[T.EDGES]
        found.append(mask)
    assert np.array_equal(*found)
    return found[0]
