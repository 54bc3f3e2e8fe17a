"""Encoding for the VM of attention over selected blocks."""

from __future__ import annotations

from graphwright.array.vm.code import Code
from graphwright.array.vm.encode import operands as vm

_QUERIES = 64
"""About how many queries a unit of work of the forward pass has."""


@vm.form()
def SDPA_SELECTED(outs: vm.Views, ins: vm.Views, attrs: vm.Attrs) -> vm.Rows:
    """Encode attention over lists of blocks, or its gradient."""
    given, results = 5 + len(attrs["optional"]), 4 if len(ins) > 5 + len(attrs["optional"]) else 1
    (q, k, v, blocks, gates, *start), rest = ins[:given], ins[given:]
    outs = outs[:results]
    operands = [q, k, v, *rest, *outs[:3]]
    if not vm.all_f32(*operands, gates) or any(o.strides[-1] != 1 and o.shape[-1] != 1 for o in operands):
        return None
    if 0 in (*q.shape, *k.shape, *v.shape, *blocks.shape) or not (blocks.packed and gates.packed and outs[-1].packed):
        return None
    (batch, heads, queries, deep), (groups, keys) = q.shape, k.shape[1:3]
    lists, length, tile = blocks.shape[2], blocks.shape[3], attrs["tile"]
    each = lists if rest else max(_QUERIES // tile, 1)
    units = batch * groups * -(-lists // each)
    multiplied = queries * heads * batch * length * attrs["block"] * (deep + v.shape[3])
    code, products = (Code.ATTEND_LISTS_BACKWARD, 4) if rest else (Code.ATTEND_LISTS, 1)
    sizes = (heads, groups, queries, keys, deep, v.shape[3], vm.bits(attrs["scale"]))
    nanoseconds = max(multiplied * products // (30 * units), 1)
    head = vm.row_of(code, 0, units, *sizes, start[0].address if start else 0, nanoseconds)
    cells = [cell for o in operands for cell in (o.address, *(4 * s for s in o.strides[:3]))]
    slopes = outs[3].address if rest else 0
    words = (blocks.address, gates.address, slopes, lists, length, attrs["block"], tile, each)
    return [head, *vm.table_of(cells), *vm.table_of(words)]
