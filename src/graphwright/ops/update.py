"""The op that carries the KV cache to the next step; those of optimizers are in `optimize.py`."""

from __future__ import annotations

import numpy as np

from graphwright.array.dtype import int64
from graphwright.array.spec import Spec
from graphwright.errors import DTypeError, ShapeError
from graphwright.ops.registry import Cost, Traits, op

_WHY = {"vjp": "an update of carried state; gradients do not cross steps"}


@op("kv_append")
class KvAppend:
    """The cache [B, G, M, D] with rows [B, G, T, D] written from `start` (int64 scalar) on along its length axis."""

    arity, vjp, why = 3, None, _WHY
    traits = Traits(inplace=((0, 0),), update=True, fixed=(2,))

    @staticmethod
    def infer(cache, rows, start):
        if cache.dtype is not rows.dtype or start != Spec((), int64):
            raise DTypeError("cache and rows share a dtype, start is an int64 scalar", got=f"{cache}, {rows}, {start}")
        if (*cache.shape[:2], cache.shape[3]) != (*rows.shape[:2], rows.shape[3]):
            raise ShapeError("rows do not fit the cache", expected=cache, got=rows)
        return cache

    @staticmethod
    def cost(ins, outs, attrs):
        return Cost(0, ins[1].nbytes, ins[1].nbytes)

    @staticmethod
    def sample(rng):
        return [rng.normal(size=(2, 2, 6, 3)), rng.normal(size=(2, 2, 2, 3)), np.int64(3)], {}
