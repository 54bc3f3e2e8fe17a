"""Rewrite rules that remove instructions from a plan without changing its bits (except the payload of a NaN).

The rules added by `rewrites="fast"` round differently; each application lists its error bound.

One pass in program order reaches the fixpoint: a rule replaces a result by an earlier one, or an operand by one closer
to its source, so it changes nothing before the current record. Rules change records of the builder, never the program.
They depend on the traits and layouts of ops, not on their names.
"""

from __future__ import annotations

from math import copysign

from graphwright.array import DType, bfloat16, float32
from graphwright.ops import Op, get
from graphwright.plan.planning.plan_builder import PlanBuilder, RewriteRule
from graphwright.plan.planning.plan_tables import NodeRecord, RewriteRecord
from graphwright.program.kinds import KINDS, PARAM

BY_VALUE = ("neutral operand", "zero added")
"""Names of the rules that depend on the value of a constant."""
Slots = tuple[int, ...] | None


def single_edge(builder: PlanBuilder, record: NodeRecord, op: Op) -> Slots:
    """Replace a junction with one incoming edge by the value of that edge."""
    return builder.replace("single edge", record, record.reads) if builder.passes_on(record, op) else None


def _row_major(builder: PlanBuilder, slot: int) -> bool:
    """Return True if reading the slot gives the same bits as reading a row-major copy of it."""
    return builder.tables.slots[slot].layout.contiguous


def same_view(builder: PlanBuilder, record: NodeRecord, op: Op) -> Slots:
    """Replace a view by its source if both are equal, as for a double transpose, else by an equal earlier view."""
    slots, layout = builder.tables.slots, record.signature.view_layout
    if layout is None:  # the view needs a copy
        return None
    base, dtype = slots[slots[record.reads[0]].base], record.specs[0].dtype
    if layout == base.layout and dtype is base.dtype:
        return builder.replace("identity view", record, (base.index,))
    earlier = builder.first_equal(record, ("view", base.index, layout, dtype))
    return None if earlier is None else builder.replace("same view", record, earlier.results)


def neutral_operand(builder: PlanBuilder, record: NodeRecord, op: Op) -> Slots:
    """Replace x·1, x/1, x - 0 and x + (-0) by x, but not x + 0, which turns -0 into 0."""
    if len(record.reads) != 2:
        return None
    for number, neutral in op.traits.identity:
        other = record.reads[1 - number]
        if builder.tables.slots[other].spec != record.specs[0] or not _row_major(builder, other):
            continue
        value = builder.constant(record.reads[number])
        if value is not None and value == neutral and copysign(1.0, value) == copysign(1.0, neutral):
            return builder.replace("neutral operand", record, (other,))
    return None


def conversion_chain(builder: PlanBuilder, record: NodeRecord, op: Op) -> Slots:
    """Make a conversion read the source of a preceding exact widening; replace a conversion of x to x's dtype by x."""
    slots, last = builder.tables.slots, record.specs[0].dtype
    source = slots[record.reads[0]]
    before = builder.maker(source.index)
    while before is not None and before.op not in KINDS and get(before.op).traits.convert:
        first = slots[before.reads[0]]
        exact = widens(first.dtype, source.dtype)
        if not (exact and (last is first.dtype or (first.dtype.is_float and last.is_float))):
            break
        into = builder.maker(first.index)
        record.log("conversion chain", None if into is None else into.node)
        record.reads, source, before = (first.index,), first, into
    if source.spec == record.specs[0] and _row_major(builder, source.index):
        return builder.replace("identity conversion", record, (source.index,))
    return None


def same_result(builder: PlanBuilder, record: NodeRecord, op: Op) -> Slots:
    """Replace a node's results by the results of an earlier node with the same op, attributes and operands."""
    earlier = builder.first_equal(record, (record.signature.content, record.reads))
    return None if earlier is None else builder.replace("same result", record, earlier.results, earlier.node)


def zero_added(builder: PlanBuilder, record: NodeRecord, op: Op) -> Slots:
    """Replace x + 0 by x; the result is -0 instead of 0 if x is -0."""
    for number, other in _operand_pairs(record):
        same_spec = builder.tables.slots[other].spec == record.specs[0]
        if same_spec and builder.constant(record.reads[number]) == 0:
            return builder.replace("zero added", record, (other,), bound="0; a zero may have the other sign")
    return None


def addend_into_product(builder: PlanBuilder, record: NodeRecord, op: Op) -> Slots:
    """Replace x·W + b by one op that multiplies and adds b, if nothing else reads x·W."""
    slots = builder.tables.slots
    for number, addend in _operand_pairs(record):
        inner, other = slots[record.reads[number]].spec, slots[addend].spec
        value = record.sources[number]
        product = builder.records[value.node]
        if product.op in KINDS:
            continue
        traits = get(product.op).traits
        if traits.addend != len(product.reads) or traits.channels_first:
            continue
        if record.reads[number] not in product.own or not builder.read_once(value):
            continue
        spec = record.specs[0]
        if inner != spec or other.shape != spec.shape[-1:] or other.dtype is not spec.dtype:
            continue
        terms, digits = slots[product.reads[0]].spec.sizes[-1], _DIGITS[spec.dtype.name][0]
        bound = f"{terms + 2} · 2^-{digits} · (Σ|x·w| + |b|)"
        use = RewriteRecord("addend into product", product.node, record.node, bound)
        record.rewrites = (*record.rewrites, use)
        record.op, record.attrs = product.op, product.attrs
        record.reads = (*product.reads, addend)
        return None
    return None


def _operand_pairs(record: NodeRecord) -> list[tuple[int, int]]:
    """Return (operand index, slot of the other operand) for both operands; [] if there are not exactly two."""
    return [(0, record.reads[1]), (1, record.reads[0])] if len(record.reads) == 2 else []


def narrow_weight(builder: PlanBuilder, record: NodeRecord, op: Op) -> Slots:
    """Read a bfloat16 weight directly instead of its float32 conversion: the VM widens it in registers."""
    if builder.depends_on_frozen(record, op):  # folded outside of the VM
        return None
    slots = builder.tables.slots
    assert op.narrow is not None
    for number in op.narrow([slots[s].spec for s in record.reads], record.attrs):
        wide = slots[record.reads[number]]
        before = builder.maker(wide.index)
        if before is None or before.op in KINDS or not get(before.op).traits.convert or wide.dtype is not float32:
            continue
        stored = slots[before.reads[0]]
        param = builder.maker(stored.index)
        if param is None or param.op != PARAM or stored.index not in param.own or stored.dtype is not bfloat16:
            continue
        record.log("narrow weight", param.node)
        record.reads = (*record.reads[:number], stored.index, *record.reads[number + 1 :])
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
NARROW_WEIGHT = RewriteRule(narrow_weight, lambda op: op.narrow is not None)


_DIGITS = {
    **{"float64": (53, 1023), "float32": (24, 127), "float16": (11, 15), "bfloat16": (8, 127)},
    **{"int64": (63, 63), "int32": (31, 31), "int16": (15, 15), "int8": (7, 7), "uint8": (8, 8), "bool": (1, 1)},
}
"""Dtype name -> (bits of precision, largest exponent)."""


def widens(narrow: DType, wide: DType) -> bool:
    """Return True if `wide` represents every value of `narrow` exactly."""
    if narrow is wide:
        return True
    if narrow.is_float and not wide.is_float:
        return False
    if narrow.kind == "int" and wide.kind in ("uint", "bool"):
        return False
    (p, e), (q, f) = _DIGITS[narrow.name], _DIGITS[wide.name]
    return p <= q and e <= f
