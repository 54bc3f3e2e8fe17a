"""Matrix products: numpy's matmul, `linear` with weights [out, in] in floats or int8, grouped matrix products."""

from __future__ import annotations

import numpy as np

from graphwright.array.dtype import int8, int64
from graphwright.array.spec import Spec, broadcast_shapes
from graphwright.array.vm.encode import products as forms
from graphwright.errors import DTypeError, ShapeError
from graphwright.ops.attributes import Attr
from graphwright.ops.axes import Atom, AxesUse, broadcast_dims, chain, size
from graphwright.ops.call import call
from graphwright.ops.emit import TorchModule
from graphwright.ops.onnx import OnnxUse
from graphwright.ops.registry import Cost, Row, Saves, Traits, op
from graphwright.ops.rules import Backward, equal_dim, floating, one_dtype, wanted


def transposed(t):
    """Transpose the last two axes."""
    rank = len(t.shape)
    return call("permute", t, axes=(*range(rank - 2), rank - 1, rank - 2))


def _rows(t):
    """Flatten [..., K] to [N, K]."""
    return t if len(t.shape) == 2 else call("flatten", t, start=0, end=len(t.shape) - 2)


def _column_sums(g):
    return call("sum", g, axes=tuple(range(len(g.shape) - 1)), keepdims=False)


class _Product(Row):
    traits = Traits(amp="low")

    def cost(ins, outs, attrs):
        return Cost(2 * outs[0].size * ins[0].shape[-1], sum(i.nbytes for i in ins), outs[0].nbytes)


@op("matmul")
class Matmul(_Product):
    """a · b for ranks ≥ 1, leading axes broadcast; dA = g·bᵀ, dB = aᵀ·g, summed over broadcast axes."""

    arity, saves, traits = 2, Saves(inputs=(0, 1)), Traits(contracts="in_out", linear_in=(0, 1))
    onnx, emit, vm = "MatMul", "{0} @ {1}", forms.MATMUL

    def infer(a, b):
        if one_dtype(a, b).dtype.kind not in ("int", "uint"):
            floating(a)
        if not a.shape or not b.shape:
            raise ShapeError("matmul got a scalar operand", expected="ranks of at least 1")
        equal_dim(a.shape[-1], b.shape[-2 if len(b.shape) > 1 else 0], "contraction")
        batch = broadcast_shapes(a.shape[:-2], b.shape[:-2])
        rows = a.shape[-2:-1] if len(a.shape) > 1 else ()
        columns = b.shape[-1:] if len(b.shape) > 1 else ()
        return Spec((*batch, *rows, *columns), a.dtype)

    def vjp(g, ins, outs, attrs, needs):
        a, b = ins
        if len(a.shape) == 1 and len(b.shape) == 1:
            return g * b if needs[0] else None, g * a if needs[1] else None
        row, column = len(a.shape) == 1, len(b.shape) == 1
        a2 = call("reshape", a, shape=(1, *a.shape)) if row and needs[1] else a
        b2 = call("reshape", b, shape=(*b.shape, 1)) if column and needs[0] else b
        g2 = call("reshape", g, shape=(*g.shape[:-1], 1, g.shape[-1])) if row else g
        g2 = call("reshape", g2, shape=(*g2.shape, 1)) if column else g2
        da = db = None
        if needs[0]:
            da = call("matmul", g2, transposed(b2))
            if row:
                da = call("reshape", da, shape=(*da.shape[:-2], da.shape[-1]))
        if needs[1]:
            if len(b2.shape) == 2 and len(a2.shape) > 2:  # one product over all rows, no batch of partial sums
                db = call("matmul", transposed(_rows(a2)), _rows(g2))
            else:
                db = call("matmul", transposed(a2), g2)
            if column:
                db = call("reshape", db, shape=db.shape[:-1])
        return da, db

    def sample(rng):
        left = [(2, 3, 4), (3, 4), (2, 1, 3, 4), (4,), (2, 3, 4), (4,), (2, 3, 4), (4,)]
        right = [(2, 4, 5), (4, 2), (3, 4, 2), (4, 3), (4,), (4,), (4, 5), (2, 4, 3)]
        n = rng.integers(8)
        return [rng.normal(size=left[n]), rng.normal(size=right[n])], {}

    def axes(u: AxesUse):
        a, b = u.ins
        u.same(a[-1], b[-2:][0])
        u.summed(a[-1], (0, -1), (1, -2 if len(b) > 1 else 0))
        u.kind(a[-1], "neurons")
        rows, columns, shape = a[-2:-1] if len(a) > 1 else (), b[-1:] if len(b) > 1 else (), u.shapes[0]
        lead = broadcast_dims(u, (a[:-2], b[:-2]), shape[: len(shape) - len(rows) - len(columns)])
        for t in lead:
            shared = all(any(size(d) == size(t) for d in dims[:-2]) for dims in (a, b))
            if shared and isinstance(size(t), int):
                u.kind(t, "experts" if any(u.stored) else "heads")
        return [(*lead, *rows, *columns)]


