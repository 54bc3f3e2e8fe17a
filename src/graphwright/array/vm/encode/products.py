"""Encoding of matrix products for the VM, with float32, bfloat16 and int8 weights."""

from __future__ import annotations

from math import prod

from graphwright.array.dtype import bfloat16, float32, int8
from graphwright.array.vm.code import FEW, GROUP, STRIPS, WORK, ZEROS, Code
from graphwright.array.vm.encode import operands as vm


def _product(a: vm.View, b: vm.View, out: vm.View, init: int = 0) -> vm.Row | None:
    """Encode out[m, n] = a[m, k]·b[k, n] + init[n]; `init` is an address, or 0 for no term, and `out` is row-major.

    Return None if a repeats one column.
    """
    (m, k), n = a.shape, b.shape[1]
    if a.strides[1] == 0:  # the loop takes a step of 0 along k for strips; one entry of k has any step
        if k > 1:
            return None
        a = a._replace(strides=(a.strides[0], 1))
    steps = [4 * s for view in (a, b) for s in view.strides]
    if b.shape[0] == 1:  # the stride of an axis of size 1 is meaningless
        steps[2] = 4 * max(n, 1)
    if n == 1:
        steps[3] = 4
    sizes = (out.address, 4 * n, m, n, k, init, 0)
    return vm.row_of(Code.PRODUCT, a.address, *steps[:2], b.address, *steps[2:], *sizes)


def _rows(*rows: vm.Row | None) -> vm.Rows:
    """Return rows of code, or None if one of them cannot be encoded."""
    return None if any(row is None for row in rows) else [row for row in rows if row is not None]


@vm.form()
def LINEAR(outs: vm.Views, ins: vm.Views, attrs: vm.Attrs) -> vm.Rows:
    x, w, *bias = ins
    if not vm.all_f32(*outs, x, *bias) or not outs[0].packed or 0 in outs[0].shape:
        return None
    lead = vm.merged(x.shape[:-1], [x.strides[:-1]])
    if len(lead) > 1 or any(not b.packed for b in bias):
        return None
    m, step = (lead[0][0], lead[0][1][0]) if lead else (1, 0)
    a = x._replace(shape=(m, x.shape[-1]), strides=(step, x.strides[-1]))
    few = _FEW_ROWS if _few(m, w) else _MANY_ROWS
    tiny = w.dtype is float32 and m > 2 and w.shape[0] > 1 and w.shape[1] <= SHORT
    if w.dtype in few and not tiny and w.packed and (a.strides[1] == 1 or a.shape[1] == 1):
        return [_by_rows(few[w.dtype], a, w, outs[0], bias)]
    if w.dtype is not float32:
        return None
    b = w._replace(shape=w.shape[::-1], strides=w.strides[::-1])
    return _rows(_product(a, b, outs[0], bias[0].address if bias else 0))


SHORT = 32
"""The largest k for which a product of 3 or 4 rows is faster than as many dot products."""
_FEW_ROWS = {float32: Code.ROWS_F32, bfloat16: Code.ROWS_BF16}
_MANY_ROWS = {bfloat16: Code.PANELS_BF16}


def _few(m: int, w: vm.View) -> bool:
    """Return True if x has so few rows (m) that reading the weights takes longest, and x fits the scratch."""
    return m <= FEW and m * -(-w.shape[-1] // GROUP) * WORK.get(w.dtype.itemsize, 0) <= STRIPS - ZEROS


def _by_rows(code: Code, x: vm.View, w: vm.View, out: vm.View, bias: vm.Views, scales: int = 0) -> vm.Row:
    """Encode a product with weights w stored as [out, in]; `scales`: the address of the scales of int8 weights."""
    (m, k), n = x.shape, w.shape[0]
    init = bias[0].address if bias else 0
    return vm.row_of(code, w.address, n, k, init, x.address, 4 * x.strides[0], out.address, 4 * n, m, scales)


@vm.form()
def LINEAR_INT8(outs: vm.Views, ins: vm.Views, attrs: vm.Attrs) -> vm.Rows:
    x, w, scales, *bias = ins
    fits = vm.all_f32(*outs, x, scales, *bias) and w.dtype is int8 and attrs["group"] == GROUP
    if not fits or not all(view.packed for view in (outs[0], w, scales, *bias)):
        return None
    grid = vm.matrix(x)
    if grid is None or 0 in outs[0].shape:
        return None
    m, k, step = grid
    a = x._replace(shape=(m, k), strides=(step, 1))
    return [_by_rows(Code.ROWS_I8 if _few(m, w) else Code.PANELS_I8, a, w, outs[0], bias, scales.address)]


@vm.form()
def MATMUL(outs: vm.Views, ins: vm.Views, attrs: vm.Attrs) -> vm.Rows:
    a, b = ins
    out = outs[0]
    if not vm.all_f32(*outs, *ins) or not out.packed or 0 in out.shape:
        return None
    if len(a.shape) == 1:
        a = a._replace(shape=(1, *a.shape), strides=(0, *a.strides))
    if len(b.shape) == 1:
        b = b._replace(shape=(*b.shape, 1), strides=(*b.strides, 1))
    m, n = a.shape[-2], b.shape[-1]
    if len(b.shape) == 2 and len(a.shape) > 2:
        lead = vm.merged(a.shape[:-1], [a.strides[:-1]])
        if len(lead) <= 1:
            rows, step = (lead[0][0], lead[0][1][0]) if lead else (1, 0)
            a = a._replace(shape=(rows, a.shape[-1]), strides=(step, a.strides[-1]))
            return _rows(_product(a, b, out))
    batch = out.shape[: len(out.shape) - (len(ins[0].shape) > 1) - (len(ins[1].shape) > 1)]
    if prod(batch) > vm.MOST_ROWS:
        return None
    strides = [vm.spread(v._replace(shape=v.shape[:-2], strides=v.strides[:-2]), batch) for v in (a, b)]
    axes = [(size, steps) for size, *steps in zip(batch, *strides, strict=True)]
    rows = []
    for i, (at_a, at_b) in enumerate(vm.offsets([(size, tuple(steps)) for size, steps in axes], 2)):
        one, other = (
            v._replace(shape=v.shape[-2:], strides=v.strides[-2:], address=v.address + 4 * at)
            for v, at in ((a, at_a), (b, at_b))
        )
        rows.append(_product(one, other, out._replace(address=out.address + 4 * i * m * n)))
    return _rows(*rows)
