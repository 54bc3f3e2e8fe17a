"""Encoding of elementwise ops and of reductions for the VM."""

from __future__ import annotations

from typing import Any

from graphwright.array.dtype import bfloat16, bool_, float32, int64
from graphwright.array.vm.code import Code
from graphwright.array.vm.encode import operands as vm
from graphwright.array.vm.encode.fuse import Member, encode_group, f32


def pointwise(code: Code) -> vm.VmForm:
    """Make the `VmForm` of an op that is one float32 instruction; bfloat16 operands are widened tile by tile."""
    return vm.VmForm(_encoder(code), code=code)


def _encoder(code: Code) -> vm.Encoder:
    def encode(outs: vm.Views, ins: vm.Views, attrs: vm.Attrs) -> vm.Rows:
        if vm.all_f32(*outs, *ins):
            return vm.elementwise(code, outs[0], ins)
        dtypes = [view.dtype for view in (*outs, *ins)]
        narrow = all(dtype in (float32, bfloat16) for dtype in dtypes)
        return encode_group(outs[0].shape, [Member(f32(code), outs, ins, attrs, dtypes)]) if narrow else None

    return encode


def compared(code: Code, *, swapped: bool = False) -> vm.VmForm:
    """Make the `VmForm` of a float32 comparison by opcode `code`, with its two operands exchanged if `swapped`."""

    def encode(outs: vm.Views, ins: vm.Views, attrs: vm.Attrs) -> vm.Rows:
        fits = vm.all_f32(*ins) and outs[0].dtype is bool_
        return vm.elementwise(code, outs[0], ins[::-1] if swapped else ins) if fits else None

    return vm.VmForm(encode)


def _add(outs: vm.Views, ins: vm.Views, attrs: vm.Attrs) -> vm.Rows:
    """Encode an addition of floats, or of at most 64 int64, such as counters and keys of random generators."""
    if all(view.dtype is int64 for view in (*outs, *ins)):
        return vm.elementwise(Code.ADD_I64, outs[0], ins) if outs[0].size <= vm.MOST_ROWS else None
    return _encoder(Code.ADD)(outs, ins, attrs)


ADD = vm.VmForm(_add, code=Code.ADD)


GELU = vm.VmForm(
    lambda o, i, a: _encoder(Code.GELU_TANH if a["approximate"] == "tanh" else Code.GELU)(o, i, a), limit=1 << 17
)
SIZE = vm.VmForm(lambda o, i, a: [vm.row_of(Code.PUT_I64, o[0].address, i[0].shape[a["axis"]])])
FULL_LIKE = vm.VmForm(
    lambda o, i, a: vm.elementwise(Code.FILL, o[0], [], vm.bits(float(a["value"]))) if vm.all_f32(o[0]) else None
)


@vm.form()
def WHERE(outs: vm.Views, ins: vm.Views, attrs: vm.Attrs) -> vm.Rows:
    fits = ins[0].dtype is bool_ and vm.all_f32(outs[0], *ins[1:])
    return vm.elementwise(Code.WHERE, outs[0], ins) if fits else None


@vm.form()
def JUNCTION(outs: vm.Views, ins: vm.Views, attrs: vm.Attrs) -> vm.Rows:
    if len(ins) < 3:
        return _encoder(Code.ADD if len(ins) == 2 else Code.COPY)(outs, ins, attrs) if ins else None
    if not vm.all_f32(*outs, *ins):
        return None
    pairs = [ins[:2], *([outs[0], other] for other in ins[2:])]
    parts = [vm.elementwise(Code.ADD, outs[0], pair) for pair in pairs]
    return None if None in parts else [row for part in parts for row in part or ()]


# -- reductions --------------------------------------------------------------------------------------------------------
def _reduction(out: vm.View, x: vm.View, axes: Any, rows_code: Code, columns_code: Code | None, *cells: int) -> vm.Rows:
    """Encode a reduction over leading, middle or trailing axes (None: all), or return None if layouts prevent it.

    `rows_code` reduces the rows of a matrix, `columns_code` its columns (None: unsupported); `cells`: further words.
    """
    if not vm.all_f32(out, x) or not out.packed or 0 in x.shape:
        return None
    gone = set(range(len(x.shape))) if axes is None else {a % max(len(x.shape), 1) for a in axes}
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
        return vm.elementwise(Code.COPY, out, [x._replace(shape=out.shape, strides=_remaining_strides(x, gone, out))])
    if shape in ((True,), (False, True)) and runs[-1][2] == 1:
        count, jump = (1, 0) if len(runs) == 1 else (runs[0][1], 4 * runs[0][2])
        return [vm.row_of(rows_code, count, runs[-1][1], out.address, 4, 0, x.address, jump, 1, *cells)]
    if columns_code is None or shape not in ((True,), (True, False), (False, True, False)):
        return None
    if shape == (True,):
        runs.append((False, 1, 1))
    if runs[-1][2] != 1:
        return None
    outer, jump = (runs[0][1], runs[0][2]) if len(runs) == 3 else (1, 0)
    if outer > vm.MOST_ROWS:
        return None
    (_, n, step), (_, cols, _) = runs[-2:]
    ends = [(out.address + 4 * i * cols, 0, 1, x.address + 4 * i * jump) for i in range(outer)]
    return [vm.row_of(columns_code, n, cols, *end, 4 * step, 1, *cells) for end in ends]


def _remaining_strides(x: vm.View, gone: set[int], out: vm.View) -> tuple[int, ...]:
    """Return the strides of x along the axes of `out`; if `out` lacks the reduced axes `gone`, theirs are left out."""
    strides = [s for a, s in enumerate(x.strides) if a not in gone]
    return tuple(strides) if len(strides) == len(out.shape) else x.strides


def _reduced(rows_code: Code, columns_code: Code | None = None, *, mean: bool = False) -> vm.VmForm:
    def encode(outs: vm.Views, ins: vm.Views, attrs: vm.Attrs) -> vm.Rows:
        count = ins[0].size // max(outs[0].size, 1) if mean else 1
        cells = () if columns_code is None else (vm.bits(float(count)),)
        return _reduction(outs[0], ins[0], attrs["axes"], rows_code, columns_code, *cells)

    return vm.VmForm(encode, limit=1 << 24)


SUM = _reduced(Code.SUM_ROWS, Code.SUM_COLUMNS)
MEAN = _reduced(Code.SUM_ROWS, Code.SUM_COLUMNS, mean=True)
AMAX = _reduced(Code.AMAX_ROWS)
