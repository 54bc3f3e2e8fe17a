"""Matrix products of runs of rows, each with a matrix of its own: what experts compute."""

from __future__ import annotations

import numpy as np

from graphwright.array.dtype import int64
from graphwright.array.spec import Spec
from graphwright.errors import ShapeError
from graphwright.ops.call import call
from graphwright.ops.registry import Cost, Saves, Traits, op
from graphwright.ops.rules import equal_dim, floating, one_dtype


def _check(x: Spec, other: Spec, offsets: Spec) -> None:
    one_dtype(x, other)
    floating(x)
    if len(x.shape) != 2 or offsets.dtype is not int64 or len(offsets.shape) != 1:
        raise ShapeError("takes rows [N, d] and offsets int64 [E + 1]", got=f"{x}, {offsets}")


def _draw(rng):
    """Three runs of at most seven rows, empty ones among them."""
    return np.array([0, *np.sort(rng.integers(0, 8, 3))])


@op("grouped_matmul")
class GroupedMatmul:
    """Rows offsets[e] to offsets[e + 1] of x [N, d] times w[e]: w [E, d, f] -> [N, f].

    Offsets [E + 1] go from 0 up, to N at most; a run may be empty, and rows behind the last give 0. dx = g·wᵀ by the
    same runs, dw = grouped_outer.
    """

    arity, saves, traits = 3, Saves(inputs=(0, 1, 2)), Traits(amp="low", fixed=(2,), contiguous=(0, 1))

    @staticmethod
    def infer(x, w, offsets):
        _check(x, w, offsets)
        if len(w.shape) != 3 or offsets.shape != (w.shape[0] + 1,):
            raise ShapeError("takes w [E, d, f] and offsets [E + 1]", got=f"{w}, {offsets}")
        equal_dim(w.shape[1], x.shape[1], "d")
        return Spec((x.shape[0], w.shape[2]), x.dtype)

    @staticmethod
    def vjp(g, ins, outs, attrs, needs):
        x, w, offsets = ins
        dx = call("grouped_matmul", g, call("permute", w, axes=(0, 2, 1)), offsets) if needs[0] else None
        return dx, call("grouped_outer", x, g, offsets) if needs[1] else None, None

    @staticmethod
    def cost(ins, outs, attrs):
        return Cost(2 * outs[0].size * ins[0].shape[1], sum(i.nbytes for i in ins), outs[0].nbytes)

    @staticmethod
    def sample(rng):
        return [rng.normal(size=(7, 3)), rng.normal(size=(3, 3, 2)), _draw(rng)], {}


@op("grouped_outer")
class GroupedOuter:
    """Xᵀ·y over each run of rows of x [N, d] and y [N, f]: [E, d, f], 0 for an empty run."""

    arity, saves, traits = 3, Saves(inputs=(0, 1, 2)), Traits(amp="low", fixed=(2,), contiguous=(0, 1))

    @staticmethod
    def infer(x, y, offsets):
        _check(x, y, offsets)
        if len(y.shape) != 2:
            raise ShapeError("takes rows y [N, f]", got=y)
        equal_dim(y.shape[0], x.shape[0], "N")
        return Spec((offsets.sizes[0] - 1, x.shape[1], y.shape[1]), x.dtype)

    @staticmethod
    def vjp(g, ins, outs, attrs, needs):
        x, y, offsets = ins
        dx = call("grouped_matmul", y, call("permute", g, axes=(0, 2, 1)), offsets) if needs[0] else None
        return dx, call("grouped_matmul", x, g, offsets) if needs[1] else None, None

    @staticmethod
    def cost(ins, outs, attrs):
        return Cost(2 * ins[0].size * ins[1].shape[1], sum(i.nbytes for i in ins), outs[0].nbytes)

    @staticmethod
    def sample(rng):
        return [rng.normal(size=(7, 3)), rng.normal(size=(7, 2)), _draw(rng)], {}
