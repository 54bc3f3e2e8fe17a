"""Rewrites: what is written shorter and gives the same bits (a NaN stays a NaN, of any payload).

`fast` adds rules that round otherwise; each use lists its error bound.

One pass in order reaches the fixpoint: a rule lets an earlier result stand for a later one or brings an operand nearer
to its source, so nothing before the row at hand can change again. Rules change rows of the ledger and never the
program; they read traits and layouts, no op names.
"""

from __future__ import annotations

from math import copysign
from typing import TYPE_CHECKING

from graphwright.array import bfloat16, float32
from graphwright.ops import get
from graphwright.plan.planning.plan_builder import RewriteRule
from graphwright.plan.planning.records import RewriteRecord
from graphwright.program.kinds import KINDS, PARAM

if TYPE_CHECKING:
    from graphwright.array import DType
    from graphwright.ops import Op
    from graphwright.plan.planning.plan_builder import PlanBuilder
    from graphwright.plan.planning.records import NodeRecord

MODES = ("none", "exact", "fast")
BY_VALUE = ("neutral operand", "zero added")
"""Rules that look at the value of a constant."""
Stands = tuple[int, ...] | None


def single_edge(ledger: PlanBuilder, row: NodeRecord, op: Op) -> Stands:
    """A sum of one edge is what the edge carries."""
    return ledger.stand("single edge", row, row.reads) if len(row.reads) == 1 else None


def same_view(ledger: PlanBuilder, row: NodeRecord, op: Op) -> Stands:
    """A view that shows its source unchanged (double permute, identity reshape), or what an earlier view shows."""
    source, shown = ledger.slots[row.reads[0]], row.alike.shown
    if shown is None:  # must copy: a source of its own
        return None
    base, kind = ledger.slots[source.base], row.specs[0].dtype
    if shown == base.layout and kind is base.dtype:
        return ledger.stand("identity view", row, (base.index,))
    earlier = ledger.first_of(row, ("view", base.index, shown, kind))
    return None if earlier is None else ledger.stand("same view", row, earlier.results)


def neutral_operand(ledger: PlanBuilder, row: NodeRecord, op: Op) -> Stands:
    """x·1, x/1, x - 0, x + (-0): the other operand. Never x + 0, which turns -0 into 0."""
    if len(row.reads) != 2:
        return None
    for place, neutral in op.traits.identity:
        other = row.reads[1 - place]
        if ledger.slots[other].spec != row.specs[0]:
            continue
        value = ledger.number(row.reads[place])
        if value is not None and value == neutral and copysign(1.0, value) == copysign(1.0, neutral):
            return ledger.stand("neutral operand", row, (other,))
    return None


def conversion_chain(ledger: PlanBuilder, row: NodeRecord, op: Op) -> Stands:
    """A conversion to the dtype at hand is the operand; one after an exact widening starts from the narrow value."""
    slots, last = ledger.slots, row.specs[0].dtype
    source = slots[row.reads[0]]
    before = ledger.maker(source.index)
    while before is not None and before.op not in KINDS and get(before.op).traits.convert:
        first = slots[before.reads[0]]
        exact = widens(first.dtype, source.dtype)
        if not (exact and (last is first.dtype or (first.dtype.is_float and last.is_float))):
            break
        into = ledger.maker(first.index)
        row.uses = (*row.uses, RewriteRecord("conversion chain", row.node, None if into is None else into.node))
        row.reads, source, before = (first.index,), first, into
    if source.spec == row.specs[0]:
        return ledger.stand("identity conversion", row, (source.index,))
    return None


def same_result(ledger: PlanBuilder, row: NodeRecord, op: Op) -> Stands:
    """The same op on the same operands was computed before; never one that carries state."""
    earlier = ledger.first_of(row, (row.alike.does, row.reads))
    return None if earlier is None else ledger.stand("same result", row, earlier.results, earlier.node)


