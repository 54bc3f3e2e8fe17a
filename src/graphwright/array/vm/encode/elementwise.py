"""VM forms of elementwise ops and of reductions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from graphwright.array.dtype import bfloat16, bool_, float32, int64
from graphwright.array.vm.code import Code
from graphwright.array.vm.encode.fuse import Member, encode_group, f32
from graphwright.array.vm.encode.operands import (
    MOST_ROWS,
    Encoder,
    Row,
    View,
    VmForm,
    all_f32,
    bits,
    elementwise,
    row_of,
    vm_form,
)


def pointwise(code: Code) -> VmForm:
    """The form of an op that is one instruction on float32, with bfloat16 operands widened tile by tile."""
    return VmForm(_encoder(code), code=code)


def _encoder(code: Code) -> Encoder:
    def encode(outs: Sequence[View], ins: Sequence[View], attrs: Mapping[str, Any]) -> list[Row] | None:
        if all_f32(*outs, *ins):
            return elementwise(code, outs[0], ins)
        dtypes = [view.dtype for view in (*outs, *ins)]
        narrow = all(dtype in (float32, bfloat16) for dtype in dtypes)
        return encode_group(outs[0].shape, [Member(f32(code), outs, ins, attrs, dtypes)]) if narrow else None

    return encode


def compared(code: Code, *, swapped: bool = False) -> VmForm:
    """The form of a comparison of float32; swapped if the instruction compares the second operand with the first."""
    return VmForm(
        lambda outs, ins, attrs: (
            elementwise(code, outs[0], ins[::-1] if swapped else ins)
            if all_f32(*ins) and outs[0].dtype is bool_
            else None
        )
    )


def _add(outs: Sequence[View], ins: Sequence[View], attrs: Mapping[str, Any]) -> list[Row] | None:
    """Add floats; or a few int64, such as counters and keys of generators."""
    if all(view.dtype is int64 for view in (*outs, *ins)):
        return elementwise(Code.ADD_I64, outs[0], ins) if outs[0].size <= MOST_ROWS else None
    return _encoder(Code.ADD)(outs, ins, attrs)


ADD = VmForm(_add, code=Code.ADD)


@vm_form(limit=1 << 17)
def GELU(outs: Sequence[View], ins: Sequence[View], attrs: Mapping[str, Any]) -> list[Row] | None:
    return _encoder(Code.GELU_TANH if attrs["approximate"] == "tanh" else Code.GELU)(outs, ins, attrs)


@vm_form()
def WHERE(outs: Sequence[View], ins: Sequence[View], attrs: Mapping[str, Any]) -> list[Row] | None:
    fits = ins[0].dtype is bool_ and all_f32(outs[0], *ins[1:])
    return elementwise(Code.WHERE, outs[0], ins) if fits else None


@vm_form()
def FULL_LIKE(outs: Sequence[View], ins: Sequence[View], attrs: Mapping[str, Any]) -> list[Row] | None:
    return elementwise(Code.FILL, outs[0], [], bits(float(attrs["value"]))) if all_f32(outs[0]) else None


@vm_form()
def SIZE(outs: Sequence[View], ins: Sequence[View], attrs: Mapping[str, Any]) -> list[Row] | None:
    return [row_of(Code.PUT_I64, outs[0].address, ins[0].shape[attrs["axis"]])]


@vm_form()
def JUNCTION(outs: Sequence[View], ins: Sequence[View], attrs: Mapping[str, Any]) -> list[Row] | None:
    if len(ins) < 3:
        return _encoder(Code.ADD if len(ins) == 2 else Code.COPY)(outs, ins, attrs) if ins else None
    if not all_f32(*outs, *ins):
        return None
    rows = elementwise(Code.ADD, outs[0], ins[:2])
    for other in ins[2:]:
        more = elementwise(Code.ADD, outs[0], [outs[0], other])
        rows = None if rows is None or more is None else rows + more
    return rows


# -- reductions --------------------------------------------------------------------------------------------------------
def _reduction(
    out: View, x: View, axes: Any, rows_code: Code, columns_code: Code | None, *cells: int
) -> list[Row] | None:
    """Reduce leading, middle or trailing axes; `out` must be packed."""
    if not all_f32(out, x) or not out.packed or 0 in x.shape:
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
        return elementwise(Code.COPY, out, [x._replace(shape=out.shape, strides=_kept(x, gone, out))])
    if shape in ((True,), (False, True)) and runs[-1][2] == 1:
        count, jump = (1, 0) if len(runs) == 1 else (runs[0][1], 4 * runs[0][2])
        return [row_of(rows_code, count, runs[-1][1], out.address, 4, 0, x.address, jump, 1, *cells)]
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
        row_of(
            columns_code, n, cols, out.address + 4 * i * cols, 0, 1, x.address + 4 * i * jump, 4 * step, 1, *cells
        )
        for i in range(outer)
    ]  # fmt: skip


def _kept(x: View, gone: set[int], out: View) -> tuple[int, ...]:
    """Strides of x without the reduced axes, which have one entry each."""
    strides = [s for a, s in enumerate(x.strides) if a not in gone]
    return tuple(strides) if len(strides) == len(out.shape) else x.strides


@vm_form(limit=1 << 24)
def SUM(outs: Sequence[View], ins: Sequence[View], attrs: Mapping[str, Any]) -> list[Row] | None:
    return _reduction(outs[0], ins[0], attrs["axes"], Code.SUM_ROWS, Code.SUM_COLUMNS, bits(1.0))


@vm_form(limit=1 << 24)
def MEAN(outs: Sequence[View], ins: Sequence[View], attrs: Mapping[str, Any]) -> list[Row] | None:
    count = ins[0].size // max(outs[0].size, 1)
    return _reduction(outs[0], ins[0], attrs["axes"], Code.SUM_ROWS, Code.SUM_COLUMNS, bits(float(count)))


@vm_form(limit=1 << 24)
def AMAX(outs: Sequence[View], ins: Sequence[View], attrs: Mapping[str, Any]) -> list[Row] | None:
    return _reduction(outs[0], ins[0], attrs["axes"], Code.AMAX_ROWS, None)
