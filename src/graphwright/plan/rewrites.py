"""Rewrites of a draft: what is written shorter and gives the same bits (a NaN stays a NaN, of any payload).

`fast` adds rules that round otherwise; each use lists its error bound.

One pass in order reaches the fixpoint: a rule lets an earlier result stand for a later one or brings an operand nearer
to its source, so nothing before the row at hand can change again. Rules read traits and layouts, no op names.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from math import copysign

from graphwright.array import DType, Layout, bfloat16, float32
from graphwright.array.layout import row_major
from graphwright.ops import Op, get
from graphwright.plan.draft import Draft, Firing, Ref, Row
from graphwright.program.kinds import CONST, KINDS, PARAM

MODES = ("none", "exact", "fast")


class _Pass:
    """What the rules know of the rows before the one at hand."""

    def __init__(self, draft: Draft) -> None:
        self.draft = draft
        self.views: dict[Ref, tuple[Ref, Layout]] = {}
        self.shown: dict[tuple[Ref, Layout], Ref] = {}
        self.computed: dict[tuple, int] = {}
        self.numbers: dict[Ref, float | None] = {}
        self.readers = Counter(ref for row in draft.rows for ref in row.operands)
        self.readers.update([*draft.outputs.values(), *draft.watched.values()])

    def number(self, ref: Ref) -> float | None:
        """The value of a constant of one element that nobody writes, else None; reads no mapped page."""
        if ref not in self.numbers:
            row = self.draft.rows[ref.row]
            value = None
            if row.op == CONST and self.draft.spec(ref).size == 1:
                array = self.draft.program.weights.array(row.attrs["key"])
                if not array.storage.readonly or array.storage.touched:
                    value = array.item()
                    self.draft.guards[row.attrs["key"]] = (array, array.storage.version)
            self.numbers[ref] = value
        return self.numbers[ref]


Rule = Callable[[_Pass, int, Row, Op], bool]
"""Looks at a row; True if another result stands for its result now."""


def single_edge(state: _Pass, i: int, row: Row, op: Op) -> bool:
    """A sum of one edge is what the edge carries."""
    if not op.traits.nary or len(row.operands) != 1:
        return False
    state.draft.replace("single edge", i, row.operands[0])
    return True


def same_view(state: _Pass, i: int, row: Row, op: Op) -> bool:
    """A view that shows its source unchanged (double permute, identity reshape), or what an earlier view shows."""
    if op.view is None:
        return False
    source = row.operands[0]
    shape = state.draft.spec(source).sizes
    root, layout = state.views.get(source) or (source, Layout(shape, row_major(shape)))
    shown = op.view(layout, row.attrs)
    if shown is None:  # must copy: a source of its own
        return False
    here = Ref(i)
    if shown.shape == state.draft.spec(root).shape and shown == Layout(shown.shape, row_major(shown.shape)):
        state.draft.replace("identity view", i, root)
        return True
    earlier = state.shown.setdefault((root, shown), here)
    if earlier is not here:
        state.draft.replace("same view", i, earlier)
        return True
    state.views[here] = (root, shown)
    return False


def neutral_operand(state: _Pass, i: int, row: Row, op: Op) -> bool:
    """x·1, x/1, x - 0, x + (-0): the other operand. Never x + 0, which turns -0 into 0."""
    if len(row.operands) != 2:
        return False
    for place, neutral in op.traits.identity:
        other = row.operands[1 - place]
        if state.draft.spec(other) != row.specs[0]:
            continue
        value = state.number(row.operands[place])
        if value is not None and value == neutral and copysign(1.0, value) == copysign(1.0, neutral):
            state.draft.replace("neutral operand", i, other)
            return True
    return False


def conversion_chain(state: _Pass, i: int, row: Row, op: Op) -> bool:
    """A conversion to the dtype at hand is the operand; one after an exact widening starts from the narrow value."""
    if not op.traits.convert:
        return False
    draft, source = state.draft, row.operands[0]
    before = draft.rows[source.row]
    while before.op not in KINDS and get(before.op).traits.convert:
        first, middle, last = (draft.spec(r).dtype for r in (before.operands[0], source, Ref(i)))
        if not (widens(first, middle) and (last is first or (first.is_float and last.is_float))):
            break
        draft.log.append(Firing("conversion chain", draft.path(i), draft.path(before.operands[0].row)))
        row.operands[0] = source = before.operands[0]
        before = draft.rows[source.row]
    if draft.spec(source) == row.specs[0]:
        draft.replace("identity conversion", i, source)
        return True
    return False


def same_result(state: _Pass, i: int, row: Row, op: Op) -> bool:
    """The same op on the same operands was computed before; never one that carries state."""
    if op.traits.update or op.view is not None:
        return False
    key = (row.op, repr(row.attrs), row.specs, tuple(row.operands))  # repr: 0.0, -0.0, 0 and False differ
    earlier = state.computed.setdefault(key, i)
    if earlier == i:
        return False
    draft = state.draft
    for port in range(len(row.specs)):
        draft.same[Ref(i, port)] = Ref(earlier, port)
    draft.log.append(Firing("same result", draft.path(i), draft.path(earlier)))
    return True


def zero_added(state: _Pass, i: int, row: Row, op: Op) -> bool:
    """X + 0: x, whose -0 then stays -0."""
    if not op.traits.sums or len(row.operands) != 2:
        return False
    for place in (0, 1):
        other = row.operands[1 - place]
        if state.draft.spec(other) == row.specs[0] and state.number(row.operands[place]) == 0:
            state.draft.replace("zero added", i, other, bound="0; a zero may have the other sign")
            return True
    return False


def addend_into_product(state: _Pass, i: int, row: Row, op: Op) -> bool:
    """A vector added to a product that nothing else reads: the product's own addend, so that it is written once."""
    if not op.traits.sums or len(row.operands) != 2:
        return False
    draft = state.draft
    for place in (0, 1):
        inner, other = row.operands[place], row.operands[1 - place]
        product = draft.rows[inner.row]
        if product.op in KINDS or get(product.op).traits.addend != len(product.operands) or state.readers[inner] != 1:
            continue
        spec, vector = row.specs[0], draft.spec(other)
        if draft.spec(inner) != spec or vector.shape != spec.shape[-1:] or vector.dtype is not spec.dtype:
            continue
        terms, digits = draft.spec(product.operands[0]).sizes[-1], _DIGITS[spec.dtype.name][0]
        bound = f"{terms + 2} · 2^-{digits} · (Σ|x·w| + |b|)"
        draft.log.append(Firing("addend into product", draft.path(inner.row), draft.path(i), bound))
        row.op, row.attrs, row.operands = product.op, product.attrs, [*product.operands, other]
        return True
    return False


