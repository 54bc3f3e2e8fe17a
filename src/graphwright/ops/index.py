"""Rows by index."""

from __future__ import annotations

from graphwright.array.dtype import int64
from graphwright.array.spec import Spec
from graphwright.errors import DTypeError, ShapeError
from graphwright.ops.call import call
from graphwright.ops.registry import Cost, Saves, Traits, op
from graphwright.ops.rules import axis_of


def _ids(ids: Spec) -> None:
    if ids.dtype.kind != "int":
        raise DTypeError("ids must be integers", expected="int64", got=ids)


@op("embedding")
class Embedding:
    """Rows of a table [V, D] for ids of any shape: [..., D]; repeated ids add up in the gradient."""

    arity, saves, traits = 2, Saves(inputs=(1,)), Traits(contiguous=(1,))

    @staticmethod
    def infer(table, ids):
        _ids(ids)
        if len(table.shape) != 2:
            raise ShapeError("the table must be [V, D]", got=table)
        return Spec((*ids.shape, table.shape[1]), table.dtype)

    @staticmethod
    def vjp(g, ins, outs, attrs, needs):
        return (call("embedding_backward", g, ins[1], rows=ins[0].shape[0]) if needs[0] else None), None

    @staticmethod
    def cost(ins, outs, attrs):
        return Cost(0, outs[0].nbytes + ins[1].nbytes, outs[0].nbytes)

    @staticmethod
    def sample(rng):
        return [rng.normal(size=(5, 3)), rng.integers(0, 5, (2, 4))], {}


@op("embedding_backward")
class EmbeddingBackward:
    """Σ of gradient rows [..., D] per id into [rows, D], in index order."""

    arity, attrs, saves, traits = 2, {"rows": ...}, Saves(inputs=(1,)), Traits(contiguous=(0, 1))

    @staticmethod
    def infer(g, ids, rows):
        _ids(ids)
        return Spec((rows, g.shape[-1]), g.dtype)

    @staticmethod
    def vjp(g, ins, outs, attrs, needs):
        return (call("embedding", g, ins[1]) if needs[0] else None), None

    @staticmethod
    def sample(rng):
        return [rng.normal(size=(2, 4, 3)), rng.integers(0, 5, (2, 4))], {"rows": 5}


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
