"""Rows by id, and entries by one index array per axis, as in numpy's advanced indexing."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import numpy as np

from graphwright.array.dtype import int64
from graphwright.array.spec import Dim, Spec, broadcast_shapes
from graphwright.array.vm.encode import rows as forms
from graphwright.errors import DTypeError, ShapeError
from graphwright.ops.axes import Atom, AxesUse, Dims, Term, axis_of, broadcast_dims, indexed, size
from graphwright.ops.call import call
from graphwright.ops.onnx import OnnxUse, numpy_dtype
from graphwright.ops.registry import Cost, Saves, Traits, op
from graphwright.ops.rules import Backward, one_dtype


def _ids(ids: Spec) -> None:
    if ids.dtype.kind != "int":
        raise DTypeError("ids must be integers", expected="int64", got=ids)


def _index_update_axes(u: AxesUse) -> Sequence[Dims]:
    """The dimensions of the updated operand; values have those of the index."""
    x, *ids = u.ins
    start = axis_of(u.attrs["axis"], len(x))
    values: Dims = ids.pop(0) if "value" not in u.attrs else ()
    for port, axis in enumerate(x[start : start + len(ids)], len(u.ins) - len(ids)):
        indexed(u, axis, port)
    for term in (t for dims in ids for t in dims):
        u.mixed(term, "writes by number in order")
    if values:
        rest = (*x[:start], *broadcast_dims(u, ids, _joined(ids)), *x[start + len(ids) :])
        broadcast_dims(u, (rest, values), [size(t) for t in rest])
    return [x]


def _scatter_axes(u: AxesUse) -> Sequence[Dims]:
    """One axis is written by number; the others are those of the index where it writes all."""
    x, values, index = u.ins
    at = axis_of(u.attrs["axis"], len(x))
    u.frozen(x[at], "writes it by number")
    for a, b in zip(values, index, strict=True):
        u.same(a, b)
    for i, (a, b) in enumerate(zip(x, index, strict=False)):
        if len(index) == len(x) and i != at and size(a) == size(b):
            u.same(a, b)
        else:
            for term in (a, b):
                u.frozen(term, "writes by number in order")
    return [x]


def _joined(ids: Sequence[Dims]) -> list[Dim]:
    rank = max(map(len, ids))
    here = [[size(d[-back]) for d in ids if len(d) >= back] for back in range(rank, 0, -1)]
    return [next((n for n in sizes if n != 1), 1) for sizes in here]


def _indexed_dims(u: AxesUse, ids: Sequence[Dims], shape: Sequence[Dim], start: int, trailing: int) -> Dims:
    return broadcast_dims(u, ids, shape[start : len(shape) - trailing])


def _counted(u: AxesUse, attr: str) -> Term:
    axis = Atom(u.attrs[attr])
    indexed(u, axis, 0)
    u.sizes[attr] = axis
    return axis


@op("embedding")
class Embedding:
    """table[ids]: rows of a table [V, D] for ids of any shape, [..., D]; gradients of repeated ids add up."""

    arity, saves, traits = 2, Saves(inputs=(1,)), Traits(lookup=True, matrix=0, contiguous=(1,))
    emit = "F.embedding({1}, {0})"
    vm = forms.EMBEDDING

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
    def expand(ins, attrs):
        return call("index", *ins, axis=0)

    @staticmethod
    def cost(ins, outs, attrs):
        return Cost(0, outs[0].nbytes + ins[1].nbytes, outs[0].nbytes)

    @staticmethod
    def sample(rng):
        return [rng.normal(size=(5, 3)), rng.integers(0, 5, (2, 4))], {}

    @staticmethod
    def axes(u: AxesUse):
        table, ids = u.ins
        indexed(u, table[0], 1)
        if u.stored[0]:
            u.kind(table[0], "vocabulary")
            u.kind(table[1], "channels")
        return [(*ids, table[1])]

    @staticmethod
    def onnx(u: OnnxUse):
        return u("Gather", *u.names, axis=0)


@op("embedding_backward")
class EmbeddingBackward(Backward):
    """Σ of gradient rows [..., D] per id, [rows, D], summed in index order."""

    arity, attrs, saves, traits = (
        2,
        {"rows": ...},
        Saves(inputs=(1,)),
        Traits(backward_of="embedding", contiguous=(0, 1)),
    )
    vm = forms.EMBEDDING_BACKWARD

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


AXES = 8
"""The most index arrays of one op."""


class _Picked:
    """The entries that index arrays for consecutive axes select: the axes `start..end`, and the shape of the result."""

    def __init__(self, shape: Sequence[Any], ids: Sequence[Spec], axis: int) -> None:
        self.start = axis_of(axis, len(shape))
        self.end = self.start + len(ids)
        if self.end > len(shape) or any(isinstance(n, str) for n in shape[self.start : self.end]):
            raise ShapeError(
                "index arrays need consecutive axes of known size", where=f"from axis {axis}", got=tuple(shape)
            )
        if any(i.dtype is not int64 for i in ids):
            raise DTypeError("index arrays must be int64", got=", ".join(map(repr, ids)), fix='index.to("int64")')
        self.index_shape = broadcast_shapes(*(i.shape for i in ids))
        self.shape = (*shape[: self.start], *self.index_shape, *shape[self.end :])


def _sample_ids(rng: Any, *, distinct: bool = False) -> tuple[tuple[int, ...], list[np.ndarray], dict[str, Any]]:
    """A shape, one or two index arrays for it (negative indices included), and the first indexed axis."""
    shape, count = (2, 3, 4), int(rng.integers(1, 3))
    axis = int(rng.integers(0, 4 - count))
    sizes = shape[axis : axis + count]
    if distinct:
        ids = list(np.unravel_index(rng.permutation(prod(sizes))[:2], sizes))
    else:
        ids = [rng.integers(-n, n, (3, 1) if k else (2,)) for k, n in enumerate(sizes)]
    return shape, ids, {"axis": axis - 3 if rng.random() < 0.5 else axis}


@op("index")
class Index:
    """x[..., i, j, ...]: entries by index arrays, one per axis from `axis` on, which broadcast together.

    Negative indices count from the end; an index outside its axis raises.
    """

    arity, attrs, traits = (2, 1 + AXES), {"axis": 0}, Traits(linear_in=(0,), mixes="axis", contiguous=(0,))
    saves = Saves(inputs=tuple(range(1, 1 + AXES)))

    @staticmethod
    def infer(x, *ids, axis):
        return Spec(_Picked(x.shape, ids, axis).shape, x.dtype)

    @staticmethod
    def vjp(g, ins, outs, attrs, needs):
        x, *ids = ins
        dx = call("index_sum", g, *ids, **attrs, shape=x.shape) if needs[0] else None
        return (dx, *(None for _ in ids))

    @staticmethod
    def sample(rng):
        shape, ids, attrs = _sample_ids(rng)
        return [rng.normal(size=shape), *ids], attrs

    @staticmethod
    def axes(u: AxesUse):
        x, *ids = u.ins
        start = axis_of(u.attrs["axis"], len(x))
        for port, axis in enumerate(x[start : start + len(ids)], 1):
            if len(ids) == 1 and len(ids[0]) == 1 and any(u.tables[1:]):
                u.lookups.append((axis, port))
            else:
                indexed(u, axis, port)
        return [
            (*x[:start], *_indexed_dims(u, ids, u.shapes[0], start, len(x) - start - len(ids)), *x[start + len(ids) :])
        ]

    @staticmethod
    def onnx(u: OnnxUse):
        return u("Gather", *u.names, axis=u.attrs["axis"]) if len(u.names) == 2 else None

    @staticmethod
    def emit(i, a):
        axis, ids = a["axis"], list(i[1:])
        index = [":"] * axis + ids if axis >= 0 else ["...", *ids, *[":"] * (-axis - len(ids))]
        return f"{i[0]}[{', '.join(index)}]"


@op("index_sum")
class IndexSum(Backward):
    """indexᵀ g: zeros of `shape` with each entry of g added at its index, in order."""

    arity, attrs, saves = Index.arity, {"axis": 0, "shape": ...}, Index.saves
    traits = Traits(contiguous=(0,), backward_of="index")

    @staticmethod
    def infer(g, *ids, axis, shape):
        picked = _Picked(shape, ids, axis)
        if g.shape != picked.shape:
            raise ShapeError("the gradient must have one entry per index", expected=picked.shape, got=g)
        return Spec(tuple(shape), g.dtype)

    @staticmethod
    def vjp(g, ins, outs, attrs, needs):
        ids = ins[1:]
        return (call("index", g, *ids, axis=attrs["axis"]) if needs[0] else None, *(None for _ in ids))

    @staticmethod
    def sample(rng):
        shape, ids, attrs = _sample_ids(rng)
        picked = _Picked(shape, [Spec(i.shape, int64) for i in ids], attrs["axis"])
        return [rng.normal(size=picked.shape), *ids], {**attrs, "shape": shape}


def _updated(x: Spec, values: Spec, *ids: Spec, axis: int) -> Spec:
    one_dtype(x, values)
    picked = _Picked(x.shape, ids, axis)
    if broadcast_shapes(picked.shape, values.shape) != picked.shape:
        raise ShapeError("values must broadcast to the indexed shape", expected=picked.shape, got=values)
    return x


_UPDATE = Traits(contiguous=(0, 1), inplace=((0, 0),), fixed=tuple(range(2, 2 + AXES)), amp="promote")
_UPDATE_ARITY = (3, 2 + AXES)
_UPDATE_SAVES = Saves(inputs=tuple(range(2, 2 + AXES)))


@op("index_put")
class IndexPut:
    """x[i, j, ...] ← v: operands x, values, then one index array per axis from `axis` on; values broadcast.

    Of several values for one index the last is written; each of them gets the gradient of that entry, as in torch.
    """

    arity, attrs, saves, traits, infer = _UPDATE_ARITY, {"axis": 0}, _UPDATE_SAVES, _UPDATE, _updated
    axes = _index_update_axes
    why = {
        "onnx": "writes at several indices at once have no node",
        "emit": "torch writes at an index in a statement of its own",
    }

    @staticmethod
    def vjp(g, ins, outs, attrs, needs):
        ids = ins[2:]
        dx = call("index_fill", g, *ids, **attrs, value=0.0) if needs[0] else None
        return (dx, call("index", g, *ids, **attrs) if needs[1] else None, *(None for _ in ids))

    @staticmethod
    def sample(rng):
        shape, ids, attrs = _sample_ids(rng, distinct=True)
        picked = _Picked(shape, [Spec(i.shape, int64) for i in ids], attrs["axis"]).shape
        return [rng.normal(size=shape), rng.normal(size=picked[int(rng.integers(0, 2)) :]), *ids], attrs


@op("index_add")
class IndexAdd:
    """x[i, j, ...] += v, in order: operands as of `index_put`; values for one index add up."""

    arity, attrs, saves, traits, infer = _UPDATE_ARITY, {"axis": 0}, _UPDATE_SAVES, _UPDATE, _updated
    axes = _index_update_axes
    why = {
        "onnx": "writes at several indices at once have no node",
        "emit": "torch writes at an index in a statement of its own",
    }

    @staticmethod
    def vjp(g, ins, outs, attrs, needs):
        ids = ins[2:]
        dv = call("index", g, *ids, **attrs) if needs[1] else None
        return (g if needs[0] else None, dv, *(None for _ in ids))

    @staticmethod
    def sample(rng):
        shape, ids, attrs = _sample_ids(rng)
        picked = _Picked(shape, [Spec(i.shape, int64) for i in ids], attrs["axis"]).shape
        return [rng.normal(size=shape), rng.normal(size=picked[int(rng.integers(0, 2)) :]), *ids], attrs


@op("index_fill")
class IndexFill:
    """x[i, j, ...] ← value, with one index array per axis from `axis` on."""

    arity, attrs, saves = Index.arity, {"axis": 0, "value": ...}, Index.saves
    traits = Traits(contiguous=(0,), inplace=((0, 0),))
    axes = _index_update_axes
    why = {
        "onnx": "writes at several indices at once have no node",
        "emit": "torch writes at an index in a statement of its own",
    }

    @staticmethod
    def infer(x, *ids, axis, value):
        _Picked(x.shape, ids, axis)
        return x

    @staticmethod
    def vjp(g, ins, outs, attrs, needs):
        ids = ins[1:]
        dx = call("index_fill", g, *ids, axis=attrs["axis"], value=0.0) if needs[0] else None
        return (dx, *(None for _ in ids))

    @staticmethod
    def sample(rng):
        shape, ids, attrs = _sample_ids(rng)
        return [rng.normal(size=shape), *ids], {**attrs, "value": -1.5}


@op("one_hot")
class OneHot:
    """1 if k = id else 0, for k along a new last axis of `classes`, int64. An id outside raises."""

    arity, attrs, traits = 1, {"classes": ...}, Traits(contiguous=(0,))
    vjp, why = None, {"vjp": "ids are integers"}
    emit = "F.one_hot({0}, {classes})"

    @staticmethod
    def infer(ids, classes):
        _ids(ids)
        if classes < 0:
            raise ShapeError("classes must be >= 0", expected="at least 0", got=classes)
        return Spec((*ids.shape, classes), int64)

    @staticmethod
    def sample(rng):
        return [rng.integers(0, 4, (2, 3))], {"classes": 4}

    @staticmethod
    def axes(u: AxesUse):
        return [(*u.ins[0], _counted(u, "classes"))]

    @staticmethod
    def onnx(u: OnnxUse):
        values = u.nodes.constant(np.array([0, 1], numpy_dtype(u.outs[0].dtype)))
        return u("OneHot", u.names[0], u.ints_scalar(u.attrs["classes"]), values, axis=-1)


@op("bincount")
class Bincount:
    """Σ [id = k] for k = 0, ..., length - 1: how often each id occurs, int64. An id outside raises."""

    arity, attrs, traits = 1, {"length": ...}, Traits(contiguous=(0,))
    vjp, why = None, {"vjp": "ids are integers"}
    emit = "torch.bincount({0}.flatten(), minlength={length})"

    @staticmethod
    def infer(ids, length):
        _ids(ids)
        if length < 0:
            raise ShapeError("length must be >= 0", expected="at least 0", got=length)
        return Spec((length,), int64)

    @staticmethod
    def sample(rng):
        return [rng.integers(0, 4, (2, 5))], {"length": 6}

    @staticmethod
    def axes(u: AxesUse):
        for term in u.ins[0]:
            u.mixed(term, "counts over it")
        return [(_counted(u, "length"),)]

    @staticmethod
    def onnx(u: OnnxUse):
        flat = u("Reshape", u.names[0], u.ints(-1))
        hot = u("OneHot", flat, u.ints_scalar(u.attrs["length"]), u.ints(0, 1), axis=-1)
        return u("ReduceSum", hot, u.ints(0), keepdims=0)


@op("nonzero")
class Nonzero:
    """Indices [size, ndim] int64 of the first `size` nonzero entries, in row-major order, then rows of `fill`.

    The number of nonzero entries is known at run time only; `size` is fixed when the program is built.
    """

    arity, attrs = 1, {"size": ..., "fill": -1}
    vjp = None
    why = {
        "vjp": "indices are integers",
        "axes": "the order of its entries matters: the result's values are indices",
        "onnx": "the number of results would be a size known only at run time",
    }
    emit = "torch.nonzero_static({0}, size={size}, fill_value={fill})"

    @staticmethod
    def infer(x, size, fill):
        if size < 0 or any(isinstance(n, str) for n in x.shape):
            raise ShapeError(
                "nonzero needs size >= 0 and an operand of known shape", expected="size at least 0", got=f"{size}, {x}"
            )
        return Spec((size, len(x.shape)), int64)

    @staticmethod
    def sample(rng):
        attrs = {"size": int(rng.integers(0, 9)), "fill": int(rng.integers(-1, 3))}
        return [rng.integers(0, 2, (2, 4)) * rng.normal(size=(2, 4))], attrs


def _along(x: Spec, index: Spec, axis: int) -> int:
    """Normalise the axis. Raises: ShapeError unless `index` has the rank of x and fits all other axes."""
    at = axis_of(axis, len(x.shape))
    if index.dtype is not int64:
        raise DTypeError("index arrays must be int64", got=index, fix='index.to("int64")')
    fits = len(index.shape) == len(x.shape) and all(
        a == at or i == n or (isinstance(i, int) and isinstance(n, int) and i <= n)
        for a, (i, n) in enumerate(zip(index.shape, x.shape, strict=True))
    )
    if not fits:
        raise ShapeError(
            "the index exceeds the operand on another axis", where=f"axis {at} excepted", expected=x.shape, got=index
        )
    return at


@op("gather")
class Gather:
    """y[i, j] = x[index[i, j], j] for axis 0: entries by index along an axis; y has the shape of the index."""

    arity, attrs, saves, traits = 2, {"axis": ...}, Saves(inputs=(1,)), Traits(contiguous=(0, 1))
    emit = "{0}.gather({axis}, {1})"

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

    @staticmethod
    def axes(u: AxesUse):
        x, index = u.ins[:2]
        at = axis_of(u.attrs["axis"], len(x))
        if len(index) != len(x):
            for term in x:
                u.frozen(term, "reads it by number")
            return [index]
        indexed(u, x[at], 1)
        for i, (a, b) in enumerate(zip(x, index, strict=True)):
            if i != at and size(a) == size(b):
                u.same(a, b)
            elif i != at:
                for term in (a, b):
                    u.frozen(term, "reads its first places")
        return [index]

    @staticmethod
    def onnx(u: OnnxUse):
        return u("GatherElements", *u.names, axis=u.attrs["axis"])


@op("scatter_sum")
class ScatterSum(Backward):
    """gatherᵀ x: zeros of `shape` with each entry of x added at its index along an axis, in order."""

    arity, attrs, saves, traits = (
        2,
        {"axis": ..., "shape": ...},
        Saves(inputs=(1,)),
        Traits(backward_of="gather", contiguous=(0, 1)),
    )

    @staticmethod
    def infer(x, index, axis, shape):
        if x.shape != index.shape:
            raise ShapeError("operand and index must have equal shapes", expected=x, got=index)
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
        raise ShapeError("values and index must have equal shapes", expected=index, got=values)
    return x


@op("scatter")
class Scatter:
    """y[index[i, j], j] ← v[i, j] for axis 0, in order: x with values written by index along an axis.

    Of several values for one index the last is written; each of them gets the gradient of that entry, as in torch.
    """

    arity, attrs, saves, infer = 3, {"axis": ...}, Saves(inputs=(1,)), _written
    traits = Traits(contiguous=(0, 1, 2), inplace=((0, 0),), fixed=(1,), amp="promote")
    axes = _scatter_axes
    emit = "{0}.scatter({axis}, {1}, {2})"

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
        order = rng.permuted(np.indices((3, 4))[axis % 2], axis=axis)  # no index twice: that has no difference quotient
        index = order[: rng.integers(1, 4), : rng.integers(1, 5)]
        return [rng.normal(size=(3, 4)), index, rng.normal(size=index.shape)], {"axis": axis}

    @staticmethod
    def onnx(u: OnnxUse):
        return u("ScatterElements", *u.names, axis=u.attrs["axis"])


@op("scatter_add")
class ScatterAdd:
    """y[index[i, j], j] += v[i, j] for axis 0, in order: x with values added by index along an axis."""

    arity, attrs, saves, infer = 3, {"axis": ...}, Saves(inputs=(1,)), _written
    traits = Traits(contiguous=(0, 1, 2), inplace=((0, 0),), fixed=(1,), amp="promote")
    axes = _scatter_axes
    emit = "{0}.scatter_add({axis}, {1}, {2})"

    @staticmethod
    def vjp(g, ins, outs, attrs, needs):
        return g if needs[0] else None, None, call("gather", g, ins[1], **attrs) if needs[2] else None

    @staticmethod
    def sample(rng):
        (x, index), attrs = Gather.sample(rng)
        return [x, index, rng.normal(size=index.shape)], attrs

    @staticmethod
    def onnx(u: OnnxUse):
        return u("ScatterElements", *u.names, axis=u.attrs["axis"], reduction="add")
