"""Encoding of block-sparse attention for the VM."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod

from graphwright.array.dtype import float32
from graphwright.array.formulas.block_attention import PACKED, PARTS, named
from graphwright.array.layout import row_major
from graphwright.array.vm.code import Code
from graphwright.array.vm.encode import operands as vm

_SIDE = 64


def _view(*shape: int) -> vm.View:
    return vm.View(float32, shape, row_major(shape))


def _tiles(t: vm.View) -> vm.View:
    """Return the view of the packed tokens of t [N, H, T, width]."""
    batch, heads, tokens, width = t.shape
    return _view(batch, heads, -(-tokens // _SIDE), width, _SIDE)


def _parts(k: vm.View) -> int:
    """Return among how many parts the queries of a key head are shared, so that several threads have work."""
    return max(PARTS // max(k.shape[0] * k.shape[1], 1), 1)


def _fits(operands: Sequence[vm.View], table: vm.View, extra: Mapping[str, vm.View], attrs: vm.Attrs) -> bool:
    """Return whether the code runs for operands q, k, v, ... [N, H, T, width] and optional ones."""
    if attrs["algorithm"] not in ("auto", "block") or not vm.all_f32(*operands):
        return False
    if any(0 in t.shape or (t.strides[-1] != 1 and t.shape[-1] != 1) for t in operands) or not table.packed:
        return False
    return all(t.packed and (name == "q_start" or t.dtype is float32) for name, t in extra.items())


def _instruction(
    code: Code, units: int, q: vm.View, k: vm.View, v: vm.View | None, table: vm.View, extra: Mapping[str, vm.View],
    attrs: vm.Attrs, operands: Mapping[int, vm.View], more: Sequence[int],
) -> list[vm.Row]:  # fmt: skip
    """Encode an instruction. `operands`: by their numbers; `more`: the words after them but the size of the gates."""
    (_, heads, queries, deep), (groups, keys) = q.shape, k.shape[1:3]
    address = {name: extra[name].address if name in extra else 0 for name in ("gates", "q_start")}
    sizes = (heads, groups, queries, keys, deep, 0 if v is None else v.shape[3], table.address, attrs["planes"])
    rule = (vm.bits(float(attrs["scale"])), vm.bits(float(attrs["softcap"] or 0.0)), int(attrs["where"] == "weight"))
    head = vm.row_of(code, 0, units, *sizes, *rule, address["gates"], address["q_start"])
    given = {0: q, 1: k, **({} if v is None else {2: v}), **operands}
    cells: list[int] = []
    for index in range(9):
        t = given.get(index)
        cells += [0] * 4 if t is None else [t.address, *(4 * s for s in (*t.strides, 0)[:3])]
    packed_k, packed_v, *others = more
    gates = extra["gates"].size if "gates" in extra else 0
    cells += [packed_k, packed_v, gates, *others]
    return [head, *vm.table_of([*cells, *[0] * (48 - len(cells))])]


def _pack(t: vm.View, to: vm.View, scale: float) -> vm.Row:
    batch, heads, tokens, width = t.shape
    steps = [4 * s for s in t.strides[:3]]
    sizes = (0, batch * heads * to.shape[2], heads, tokens, width)
    return vm.row_of(Code.BLOCK_PACK, *sizes, t.address, *steps, to.address, vm.bits(float(scale)))


def _forward_work(outs: vm.Views, ins: vm.Views, attrs: vm.Attrs) -> list[vm.View]:
    return [_tiles(ins[1])] if ins[0].dtype is float32 and ins[0].shape[2] >= PACKED else []


@vm.form(work=_forward_work)
def BLOCK_SDPA(outs: vm.Views, ins: vm.Views, attrs: vm.Attrs) -> vm.Rows:
    """Encode `block_sdpa`: pack the keys, then attend."""
    (q, k, v, table, *rest), (out, lse, *packed) = ins, outs
    extra = named(rest, attrs)
    if not _fits([q, k, v, out, lse], table, extra, attrs):
        return None
    before = [_pack(k, packed[0], attrs["scale"])] if packed else []
    units = q.shape[0] * q.shape[1] * -(-q.shape[2] // _SIDE)
    more = [packed[0].address if packed else 0, 0, 1]
    operands = {3: out, 8: lse}
    return [*before, *_instruction(Code.BLOCK_ATTEND, units, q, k, v, table, extra, attrs, operands, more)]


def _gradient_work(q: vm.View, k: vm.View, v: vm.View | None, extra: Mapping[str, vm.View]) -> list[vm.View]:
    """Return views of packed keys and values, then, with several parts, their gradients of keys, values and gates."""
    if q.dtype is not float32:
        return []
    parts, tokens = _parts(k), (k,) if v is None else (k, v)
    work = [_tiles(t) if q.shape[2] >= PACKED else _view(0) for t in tokens]
    work += [_view(parts, *t.shape) if parts > 1 else _view(0) for t in tokens]
    return [*work, _view(parts * prod(k.shape[:2]), extra["gates"].size)] if "gates" in extra else work


def _backward_work(outs: vm.Views, ins: vm.Views, attrs: vm.Attrs) -> list[vm.View]:
    return _gradient_work(ins[0], ins[1], ins[2], named(ins[4:-3], attrs))


@vm.form(work=_backward_work)
def BLOCK_SDPA_BACKWARD(outs: vm.Views, ins: vm.Views, attrs: vm.Attrs) -> vm.Rows:
    """Encode `block_sdpa_backward`: pack keys and values, compute gradients in parts, add those up."""
    q, k, v, table, *rest = ins
    (out, lse, g), extra = rest[-3:], named(rest[:-3], attrs)
    count = 4 if "gates" in extra else 3
    if not _fits([q, k, v, out, lse, g, *outs[:3]], table, extra, attrs):
        return None
    if any(not t.packed for t in (*outs[1:count], lse)):
        return None
    (dq, dk, dv, *dgates), (packed_k, packed_v, *work) = outs[:count], outs[count:]
    parts, pack = _parts(k), packed_k.size > 0
    before = [_pack(k, packed_k, attrs["scale"]), _pack(v, packed_v, 1.0)] if pack else []
    shared = parts > 1
    to_k, to_v = (w._replace(shape=t.shape, strides=t.strides) if shared else t
                  for w, t in zip(work[:2], (dk, dv), strict=True))  # fmt: skip
    more = [packed_k.address if pack else 0, packed_v.address if pack else 0, parts]
    more += [extra["lse_grad"].address if "lse_grad" in extra else 0, work[2].address if dgates else 0]
    more += [4 * dk.size if shared else 0, 4 * dv.size if shared else 0]
    operands = {3: out, 4: g, 5: dq, 6: to_k, 7: to_v, 8: lse}
    units = parts * k.shape[0] * k.shape[1]
    rows = _instruction(Code.BLOCK_ATTEND_BACKWARD, units, q, k, v, table, extra, attrs, operands, more)
    sums = [_sum(t, w.address, parts) for w, t in zip(work[:2], (dk, dv), strict=True)] if shared else []
    sums += [_sum(t, work[2].address, units) for t in dgates]
    return [*before, *rows, *sums]


def _sum(out: vm.View, source: int, parts: int) -> vm.Row:
    """Return an instruction that adds up `parts` arrays, which follow one another, of the size of `out`."""
    return vm.row_of(Code.SUM_COLUMNS, parts, out.size, out.address, 0, 1, source, 4 * out.size, 1, vm.bits(1.0))


_UNITS = 32
"""Among how many units the query blocks are shared for the masses of edges."""


@vm.form(work=_forward_work)
def BLOCK_MASS(outs: vm.Views, ins: vm.Views, attrs: vm.Attrs) -> vm.Rows:
    """Encode `block_mass`: pack the keys, clear the result, then sum."""
    (q, k, table, lse, *rest), (mass, *packed) = ins, outs
    extra = named(rest, attrs)
    if not _fits([q, k, lse, mass], table, extra, attrs) or not mass.packed:
        return None
    units = min(_UNITS, q.shape[2])
    before = [_pack(k, packed[0], attrs["scale"])] if packed else []
    before += [vm.row_of(Code.FILL, 1, mass.size, mass.address, 0, 1)]
    more = [packed[0].address if packed else 0, 0, units, *[0] * 4]
    more += [mass.address, mass.size, q.shape[0], int(attrs["reduce"] == "max")]
    return [*before, *_instruction(Code.BLOCK_MASS, units, q, k, None, table, extra, attrs, {8: lse}, more)]


@vm.form()
def BLOCK_GATE_GRADIENT(outs: vm.Views, ins: vm.Views, attrs: vm.Attrs) -> vm.Rows:
    """Encode `block_gate_gradient`."""
    (q, k, v, out, lse, g, pairs, table, *rest), (result,) = ins, outs
    extra = named(rest, attrs)
    if not _fits([q, k, v, out, lse, g], table, extra, attrs) or 0 in pairs.shape:
        return None
    if not (pairs.packed and result.packed and vm.all_f32(result)):
        return None
    more = [0, 0, 1, *[0] * 4, result.address, pairs.address, q.shape[0]]
    operands = {3: out, 4: g, 8: lse}
    return _instruction(Code.BLOCK_GATE_GRADIENT, pairs.shape[0], q, k, v, table, extra, attrs, operands, more)


@vm.form(work=_forward_work)
def BLOCK_ENTROPY(outs: vm.Views, ins: vm.Views, attrs: vm.Attrs) -> vm.Rows:
    """Encode `block_entropy`."""
    (q, k, table, lse, *rest), (entropy, *packed) = ins, outs
    extra = named(rest, attrs)
    if not _fits([q, k, lse, entropy], table, extra, attrs) or not entropy.packed:
        return None
    before = [_pack(k, packed[0], attrs["scale"])] if packed else []
    units = q.shape[0] * q.shape[1] * -(-q.shape[2] // _SIDE)
    more = [packed[0].address if packed else 0, 0, 1, *[0] * 4, entropy.address]
    return [*before, *_instruction(Code.BLOCK_ENTROPY, units, q, k, None, table, extra, attrs, {8: lse}, more)]


def _entropy_work(outs: vm.Views, ins: vm.Views, attrs: vm.Attrs) -> list[vm.View]:
    return _gradient_work(ins[0], ins[1], None, named(ins[4:-2], attrs))


@vm.form(work=_entropy_work)
def BLOCK_ENTROPY_BACKWARD(outs: vm.Views, ins: vm.Views, attrs: vm.Attrs) -> vm.Rows:
    """Encode `block_entropy_backward`: the loop of the gradient of attention, without values."""
    (q, k, table, lse, *rest), g = ins[:-2], ins[-1]
    extra = named(rest, attrs)
    count = 4 if "gates" in extra else 3
    if not _fits([q, k, lse, g, *outs[:3]], table, extra, attrs):
        return None
    if any(not t.packed for t in (*outs[1:count], lse, g)):
        return None
    (dq, dk, dlse, *dgates), (packed, *work) = outs[:count], outs[count:]
    parts, pack = _parts(k), packed.size > 0
    to_k = work[0]._replace(shape=dk.shape, strides=dk.strides) if parts > 1 else dk
    more = [packed.address if pack else 0, 0, parts, g.address, work[1].address if dgates else 0]
    more += [4 * dk.size if parts > 1 else 0, 0, dlse.address, 0, 0, 1]
    operands = {5: dq, 6: to_k, 8: lse}
    units = parts * k.shape[0] * k.shape[1]
    before = [_pack(k, packed, attrs["scale"])] if pack else []
    rows = _instruction(Code.BLOCK_ATTEND_BACKWARD, units, q, k, None, table, extra, attrs, operands, more)
    sums = [_sum(dk, work[0].address, parts)] if parts > 1 else []
    return [*before, *rows, *sums, *(_sum(t, work[1].address, units) for t in dgates)]