def zero_added(ledger: PlanBuilder, row: NodeRecord, op: Op) -> Stands:
    """X + 0: x, whose -0 then stays -0."""
    if len(row.reads) != 2:
        return None
    for place in (0, 1):
        other = row.reads[1 - place]
        if ledger.slots[other].spec == row.specs[0] and ledger.number(row.reads[place]) == 0:
            return ledger.stand("zero added", row, (other,), bound="0; a zero may have the other sign")
    return None


def addend_into_product(ledger: PlanBuilder, row: NodeRecord, op: Op) -> Stands:
    """A vector added to a product that nothing else reads: the product's own addend, so that it is written once."""
    if len(row.reads) != 2:
        return None
    for place in (0, 1):
        inner, other = (ledger.slots[row.reads[p]].spec for p in (place, 1 - place))
        value = row.sources[place]
        product = ledger.rows[value.node]
        if product.op in KINDS or get(product.op).traits.addend != len(product.reads):
            continue
        if row.reads[place] not in product.own or not ledger.read_once(value):
            continue
        spec = row.specs[0]
        if inner != spec or other.shape != spec.shape[-1:] or other.dtype is not spec.dtype:
            continue
        terms, digits = ledger.slots[product.reads[0]].spec.sizes[-1], _DIGITS[spec.dtype.name][0]
        bound = f"{terms + 2} · 2^-{digits} · (Σ|x·w| + |b|)"
        row.uses = (*row.uses, RewriteRecord("addend into product", product.node, row.node, bound))
        row.op, row.attrs, row.reads = product.op, product.attrs, (*product.reads, row.reads[1 - place])
        return None
    return None


def narrow_weight(ledger: PlanBuilder, row: NodeRecord, op: Op) -> Stands:
    """A stored bfloat16 weight read as it is instead of as a float32 copy: the VM widens it in registers."""
    if ledger.still(row, op):  # what is folded runs outside of the VM
        return None
    for place in op.traits.narrow:
        wide = ledger.slots[row.reads[place]]
        before = ledger.maker(wide.index)
        if before is None or before.op in KINDS or not get(before.op).traits.convert or wide.dtype is not float32:
            continue
        stored = ledger.slots[before.reads[0]]
        param = ledger.maker(stored.index)
        if param is None or param.op != PARAM or stored.index not in param.own or stored.dtype is not bfloat16:
            continue
        row.uses = (*row.uses, RewriteRecord("narrow weight", row.node, param.node))
        row.reads = (*row.reads[:place], stored.index, *row.reads[place + 1 :])
    return None


RULES = (
    RewriteRule(single_edge, lambda op: op.traits.nary),
    RewriteRule(same_view, lambda op: op.view is not None and not op.traits.barrier),
    RewriteRule(neutral_operand, lambda op: bool(op.traits.identity)),
    RewriteRule(conversion_chain, lambda op: op.traits.convert),
    RewriteRule(same_result, lambda op: op.view is None and not op.traits.update),
)
FAST_RULES = (
    RewriteRule(zero_added, lambda op: op.traits.sums),
    RewriteRule(addend_into_product, lambda op: op.traits.sums),
)
NARROW_WEIGHT = RewriteRule(narrow_weight, lambda op: bool(op.traits.narrow))


_DIGITS = {
    **{"float64": (53, 1023), "float32": (24, 127), "float16": (11, 15), "bfloat16": (8, 127)},
    **{"int64": (63, 63), "int32": (31, 31), "int16": (15, 15), "int8": (7, 7), "uint8": (8, 8), "bool": (1, 1)},
}
"""Bits of precision and largest exponent."""


def widens(narrow: DType, wide: DType) -> bool:
    """True if every value of one dtype is a value of the other."""
    if narrow is wide:
        return True
    if narrow.is_float and not wide.is_float:
        return False
    if narrow.kind == "int" and wide.kind in ("uint", "bool"):
        return False
    (p, e), (q, f) = _DIGITS[narrow.name], _DIGITS[wide.name]
    return p <= q and e <= f
