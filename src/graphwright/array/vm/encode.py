"""From an op on arrays to rows of the machine's code, or None where only another kernel can do it.

The same function answers while planning, from layouts alone, and when a plan is bound, with addresses.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import prod
from struct import pack, unpack
from typing import Any, NamedTuple

from graphwright.array.dtype import DType, bfloat16, bool_, float32, int8, int64
from graphwright.array.layout import is_row_major
from graphwright.array.vm.code import CELLS, FEW, GROUP, PAST, SCRATCH, WORK, ZEROS, Code

Row = list[int]
Encoder = Callable[[Sequence["View"], Sequence["View"], Mapping[str, Any]], "list[Row] | None"]
MOST_ROWS = 64
"""Rows of code that axes may be unrolled to; beyond it another kernel is no slower."""


CACHED = 8 << 20
"""Bytes of a result from which on it goes past the caches: written and then read, it takes longer below, less above."""


class View(NamedTuple):
    """An operand: dtype, shape and strides in elements, and the address of its first element."""

    dtype: DType
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    address: int = 0

    @property
    def size(self) -> int:
        """Number of elements."""
        return prod(self.shape)

    @property
    def packed(self) -> bool:
        """True if the elements lie row by row."""
        return is_row_major(self.shape, self.strides)


ENCODERS: dict[str, Encoder] = {}


def encode(op: str, outs: Sequence[View], ins: Sequence[View], attrs: Mapping[str, Any]) -> list[Row] | None:
    """Rows that compute `outs` from `ins`; None if there are none for these layouts and dtypes."""
    encoder = ENCODERS.get(op)
    if encoder is None:
        return None
    return encoder(outs, ins, attrs)


def _encoder(*ops: str) -> Callable[[Encoder], Encoder]:
    def enter(function: Encoder) -> Encoder:
        ENCODERS.update(dict.fromkeys(ops, function))
        return function

    return enter


def _row(code: Code, *cells: int) -> Row:
    return [int(code), *cells] + [0] * (CELLS - 1 - len(cells))


def _bits(value: float) -> int:
    """A float64 as a cell."""
    return unpack("<q", pack("<d", value))[0]


def _all_f32(*views: View) -> bool:
    return all(view.dtype is float32 for view in views)


def copy_row(target: int, words: int) -> Row:
    """A copy of packed words of 4 bytes, whatever they stand for, whose source is filled in later."""
    return _row(Code.COPY, 1, words, target, 0, 1, target, 0, 1)


# -- elementwise -------------------------------------------------------------------------------------------------------
def merged(shape: Sequence[int], strides: Sequence[Sequence[int]]) -> list[tuple[int, tuple[int, ...]]]:
    """Axes (size, stride per operand) of which as many as possible are one; axes of size 1 are left out."""
    axes: list[tuple[int, tuple[int, ...]]] = []
    for n, *steps in zip(shape, *strides, strict=True):
        if n == 1:
            continue
        if axes and all(outer == inner * n for outer, inner in zip(axes[-1][1], steps, strict=True)):
            axes[-1] = (axes[-1][0] * n, tuple(steps))
        else:
            axes.append((n, tuple(steps)))
    return axes


def spread(view: View, shape: tuple[int, ...]) -> list[int]:
    """Strides of an operand that is broadcast to `shape`."""
    lead = len(shape) - len(view.shape)
    return [0] * lead + [0 if n == 1 else s for n, s in zip(view.shape, view.strides, strict=True)]


def places(axes: Sequence[tuple[int, tuple[int, ...]]], operands: int) -> list[list[int]]:
    """Element offsets per operand of every index of some axes."""
    places = [[0] * operands]
    for n, steps in axes:
        places = [[p + i * s for p, s in zip(place, steps, strict=True)] for place in places for i in range(n)]
    return places


def _elementwise(code: Code, out: View, ins: Sequence[View], *cells: int) -> list[Row] | None:
    """Rows of 1 or 2 axes each, further axes unrolled."""
    views = [out, *ins]
    if 0 in out.shape:
        return []
    axes = merged(out.shape, [spread(view, out.shape) for view in views])
    if not axes or axes[-1][1][0] != 1 or any(s not in (0, 1) for s in axes[-1][1]):
        axes.append((1, (0,) * len(views)))  # one column
    if prod(n for n, _ in axes[:-2]) > MOST_ROWS:
        return None
    cols, steps = axes[-1]
    count, jumps = axes[-2] if len(axes) > 1 else (1, (0,) * len(views))
    rows = []
    last = along(out, steps[0])
    for place in places(axes[:-2], len(views)):
        operands: list[int] = []
        for view, at, jump, step in zip(views, place, jumps, steps, strict=True):
            operands += [view.address + at * view.dtype.itemsize, jump * view.dtype.itemsize, step]
        operands[2] = last
        rows.append(_row(code, count, cols, *operands, *cells))
    return rows


def along(out: View, step: int) -> int:
    """The step of a result along a row: PAST where it is so large that the caches would not keep it."""
    return PAST if step == 1 and out.dtype is float32 and 4 * out.size > CACHED else step


_NAMES = ("copy", "neg", "abs", "sign", "floor", "exp", "log", "sqrt", "rsqrt", "reciprocal")
_UNARY = {op: Code[op.upper()] for op in (*_NAMES, "tanh", "sigmoid", "erf", "relu", "silu")}
_BINARY = {op: Code[op.upper()] for op in ("add", "sub", "mul", "div", "minimum", "maximum", "swiglu")}
_COMPARISONS = {op: Code[op.upper()] for op in ("eq", "lt", "le")}


def _pointwise(code: Code) -> Encoder:
    return lambda outs, ins, attrs: _elementwise(code, outs[0], ins) if _all_f32(*outs, *ins) else None


def _compared(code: Code) -> Encoder:
    return lambda outs, ins, attrs: (
        _elementwise(code, outs[0], ins) if _all_f32(*ins) and outs[0].dtype is bool_ else None
    )


ENCODERS.update({op: _pointwise(code) for op, code in {**_UNARY, **_BINARY}.items()})
ENCODERS.update({op: _compared(code) for op, code in _COMPARISONS.items()})


@_encoder("gelu")
def _gelu(outs: Sequence[View], ins: Sequence[View], attrs: Mapping[str, Any]) -> list[Row] | None:
    return _pointwise(Code.GELU_TANH if attrs["approximate"] == "tanh" else Code.GELU)(outs, ins, attrs)


@_encoder("where")
def _where(outs: Sequence[View], ins: Sequence[View], attrs: Mapping[str, Any]) -> list[Row] | None:
    fits = ins[0].dtype is bool_ and _all_f32(outs[0], *ins[1:])
    return _elementwise(Code.WHERE, outs[0], ins) if fits else None


@_encoder("full_like")
def _fill(outs: Sequence[View], ins: Sequence[View], attrs: Mapping[str, Any]) -> list[Row] | None:
    return _elementwise(Code.FILL, outs[0], [], _bits(float(attrs["value"]))) if _all_f32(outs[0]) else None


@_encoder("junction")
def _junction(outs: Sequence[View], ins: Sequence[View], attrs: Mapping[str, Any]) -> list[Row] | None:
    if not _all_f32(*outs, *ins) or not ins:
        return None
    if len(ins) == 1:
        return _elementwise(Code.COPY, outs[0], ins)
    rows = _elementwise(Code.ADD, outs[0], ins[:2])
    for other in ins[2:]:
        more = _elementwise(Code.ADD, outs[0], [outs[0], other])
        rows = None if rows is None or more is None else rows + more
    return rows


# -- reductions --------------------------------------------------------------------------------------------------------
def _reduction(
    out: View, x: View, axes: Any, rows_code: Code, columns_code: Code | None, *cells: int
) -> list[Row] | None:
    """Reductions over the last axes, or the first ones, or those between; `out` is packed."""
    if not _all_f32(out, x) or not out.packed or 0 in x.shape:
        return None
    gone = set(range(len(x.shape))) if axes is None else {a % len(x.shape) for a in axes}
    runs: list[tuple[bool, int, int]] = []  # reduced?, size, stride
    for axis, (n, s) in enumerate(zip(x.shape, x.strides, strict=True)):
        if n == 1:
            continue
        if runs and runs[-1][0] == (axis in gone) and runs[-1][2] == s * n:
            runs[-1] = (runs[-1][0], runs[-1][1] * n, s)
        else:
            runs.append((axis in gone, n, s))
    shape = tuple(reduced for reduced, _, _ in runs)
    if not any(shape):
        return _elementwise(Code.COPY, out, [x._replace(shape=out.shape, strides=_kept(x, gone, out))])
    if shape in ((True,), (False, True)) and runs[-1][2] == 1:
        count, jump = (1, 0) if len(runs) == 1 else (runs[0][1], 4 * runs[0][2])
        return [_row(rows_code, count, runs[-1][1], out.address, 4, 0, x.address, jump, 1, *cells)]
    if columns_code is None or shape not in ((True,), (True, False), (False, True, False)):
        return None
    if shape == (True,):
        runs.append((False, 1, 1))
    if runs[-1][2] != 1:
        return None
    outer, jump = (runs[0][1], runs[0][2]) if len(runs) == 3 else (1, 0)
    if outer > MOST_ROWS:
        return None
    (_, n, step), (_, cols, _) = runs[-2:]
    return [
        _row(
            columns_code, n, cols, out.address + 4 * i * cols, 0, 1, x.address + 4 * i * jump, 4 * step, 1, *cells
        )
        for i in range(outer)
    ]  # fmt: skip


def _kept(x: View, gone: set[int], out: View) -> tuple[int, ...]:
    """Strides of x for the shape of a result whose reduced axes had one entry each."""
    strides = [s for a, s in enumerate(x.strides) if a not in gone]
    return tuple(strides) if len(strides) == len(out.shape) else x.strides


@_encoder("sum")
def _sum(outs: Sequence[View], ins: Sequence[View], attrs: Mapping[str, Any]) -> list[Row] | None:
    return _reduction(outs[0], ins[0], attrs["axes"], Code.SUM_ROWS, Code.SUM_COLUMNS, _bits(1.0))


@_encoder("mean")
def _mean(outs: Sequence[View], ins: Sequence[View], attrs: Mapping[str, Any]) -> list[Row] | None:
    count = ins[0].size // max(outs[0].size, 1)
    return _reduction(outs[0], ins[0], attrs["axes"], Code.SUM_ROWS, Code.SUM_COLUMNS, _bits(float(count)))


@_encoder("amax")
def _amax(outs: Sequence[View], ins: Sequence[View], attrs: Mapping[str, Any]) -> list[Row] | None:
    return _reduction(outs[0], ins[0], attrs["axes"], Code.AMAX_ROWS, None)


# -- rows --------------------------------------------------------------------------------------------------------------
def _matrix(view: View) -> tuple[int, int, int] | None:
    """(rows, columns, elements from row to row) of [..., C] whose last axis is adjacent, or None."""
    if not view.shape or 0 in view.shape or (view.strides[-1] != 1 and view.shape[-1] != 1):
        return None
    lead = merged(view.shape[:-1], [view.strides[:-1]])
    if len(lead) > 1:
        return None
    return (lead[0][0], view.shape[-1], lead[0][1][0]) if lead else (1, view.shape[-1], 0)


@_encoder("softmax")
def _softmax(outs: Sequence[View], ins: Sequence[View], attrs: Mapping[str, Any]) -> list[Row] | None:
    grid = _matrix(ins[0])
    if grid is None or not _all_f32(*outs, *ins) or not outs[0].packed or attrs.get("axis", -1) not in (-1, None):
        return None
    rows, cols, jump = grid
    return [_row(Code.SOFTMAX, rows, cols, outs[0].address, 4 * cols, 1, ins[0].address, 4 * jump, 1)]


@_encoder("rms_norm")
def _rms_norm(outs: Sequence[View], ins: Sequence[View], attrs: Mapping[str, Any]) -> list[Row] | None:
    grid = _matrix(ins[0])
    plain = len(ins) == 2 and not attrs["unit_offset"]
    if grid is None or not plain or not _all_f32(*outs, *ins) or not (outs[0].packed and ins[1].packed):
        return None
    rows, cols, jump = grid
    cells = (ins[1].address, 0, _bits(attrs["eps"]))
    head = (rows, cols, outs[0].address, 4 * cols, along(outs[0], 1))
    return [_row(Code.RMS_NORM, *head, ins[0].address, 4 * jump, 1, *cells)]


@_encoder("cross_entropy", "cross_entropy_backward")
def _cross_entropy(outs: Sequence[View], ins: Sequence[View], attrs: Mapping[str, Any]) -> list[Row] | None:
    scores, targets, *rest = ins
    grid = _matrix(scores)
    fits = _all_f32(scores, *outs) and targets.dtype is int64 and targets.packed and outs[0].packed
    if grid is None or not fits or attrs["smoothing"]:
        return None
    rows, cols, jump = grid
    head = (scores.address, 4 * jump, targets.address)
    if len(outs) == 2 and not rest and outs[1].packed:
        tail = (outs[1].address, attrs["ignore_index"])
        return [_row(Code.CROSS_ENTROPY, rows, cols, outs[0].address, 0, 0, *head, *tail)]
    if len(rest) != 2 or not _all_f32(*rest) or not rest[0].packed:
        return None
    grads = merged(rest[1].shape, [rest[1].strides])
    if len(grads) > 1:
        return None
    tail = (rest[0].address, attrs["ignore_index"], rest[1].address, 4 * grads[0][1][0] if grads else 0)
    result = (outs[0].address, 4 * cols, along(outs[0], 1))
    return [_row(Code.CROSS_ENTROPY_BACKWARD, rows, cols, *result, *head, *tail)]


# -- products ----------------------------------------------------------------------------------------------------------
def _product(a: View, b: View, out: View, init: int = 0) -> Row:
    """Code for out[m, n] = init + a[m, k] · b[k, n], all of two axes; columns of `out` are adjacent."""
    (m, k), n = a.shape, b.shape[1]
    steps = [4 * s for view in (a, b) for s in view.strides]
    if b.shape[0] == 1:  # a stride along an axis of one entry says nothing
        steps[2] = 4 * max(n, 1)
    if n == 1:
        steps[3] = 4
    return _row(
        Code.PRODUCT, a.address, *steps[:2], b.address, *steps[2:], out.address, 4 * n, m, n, k, init, 0
    )  # fmt: skip


@_encoder("linear")
def _linear(outs: Sequence[View], ins: Sequence[View], attrs: Mapping[str, Any]) -> list[Row] | None:
    x, w, *bias = ins
    if not _all_f32(*outs, x, *bias) or not outs[0].packed or 0 in outs[0].shape:
        return None
    lead = merged(x.shape[:-1], [x.strides[:-1]])
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
    return [_product(a, b, outs[0], bias[0].address if bias else 0)]


SHORT = 32
"""Terms up to which a product of 3 or 4 rows takes less time than as many dot products."""
_FEW_ROWS = {float32: Code.ROWS_F32, bfloat16: Code.ROWS_BF16}
_MANY_ROWS = {bfloat16: Code.PANELS_BF16}


def _few(m: int, w: View) -> bool:
    """Whether m rows are so few that reading the weights is what takes time, and fit the scratch in their order."""
    return m <= FEW and m * -(-w.shape[-1] // GROUP) * WORK.get(w.dtype.itemsize, 0) <= SCRATCH - ZEROS


def _by_rows(code: Code, x: View, w: View, out: View, bias: Sequence[View], scales: int = 0) -> Row:
    """Code for a product with weights as they are stored."""
    (m, k), n = x.shape, w.shape[0]
    init = bias[0].address if bias else 0
    return _row(code, w.address, n, k, init, x.address, 4 * x.strides[0], out.address, 4 * n, m, scales)


@_encoder("linear_int8")
def _linear_int8(outs: Sequence[View], ins: Sequence[View], attrs: Mapping[str, Any]) -> list[Row] | None:
    x, w, scales, *bias = ins
    fits = _all_f32(*outs, x, scales, *bias) and w.dtype is int8 and attrs["group"] == GROUP
    if not fits or not all(view.packed for view in (outs[0], w, scales, *bias)):
        return None
    grid = _matrix(x)
    if grid is None or 0 in outs[0].shape:
        return None
    m, k, step = grid
    a = x._replace(shape=(m, k), strides=(step, 1))
    return [_by_rows(Code.ROWS_I8 if _few(m, w) else Code.PANELS_I8, a, w, outs[0], bias, scales.address)]


@_encoder("matmul")
def _matmul(outs: Sequence[View], ins: Sequence[View], attrs: Mapping[str, Any]) -> list[Row] | None:
    a, b = ins
    out = outs[0]
    if not _all_f32(*outs, *ins) or not out.packed or 0 in out.shape:
        return None
    if len(a.shape) == 1:
        a = a._replace(shape=(1, *a.shape), strides=(0, *a.strides))
    if len(b.shape) == 1:
        b = b._replace(shape=(*b.shape, 1), strides=(*b.strides, 1))
    m, n = a.shape[-2], b.shape[-1]
    if len(b.shape) == 2 and len(a.shape) > 2:
        lead = merged(a.shape[:-1], [a.strides[:-1]])
        if len(lead) <= 1:
            rows, step = (lead[0][0], lead[0][1][0]) if lead else (1, 0)
            a = a._replace(shape=(rows, a.shape[-1]), strides=(step, a.strides[-1]))
            return [_product(a, b, out)]
    batch = out.shape[: len(out.shape) - (len(ins[0].shape) > 1) - (len(ins[1].shape) > 1)]
    if prod(batch) > MOST_ROWS:
        return None
    strides = [spread(v._replace(shape=v.shape[:-2], strides=v.strides[:-2]), batch) for v in (a, b)]
    axes = [(size, steps) for size, *steps in zip(batch, *strides, strict=True)]
    rows = []
    for i, (at_a, at_b) in enumerate(places([(size, tuple(steps)) for size, steps in axes], 2)):
        one, other = (
            v._replace(shape=v.shape[-2:], strides=v.strides[-2:], address=v.address + 4 * at)
            for v, at in ((a, at_a), (b, at_b))
        )
        rows.append(_product(one, other, out._replace(address=out.address + 4 * i * m * n)))
    return rows


# -- attention ---------------------------------------------------------------------------------------------------------
@_encoder("sdpa", "sdpa_backward")
def _sdpa(outs: Sequence[View], ins: Sequence[View], attrs: Mapping[str, Any]) -> list[Row] | None:
    given = len(attrs["optional"])
    q, k, v, *rest = ins
    extra, rest = dict(zip(attrs["optional"], rest[:given], strict=True)), rest[given:]
    operands = [q, k, v, *outs] if not rest else [q, k, v, *rest, *outs]
    if not _all_f32(*operands) or any(o.strides[-1] != 1 and o.shape[-1] != 1 for o in operands) or q.size == 0:
        return None
    if 0 in k.shape or any(not view.packed for view in extra.values()):
        return None
    places = [extra[name].address if name in extra else 0 for name in ("q_start", "key_mask")]
    plain = not rest and attrs["causal"] and "key_mask" not in extra and v.shape[3]
    if plain and q.shape[2] == 1 and q.packed and outs[0].packed:
        start = (places[0], k.shape[2] - 1)
        return _attend(q, k.address, v.address, outs[0], k.shape[1], start, attrs, (*_steps(k), *_steps(v), k.shape[2]))
    (batch, heads, queries, deep), (groups, keys) = q.shape, k.shape[1:3]
    units = batch * (groups if rest else heads)
    code = Code.ATTEND_BACKWARD if rest else Code.ATTEND
    sizes = (heads, groups, queries, keys, deep, v.shape[3], _bits(attrs["scale"]))
    head = _row(code, 0, units, *sizes, places[0], int(attrs["causal"]), attrs["window"] or 0, places[1])
    table = [cell for o in operands for cell in (o.address, *(4 * s for s in o.strides[:3]))]
    return [head, *(table[i : i + CELLS] for i in range(0, len(table), CELLS))]


@_encoder("kv_append")
def _kv_append(outs: Sequence[View], ins: Sequence[View], attrs: Mapping[str, Any]) -> list[Row] | None:
    cache, rows, start = ins
    out = outs[0]
    if not _all_f32(out, cache, rows) or not out.packed or 0 in rows.shape or rows.strides[3] != 1:
        return None
    head = (out.address, rows.address, start.address, *rows.shape)
    row = _row(Code.KV_APPEND, *head, *_steps(out), *_steps(rows), out.shape[2])
    before = _elementwise(Code.COPY, out, [cache]) if out.address != cache.address else []
    return None if before is None else [*before, row]


@_encoder("kv_append_paged")
def _kv_append_paged(outs: Sequence[View], ins: Sequence[View], attrs: Mapping[str, Any]) -> list[Row] | None:
    pool, rows, table, lengths = ins
    out = outs[0]
    if not _all_f32(out, pool, rows) or not (out.packed and table.packed and lengths.packed) or 0 in rows.shape:
        return None
    if rows.strides[3] != 1:
        return None
    head = (out.address, rows.address, table.address, lengths.address, *rows.shape)
    row = _row(Code.KV_SCATTER, *head, out.shape[2], table.shape[1], out.shape[0], *_steps(rows))
    before = _elementwise(Code.COPY, out, [pool]) if out.address != pool.address else []
    return None if before is None else [*before, row]


@_encoder("sdpa_paged")
def _sdpa_paged(outs: Sequence[View], ins: Sequence[View], attrs: Mapping[str, Any]) -> list[Row] | None:
    q, k, v, table, lengths = ins
    packed = all(view.packed for view in (q, outs[0], table, lengths))
    if not packed or not _all_f32(*outs, q, k, v) or 0 in (*q.shape, *k.shape, v.shape[3]):
        return None
    if k.strides[3] != 1 or v.strides[3] != 1:
        return None
    steps = [4 * s for t in (k, v) for s in (0, *t.strides[1:3])]
    block, most = k.shape[2], table.shape[1]
    more = (*steps, block * most, table.address, 4 * most, block, 4 * k.strides[0], 4 * v.strides[0])
    return _attend(q, k.address, v.address, outs[0], k.shape[1], (lengths.address, 0), attrs, more)


def _steps(cache: View) -> list[int]:
    return [4 * s for s in cache.strides[:3]]


def _attend(
    q: View, k: int, v: int, out: View, groups: int, start: tuple[int, int], attrs: Mapping[str, Any],
    more: Sequence[int],
) -> list[Row]:  # fmt: skip
    """Code for attention query by query; `more` is what the second row begins with."""
    batch, heads, queries, width = q.shape
    head = (q.address, k, v, out.address, heads, groups, queries, width, out.shape[3])
    tail = (*start, attrs["window"] or 0, _bits(float(attrs["scale"])))
    second = [*more, *[0] * (12 - len(more)), _bits(float(attrs.get("softcap") or 0.0)), 0, 0, 0]
    return [_row(Code.ATTEND_CACHED, 0, batch * heads, *head, *tail), second]


# -- moves -------------------------------------------------------------------------------------------------------------
@_encoder("copy")
def _copy(outs: Sequence[View], ins: Sequence[View], attrs: Mapping[str, Any]) -> list[Row] | None:
    """As elementwise, else up to four axes."""
    out, x = outs[0], ins[0]
    if not _all_f32(out, x):
        return None
    axes = merged(out.shape, [out.strides, spread(x, out.shape)])
    if len(axes) < 3 or len(axes) > 4 or 0 in out.shape or axes[-1][1] != (1, 1):
        return _elementwise(Code.COPY, out, ins)
    (a, b, c, (cols, last)) = [(1, (0, 0))] * (4 - len(axes)) + axes
    sizes = (a[0], b[0], c[0], cols)
    target, source = ((view.address, *(4 * axis[1][k] for axis in (a, b, c))) for k, view in enumerate((out, x)))
    return [_row(Code.COPY_AXES, *sizes, *target, *source, 4 * last[1])]


@_encoder("embedding")
def _embedding(outs: Sequence[View], ins: Sequence[View], attrs: Mapping[str, Any]) -> list[Row] | None:
    table, ids = ins
    if not _all_f32(outs[0], table) or ids.dtype is not int64 or not (outs[0].packed and ids.packed):
        return None
    if table.strides[1] != 1 and table.shape[1] != 1:
        return None
    rows, cols = table.shape
    head = (ids.size, cols, outs[0].address, 4 * cols, 0, table.address, 4 * table.strides[0])
    return [_row(Code.GATHER_ROWS, *head, ids.address, rows)]


@_encoder("embedding_backward")
def _embedding_backward(outs: Sequence[View], ins: Sequence[View], attrs: Mapping[str, Any]) -> list[Row] | None:
    grad, ids = ins
    if not _all_f32(outs[0], grad) or ids.dtype is not int64 or not all(v.packed for v in (outs[0], grad, ids)):
        return None
    rows, cols = outs[0].shape
    return [_row(Code.ADD_ROWS, ids.size, cols, outs[0].address, 4 * cols, rows, grad.address, 4 * cols, ids.address)]


@_encoder("rope")
def _rope(outs: Sequence[View], ins: Sequence[View], attrs: Mapping[str, Any]) -> list[Row] | None:
    x, cos, sin = ins
    if not _all_f32(*outs, *ins) or not all(v.packed for v in (outs[0], cos, sin)) or 0 in x.shape:
        return None
    if attrs["style"] != "half" or (x.strides[3] != 1 and x.shape[3] != 1):
        return None
    (batch, heads, positions, size), half = x.shape, cos.shape[2]
    each = 0 if cos.shape[0] == 1 else 4 * positions * half
    place = (x.address, *(4 * x.strides[axis] for axis in (0, 2, 1)))
    tail = (outs[0].address, cos.address, sin.address, each, 4 * heads * positions * size)
    return [_row(Code.ROPE, batch, positions, heads, size, half, *place, *tail)]


# -- updates -----------------------------------------------------------------------------------------------------------
@_encoder("adamw_step")
def _adamw(outs: Sequence[View], ins: Sequence[View], attrs: Mapping[str, Any]) -> list[Row] | None:
    """One row of code, and half a row per parameter."""
    lr, found, *members = ins
    if attrs["amsgrad"] or attrs["maximize"] or not _all_f32(*outs, *members):
        return None
    if not all(view.packed for view in (*outs, *members)):
        return None
    n = len(outs) // 4
    rows: list[Row] = []
    for out, before in zip(outs, members[n:], strict=True):
        if out.address != before.address:
            rows += _elementwise(Code.COPY, out, [before]) or []
    numbers = [_bits(attrs[name]) for name in ("beta1", "beta2", "eps", "weight_decay")]
    rows.append(_row(Code.ADAMW, n, lr.address, found.address, *numbers))
    table: list[int] = []
    for k in range(n):
        param, m, v, steps = (outs[k + c * n].address for c in range(4))
        table += [outs[k].size, param, members[k].address, m, v, steps, 0, 0]
    table += [0] * (-len(table) % CELLS)
    return rows + [table[i : i + CELLS] for i in range(0, len(table), CELLS)]
