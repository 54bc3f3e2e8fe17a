"""Order along an axis: equal entries keep their order, so of ties the lowest index comes first. NaN is the largest."""

from __future__ import annotations

from graphwright.array.dtype import int64
from graphwright.array.spec import Spec
from graphwright.errors import ShapeError
from graphwright.ops.call import call
from graphwright.ops.registry import Cost, Saves, op
from graphwright.ops.rules import axis_of


class _Ordered:
    """Results are values and their indices; the gradient of a value goes to its index."""

    arity, saves = 1, Saves(outputs=(1,))

    @staticmethod
    def vjp(g, ins, outs, attrs, needs):
        return (call("scatter_sum", g[0], outs[1], axis=attrs["axis"], shape=ins[0].shape),)

    @staticmethod
    def cost(ins, outs, attrs):
        size = ins[0].size
        return Cost(size * max(size.bit_length(), 1), ins[0].nbytes, sum(o.nbytes for o in outs))


@op("sort")
class Sort(_Ordered):
    """Entries along an axis from the smallest to the largest, or the other way, and their indices; stable."""

    attrs = {"axis": -1, "descending": False}

    @staticmethod
    def infer(x, axis, descending):
        axis_of(axis, len(x.shape))
        return x, Spec(x.shape, int64)

    @staticmethod
    def sample(rng):
        return [rng.normal(size=(3, 4, 2))], {"axis": int(rng.integers(-3, 3)), "descending": bool(rng.random() < 0.5)}


@op("topk")
class TopK(_Ordered):
    """The k largest entries along an axis, or the smallest, in order, and their indices; of ties the lowest first."""

    attrs = {"k": ..., "axis": -1, "largest": True}

    @staticmethod
    def infer(x, k, axis, largest):
        at = axis_of(axis, len(x.shape))
        size = x.shape[at]
        if k < 0 or (isinstance(size, int) and k > size):
            raise ShapeError("not that many entries", where=f"axis {at}", expected=f"k of 0 to {size}", got=k)
        shape = (*x.shape[:at], k, *x.shape[at + 1 :])
        return Spec(shape, x.dtype), Spec(shape, int64)

    @staticmethod
    def sample(rng):
        axis = int(rng.integers(-3, 3))
        k = int(rng.integers(1, (3, 4, 2)[axis] + 1))
        return [rng.normal(size=(3, 4, 2))], {"k": k, "axis": axis, "largest": bool(rng.random() < 0.5)}

    @staticmethod
    def expand(ins, attrs):
        ordered = call("sort", ins[0], axis=attrs["axis"], descending=attrs["largest"])
        return tuple(call("slice", t, axis=attrs["axis"], start=0, size=attrs["k"]) for t in ordered)
