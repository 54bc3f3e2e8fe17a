"""Axes of rotary positions, attention and its cache."""

from __future__ import annotations

from collections.abc import Sequence

from graphwright.ops.axes.use import Dims, Use
from graphwright.ops.terms import Atom, chain, product, size


def rope_table(u: Use) -> Sequence[Dims]:
    """Positions with the frequencies as a last axis."""
    return [(*u.ins[0], u.ins[1][0])] * 2


def rope_dynamic(u: Use) -> Sequence[Dims]:
    """One frequency per pair of places; their number is in the formula."""
    u.frozen(u.ins[1][0], "has its size in its formula")
    for term in u.ins[0]:
        u.mixed(term, "takes the largest over it")
    return [u.ins[1]]


def rope_longer(u: Use) -> Sequence[Dims]:
    """Two tables of frequencies are one axis."""
    u.same(u.ins[1][0], u.ins[2][0])
    return [u.ins[1]]


def rope(u: Use) -> Sequence[Dims]:
    """Places i and i + D/2 turn together."""
    x, *tables = u.ins
    half = tables[0][2]
    u.same(x[3], chain(half, half))
    u.kind(x[3], "head_dim")
    for table in tables:
        u.same(table[2], half)
        for axis, place in ((0, 0), (2, 1)):
            if size(x[axis]) == size(table[place]):
                u.same(x[axis], table[place])
    return [x]


def sdpa(u: Use) -> Sequence[Dims]:
    """Query heads are key heads × the queries of each."""
    q, k, v, *extra = u.ins
    _heads(u)
    u.same(q[0], k[0])
    u.mixed(k[2], "takes a softmax over it")
    for name, dims in zip(u.attrs["optional"], extra, strict=True):
        if name == "key_mask":
            u.same(dims[0], k[0])
            u.same(dims[1], k[2])
    return [(*q[:3], v[3])]


def _heads(u: Use) -> None:
    """What attention says of heads and their sizes, wherever keys lie; keys and values are alike in the rest."""
    q, k, v = u.ins[:3]
    heads, groups = size(q[1]), size(k[1])
    repeats = Atom(int(heads) // int(groups)) if isinstance(heads, int) and isinstance(groups, int) else Atom(1)
    for axis in (0, 1, 2):
        u.same(k[axis], v[axis])
    u.same(q[1], product(k[1], repeats))
    u.kind(q[1], "heads")
    u.kind(k[1], "kv_groups")
    if size(repeats) != 1:
        u.kind(repeats, "queries")
    u.same(q[3], k[3])
    u.summed(q[3], (0, 3), (1, 3))
    u.kind(q[3], "head_dim")
    u.kind(v[3], "head_dim")
    u.mixed(q[2], "sees keys by their place")


def sdpa_paged(u: Use) -> Sequence[Dims]:
    """As `sdpa`, with keys in blocks that a table names."""
    q, k, v, table, lengths = u.ins
    _heads(u)
    u.same(q[0], table[0])
    u.same(q[0], lengths[0])
    for term in (k[0], k[2], table[1]):
        u.frozen(term, "finds rows through a table")
    return [(*q[:3], v[3])]


def kv_append_paged(u: Use) -> Sequence[Dims]:
    """Key heads and places of a head are those of the rows; everything else is by place."""
    pool, rows, table, lengths = u.ins
    u.same(pool[1], rows[1])
    u.same(pool[3], rows[3])
    u.same(rows[0], table[0])
    u.same(rows[0], lengths[0])
    for term in (pool[0], pool[2], rows[0], rows[2], table[1]):
        u.frozen(term, "finds rows through a table")
    return [pool]


def kv_append(u: Use) -> Sequence[Dims]:
    """Batch, key heads and places of a head are those of the rows; the length is by place."""
    cache, rows, _ = u.ins
    for axis in (0, 1, 3):
        u.same(cache[axis], rows[axis])
    for term in (cache[2], rows[2]):
        u.frozen(term, "writes rows by their place")
    return [cache]