@op("linear")
class Linear(_Product):
    """x · wᵀ (+ b): x [..., in], w [out, in], b [out]."""

    arity, saves, emit, vm = (2, 3), Saves(inputs=(0, 1)), "F.linear({all})", forms.LINEAR
    traits = Traits(contracts="out_in", matrix=1, linear_in=(0,), addend=2)
    narrow = lambda ins, attrs: (1,)
    torch_module = TorchModule(
        "nn.Linear", lambda ins, a: (*ins[1].shape[::-1], len(ins) > 2), {1: "weight", 2: "bias"}
    )

    def infer(x, w, b=None):
        floating(one_dtype(x, w, b))
        if not x.shape or len(w.shape) != 2:
            raise ShapeError("invalid operands of linear", expected="x [..., in] and w [out, in]", got=f"{x}, {w}")
        equal_dim(w.shape[1], x.shape[-1], "in")
        if b is not None and b.shape != w.shape[:1]:
            raise ShapeError("the bias does not have one entry per output", expected=w.shape[:1], got=b)
        return Spec((*x.shape[:-1], w.shape[0]), x.dtype)

    def vjp(g, ins, outs, attrs, needs):
        x, w = ins[:2]
        dx = call("matmul", g, w) if needs[0] else None
        if len(x.shape) == 1:
            dw = call("reshape", g, shape=(*g.shape, 1)) * x if needs[1] else None
        else:
            dw = call("matmul", transposed(_rows(g)), _rows(x)) if needs[1] else None
        return (dx, dw) if len(ins) == 2 else (dx, dw, _column_sums(g) if needs[2] else None)

    def expand(ins, attrs):
        y = call("matmul", ins[0], transposed(ins[1]))
        return y + ins[2] if len(ins) > 2 else y

    def sample(rng):
        x = rng.normal(size=[(2, 3, 4), (5, 4), (4,)][rng.integers(3)])
        return [x, rng.normal(size=(3, 4)), rng.normal(size=(3,))][: rng.integers(2, 4)], {}

    def axes(u: AxesUse):
        x, w = u.ins[:2]
        u.same(x[-1], w[1])
        u.summed(w[1], (0, -1), (1, 1))
        u.kind(w[1], "neurons")
        if len(u.ins) > 2:
            u.same(w[0], u.ins[2][0])
        return [(*x[:-1], w[0])]

    def onnx(u: OnnxUse):
        y = u("MatMul", u.names[0], u("Transpose", u.names[1], perm=[1, 0]))
        return u("Add", y, u.names[2]) if len(u.names) > 2 else y


def _dequantised(q, scales, group):
    """Return float weights [out, in] from integers q and scales, one scale for each `group` entries of a row."""
    wide = call("repeat_interleave", scales, repeats=group, axis=1)
    return call("cast", q, dtype=scales.dtype) * call("slice", wide, axis=1, start=0, size=q.shape[1])


