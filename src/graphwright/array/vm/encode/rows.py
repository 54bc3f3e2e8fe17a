"""Encoding for the VM of copies, lookups, rotary embedding, softmax, norms, losses and random draws.

Random draws are Philox words, made from a key in memory and the index of each element.
"""

from __future__ import annotations

from math import ceil

from graphwright.array.dtype import bfloat16, float32, int64
from graphwright.array.vm import code
from graphwright.array.vm.code import Code
from graphwright.array.vm.encode import operands as vm


@vm.form()
def COPY(outs: vm.Views, ins: vm.Views, attrs: vm.Attrs) -> vm.Rows:
    """Encode a copy between layouts or a broadcast; bfloat16 is copied in pairs where layouts allow it."""
    out, x = outs[0], ins[0]
    if out.dtype is bfloat16 and x.dtype is bfloat16 and _in_pairs(out) and _in_pairs(x):
        out, x = _pairs(out), _pairs(x)
    if not vm.all_f32(out, x):
        return None
    axes = vm.merged(out.shape, [out.strides, vm.spread(x, out.shape)])
    if len(axes) < 3 or len(axes) > 4 or 0 in out.shape or axes[-1][1] != (1, 1):
        return vm.elementwise(Code.COPY, out, [x])
    (a, b, c, (cols, last)) = [(1, (0, 0))] * (4 - len(axes)) + axes
    sizes = (a[0], b[0], c[0], cols)
    target, source = ((view.address, *(4 * axis[1][k] for axis in (a, b, c))) for k, view in enumerate((out, x)))
    return [vm.row_of(Code.COPY_AXES, *sizes, *target, *source, 4 * last[1])]


def _in_pairs(view: vm.View) -> bool:
    """Return whether the 16-bit elements of each row form whole groups of 4 bytes."""
    return bool(view.shape) and view.strides[-1] == 1 and not any(n % 2 for n in (view.shape[-1], *view.strides[:-1]))


