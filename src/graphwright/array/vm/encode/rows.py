"""VM forms of ops over whole rows: softmax, norms, losses."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from graphwright.array.dtype import int64
from graphwright.array.vm.code import Code
from graphwright.array.vm.encode.operands import Row, View, all_f32, along, bits, matrix, merged, row_of, vm_form


@vm_form(by_row=True)
def SOFTMAX(outs: Sequence[View], ins: Sequence[View], attrs: Mapping[str, Any]) -> list[Row] | None:
    grid = matrix(ins[0])
    if grid is None or not all_f32(*outs, *ins) or not outs[0].packed or attrs.get("axis", -1) not in (-1, None):
        return None
    rows, cols, jump = grid
    return [row_of(Code.SOFTMAX, rows, cols, outs[0].address, 4 * cols, 1, ins[0].address, 4 * jump, 1)]


@vm_form(by_row=True)
def RMS_NORM(outs: Sequence[View], ins: Sequence[View], attrs: Mapping[str, Any]) -> list[Row] | None:
    grid = matrix(ins[0])
    plain = len(ins) == 2 and not attrs["unit_offset"]
    if grid is None or not plain or not all_f32(*outs, *ins) or not (outs[0].packed and ins[1].packed):
        return None
    rows, cols, jump = grid
    cells = (ins[1].address, 0, bits(attrs["eps"]))
    head = (rows, cols, outs[0].address, 4 * cols, along(outs[0], 1))
    return [row_of(Code.RMS_NORM, *head, ins[0].address, 4 * jump, 1, *cells)]


@vm_form()
def LAYER_NORM(outs: Sequence[View], ins: Sequence[View], attrs: Mapping[str, Any]) -> list[Row] | None:
    """Normalise over one axis, or several that are contiguous."""
    x, *scale = ins
    lead = len(x.shape) - attrs["rank"]
    if 0 in x.shape or not all_f32(*outs, *ins) or not all(view.packed for view in (outs[0], *scale)):
        return None
    inner = merged(x.shape[lead:], [x.strides[lead:]])
    if len(inner) > 1:
        return None
    cols, step = (inner[0][0], inner[0][1][0]) if inner else (1, 1)
    grid = matrix(x._replace(shape=(*x.shape[:lead], cols), strides=(*x.strides[:lead], step)))
    if grid is None:
        return None
    rows, _, jump = grid
    affine = [cell for view in scale for cell in (view.address, 0, 1)] + [0] * (6 - 3 * len(scale))
    head = (rows, cols, outs[0].address, 4 * cols, along(outs[0], 1))
    return [row_of(Code.LAYER_NORM, *head, x.address, 4 * jump, 1, *affine, bits(attrs["eps"]))]


@vm_form()
def CROSS_ENTROPY(outs: Sequence[View], ins: Sequence[View], attrs: Mapping[str, Any]) -> list[Row] | None:
    scores, targets, *rest = ins
    grid = matrix(scores)
    fits = all_f32(scores, *outs) and targets.dtype is int64 and targets.packed and outs[0].packed
    if grid is None or not fits or attrs["smoothing"]:
        return None
    rows, cols, jump = grid
    head = (scores.address, 4 * jump, targets.address)
    if len(outs) == 2 and not rest and outs[1].packed:
        tail = (outs[1].address, attrs["ignore_index"])
        return [row_of(Code.CROSS_ENTROPY, rows, cols, outs[0].address, 0, 0, *head, *tail)]
    if len(rest) != 2 or not all_f32(*rest) or not rest[0].packed:
        return None
    grads = merged(rest[1].shape, [rest[1].strides])
    if len(grads) > 1:
        return None
    tail = (rest[0].address, attrs["ignore_index"], rest[1].address, 4 * grads[0][1][0] if grads else 0)
    result = (outs[0].address, 4 * cols, along(outs[0], 1))
    return [row_of(Code.CROSS_ENTROPY_BACKWARD, rows, cols, *result, *head, *tail)]