def narrow_weight(state: _Pass, i: int, row: Row, op: Op) -> bool:
    """A stored bfloat16 weight read as it is instead of as a float32 copy: the VM widens it in registers."""
    draft = state.draft
    for place in op.traits.narrow:
        wide = row.operands[place]
        before = draft.rows[wide.row]
        if before.op in KINDS or not get(before.op).traits.convert or draft.spec(wide).dtype is not float32:
            continue
        stored = before.operands[0]
        if draft.rows[stored.row].op == PARAM and draft.spec(stored).dtype is bfloat16:
            draft.log.append(Firing("narrow weight", draft.path(i), draft.path(stored.row)))
            row.operands[place] = stored
    return False


RULES: tuple[Rule, ...] = (single_edge, same_view, neutral_operand, conversion_chain, same_result)


FAST_RULES: tuple[Rule, ...] = (zero_added, addend_into_product)


def rewrite(draft: Draft, *, fast: bool = False, narrow: bool = False) -> None:
    """Apply the rules to every row, in order; `draft.log` says what happened.

    `narrow`: weights may be read in the dtype they are stored in; the VM then has to run what reads them.
    """
    state, same, find = _Pass(draft), draft.same, draft.find
    rules = (*RULES, *(FAST_RULES if fast else ()), *((narrow_weight,) if narrow else ()))
    for i, row in enumerate(draft.rows):
        if same:
            row.operands = [find(ref) if ref in same else ref for ref in row.operands]
        if row.op in KINDS:
            continue
        op = get(row.op)
        for rule in rules:
            if rule(state, i, row, op):
                break
        for port in range(len(row.specs)):  # who read the row reads what stands for it
            if (by := same.get(Ref(i, port))) is not None:
                state.readers[by] += state.readers[Ref(i, port)]


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
