"""Lookups of table rows by id, and reads and writes at index arrays as in numpy's advanced indexing."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any, NamedTuple

import numpy as np

from graphwright.array.dtype import int64
from graphwright.array.spec import Dim, Spec, broadcast_shapes
from graphwright.array.vm.encode import rows as forms
from graphwright.errors import DTypeError, ShapeError
from graphwright.ops.attributes import Attr, Dimension, Shape, StaticSize
from graphwright.ops.axes import Atom, AxesUse, Dims, Term, axis_of, broadcast_dims, indexed, size
from graphwright.ops.call import call
from graphwright.ops.emit import TorchModule
from graphwright.ops.onnx import OnnxUse, numpy_dtype
from graphwright.ops.registry import Cost, Row, Saves, Traits, op
from graphwright.ops.rules import Backward, one_dtype


def _ids(ids: Spec) -> None:
    if ids.dtype.kind != "int":
        raise DTypeError("the ids are not integers", expected="int64", got=ids)


def _counted(u: AxesUse, attr: str) -> Term:
    axis = Atom(u.attrs[attr])
    indexed(u, axis, 0)
    u.sizes[attr] = axis
    return axis


@op("embedding")
class Embedding(Row):
    """table[ids]: rows of a table [V, D] for ids of any shape, [..., D]; gradients of repeated ids add up."""

    arity, saves, traits = 2, Saves(inputs=(1,)), Traits(lookup=True, matrix=0, contiguous=(1,))
    emit, vm = "F.embedding({1}, {0})", forms.EMBEDDING
    torch_module = TorchModule("nn.Embedding", lambda ins, a: ins[0].shape, {0: "weight"})
    vjp = lambda g, ins, outs, attrs, needs: (call("embedding_backward", g, ins[1], rows=ins[0].shape[0]),)
    expand = lambda ins, attrs: call("index", *ins, axis=0)
    cost = lambda ins, outs, attrs: Cost(0, outs[0].nbytes + ins[1].nbytes, outs[0].nbytes)
    sample = lambda rng: ([rng.normal(size=(5, 3)), rng.integers(0, 5, (2, 4))], {})
    onnx = lambda u: u("Gather", *u.names, axis=0)

    def infer(table, ids):
        _ids(ids)
        if len(table.shape) != 2:
            raise ShapeError("the table is not a matrix", expected="[V, D]", got=table)
        return Spec((*ids.shape, table.shape[1]), table.dtype)

    def axes(u: AxesUse):
        table, ids = u.ins
        indexed(u, table[0], 1)
        if u.stored[0]:
            u.kind(table[0], "vocabulary")
            u.kind(table[1], "channels")
        return [(*ids, table[1])]


@op("embedding_backward")
class EmbeddingBackward(Backward):
    """Gradient of `embedding` w.r.t. its table [rows, D]: row k sums the rows of g [..., D] with id k, in order."""

    arity, attrs, saves, vm = 2, {"rows": Attr(Dimension)}, Saves(inputs=(1,)), forms.EMBEDDING_BACKWARD
    traits = Traits(backward_of="embedding", contiguous=(0, 1))
    vjp = lambda g, ins, outs, attrs, needs: (call("embedding", g, ins[1]),)
    sample = lambda rng: ([rng.normal(size=(2, 4, 3)), rng.integers(0, 5, (2, 4))], {"rows": 5})

    def infer(g, ids, rows):
        _ids(ids)
        return Spec((rows, g.shape[-1]), g.dtype)


AXES = 8
"""The most index arrays of one op."""


def _picked(shape: Sequence[Any], ids: Sequence[Spec], axis: int) -> tuple[Any, ...]:
    """Check the index arrays i, j, ... and return the shape of x[..., i, j, ...], in which i is at axis `axis` of x."""
    start = axis_of(axis, len(shape))
    end = start + len(ids)
    if end > len(shape):
        expected = f"at most {len(shape) - start} from axis {axis} of {tuple(shape)}"
        raise ShapeError("there are more index arrays than axes", expected=expected, got=len(ids))
    if any(i.dtype is not int64 for i in ids):
        got = ", ".join(map(repr, ids))
        raise DTypeError("an index array is not int64", expected="int64", got=got, fix='index.to("int64")')
    return (*shape[:start], *broadcast_shapes(*(i.shape for i in ids)), *shape[end:])


def _sample_ids(rng: Any, *, distinct: bool = False) -> tuple[tuple[int, ...], tuple[int, ...], list, dict[str, int]]:
    """Draw the shape of x, that of the selected entries, one or two index arrays, {"axis": the first indexed axis}."""
    shape, count = (2, 3, 4), int(rng.integers(1, 3))
    axis = int(rng.integers(0, 4 - count))
    sizes = shape[axis : axis + count]
    if distinct:
        ids = list(np.unravel_index(rng.permutation(prod(sizes))[:2], sizes))
    else:
        ids = [rng.integers(-n, n, (3, 1) if k else (2,)) for k, n in enumerate(sizes)]
    picked = _picked(shape, [Spec(i.shape, int64) for i in ids], axis)
    return shape, picked, ids, {"axis": axis - 3 if rng.random() < 0.5 else axis}


@op("index")
class Index(Row):
    """x[..., i, j, ...]: entries selected by index arrays, one for each axis from `axis` on; the arrays broadcast.

    Negative indices count from the end; an index out of range raises.
    """

    arity, attrs, saves = (2, 1 + AXES), {"axis": Attr(int, 0)}, Saves(inputs=tuple(range(1, 1 + AXES)))
    traits = Traits(linear_in=(0,), mixes="axis", contiguous=(0,))
    infer = lambda x, *ids, axis: Spec(_picked(x.shape, ids, axis), x.dtype)
    vjp = lambda g, ins, outs, attrs, needs: (call("index_sum", g, *ins[1:], **attrs, shape=ins[0].shape),)

    def onnx(u: OnnxUse):
        x, *ids = u.names
        if len(ids) == 1:
            return u("Gather", x, ids[0], axis=u.attrs["axis"])
        tuples = _IndexTuples.of(u, ids, u.ins[1:])
        found = u("GatherND", tuples.first(u, x), tuples.indices)
        order = range(tuples.start), range(tuples.end, len(u.ins[0].shape))
        before, after = ([tuples.rank + a - (len(ids) if a >= tuples.end else 0) for a in axes] for axes in order)
        return u("Transpose", found, perm=[*before, *range(tuples.rank), *after])

    def sample(rng):
        shape, _, ids, attrs = _sample_ids(rng)
        return [rng.normal(size=shape), *ids], attrs

    def axes(u: AxesUse):
        x, *ids = u.ins
        start = axis_of(u.attrs["axis"], len(x))
        end, shape = start + len(ids), u.shapes[0]
        u.result_ranges[0] = u.ranges[0]
        for port, axis in enumerate(x[start:end], 1):
            if len(ids) == 1 and len(ids[0]) == 1 and any(u.tables[1:]):
                u.lookups.append((axis, port))
            else:
                indexed(u, axis, port)
        return [(*x[:start], *broadcast_dims(u, ids, shape[start : len(shape) - len(x) + end]), *x[end:])]

    def emit(i, a):
        axis, ids = a["axis"], list(i[1:])
        index = [":"] * axis + ids if axis >= 0 else ["...", *ids, *[":"] * (-axis - len(ids))]
        return f"{i[0]}[{', '.join(index)}]"


@op("index_sum")
class IndexSum(Backward):
    """Gradient of `index` w.r.t. x: zeros of `shape`, to which each entry of g is added at its index, in order."""

    arity, attrs, saves = Index.arity, {"axis": Attr(int, 0), "shape": Attr(Shape)}, Index.saves
    traits = Traits(contiguous=(0,), backward_of="index")
    vjp = lambda g, ins, outs, attrs, needs: (call("index", g, *ins[1:], axis=attrs["axis"]),)

    def infer(g, *ids, axis, shape):
        picked = _picked(shape, ids, axis)
        if g.shape != picked:
            raise ShapeError("the gradient does not have one entry per index", expected=picked, got=g)
        return Spec(tuple(shape), g.dtype)

    def sample(rng):
        shape, picked, ids, attrs = _sample_ids(rng)
        return [rng.normal(size=picked), *ids], {**attrs, "shape": shape}


_IN_PLACE = "torch writes at an index in a statement of its own"


class _IndexTuples(NamedTuple):
    """Index arrays of a use of an op as the last axis of one operand of GatherND or ScatterND.

    Attributes:
        indices: name of the int64 tensor [..., arrays].
        rank: how many axes the arrays have together.
        start, end: the indexed axes of x.
    """

    indices: str
    rank: int
    start: int
    end: int

    @classmethod
    def of(cls, u: OnnxUse, names: Sequence[str], specs: Sequence[Spec]) -> _IndexTuples:
        """Add the nodes that join index arrays."""
        shape, start = broadcast_shapes(*(i.shape for i in specs)), u.axis(u.attrs["axis"])
        same = (n if i.shape == shape else u("Expand", n, u.shape(shape)) for n, i in zip(names, specs, strict=True))
        indices = u("Concat", *(u("Unsqueeze", name, u.ints(-1)) for name in same), axis=-1)
        return cls(indices, len(shape), start, start + len(names))

    def order(self, rank: int) -> list[int]:
        """Return the axes of x with the indexed ones first."""
        return [*range(self.start, self.end), *range(self.start), *range(self.end, rank)]

    def first(self, u: OnnxUse, x: str) -> str:
        """Return x with the indexed axes first."""
        return u("Transpose", x, perm=self.order(len(u.ins[0].shape))) if self.start else x

    def written(self, u: OnnxUse, x: str, values: str, reduction: str = "none") -> str:
        """Return x after values, which broadcast, are written at the indices or added there."""
        picked = _picked(u.ins[0].shape, u.ins[-(self.end - self.start) :], self.start)
        whole, moved = u("Expand", values, u.shape(picked)), self.start + self.rank
        if self.start:
            order = [*range(self.start, moved), *range(self.start), *range(moved, len(picked))]
            whole = u("Transpose", whole, perm=order)
        made = u("ScatterND", self.first(u, x), self.indices, whole, reduction=reduction)
        back = np.argsort(self.order(len(u.ins[0].shape))).tolist()
        return u("Transpose", made, perm=back) if self.start else made


class _IndexWrite(Row):
    def axes(u: AxesUse) -> Sequence[Dims]:
        x, *ids = u.ins
        start = axis_of(u.attrs["axis"], len(x))
        values: Dims = ids.pop(0) if "value" not in u.attrs else ()
        for port, axis in enumerate(x[start : start + len(ids)], len(u.ins) - len(ids)):
            indexed(u, axis, port)
        for term in (t for dims in ids for t in dims):
            u.mixed(term, "writes by index, in order")
        if values:  # they have the dimensions of the index
            rest = (*x[:start], *broadcast_dims(u, ids, _joined(ids)), *x[start + len(ids) :])
            broadcast_dims(u, (rest, values), [size(t) for t in rest])
        return [x]


def _joined(ids: Sequence[Dims]) -> list[Dim]:
    rank = max(map(len, ids))
    here = [[size(d[-back]) for d in ids if len(d) >= back] for back in range(rank, 0, -1)]
    return [next((n for n in sizes if n != 1), 1) for sizes in here]


class _IndexUpdate(_IndexWrite):
    """An op with operands x, values (which broadcast) and one index array for each axis from `axis` on."""

    arity, attrs, saves = (3, 2 + AXES), {"axis": Attr(int, 0)}, Saves(inputs=tuple(range(2, 2 + AXES)))
    traits = Traits(contiguous=(0, 1), inplace=((0, 0),), fixed=tuple(range(2, 2 + AXES)), amp="promote")

    def infer(x: Spec, values: Spec, *ids: Spec, axis: int) -> Spec:
        one_dtype(x, values)
        picked = _picked(x.shape, ids, axis)
        if broadcast_shapes(picked, values.shape) != picked:
            raise ShapeError("the values do not broadcast to the indexed shape", expected=picked, got=values)
        return x


def _update_sample(rng: np.random.Generator, distinct: bool) -> tuple[list[Any], dict[str, Any]]:
    shape, picked, ids, attrs = _sample_ids(rng, distinct=distinct)
    return [rng.normal(size=shape), rng.normal(size=picked[int(rng.integers(0, 2)) :]), *ids], attrs


@op("index_put")
class IndexPut(_IndexUpdate):
    """x[i, j, ...] ← v: operands x, values, then one index array for each axis from `axis` on; values broadcast.

    Of several values for the same index the last is written, or any of them in ONNX; as in torch, each of them gets the
    entry's gradient.
    """

    emit = lambda i, a: f"index_put({i[0]}, {i[1]}, {a['axis']}, {', '.join(i[2:])})"
    onnx = lambda u: _IndexTuples.of(u, u.names[2:], u.ins[2:]).written(u, *u.names[:2])
    sample = lambda rng: _update_sample(rng, distinct=True)

    def vjp(g, ins, outs, attrs, needs):
        dx = call("index_fill", g, *ins[2:], **attrs, value=0.0) if needs[0] else None
        return dx, call("index", g, *ins[2:], **attrs) if needs[1] else None


@op("index_add")
class IndexAdd(_IndexUpdate):
    """x[i, j, ...] += v, in order: operands x, v (which broadcasts), then one index array per axis from `axis` on."""

    why = {"emit": _IN_PLACE}
    onnx = lambda u: _IndexTuples.of(u, u.names[2:], u.ins[2:]).written(u, *u.names[:2], reduction="add")
    sample = lambda rng: _update_sample(rng, distinct=False)
    vjp = lambda g, ins, outs, attrs, needs: (g, call("index", g, *ins[2:], **attrs) if needs[1] else None)


@op("index_fill")
class IndexFill(_IndexWrite):
    """x[i, j, ...] ← value, with one index array for each axis from `axis` on."""

    arity, attrs, saves = Index.arity, {"axis": Attr(int, 0), "value": Attr(bool | int | float)}, Index.saves
    why = {"emit": _IN_PLACE}
    onnx = lambda u: _IndexTuples.of(u, u.names[1:], u.ins[1:]).written(u, u.names[0], u.scalar(u.attrs["value"]))
    traits = Traits(contiguous=(0,), inplace=((0, 0),))
    vjp = lambda g, ins, outs, attrs, needs: (call("index_fill", g, *ins[1:], axis=attrs["axis"], value=0.0),)

    def infer(x, *ids, axis, value):
        _picked(x.shape, ids, axis)
        return x

    def sample(rng):
        operands, attrs = Index.sample(rng)
        return operands, {**attrs, "value": -1.5}


@op("one_hot")
class OneHot(Row):
    """1 if k = id else 0, for k along a new last axis of size `classes`, int64. An id out of range raises."""

    arity, attrs, traits = 1, {"classes": Attr(StaticSize)}, Traits(contiguous=(0,))
    emit = "F.one_hot({0}, {classes})"
    vjp, why = None, {"vjp": "ids are integers"}
    sample = lambda rng: ([rng.integers(0, 4, (2, 3))], {"classes": 4})
    axes = lambda u: [(*u.ins[0], _counted(u, "classes"))]

    def infer(ids, classes):
        _ids(ids)
        return Spec((*ids.shape, classes), int64)

    def onnx(u: OnnxUse):
        values = u.nodes.constant(np.array([0, 1], numpy_dtype(u.outs[0].dtype)))
        return u("OneHot", u.names[0], u.ints_scalar(u.attrs["classes"]), values, axis=-1)


@op("bincount")
class Bincount(Row):
    """Σ [id = k] for k = 0, ..., length - 1: how often each id occurs, int64. An id out of range raises."""

    arity, attrs, traits, vjp = 1, {"length": Attr(StaticSize)}, Traits(contiguous=(0,)), None
    why, emit = {"vjp": "ids are integers"}, "torch.bincount({0}.flatten(), minlength={length})"
    sample = lambda rng: ([rng.integers(0, 4, (2, 5))], {"length": 6})

    def infer(ids, length):
        _ids(ids)
        return Spec((length,), int64)

    def axes(u: AxesUse):
        for term in u.ins[0]:
            u.mixed(term, "counts over it")
        return [(_counted(u, "length"),)]

    def onnx(u: OnnxUse):
        flat = u("Reshape", u.names[0], u.ints(-1))
        hot = u("OneHot", flat, u.ints_scalar(u.attrs["length"]), u.ints(0, 1), axis=-1)
        return u("ReduceSum", hot, u.ints(0), keepdims=0)


@op("nonzero")
class Nonzero(Row):
    """Indices [size, ndim] int64 of the first `size` nonzero entries, in row-major order, then rows of `fill`.

    The number of nonzero entries is known at run time only; `size` is fixed when the program is built.
    """

    arity, attrs, vjp = 1, {"size": Attr(StaticSize), "fill": Attr(int, -1)}, None
    why = {
        "vjp": "indices are integers",
        "axes": "the order of its entries matters: the result's values are indices",
        "onnx": "the number of results would be a size known only at run time",
    }
    emit = "torch.nonzero_static({0}, size={size}, fill_value={fill})"

    def infer(x, size, fill):
        if any(isinstance(n, str) for n in x.shape):
            raise ShapeError("the operand of nonzero has a named size", expected="static sizes", got=x)
        return Spec((size, len(x.shape)), int64)

    def sample(rng):
        attrs = {"size": int(rng.integers(0, 9)), "fill": int(rng.integers(-1, 3))}
        return [rng.integers(0, 2, (2, 4)) * rng.normal(size=(2, 4))], attrs


def _along(x: Spec, index: Spec, axis: int) -> None:
    """Check that `index` is int64, has the rank of x, and on every axis but `axis` is no longer than x.

    Raises: DTypeError, ShapeError.
    """
    at = axis_of(axis, len(x.shape))
    if index.dtype is not int64:
        raise DTypeError("the index is not int64", expected="int64", got=index, fix='index.to("int64")')
    if len(index.shape) != len(x.shape):
        raise ShapeError("index and operand have different ranks", expected=f"rank {len(x.shape)}", got=index)
    if not all(
        a == at or i == n or (isinstance(i, int) and isinstance(n, int) and i <= n)
        for a, (i, n) in enumerate(zip(index.shape, x.shape, strict=True))
    ):
        raise ShapeError(f"the index is too large on an axis other than {at}", expected=f"at most {x.shape}", got=index)


@op("gather")
class Gather(Row):
    """y[i, j] = x[index[i, j], j] for axis 0: entries selected by index along an axis; y has the shape of the index."""

    arity, attrs, saves, traits = 2, {"axis": Attr(int)}, Saves(inputs=(1,)), Traits(contiguous=(0, 1))
    emit = "{0}.gather({axis}, {1})"
    vjp = lambda g, ins, outs, attrs, needs: (call("scatter_sum", g, ins[1], **attrs, shape=ins[0].shape),)
    onnx = lambda u: u("GatherElements", *u.names, axis=u.attrs["axis"])

    def infer(x, index, axis):
        _along(x, index, axis)
        return Spec(index.shape, x.dtype)

    def sample(rng):
        axis = int(rng.integers(-3, 3))
        shape = [2, 3, 4]
        shape[axis] = 5
        for a in {0, 1, 2} - {axis % 3}:
            shape[a] -= int(rng.integers(0, 2))
        return [rng.normal(size=(2, 3, 4)), rng.integers(0, (2, 3, 4)[axis], shape)], {"axis": axis}

    def axes(u: AxesUse):
        x, index = u.ins[:2]
        at = axis_of(u.attrs["axis"], len(x))
        u.result_ranges[0] = u.ranges[0]
        if len(index) != len(x):
            for term in x:
                u.frozen(term, "reads it by index")
            return [index]
        indexed(u, x[at], 1)
        for i, (a, b) in enumerate(zip(x, index, strict=True)):
            if i != at and size(a) == size(b):
                u.same(a, b)
            elif i != at:
                for term in (a, b):
                    u.frozen(term, "reads its first entries")
        return [index]


@op("scatter_sum")
class ScatterSum(Backward):
    """Transpose of `gather`: zeros of `shape`, to which entries of x are added at indices along an axis, in order."""

    arity, attrs, saves = 2, {"axis": Attr(int), "shape": Attr(Shape)}, Saves(inputs=(1,))
    traits = Traits(backward_of="gather", contiguous=(0, 1))
    vjp = lambda g, ins, outs, attrs, needs: (call("gather", g, ins[1], axis=attrs["axis"]),)

    def infer(x, index, axis, shape):
        if x.shape != index.shape:
            raise ShapeError("operand and index have different shapes", expected=x.shape, got=index)
        _along(Spec(tuple(shape), x.dtype), index, axis)
        return Spec(tuple(shape), x.dtype)

    def sample(rng):
        (x, index), attrs = Gather.sample(rng)
        return [rng.normal(size=index.shape), index], {**attrs, "shape": x.shape}


class _Scatter(Row):
    """An op with operands x, index and values; it changes entries of x, selected by index along an axis, in order."""

    arity, attrs, saves = 3, {"axis": Attr(int)}, Saves(inputs=(1,))
    traits = Traits(contiguous=(0, 1, 2), inplace=((0, 0),), fixed=(1,), amp="promote")

    def infer(x: Spec, index: Spec, values: Spec, axis: int) -> Spec:
        one_dtype(x, values)
        _along(x, index, axis)
        if values.shape != index.shape:
            raise ShapeError("values and index have different shapes", expected=index.shape, got=values)
        return x

    def axes(u: AxesUse) -> Sequence[Dims]:
        """Freeze the indexed axis; unify each other axis of x and the index if their sizes match, else freeze both."""
        x, index, values = u.ins
        at = axis_of(u.attrs["axis"], len(x))
        u.frozen(x[at], "writes it by index")
        for a, b in zip(index, values, strict=True):
            u.same(a, b)
        for i, (a, b) in enumerate(zip(x, index, strict=False)):
            if len(index) == len(x) and i != at and size(a) == size(b):
                u.same(a, b)
            else:
                for term in (a, b):
                    u.frozen(term, "writes by index, in order")
        return [x]


@op("scatter")
class Scatter(_Scatter):
    """y[index[i, j], j] ← v[i, j] for axis 0, in order: x with values written by index along an axis.

    Of several values for the same index the last is written, or any of them in ONNX; as in torch, each of them gets the
    entry's gradient.
    """

    emit = "{0}.scatter({axis}, {1}, {2})"
    onnx = lambda u: u("ScatterElements", *u.names, axis=u.attrs["axis"])

    def vjp(g, ins, outs, attrs, needs):
        index, dx = ins[1], None
        if needs[0]:
            zero = call("cast", call("full_like", index, value=0), dtype=g.dtype)
            dx = call("scatter", g, index, zero, **attrs)
        return dx, None, call("gather", g, index, **attrs) if needs[2] else None

    def sample(rng):
        axis = int(rng.integers(-2, 2))
        order = rng.permuted(np.indices((3, 4))[axis % 2], axis=axis)  # no index twice: that has no difference quotient
        index = order[: rng.integers(1, 4), : rng.integers(1, 5)]
        return [rng.normal(size=(3, 4)), index, rng.normal(size=index.shape)], {"axis": axis}


@op("scatter_add")
class ScatterAdd(_Scatter):
    """y[index[i, j], j] += v[i, j] for axis 0, in order: x with values added by index along an axis."""

    emit = "{0}.scatter_add({axis}, {1}, {2})"
    vjp = lambda g, ins, outs, attrs, needs: (g, None, call("gather", g, ins[1], **attrs) if needs[2] else None)
    onnx = lambda u: u("ScatterElements", *u.names, axis=u.attrs["axis"], reduction="add")

    def sample(rng):
        (x, index), attrs = Gather.sample(rng)
        return [x, index, rng.normal(size=index.shape)], attrs
