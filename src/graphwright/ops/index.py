"""Rows by index."""

from __future__ import annotations

from graphwright.array.spec import Spec
from graphwright.errors import DTypeError, ShapeError
from graphwright.ops.call import call
from graphwright.ops.registry import Cost, Saves, Traits, op


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
