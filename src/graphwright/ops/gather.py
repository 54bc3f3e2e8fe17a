"""Entries by place along one axis, an index for each entry: reading, writing, adding."""

from __future__ import annotations

import numpy as np

from graphwright.array.dtype import int64
from graphwright.array.spec import Spec
from graphwright.errors import DTypeError, ShapeError
from graphwright.ops.call import call
from graphwright.ops.registry import Saves, Traits, op
from graphwright.ops.rules import axis_of, one_dtype


def _along(x: Spec, index: Spec, axis: int) -> int:
    """The axis, if `index` has as many axes as x and leaves none but that one."""
    at = axis_of(axis, len(x.shape))
    if index.dtype is not int64:
        raise DTypeError("an index is int64", got=index, fix='index.to("int64")')
    fits = len(index.shape) == len(x.shape) and all(
        a == at or i == n or (isinstance(i, int) and isinstance(n, int) and i <= n)
        for a, (i, n) in enumerate(zip(index.shape, x.shape, strict=True))
    )
    if not fits:
        raise ShapeError("the index leaves the other axes", where=f"axis {at} excepted", expected=x.shape, got=index)
    return at


@op("gather")
class Gather:
    """Entries of x by place along an axis: y[i, j] = x[index[i, j], j] for axis 0; y has the shape of the index."""

    arity, attrs, saves, traits = 2, {"axis": ...}, Saves(inputs=(1,)), Traits(contiguous=(0, 1))

    @staticmethod
    def infer(x, index, axis):
        _along(x, index, axis)
        return Spec(index.shape, x.dtype)

    @staticmethod
    def vjp(g, ins, outs, attrs, needs):
        return (call("scatter_sum", g, ins[1], **attrs, shape=ins[0].shape) if needs[0] else None), None

    @staticmethod
    def sample(rng):
        axis = int(rng.integers(-3, 3))
        shape = [2, 3, 4]
        shape[axis] = 5
        for a in {0, 1, 2} - {axis % 3}:
            shape[a] -= int(rng.integers(0, 2))
        return [rng.normal(size=(2, 3, 4)), rng.integers(0, (2, 3, 4)[axis], shape)], {"axis": axis}


@op("scatter_sum")
class ScatterSum:
    """Zeros of `shape` with each entry of x added at its place along an axis, in order: the transpose of `gather`."""

    arity, attrs, saves, traits = 2, {"axis": ..., "shape": ...}, Saves(inputs=(1,)), Traits(contiguous=(0, 1))

    @staticmethod
    def infer(x, index, axis, shape):
        if x.shape != index.shape:
            raise ShapeError("an index for each entry", expected=x, got=index)
        _along(Spec(tuple(shape), x.dtype), index, axis)
        return Spec(tuple(shape), x.dtype)

    @staticmethod
    def vjp(g, ins, outs, attrs, needs):
        return (call("gather", g, ins[1], axis=attrs["axis"]) if needs[0] else None), None

    @staticmethod
    def sample(rng):
        (x, index), attrs = Gather.sample(rng)
        return [rng.normal(size=index.shape), index], {**attrs, "shape": x.shape}


def _written(x: Spec, index: Spec, values: Spec, axis: int) -> Spec:
    one_dtype(x, values)
    _along(x, index, axis)
    if values.shape != index.shape:
        raise ShapeError("a value for each index", expected=index, got=values)
    return x


@op("scatter")
class Scatter:
    """x with values written at their places along an axis, in order: y[index[i, j], j] = v[i, j] for axis 0.

    Of values for one place the last stays; each of them gets the place's gradient, as in torch.
    """

    arity, attrs, saves, infer = 3, {"axis": ...}, Saves(inputs=(1,)), _written
    traits = Traits(contiguous=(0, 1, 2), inplace=((0, 0),), fixed=(1,), amp="promote")

    @staticmethod
    def vjp(g, ins, outs, attrs, needs):
        index, dx = ins[1], None
        if needs[0]:
            zero = call("cast", call("full_like", index, value=0), dtype=g.dtype)
            dx = call("scatter", g, index, zero, **attrs)
        return dx, None, call("gather", g, index, **attrs) if needs[2] else None

    @staticmethod
    def sample(rng):
        axis = int(rng.integers(-2, 2))
        order = rng.permuted(np.indices((3, 4))[axis % 2], axis=axis)  # no place twice: it has no difference quotient
        index = order[: rng.integers(1, 4), : rng.integers(1, 5)]
        return [rng.normal(size=(3, 4)), index, rng.normal(size=index.shape)], {"axis": axis}


@op("scatter_add")
class ScatterAdd:
    """x with values added at their places along an axis, in order; values for one place add up."""

    arity, attrs, saves, infer = 3, {"axis": ...}, Saves(inputs=(1,)), _written
    traits = Traits(contiguous=(0, 1, 2), inplace=((0, 0),), fixed=(1,), amp="promote")

    @staticmethod
    def vjp(g, ins, outs, attrs, needs):
        return g if needs[0] else None, None, call("gather", g, ins[1], **attrs) if needs[2] else None

    @staticmethod
    def sample(rng):
        (x, index), attrs = Gather.sample(rng)
        return [x, index, rng.normal(size=index.shape)], attrs
