"""Encoding of attention and of writes to KV caches for the VM."""

from __future__ import annotations

from collections.abc import Sequence

from graphwright.array.dtype import bfloat16, float32
from graphwright.array.layout import row_major
from graphwright.array.vm.code import Code
from graphwright.array.vm.encode import operands as vm

_FEW_QUERIES = 16
"""The number of queries from which on widening all keys and values costs little compared with the attention."""


def _wide(outs: vm.Views, ins: vm.Views, attrs: vm.Attrs) -> list[vm.View]:
    """Return the workspace for bfloat16: a float32 view per operand, except optional ones, then one per result."""
    if outs[0].dtype is not bfloat16:
        return []
    count = len(attrs["optional"])
    return [vm.View(float32, v.shape, row_major(v.shape)) for v in (*ins[:3], *ins[3 + count :], *outs)]


@vm.form(work=_wide)
def SDPA(outs: vm.Views, ins: vm.Views, attrs: vm.Attrs) -> vm.Rows:
    """Encode attention or its gradient; bfloat16 is computed in float32 copies, which follow the results in `outs`."""
    given, results = len(attrs["optional"]), 3 if len(ins) > 3 + len(attrs["optional"]) else 1
    outs, work = outs[:results], outs[results:]
    if work:
        stored = [*ins[:3], *ins[3 + given :]]
        if any(v.dtype is not bfloat16 for v in (*stored, *outs)) or ins[0].shape[2] < _FEW_QUERIES:
            return None
        wide, made = work[: len(stored)], work[len(stored) :]
        inner = SDPA.encode(made, [*wide[:3], *ins[3 : 3 + given], *wide[3:]], attrs)
        before = [vm.elementwise(Code.WIDEN, to, [v]) for to, v in zip(wide, stored, strict=True)]
        after = [vm.elementwise(Code.NARROW, to, [v]) for to, v in zip(outs, made, strict=True)]
        parts = [*before, inner, *after]
        return None if None in parts else [row for part in parts for row in part or ()]
    q, k, v, *rest = ins
    extra, rest = dict(zip(attrs["optional"], rest[:given], strict=True)), rest[given:]
    if "bias" in extra or "sinks" in extra:
        return None
    operands = [q, k, v, *outs] if not rest else [q, k, v, *rest, *outs]
    if not vm.all_f32(*operands) or any(o.strides[-1] != 1 and o.shape[-1] != 1 for o in operands) or q.size == 0:
        return None
    if 0 in k.shape or any(not view.packed for view in extra.values()):
        return None
    addresses = [extra[name].address if name in extra else 0 for name in ("q_start", "key_mask")]
    plain = not rest and attrs["causal"] and "key_mask" not in extra and v.shape[3]
    if plain and q.shape[2] == 1 and q.packed and outs[0].packed:
        start = (addresses[0], k.shape[2] - 1)
        return _attend(q, k.address, v.address, outs[0], k.shape[1], start, attrs, (*_steps(k), *_steps(v), k.shape[2]))
    if attrs.get("softcap") is not None:
        return None
    (batch, heads, queries, deep), (groups, keys) = q.shape, k.shape[1:3]
    units = batch * (groups if rest else heads)
    code = Code.ATTEND_BACKWARD if rest else Code.ATTEND
    sizes = (heads, groups, queries, keys, deep, v.shape[3], vm.bits(attrs["scale"]))
    head = vm.row_of(code, 0, units, *sizes, addresses[0], int(attrs["causal"]), attrs["window"] or 0, addresses[1])
    cells = [cell for o in operands for cell in (o.address, *(4 * s for s in o.strides[:3]))]
    return [head, *vm.table_of(cells)]


@vm.form()
def KV_APPEND(outs: vm.Views, ins: vm.Views, attrs: vm.Attrs) -> vm.Rows:
    cache, rows, start = ins
    out = outs[0]
    if not vm.all_f32(out, cache, rows) or not out.packed or 0 in rows.shape or rows.strides[3] != 1:
        return None
    head = (out.address, rows.address, start.address, *rows.shape)
    return _after_copy(out, cache, vm.row_of(Code.KV_APPEND, *head, *_steps(out), *_steps(rows), out.shape[2]))


@vm.form()
def KV_APPEND_PAGED(outs: vm.Views, ins: vm.Views, attrs: vm.Attrs) -> vm.Rows:
    pool, rows, table, lengths = ins
    out = outs[0]
    packed = out.packed and table.packed and lengths.packed and rows.strides[3] == 1
    if not vm.all_f32(out, pool, rows) or not packed or 0 in rows.shape:
        return None
    head = (out.address, rows.address, table.address, lengths.address, *rows.shape)
    sizes = (out.shape[2], table.shape[1], out.shape[0])
    return _after_copy(out, pool, vm.row_of(Code.KV_SCATTER, *head, *sizes, *_steps(rows)))


@vm.form()
def SDPA_PAGED(outs: vm.Views, ins: vm.Views, attrs: vm.Attrs) -> vm.Rows:
    if len(ins) > 5:  # it has sinks
        return None
    q, k, v, table, lengths = ins
    packed = all(view.packed for view in (q, outs[0], table, lengths)) and k.strides[3] == v.strides[3] == 1
    if not packed or not vm.all_f32(*outs, q, k, v) or 0 in (*q.shape, *k.shape, v.shape[3]):
        return None
    steps = [4 * s for t in (k, v) for s in (0, *t.strides[1:3])]
    block, most = k.shape[2], table.shape[1]
    more = (*steps, block * most, table.address, 4 * most, block, 4 * k.strides[0], 4 * v.strides[0])
    return _attend(q, k.address, v.address, outs[0], k.shape[1], (lengths.address, 0), attrs, more)


def _after_copy(out: vm.View, cache: vm.View, row: vm.Row) -> vm.Rows:
    before = vm.elementwise(Code.COPY, out, [cache]) if out.address != cache.address else []
    return None if before is None else [*before, row]


def _steps(cache: vm.View) -> list[int]:
    return [4 * s for s in cache.strides[:3]]


def _attend(
    q: vm.View, k: int, v: int, out: vm.View, groups: int, start: tuple[int, int], attrs: vm.Attrs,
    more: Sequence[int],
) -> list[vm.Row]:  # fmt: skip
    """Encode an ATTEND_CACHED instruction for keys and values at addresses k and v, with `groups` key heads.

    `start`: words 12 and 13 of the instruction; `more`: the first words of its second row.
    """
    batch, heads, queries, width = q.shape
    head = (q.address, k, v, out.address, heads, groups, queries, width, out.shape[3])
    tail = (*start, attrs["window"] or 0, vm.bits(float(attrs["scale"])))
    second = (*more, *[0] * (12 - len(more)), vm.bits(float(attrs.get("softcap") or 0.0)))
    return [vm.row_of(Code.ATTEND_CACHED, 0, batch * heads, *head, *tail), *vm.table_of(second)]
