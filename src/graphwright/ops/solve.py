"""Linear systems: what stands behind maps that stay orthogonal while they are trained."""

from __future__ import annotations

import numpy as np

from graphwright.array.spec import Spec
from graphwright.errors import ShapeError
from graphwright.ops.call import call
from graphwright.ops.registry import Cost, Saves, Traits, op
from graphwright.ops.rules import equal_dim, floating, one_dtype


def _turned(t):
    return call("permute", t, axes=(1, 0))


@op("solve")
class Solve:
    """X with A · X = B: A [n, n], B [n, k]; dB = A⁻ᵀ g, dA = -dB Xᵀ. A singular A gives infinities or NaN."""

    arity, saves, traits = 2, Saves(inputs=(0,), outputs=(0,)), Traits(amp="f32")

    @staticmethod
    def infer(a, b):
        one_dtype(a, b)
        floating(a)
        if len(a.shape) != 2 or len(b.shape) != 2:
            raise ShapeError("solve takes A [n, n] and B [n, k]", got=f"{a}, {b}")
        equal_dim(a.shape[0], a.shape[1], "of the square matrix")
        equal_dim(a.shape[0], b.shape[0], "rows")
        return Spec(b.shape, b.dtype)

    @staticmethod
    def vjp(g, ins, outs, attrs, needs):
        back = call("solve", _turned(ins[0]), g)
        da = call("neg", call("matmul", back, _turned(outs[0]))) if needs[0] else None
        return da, back if needs[1] else None

    @staticmethod
    def cost(ins, outs, attrs):
        n, k = outs[0].shape
        return Cost(2 * n * n * n // 3 + 2 * n * n * k, sum(i.nbytes for i in ins), outs[0].nbytes)

    @staticmethod
    def sample(rng):
        n, k = (int(i) for i in rng.integers(1, 5, 2))
        return [rng.normal(size=(n, n)) + 4 * np.eye(n), rng.normal(size=(n, k))], {}