def _pairs(view: vm.View) -> vm.View:
    """Return the view with one 4-byte element in place of each pair of 16-bit elements."""
    shape, strides = (*view.shape[:-1], view.shape[-1] // 2), (*[s // 2 for s in view.strides[:-1]], 1)
    return vm.View(float32, shape, strides, view.address)


@vm.form()
def EMBEDDING(outs: vm.Views, ins: vm.Views, attrs: vm.Attrs) -> vm.Rows:
    """Encode a lookup of rows whose length is a multiple of 4 bytes, of any dtype."""
    table, ids = ins
    size = table.dtype.itemsize
    rows, cols = table.shape
    words = (cols * size) % 4 == (table.strides[0] * size) % 4 == 0 and (table.strides[1] == 1 or cols == 1)
    if ids.dtype is not int64 or not (outs[0].packed and ids.packed) or not words:
        return None
    head = (ids.size, cols * size // 4, outs[0].address, cols * size, 0, table.address, table.strides[0] * size)
    return [vm.row_of(Code.GATHER_ROWS, *head, ids.address, rows)]


@vm.form()
def EMBEDDING_BACKWARD(outs: vm.Views, ins: vm.Views, attrs: vm.Attrs) -> vm.Rows:
    grad, ids = ins
    if not vm.all_f32(outs[0], grad) or ids.dtype is not int64 or not all(v.packed for v in (outs[0], grad, ids)):
        return None
    rows, cols = outs[0].shape
    tail = (grad.address, 4 * cols, ids.address)
    return [vm.row_of(Code.ADD_ROWS, ids.size, cols, outs[0].address, 4 * cols, rows, *tail)]


@vm.form()
def ROPE(outs: vm.Views, ins: vm.Views, attrs: vm.Attrs) -> vm.Rows:
    x, cos, sin = ins
    if not vm.all_f32(*outs, *ins) or not all(v.packed for v in (outs[0], cos, sin)) or 0 in x.shape:
        return None
    if attrs["style"] != "half" or (x.strides[3] != 1 and x.shape[3] != 1):
        return None
    (batch, heads, positions, size), half = x.shape, cos.shape[2]
    each = 0 if cos.shape[0] == 1 else 4 * positions * half
    source = (x.address, *(4 * x.strides[axis] for axis in (0, 2, 1)))
    tail = (outs[0].address, cos.address, sin.address, each, 4 * heads * positions * size)
    return [vm.row_of(Code.ROPE, batch, positions, heads, size, half, *source, *tail)]


@vm.form()
def ROPE_TABLE(outs: vm.Views, ins: vm.Views, attrs: vm.Attrs) -> vm.Rows:
    positions, frequencies = ins
    if not vm.all_f32(*outs, frequencies) or not all(view.packed for view in (*outs, *ins)):
        return None
    head = (positions.size, frequencies.size, *(view.address for view in (*outs, *ins)))
    return [vm.row_of(Code.ROPE_TABLE, *head, vm.bits(float(attrs["scale"])))]


@vm.form()
def CAST(outs: vm.Views, ins: vm.Views, attrs: vm.Attrs) -> vm.Rows:
    """Encode a cast between bfloat16 and float32."""
    code = _CASTS.get((ins[0].dtype, outs[0].dtype))
    return None if code is None else vm.elementwise(code, outs[0], ins)


_CASTS = {(bfloat16, float32): Code.WIDEN, (float32, bfloat16): Code.NARROW}


@vm.form(by_row=True)
def SOFTMAX(outs: vm.Views, ins: vm.Views, attrs: vm.Attrs) -> vm.Rows:
    grid = vm.matrix(ins[0])
    if grid is None or not vm.all_f32(*outs, *ins) or not outs[0].packed or attrs.get("axis", -1) not in (-1, None):
        return None
    rows, cols, jump = grid
    return [vm.row_of(Code.SOFTMAX, rows, cols, outs[0].address, 4 * cols, 1, ins[0].address, 4 * jump, 1)]


@vm.form(by_row=True)
def RMS_NORM(outs: vm.Views, ins: vm.Views, attrs: vm.Attrs) -> vm.Rows:
    grid = vm.matrix(ins[0])
    plain = len(ins) == 2 and not attrs["unit_offset"]
    if grid is None or not plain or not vm.all_f32(*outs, *ins) or not (outs[0].packed and ins[1].packed):
        return None
    rows, cols, jump = grid
    cells = (ins[1].address, 0, vm.bits(attrs["eps"]))
    head = (rows, cols, outs[0].address, 4 * cols, vm.along(outs[0], 1))
    return [vm.row_of(Code.RMS_NORM, *head, ins[0].address, 4 * jump, 1, *cells)]


@vm.form()
def LAYER_NORM(outs: vm.Views, ins: vm.Views, attrs: vm.Attrs) -> vm.Rows:
    """Encode layer norm over one axis, or over several that are contiguous."""
    x, *scale = ins
    lead = len(x.shape) - attrs["rank"]
    if 0 in x.shape or not vm.all_f32(*outs, *ins) or not all(view.packed for view in (outs[0], *scale)):
        return None
    inner = vm.merged(x.shape[lead:], [x.strides[lead:]])
    if len(inner) > 1:
        return None
    cols, step = (inner[0][0], inner[0][1][0]) if inner else (1, 1)
    grid = vm.matrix(x._replace(shape=(*x.shape[:lead], cols), strides=(*x.strides[:lead], step)))
    if grid is None:
        return None
    rows, _, jump = grid
    affine = [cell for view in scale for cell in (view.address, 0, 1)] + [0] * (6 - 3 * len(scale))
    head = (rows, cols, outs[0].address, 4 * cols, vm.along(outs[0], 1))
    return [vm.row_of(Code.LAYER_NORM, *head, x.address, 4 * jump, 1, *affine, vm.bits(attrs["eps"]))]


@vm.form()
def CROSS_ENTROPY(outs: vm.Views, ins: vm.Views, attrs: vm.Attrs) -> vm.Rows:
    scores, targets, *rest = ins
    grid = vm.matrix(scores)
    fits = vm.all_f32(scores, *outs) and targets.dtype is int64 and targets.packed and outs[0].packed
    if grid is None or not fits:
        return None
    rows, cols, jump = grid
    head = (scores.address, 4 * jump, targets.address)
    if len(outs) == 2 and not rest and outs[1].packed:
        tail = (outs[1].address, attrs["ignore_index"], vm.bits(float(attrs["smoothing"])))
        return [vm.row_of(Code.CROSS_ENTROPY, rows, cols, outs[0].address, 0, 0, *head, *tail)]
    if len(rest) != 2 or not vm.all_f32(*rest) or not rest[0].packed:
        return None
    grads = vm.merged(rest[1].shape, [rest[1].strides])
    if len(grads) > 1:
        return None
    step = 4 * grads[0][1][0] if grads else 0
    tail = (rest[0].address, attrs["ignore_index"], rest[1].address, step, vm.bits(float(attrs["smoothing"])))
    result = (outs[0].address, 4 * cols, vm.along(outs[0], 1))
    return [vm.row_of(Code.CROSS_ENTROPY_BACKWARD, rows, cols, *result, *head, *tail)]


def _noise(out: vm.View, key: vm.View, attrs: vm.Attrs, kind: int, x: int = 0, *numbers: float) -> list[vm.Row]:
    tail = (key.address, attrs["stream"], kind, *map(vm.bits, numbers))
    return [vm.row_of(Code.NOISE, 1, out.size, out.address, 0, 1, x, *tail)]


def _drawn(kind: int) -> vm.VmForm:
    """Make the `VmForm` of a random op, UNIFORM or BERNOULLI; its operands are probabilities, if any, and a key."""

    def encode(outs: vm.Views, ins: vm.Views, attrs: vm.Attrs) -> vm.Rows:
        fits = vm.all_f32(outs[0], *ins[:-1]) and all(view.packed for view in (outs[0], *ins))
        return _noise(outs[0], ins[-1], attrs, kind, ins[0].address if ins[:-1] else 0) if fits else None

    return vm.VmForm(encode)


UNIFORM, BERNOULLI = _drawn(code.UNIFORM), _drawn(code.BERNOULLI)


@vm.form()
def DROPOUT(outs: vm.Views, ins: vm.Views, attrs: vm.Attrs) -> vm.Rows:
    """Encode dropout: entries whose random number is at least p are kept and divided by 1 - p, as in `array/cpu`."""
    (x, key), (out, kept), p = ins, outs, attrs["p"]
    if not vm.all_f32(out, x) or not all(view.packed for view in (x, key, out, kept)):
        return None
    rows = _noise(out, key, attrs, code.DROPOUT, x.address, ceil(p * 2**24) * 2.0**-24, 1.0 if p == 1 else 1.0 - p)
    return rows + vm.copied(kept, key)


@vm.form()
def SAMPLE_TOKEN(outs: vm.Views, ins: vm.Views, attrs: vm.Attrs) -> vm.Rows:
    (ids, kept), (logits, rules, keys, seen) = outs, ins
    if not all(view.packed for view in (*outs, *ins)):
        return None
    addresses = (logits.address, rules.address, keys.address, seen.address, seen.shape[1], ids.address, kept.address)
    return [vm.row_of(Code.SAMPLE_TOKEN, *logits.shape, *addresses)]
