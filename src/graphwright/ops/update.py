"""Ops that carry state to the next step: the KV cache and the optimizer's update. No gradient flows through them."""

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


@op("adamw")
class AdamW:
    """One step of a parameter: (θ, m, v) -> (θ', m', v'); operands θ, g, m, v, step (float32, counted from 1), lr.

    θ ← θ(1 - lr·λ); m ← β1·m + (1-β1)g; v ← β2·v + (1-β2)g²;
    θ ← θ - lr·(m/(1-β1^step)) / (√(v/(1-β2^step)) + eps) (Loshchilov and Hutter 2019, algorithm 2).
    """

    arity, vjp, why = 6, None, _WHY
    attrs = {"beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "weight_decay": 0.01}
    traits = Traits(inplace=((0, 0), (1, 2), (2, 3)), contiguous=(1,), update=True)

    @staticmethod
    def infer(param, grad, m, v, step, lr, **hyper):
        for name, spec in (("grad", grad), ("m", m), ("v", v)):
            if spec != param:
                raise ShapeError(f"{name} must have the spec of the parameter", expected=param, got=spec)
        if step != Spec((), lr.dtype) or lr.shape:
            raise ShapeError("step and lr are scalars of one dtype", got=f"{step}, {lr}")
        return param, m, v

    @staticmethod
    def cost(ins, outs, attrs):
        return Cost(12 * ins[0].size, 4 * ins[0].nbytes, 3 * ins[0].nbytes)

    @staticmethod
    def sample(rng):
        shape = (3, 4)
        moments = [rng.normal(size=shape), rng.random(shape)]
        return [rng.normal(size=shape), rng.normal(size=shape), *moments, np.float32(3.0), np.float32(1e-2)], {}
