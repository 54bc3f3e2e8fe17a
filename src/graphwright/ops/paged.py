"""Attention over cached rows that lie in blocks of a pool, and what appends rows to it.

A pool is [blocks, G, block, D]; a block table int32 [B, most] names, per sequence, the block of positions
j · block .. (j + 1) · block - 1; lengths int32 [B] are rows held before the step, below 0 where there is no sequence.
The pool's dtype is its own: rows are rounded when they are appended, and widened when they are read.
"""

from __future__ import annotations

from math import prod

import numpy as np

from graphwright.array.dtype import int32
from graphwright.array.spec import Spec
from graphwright.errors import DTypeError, ShapeError, UsageError
from graphwright.ops.registry import Cost, Traits, op
from graphwright.ops.rules import equal_dim, one_dtype

_CARRIED = {"vjp": "reads or updates carried state; gradients do not cross steps"}


def _check(batch: object, table: Spec, lengths: Spec) -> None:
    if table.dtype is not int32 or lengths.dtype is not int32 or len(table.shape) != 2:
        raise DTypeError("the table is int32 [B, most], lengths int32 [B]", got=f"{table}, {lengths}")
    if lengths.shape != table.shape[:1] or table.shape[0] != batch:
        raise ShapeError("a row of the table and a length per sequence", expected=batch, got=f"{table}, {lengths}")


def _floats(*ins: Spec) -> None:
    if not all(i.dtype.is_float for i in ins):
        raise DTypeError("rows are of floating dtypes", expected="floats", got=", ".join(map(repr, ins)))


def _draw(rng):
    table = np.array([[3, 1, -1], [0, 4, 2], [-1, -1, -1]], np.int32)
    return table, np.array([rng.integers(0, 3), rng.integers(0, 5), -1], np.int32)


@op("kv_append_paged")
class KvAppendPaged:
    """The pool [N, G, block, D] with rows [B, G, T, D] written behind each sequence's length."""

    arity, vjp, why = 4, None, _CARRIED
    traits = Traits(inplace=((0, 0),), update=True, fixed=(2, 3), contiguous=(2, 3))

    @staticmethod
    def infer(pool, rows, table, lengths):
        _floats(pool, rows)
        if len(pool.shape) != 4 or len(rows.shape) != 4:
            raise ShapeError("takes a pool [N, G, block, D] and rows [B, G, T, D]", got=f"{pool}, {rows}")
        _check(rows.shape[0], table, lengths)
        if (pool.shape[1], pool.shape[3]) != (rows.shape[1], rows.shape[3]):
            raise ShapeError("rows do not fit the pool", expected=pool, got=rows)
        return pool

    @staticmethod
    def cost(ins, outs, attrs):
        return Cost(0, ins[1].nbytes, ins[1].nbytes)

    @staticmethod
    def sample(rng):
        return [rng.normal(size=(5, 2, 2, 3)), rng.normal(size=(3, 2, 2, 3)), *_draw(rng)], {}


@op("sdpa_paged")
class SdpaPaged:
    """softmax(scale · q kᵀ over visible keys) v of q [B, H, T, D] over pools of k [N, G, block, D] and v.

    Query t of sequence b stands at position lengths[b] + t, and its own row is in the pool already; it sees the rows up
    to it, with a window w the last w. Query head h reads key head h // (H / G). A place without a sequence gives 0.
    With a softcap c scores s become c · tanh(s / c).
    """

    arity, attrs, vjp, why = 5, {"scale": ..., "window": None, "softcap": None}, None, _CARRIED
    traits = Traits(contiguous=(0, 3, 4), fixed=(3, 4))

    @staticmethod
    def infer(q, k, v, table, lengths, scale, window, softcap):
        one_dtype(k, v)
        _floats(q, k)
        if any(len(t.shape) != 4 for t in (q, k, v)):
            raise ShapeError("takes q [B, H, T, D] and pools [N, G, block, D]", got=f"{q}, {k}, {v}")
        _check(q.shape[0], table, lengths)
        equal_dim(q.shape[3], k.shape[3], "head_dim of k")
        for axis, name in ((0, "blocks"), (1, "kv heads"), (2, "block")):
            equal_dim(k.shape[axis], v.shape[axis], f"{name} of v")
        if q.shape[1] % k.shape[1] or (window is not None and window < 1):
            raise ShapeError(
                "query heads are a multiple of key heads, a window holds a key",
                expected=f"k·{k.shape[1]}",
                got=f"{q.shape[1]} heads, window {window}",
            )
        if softcap is not None and not softcap > 0:
            raise UsageError("scores are capped at a positive number", where="softcap", expected="> 0", got=softcap)
        return Spec((*q.shape[:3], v.shape[3]), q.dtype)

    @staticmethod
    def cost(ins, outs, attrs):
        q, k, v, table = ins[:4]
        keys = table.sizes[1] * k.sizes[2]  # at most
        read = q.nbytes + keys * table.sizes[0] * k.sizes[1] * (k.sizes[3] + v.sizes[3]) * k.dtype.itemsize
        return Cost(2 * prod(q.sizes[:3]) * keys * (q.sizes[3] + v.sizes[3]), read, outs[0].nbytes)

    @staticmethod
    def sample(rng):
        q, (k, v) = rng.normal(size=(3, 4, 2, 3)), (rng.normal(size=(5, 2, 2, d)) for d in (3, 5))
        window, softcap = (some if rng.random() < 0.5 else None for some in (3, 0.8))
        return [q, k, v, *_draw(rng)], {"scale": 0.5, "window": window, "softcap": softcap}
