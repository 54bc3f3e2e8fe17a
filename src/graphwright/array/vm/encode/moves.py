"""VM forms of copies, casts, lookups by id, and rotary embedding."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from graphwright.array.dtype import bfloat16, float32, int64
from graphwright.array.vm.code import Code
from graphwright.array.vm.encode.operands import Row, View, all_f32, bits, elementwise, merged, row_of, spread, vm_form


@vm_form()
def COPY(outs: Sequence[View], ins: Sequence[View], attrs: Mapping[str, Any]) -> list[Row] | None:
    """Copy elementwise, or over up to four axes; bfloat16 in pairs where layouts allow it."""
    out, x = outs[0], ins[0]
    if out.dtype is bfloat16 and x.dtype is bfloat16 and _in_pairs(out) and _in_pairs(x):
        out, x = _pairs(out), _pairs(x)
    if not all_f32(out, x):
        return None
    axes = merged(out.shape, [out.strides, spread(x, out.shape)])
    if len(axes) < 3 or len(axes) > 4 or 0 in out.shape or axes[-1][1] != (1, 1):
        return elementwise(Code.COPY, out, [x])
    (a, b, c, (cols, last)) = [(1, (0, 0))] * (4 - len(axes)) + axes
    sizes = (a[0], b[0], c[0], cols)
    target, source = ((view.address, *(4 * axis[1][k] for axis in (a, b, c))) for k, view in enumerate((out, x)))
    return [row_of(Code.COPY_AXES, *sizes, *target, *source, 4 * last[1])]


def _in_pairs(view: View) -> bool:
    """True if 16-bit numbers fill whole 4-byte words."""
    return bool(view.shape) and view.strides[-1] == 1 and not any(n % 2 for n in (view.shape[-1], *view.strides[:-1]))


def _pairs(view: View) -> View:
    """The view with 4-byte words in place of pairs of 16-bit numbers."""
    shape, strides = (*view.shape[:-1], view.shape[-1] // 2), (*[s // 2 for s in view.strides[:-1]], 1)
    return View(float32, shape, strides, view.address)


@vm_form()
def EMBEDDING(outs: Sequence[View], ins: Sequence[View], attrs: Mapping[str, Any]) -> list[Row] | None:
    """Look up rows of whole 4-byte words, of any dtype."""
    table, ids = ins
    size = table.dtype.itemsize
    rows, cols = table.shape
    if (
        ids.dtype is not int64
        or not (outs[0].packed and ids.packed)
        or (cols * size) % 4
        or (table.strides[0] * size) % 4
    ):
        return None
    if table.strides[1] != 1 and cols != 1:
        return None
    head = (ids.size, cols * size // 4, outs[0].address, cols * size, 0, table.address, table.strides[0] * size)
    return [row_of(Code.GATHER_ROWS, *head, ids.address, rows)]


@vm_form()
def EMBEDDING_BACKWARD(outs: Sequence[View], ins: Sequence[View], attrs: Mapping[str, Any]) -> list[Row] | None:
    grad, ids = ins
    if not all_f32(outs[0], grad) or ids.dtype is not int64 or not all(v.packed for v in (outs[0], grad, ids)):
        return None
    rows, cols = outs[0].shape
    return [row_of(Code.ADD_ROWS, ids.size, cols, outs[0].address, 4 * cols, rows, grad.address, 4 * cols, ids.address)]


@vm_form()
def ROPE(outs: Sequence[View], ins: Sequence[View], attrs: Mapping[str, Any]) -> list[Row] | None:
    x, cos, sin = ins
    if not all_f32(*outs, *ins) or not all(v.packed for v in (outs[0], cos, sin)) or 0 in x.shape:
        return None
    if attrs["style"] != "half" or (x.strides[3] != 1 and x.shape[3] != 1):
        return None
    (batch, heads, positions, size), half = x.shape, cos.shape[2]
    each = 0 if cos.shape[0] == 1 else 4 * positions * half
    place = (x.address, *(4 * x.strides[axis] for axis in (0, 2, 1)))
    tail = (outs[0].address, cos.address, sin.address, each, 4 * heads * positions * size)
    return [row_of(Code.ROPE, batch, positions, heads, size, half, *place, *tail)]


@vm_form()
def ROPE_TABLE(outs: Sequence[View], ins: Sequence[View], attrs: Mapping[str, Any]) -> list[Row] | None:
    positions, frequencies = ins
    if not all_f32(*outs, frequencies) or not all(view.packed for view in (*outs, *ins)):
        return None
    head = (positions.size, frequencies.size, *(view.address for view in (*outs, *ins)))
    return [row_of(Code.ROPE_TABLE, *head, bits(float(attrs["scale"])))]


@vm_form()
def CAST(outs: Sequence[View], ins: Sequence[View], attrs: Mapping[str, Any]) -> list[Row] | None:
    """Cast between bfloat16 and float32."""
    code = _CASTS.get((ins[0].dtype, outs[0].dtype))
    return None if code is None else elementwise(code, outs[0], ins)


_CASTS = {(bfloat16, float32): Code.WIDEN, (float32, bfloat16): Code.NARROW}