@op("linear_int8")
class LinearInt8(_Product):
    """x · wᵀ (+ b) with w = q · scale: x [..., in], q int8 [out, in], scales [out, ⌈in / group⌉], b [out].

    A row of q has one scale for each `group` entries; the last group may be shorter. The result is `linear` of x and w.
    """

    arity, attrs, vm = (3, 4), {"group": Attr(int, 64)}, forms.LINEAR_INT8
    saves, traits = Saves(inputs=(0, 1, 2)), Traits(fixed=(1,), contiguous=(1, 2))
    why = {
        "onnx": "exported weights are floating: dequantise before the export",
        "emit": "exported weights are floating: dequantise before the export, or quantise the exported files",
    }
    expand = lambda ins, attrs: call("linear", ins[0], _dequantised(ins[1], ins[2], attrs["group"]), *ins[3:])

    def infer(x, q, scales, b=None, *, group):
        floating(one_dtype(x, scales, b))
        if q.dtype is not int8:
            raise DTypeError("the quantised weights are not int8", expected="int8", got=q)
        if not x.shape or len(q.shape) != 2 or group < 1:
            expected = "x [..., in], q [out, in] and group >= 1"
            raise ShapeError("invalid operands of linear_int8", expected=expected, got=f"{x}, {q}, group {group}")
        equal_dim(q.shape[1], x.shape[-1], "in")
        want = (q.shape[0], -(-q.shape[1] // group))
        if scales.shape != want:
            raise ShapeError("the scales do not have one entry per row and group", expected=want, got=scales)
        if b is not None and b.shape != q.shape[:1]:
            raise ShapeError("the bias does not have one entry per output", expected=q.shape[:1], got=b)
        return Spec((*x.shape[:-1], q.shape[0]), x.dtype)

    def vjp(g, ins, outs, attrs, needs):
        x, q, scales = ins[:3]

        def of_scales():  # the gradient of every entry of w times q, summed over groups
            rows = [t if len(t.shape) > 1 else call("reshape", t, shape=(1, *t.shape)) for t in (g, x)]
            dq = call("matmul", transposed(_rows(rows[0])), _rows(rows[1])) * call("cast", q, dtype=scales.dtype)
            sizes = (scales.shape[1], attrs["group"])
            whole = call("pad_slice", dq, axis=1, start=0, size=sizes[0] * sizes[1])
            return call("sum", call("unflatten", whole, axis=1, sizes=sizes), axes=(2,), keepdims=False)

        dx = lambda: call("matmul", g, _dequantised(q, scales, attrs["group"]))
        return wanted(needs, dx, lambda: None, of_scales, lambda: _column_sums(g))

    def sample(rng):
        x = rng.normal(size=[(2, 3, 7), (5, 7), (7,)][rng.integers(3)])
        q = rng.integers(-127, 128, (3, 7)).astype(np.int8)
        group = (4, 64)[rng.integers(2)]
        return [x, q, rng.random((3, -(-7 // group))), rng.normal(size=(3,))][: rng.integers(3, 5)], {"group": group}

    def axes(u: AxesUse):
        x, q, scales, *bias = u.ins
        u.same(x[-1], q[1])
        u.kind(q[1], "neurons")
        for term in (q[1], scales[1]):
            u.frozen(term, "has a scale for each group along it")
        for other in (scales, *bias):
            u.same(q[0], other[0])
        return [(*x[:-1], q[0])]


def _check(x: Spec, other: Spec, offsets: Spec) -> None:
    floating(one_dtype(x, other))
    if len(x.shape) != 2 or offsets.dtype is not int64 or len(offsets.shape) != 1:
        expected = "x [N, d] and int64 offsets [E + 1]"
        raise ShapeError("invalid operands of a grouped matrix product", expected=expected, got=f"{x}, {offsets}")


def _draw(rng):
    """Draw the offsets of three groups of rows, at most seven rows in all; a group may be empty."""
    return np.array([0, *np.sort(rng.integers(0, 8, 3))])


@op("grouped_matmul")
class GroupedMatmul(_Product):
    """x[offsets[e] : offsets[e + 1]] · w[e] for each group e of rows: x [N, d], w [E, d, f] -> [N, f].

    Offsets [E + 1] start at 0 and never decrease, to at most N. A group may be empty; rows after the last group give 0.
    dx = g·wᵀ with the same groups; dw is `grouped_outer`.
    """

    arity, saves = 3, Saves(inputs=(0, 1, 2))
    traits = Traits(fixed=(2,), contiguous=(0, 1), linear_in=(0, 1))
    why = {"onnx": "opset 20 has no grouped matrix product"}
    emit = "grouped_matmul({0}, {1}, {2})"
    sample = lambda rng: ([rng.normal(size=(7, 3)), rng.normal(size=(3, 3, 2)), _draw(rng)], {})

    def infer(x, w, offsets):
        _check(x, w, offsets)
        if len(w.shape) != 3 or offsets.shape != (w.shape[0] + 1,):
            expected = "w [E, d, f] and offsets [E + 1]"
            raise ShapeError("invalid operands of grouped_matmul", expected=expected, got=f"{w}, {offsets}")
        equal_dim(w.shape[1], x.shape[1], "d")
        return Spec((x.shape[0], w.shape[2]), x.dtype)

    def vjp(g, ins, outs, attrs, needs):
        x, w, offsets = ins
        dx = lambda: call("grouped_matmul", g, transposed(w), offsets)
        return wanted(needs, dx, lambda: call("grouped_outer", x, g, offsets))

    def axes(u: AxesUse):
        x, w, offsets = u.ins
        u.same(x[1], w[1])
        u.summed(w[1], (0, 1), (1, 1))
        u.kind(w[1], "neurons")
        u.same(offsets[0], chain(Atom(1), w[0]))
        for term in (x[0], w[0]):
            u.mixed(term, "multiplies it in groups of rows")
        u.kind(w[0], "experts")
        return [(x[0], w[2])]


@op("grouped_outer")
class GroupedOuter(Backward):
    """xᵀ·y for each group e of rows offsets[e] : offsets[e + 1] of x [N, d] and y [N, f]: [E, d, f]; 0 if empty."""

    arity, saves = 3, Saves(inputs=(0, 1, 2))
    traits = Traits(backward_of="grouped_matmul", amp="low", fixed=(2,), contiguous=(0, 1))
    cost = lambda ins, outs, attrs: Cost(2 * ins[0].size * ins[1].shape[1], sum(i.nbytes for i in ins), outs[0].nbytes)
    sample = lambda rng: ([rng.normal(size=(7, 3)), rng.normal(size=(7, 2)), _draw(rng)], {})

    def infer(x, y, offsets):
        _check(x, y, offsets)
        if len(y.shape) != 2:
            raise ShapeError("the operand y is not a matrix", expected="[N, f]", got=y)
        equal_dim(y.shape[0], x.shape[0], "N")
        return Spec((offsets.sizes[0] - 1, x.shape[1], y.shape[1]), x.dtype)

    def vjp(g, ins, outs, attrs, needs):
        x, y, offsets = ins
        dx = lambda: call("grouped_matmul", y, transposed(g), offsets)
        return wanted(needs, dx, lambda: call("grouped_matmul", x, g, offsets))


@op("solve")
class Solve(Row):
    """X with A · X = B: A [n, n], B [n, k]; dB = A⁻ᵀ g, dA = -dB Xᵀ. A singular A gives infinities or NaN."""

    arity, saves, traits = 2, Saves(inputs=(0,), outputs=(0,)), Traits(amp="f32")
    emit, why = "torch.linalg.solve({0}, {1})", {"onnx": "opset 20 has no linear solve: bake the form first"}

    def infer(a, b):
        floating(one_dtype(a, b))
        if len(a.shape) != 2 or len(b.shape) != 2 or not a.shape[0] == a.shape[1] == b.shape[0]:
            raise ShapeError("invalid operands of solve", expected="A [n, n] and B [n, k]", got=f"{a}, {b}")
        return Spec(b.shape, b.dtype)

    def vjp(g, ins, outs, attrs, needs):
        back = call("solve", transposed(ins[0]), g)
        da = call("neg", call("matmul", back, transposed(outs[0]))) if needs[0] else None
        return da, back if needs[1] else None

    def cost(ins, outs, attrs):
        n, k = outs[0].shape
        return Cost(2 * n * n * n // 3 + 2 * n * n * k, sum(i.nbytes for i in ins), outs[0].nbytes)

    def sample(rng):
        n, k = (int(i) for i in rng.integers(1, 5, 2))
        return [rng.normal(size=(n, n)) + 4 * np.eye(n), rng.normal(size=(n, k))], {}

    def axes(u: AxesUse):
        a, b = u.ins
        for term in (*a, b[0]):
            u.frozen(term, "solves a linear system along it")
        return [(a[1], b[1])]
