"""The axes table: how the dimensions of an op's operands and results hang together. One row per op, or why it has none.

A row takes one `Use` and gives the dimensions of the results as terms (`ops.terms`). On the way it joins terms, says
where a dimension ends (`summed` where zeros leave no trace, `mixed` where they do, `frozen` where its size is bound),
and which attributes are sizes. Dimensions couple by these rules alone, never by equal size or by name.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any

from graphwright.array.spec import Dim
from graphwright.ops.registry import Op
from graphwright.ops.rules import axes_of, axis_of
from graphwright.ops.terms import Atom, Term, chain, product, same, size

Dims = tuple[Term, ...]


@dataclass(frozen=True, slots=True)
class Note:
    """What a row says of a dimension beside its joins.

    Attributes:
        fact: `frozen`, `mixed`, `summed` or `kind`.
        term: the dimension.
        text: the reason, or which kind.
        ends: (operand, dimension) that a sum runs over.
    """

    fact: str
    term: Term
    text: str = ""
    ends: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True, slots=True)
class Correction:
    """How removing zeros is made exact: `eps` and the scale are multiplied by D/d and √(D/d) for a size from D to d."""

    term: Term
    port: int
    attr: str
    offset: float


@dataclass(slots=True)
class Use:
    """One use of an op in a program, as its row sees it.

    Attributes:
        ins: dimensions of the operands.
        shapes: of the results.
        attrs: of the op.
        stored: per operand, whether it is a weight as it is stored, but for a cast.
        tables: per operand, whether it is a constant of the program, whose numbers an edit can change.
        ranges: per operand, the axis whose places its integers name, if that is known.
        notes, corrections: what the row said.
        lookups: (axis, operand) whose numbers name places of the axis.
        sizes: attribute -> term, or terms, that it is the size of.
        result_ranges: per result, as `ranges`.
    """

    ins: Sequence[Dims]
    shapes: Sequence[tuple[Dim, ...]]
    attrs: Mapping[str, Any]
    stored: Sequence[bool]
    ranges: Sequence[Term | None]
    tables: Sequence[bool] = ()
    notes: list[Note] = field(default_factory=list)
    corrections: list[Correction] = field(default_factory=list)
    lookups: list[tuple[Term, int]] = field(default_factory=list)
    sizes: dict[str, Any] = field(default_factory=dict)
    result_ranges: dict[int, Term | None] = field(default_factory=dict)

    def same(self, a: Term, b: Term) -> None:
        """Join two dimensions; where no common split exists, both are frozen."""
        if not same(a, b):
            for term in (a, b):
                self.frozen(term, "splits it at places that do not fit together")

    def frozen(self, term: Term, why: str) -> None:
        """The size is bound: `why` goes on "the op ..."."""
        self.notes.append(Note("frozen", term, why))

    def mixed(self, term: Term, why: str) -> None:
        """Removing a unit is not the same as setting it to zero here."""
        self.notes.append(Note("mixed", term, why))

    def summed(self, term: Term, *ends: tuple[int, int]) -> None:
        """The dimension ends in a sum over these (operand, dimension): a zero leaves no trace."""
        ends = tuple((port, dim % len(self.ins[port])) for port, dim in ends)
        self.notes.append(Note("summed", term, "", ends))

    def kind(self, term: Term, name: str) -> None:
        """What the dimension is called in the field."""
        self.notes.append(Note("kind", term, name))

    def fresh(self, n: Dim, why: str = "") -> Term:
        """A dimension that nothing else determines; frozen if `why` says so."""
        made = Atom(n)
        if why:
            self.frozen(made, why)
        return made


Rule = Callable[[Use], Sequence[Dims]]


# -- elementwise and copies --------------------------------------------------------------------------------------------
def broadcast(u: Use) -> Sequence[Dims]:
    """Operands with broadcasting: equal dimensions join, one of size 1 joins nothing."""
    return [_broadcast(u, u.ins, shape) for shape in u.shapes]


def _broadcast(u: Use, operands: Sequence[Dims], shape: Sequence[Dim]) -> Dims:
    result: list[Term] = []
    for back in range(len(shape), 0, -1):
        here = [dims[-back] for dims in operands if len(dims) >= back]
        full = [t for t in here if size(t) == shape[-back]] or [u.fresh(shape[-back])]
        for other in full[1:]:
            u.same(full[0], other)
        result.append(full[0])
    return tuple(result)


def first(u: Use) -> Sequence[Dims]:
    """The dimensions of the first operand for every result that has them; others have their own operand's."""
    return [u.ins[min(i, len(u.ins) - 1)] for i in range(len(u.shapes))]


def _identity(u: Use) -> Sequence[Dims]:
    u.result_ranges[0] = u.ranges[0]
    return [u.ins[0]]


def _junction(u: Use) -> Sequence[Dims]:
    for other in u.ins[1:]:
        for a, b in zip(u.ins[0], other, strict=True):
            u.same(a, b)
    return [u.ins[0] if u.ins else tuple(u.fresh(n, "has no operand that says what it is") for n in u.shapes[0])]


# -- views -------------------------------------------------------------------------------------------------------------
def _reshape(u: Use) -> Sequence[Dims]:
    """Runs of dimensions between named ones, each a product on both sides."""
    x, shape = u.ins[0], u.shapes[0]
    out = tuple(Atom(n) for n in shape)
    u.result_ranges[0], u.sizes["shape"] = u.ranges[0], out
    left, right = _runs(x, [size(t) for t in x]), _runs(out, shape)
    if [a for a, _ in left] != [a for a, _ in right] or any(
        _count(a) != _count(b) for (_, a), (_, b) in zip(left, right, strict=True)
    ):
        for term in (*x, *out):
            u.frozen(term, "moves it across a dimension of unknown size")
        return [out]
    for (_, a), (_, b) in zip(left, right, strict=True):
        named = [t for t in (*a, *b) if isinstance(size(t), str)]
        if named:
            u.same(*named)
        a, b = ([t for t in run if not isinstance(size(t), str)] for run in (a, b))
        if a or b:
            u.same(product(*a), product(*b))
    return [out]


def _runs(dims: Sequence[Term], shape: Sequence[Dim]) -> list[tuple[Dim | None, list[Term]]]:
    """(name that begins it or None, its dimensions)."""
    runs: list[tuple[Dim | None, list[Term]]] = [(None, [])]
    for term, n in zip(dims, shape, strict=True):
        if isinstance(n, str):
            runs.append((n, []))
        runs[-1][1].append(term)
    return runs


def _count(dims: Sequence[Term]) -> int:
    return prod(n for t in dims if isinstance(n := size(t), int))


def _unflatten(u: Use) -> Sequence[Dims]:
    x, at = u.ins[0], axis_of(u.attrs["axis"], len(u.ins[0]))
    parts = tuple(Atom(n) for n in u.attrs["sizes"])
    u.same(x[at], product(*parts))
    u.sizes["sizes"], u.result_ranges[0] = parts, u.ranges[0]
    return [(*x[:at], *parts, *x[at + 1 :])]


def _flatten(u: Use) -> Sequence[Dims]:
    x = u.ins[0]
    a, b = (axis_of(u.attrs[k], len(x)) for k in ("start", "end"))
    u.result_ranges[0] = u.ranges[0]
    return [(*x[:a], product(*x[a : b + 1]), *x[b + 1 :])]


def _permute(u: Use) -> Sequence[Dims]:
    u.result_ranges[0] = u.ranges[0]
    return [tuple(u.ins[0][a] for a in u.attrs["axes"])]


def _expand(u: Use) -> Sequence[Dims]:
    u.result_ranges[0], x, shape = u.ranges[0], u.ins[0], u.shapes[0]
    lead = len(shape) - len(x)
    out = tuple(x[i - lead] if i >= lead and size(x[i - lead]) == n else Atom(n) for i, n in enumerate(shape))
    u.sizes["shape"] = out
    return [out]


def _squeeze(u: Use) -> Sequence[Dims]:
    x, u.result_ranges[0] = u.ins[0], u.ranges[0]
    left_out = axes_of(u.attrs["axes"], len(x))
    return [tuple(t for a, t in enumerate(x) if a not in left_out)]


def _unsqueeze(u: Use) -> Sequence[Dims]:
    rank = len(u.shapes[0])
    added, rest = axes_of(u.attrs["axes"], rank), iter(u.ins[0])
    u.result_ranges[0] = u.ranges[0]
    return [tuple(Atom(1) if a in added else next(rest) for a in range(rank))]


def _slice(u: Use) -> Sequence[Dims]:
    x, a = u.ins[0], u.attrs
    at = axis_of(a["axis"], len(x))
    u.result_ranges[0] = u.ranges[0]
    whole, taken = int(size(x[at])), Atom(a["size"])  # a slice has a known axis
    if a["step"] == 1 and a["size"]:
        before, behind = Atom(a["start"]), Atom(whole - a["start"] - a["size"])
        u.same(x[at], chain(before, taken, behind))
        u.sizes |= {"start": before, "size": taken}
    elif a["size"] != whole:
        for term in (x[at], taken):
            u.frozen(term, f"takes every {a['step']}th place of it")
    else:
        u.same(x[at], taken)
        u.sizes["size"] = taken
    return [(*x[:at], taken, *x[at + 1 :])]


def _pad_slice(u: Use) -> Sequence[Dims]:
    x, a = u.ins[0], u.attrs
    at = axis_of(a["axis"], len(x))
    if a["step"] == 1:
        before = Atom(a["start"])
        behind = Atom(a["size"] - a["start"] - int(size(x[at])))
        full = chain(before, x[at], behind)
        u.sizes |= {"start": before, "size": full}
    else:
        full = u.fresh(a["size"], f"puts zeros between {a['step']} places of it")
        u.frozen(x[at], f"puts zeros between {a['step']} places of it")
    return [(*x[:at], full, *x[at + 1 :])]


def _concat(u: Use) -> Sequence[Dims]:
    at = axis_of(u.attrs["axis"], len(u.ins[0]))
    for other in u.ins[1:]:
        for i, (a, b) in enumerate(zip(u.ins[0], other, strict=True)):
            if i != at:
                u.same(a, b)
    x = u.ins[0]
    return [(*x[:at], chain(*(dims[at] for dims in u.ins)), *x[at + 1 :])]


def _tile(u: Use) -> Sequence[Dims]:
    x, repeats = u.ins[0], u.attrs["repeats"]
    dims = (*(Atom(1) for _ in range(len(repeats) - len(x))), *x)
    copies = tuple(Atom(r) for r in repeats)
    u.sizes["repeats"] = copies
    return [tuple(t if size(c) == 1 else product(c, t) for c, t in zip(copies, dims, strict=True))]


def _repeat(u: Use) -> Sequence[Dims]:
    x, copies = u.ins[0], Atom(u.attrs["repeats"])
    at = axis_of(u.attrs["axis"], len(x))
    u.sizes["repeats"] = copies
    return [(*x[:at], product(x[at], copies), *x[at + 1 :])]


def _diagonal(u: Use) -> Sequence[Dims]:
    x = u.ins[0]
    a, b = (axis_of(axis, len(x)) for axis in u.attrs["axes"])
    rest = tuple(t for i, t in enumerate(x) if i not in (a, b))
    if u.attrs["offset"] == 0 and size(x[a]) == size(x[b]):
        u.same(x[a], x[b])
        return [(*rest, x[a])]
    for term in (x[a], x[b]):
        u.frozen(term, "reads a diagonal of it")
    return [(*rest, u.fresh(u.shapes[0][-1], "reads a diagonal"))]


def _last(u: Use) -> Sequence[Dims]:
    x, at = u.ins[0], axis_of(u.attrs["axis"], len(u.ins[0]))
    u.frozen(x[at], "reads its last place")
    return [(*x[:at], Atom(1), *x[at + 1 :])]


def _bound(why: str, *, attr: str = "axis", every: int = 0) -> Rule:
    """Dimensions of the operand; those that an attribute names (or the last `every`) are frozen."""

    def rule(u: Use) -> Sequence[Dims]:
        x = u.ins[0]
        named = range(len(x) - every, len(x)) if every else axes_of(u.attrs[attr], len(x))
        for axis in named:
            u.frozen(x[axis], why)
        return [x for _ in u.shapes]

    return rule


def _trailing(why: str) -> Rule:
    """Leading dimensions pass; those whose size the op changes, or slides over, are frozen on both sides."""

    def rule(u: Use) -> Sequence[Dims]:
        x, rank = u.ins[0], len(u.attrs.get("kernel") or u.attrs.get("sizes") or u.attrs.get("widths") or ())
        lead = len(x) - rank
        moved = [i for i in range(lead, len(x)) if "widths" not in u.attrs or any(u.attrs["widths"][i - lead])]
        for i in moved:
            u.frozen(x[i], why)
        out = tuple(u.fresh(u.shapes[0][i], why) if i in moved else t for i, t in enumerate(x))
        return [out for _ in u.shapes]

    return rule


def _size(u: Use) -> Sequence[Dims]:
    u.mixed(u.ins[0][axis_of(u.attrs["axis"], len(u.ins[0]))], "reads its size")
    return [()]


def _iota(u: Use) -> Sequence[Dims]:
    u.result_ranges[0] = axis = u.ins[0][axis_of(u.attrs["axis"], len(u.ins[0]))]
    u.mixed(axis, "numbers its places")
    return [(axis,)]


# -- reductions --------------------------------------------------------------------------------------------------------
def _reduce(u: Use) -> tuple[list[Term], Dims]:
    """The dimensions that go, and what is left."""
    x = u.ins[0]
    named = axes_of(u.attrs["axes"], len(x)) if "axes" in u.attrs else (axis_of(u.attrs["axis"], len(x)),)
    keep = u.attrs.get("keepdims", False)
    left = tuple(Atom(1) if a in named else t for a, t in enumerate(x) if keep or a not in named)
    return [x[a] for a in named], left


def _sum(u: Use) -> Sequence[Dims]:
    gone, left = _reduce(u)
    for term in gone:
        u.summed(term, (0, next(i for i, t in enumerate(u.ins[0]) if t is term)))
    return [left]


def _reduced(why: str) -> Rule:
    def rule(u: Use) -> Sequence[Dims]:
        gone, left = _reduce(u)
        for term in gone:
            u.mixed(term, why)
        return [left]

    return rule


def _along(why: str) -> Rule:
    """The operand's dimensions; along the axis, every place depends on the others."""

    def rule(u: Use) -> Sequence[Dims]:
        x = u.ins[0]
        u.mixed(x[axis_of(u.attrs["axis"], len(x))], why)
        for extra in u.ins[1:]:
            _broadcast(u, (x, extra), [size(t) for t in x])
        return [x]

    return rule


def _ordered(u: Use) -> Sequence[Dims]:
    x, at = u.ins[0], axis_of(u.attrs["axis"], len(u.ins[0]))
    u.mixed(x[at], "orders its places by value")
    dims = x
    if "k" in u.attrs:
        dims = (*x[:at], u.fresh(u.attrs["k"], "takes so many places"), *x[at + 1 :])
    u.result_ranges[1] = x[at]
    return [dims, dims]


def _arg(u: Use) -> Sequence[Dims]:
    x, at = u.ins[0], axis_of(u.attrs["axis"], len(u.ins[0]))
    u.mixed(x[at], "compares its places")
    u.result_ranges[0] = x[at]
    return [(*x[:at], *x[at + 1 :])]


# -- products ----------------------------------------------------------------------------------------------------------
def _linear(u: Use) -> Sequence[Dims]:
    x, w = u.ins[:2]
    u.same(x[-1], w[1])
    u.summed(w[1], (0, -1), (1, 1))
    u.kind(w[1], "neurons")
    if len(u.ins) > 2:
        u.same(w[0], u.ins[2][0])
    return [(*x[:-1], w[0])]


def _matmul(u: Use) -> Sequence[Dims]:
    a, b = u.ins
    u.same(a[-1], b[-2:][0])
    u.summed(a[-1], (0, -1), (1, -2 if len(b) > 1 else 0))
    u.kind(a[-1], "neurons")
    rows, columns = a[-2:-1] if len(a) > 1 else (), b[-1:] if len(b) > 1 else ()
    shape = u.shapes[0]
    lead = _broadcast(u, (a[:-2], b[:-2]), shape[: len(shape) - len(rows) - len(columns)])
    for t in lead:
        shared = all(any(size(d) == size(t) for d in dims[:-2]) for dims in (a, b))
        if shared and isinstance(size(t), int):
            u.kind(t, "experts" if any(u.stored) else "heads")
    return [(*lead, *rows, *columns)]


def _grouped_matmul(u: Use) -> Sequence[Dims]:
    x, w, offsets = u.ins
    u.same(x[1], w[1])
    u.summed(w[1], (0, 1), (1, 1))
    u.kind(w[1], "neurons")
    u.same(offsets[0], chain(Atom(1), w[0]))
    for term in (x[0], w[0]):
        u.mixed(term, "has a run of rows for each")
    u.kind(w[0], "experts")
    return [(x[0], w[2])]


def _conv(u: Use) -> Sequence[Dims]:
    """Channels are groups × those of a group; x joins by group, w has the group in its outputs only."""
    x, w = u.ins[:2]
    groups, made = Atom(u.attrs["groups"]), Atom(int(size(w[0])) // u.attrs["groups"])
    u.same(x[1], product(groups, w[1]))
    u.same(w[0], product(groups, made))
    return _convolved(u, groups, w[1], w[0], 1)


def _conv_transpose(u: Use) -> Sequence[Dims]:
    x, w = u.ins[:2]
    groups, read = Atom(u.attrs["groups"]), Atom(int(size(w[0])) // u.attrs["groups"])
    u.same(w[0], product(groups, read))
    u.same(x[1], w[0])
    return _convolved(u, groups, read, product(groups, w[1]), 0)


def _convolved(u: Use, groups: Atom, read: Term, made: Term, at: int) -> Sequence[Dims]:
    x, w = u.ins[:2]
    u.summed(read, (0, 1), (1, at))
    _grouped_channels(u, groups, x[1], made)
    if len(u.ins) > 2:
        u.same(made, u.ins[2][0])
    for term in (*x[2:], *w[2:]):
        u.frozen(term, "slides a window over it")
    return [(x[0], made, *(u.fresh(n, "has so many places for its window") for n in u.shapes[0][2:]))]


def _grouped_channels(u: Use, groups: Atom, *channels: Term) -> None:
    u.sizes["groups"] = groups
    u.kind(groups, "channel_groups")
    for term in channels:
        u.kind(term, "channels")


def _unfold(u: Use) -> Sequence[Dims]:
    x, kernel = u.ins[0], u.fresh(prod(u.attrs["kernel"]), "has so many entries in its window")
    for term in x[2:]:
        u.frozen(term, "slides a window over it")
    return [(x[0], product(x[1], kernel), u.fresh(u.shapes[0][2], "has so many places for its window"))]


def _fold(u: Use) -> Sequence[Dims]:
    x, kernel = u.ins[0], u.fresh(prod(u.attrs["kernel"]), "has so many entries in its window")
    channels = Atom(u.shapes[0][1])
    u.same(x[1], product(channels, kernel))
    u.frozen(x[2], "slides a window over it")
    return [(x[0], channels, *(u.fresh(n, "slides a window over it") for n in u.shapes[0][2:]))]


# -- norms -------------------------------------------------------------------------------------------------------------
def _rms_norm(u: Use) -> Sequence[Dims]:
    x, w = u.ins
    u.same(x[-1], w[0])
    u.mixed(x[-1], "divides by its root mean square")
    u.kind(x[-1], "channels")
    u.corrections.append(Correction(x[-1], 1, "eps", 1.0 if u.attrs["unit_offset"] else 0.0))
    return [x]


def _layer_norm(u: Use) -> Sequence[Dims]:
    x, rank = u.ins[0], u.attrs["rank"]
    for scale in u.ins[1:]:
        for a, b in zip(x[-rank:], scale, strict=True):
            u.same(a, b)
    for term in x[-rank:]:
        u.mixed(term, "subtracts its mean")
        u.kind(term, "channels")
    return [x]


def _group_norm(u: Use) -> Sequence[Dims]:
    x = u.ins[0]
    groups, inner = Atom(u.attrs["groups"]), Atom(int(size(x[1])) // u.attrs["groups"])
    u.same(x[1], product(groups, inner))
    u.mixed(inner, "normalises over it")
    _grouped_channels(u, groups, x[1])
    for term in x[2:]:
        u.mixed(term, "normalises over it")
    for scale in u.ins[1:]:
        u.same(x[1], scale[0])
    return [x]


def _batch_norm(u: Use) -> Sequence[Dims]:
    x = u.ins[0]
    u.kind(x[1], "channels")
    for table in u.ins[1:]:
        u.same(x[1], table[0])
    for term in (x[0], *x[2:]) if len(u.shapes) > 1 else ():
        u.mixed(term, "normalises over it")
    return [x, *((x[1],) for _ in u.shapes[1:])]


# -- attention ---------------------------------------------------------------------------------------------------------
def _rope_table(u: Use) -> Sequence[Dims]:
    return [(*u.ins[0], u.ins[1][0])] * 2


def _rope_dynamic(u: Use) -> Sequence[Dims]:
    u.frozen(u.ins[1][0], "has its size in its formula")
    for term in u.ins[0]:
        u.mixed(term, "takes the largest over it")
    return [u.ins[1]]


def _rope_longer(u: Use) -> Sequence[Dims]:
    u.same(u.ins[1][0], u.ins[2][0])
    return [u.ins[1]]


def _rope(u: Use) -> Sequence[Dims]:
    """Places i and i + D/2 turn together."""
    x, *tables = u.ins
    half = tables[0][2]
    u.same(x[3], chain(half, half))
    u.kind(x[3], "head_dim")
    for table in tables:
        u.same(table[2], half)
        for axis, place in ((0, 0), (2, 1)):
            if size(x[axis]) == size(table[place]):
                u.same(x[axis], table[place])
    return [x]


def _sdpa(u: Use) -> Sequence[Dims]:
    """Query heads are key heads × the queries of each."""
    q, k, v, *extra = u.ins
    heads, groups = size(q[1]), size(k[1])
    repeats = Atom(int(heads) // int(groups)) if isinstance(heads, int) and isinstance(groups, int) else Atom(1)
    u.same(k[1], v[1])
    u.same(q[1], product(k[1], repeats))
    u.kind(q[1], "heads")
    u.kind(k[1], "kv_groups")
    if size(repeats) != 1:
        u.kind(repeats, "queries")
    u.same(q[0], k[0])
    u.same(k[0], v[0])
    u.same(q[3], k[3])
    u.summed(q[3], (0, 3), (1, 3))
    u.kind(q[3], "head_dim")
    u.kind(v[3], "head_dim")
    u.same(k[2], v[2])
    u.mixed(k[2], "takes a softmax over it")
    u.mixed(q[2], "sees keys by their place")
    for name, dims in zip(u.attrs["optional"], extra, strict=True):
        if name == "key_mask":
            u.same(dims[0], k[0])
            u.same(dims[1], k[2])
    return [(*q[:3], v[3])]


def _kv_append(u: Use) -> Sequence[Dims]:
    cache, rows, _ = u.ins
    for axis in (0, 1, 3):
        u.same(cache[axis], rows[axis])
    for term in (cache[2], rows[2]):
        u.frozen(term, "writes rows by their place")
    return [cache]


# -- places by number --------------------------------------------------------------------------------------------------
def _named(u: Use, axis: Term, port: int) -> None:
    """Integers of an operand name places of an axis: join with the axis they came from, or freeze."""
    if (source := u.ranges[port]) is not None and size(source) == size(axis):
        u.same(axis, source)
    else:
        u.frozen(axis, "reads it by number")


def _embedding(u: Use) -> Sequence[Dims]:
    table, ids = u.ins
    _named(u, table[0], 1)
    if u.stored[0]:
        u.kind(table[0], "vocabulary")
        u.kind(table[1], "channels")
    return [(*ids, table[1])]


def _index(u: Use) -> Sequence[Dims]:
    x, *ids = u.ins
    start = axis_of(u.attrs["axis"], len(x))
    for port, axis in enumerate(x[start : start + len(ids)], 1):
        if len(ids) == 1 and len(ids[0]) == 1 and any(u.tables[1:]):
            u.lookups.append((axis, port))
        else:
            _named(u, axis, port)
    return [(*x[:start], *_places(u, ids, u.shapes[0], start, len(x) - start - len(ids)), *x[start + len(ids) :])]


def _places(u: Use, ids: Sequence[Dims], shape: Sequence[Dim], start: int, behind: int) -> Dims:
    return _broadcast(u, ids, shape[start : len(shape) - behind])


def _index_update(u: Use) -> Sequence[Dims]:
    x, *ids = u.ins
    start = axis_of(u.attrs["axis"], len(x))
    values: Dims = ids.pop(0) if "value" not in u.attrs else ()
    for port, axis in enumerate(x[start : start + len(ids)], len(u.ins) - len(ids)):
        _named(u, axis, port)
    for term in (t for dims in ids for t in dims):
        u.mixed(term, "writes by number in order")
    if values:
        rest = (*x[:start], *_broadcast(u, ids, _joined(ids)), *x[start + len(ids) :])
        _broadcast(u, (rest, values), [size(t) for t in rest])
    return [x]


def _joined(ids: Sequence[Dims]) -> list[Dim]:
    rank = max(map(len, ids))
    here = [[size(d[-back]) for d in ids if len(d) >= back] for back in range(rank, 0, -1)]
    return [next((n for n in sizes if n != 1), 1) for sizes in here]


def _gather(u: Use) -> Sequence[Dims]:
    x, index = u.ins[:2]
    at = axis_of(u.attrs["axis"], len(x))
    if len(index) != len(x):
        for term in x:
            u.frozen(term, "reads it by number")
        return [index]
    _named(u, x[at], 1)
    for i, (a, b) in enumerate(zip(x, index, strict=True)):
        if i != at and size(a) == size(b):
            u.same(a, b)
        elif i != at:
            for term in (a, b):
                u.frozen(term, "reads its first places")
    return [index]


def _scatter(u: Use) -> Sequence[Dims]:
    x, values, index = u.ins
    at = axis_of(u.attrs["axis"], len(x))
    u.frozen(x[at], "writes it by number")
    for a, b in zip(values, index, strict=True):
        u.same(a, b)
    for i, (a, b) in enumerate(zip(x, index, strict=False)):
        if len(index) == len(x) and i != at and size(a) == size(b):
            u.same(a, b)
        else:
            for term in (a, b):
                u.frozen(term, "writes by number in order")
    return [x]


def _one_hot(u: Use) -> Sequence[Dims]:
    return [(*u.ins[0], _counted(u, "classes"))]


def _bincount(u: Use) -> Sequence[Dims]:
    for term in u.ins[0]:
        u.mixed(term, "counts over it")
    return [(_counted(u, "length"),)]


def _counted(u: Use, attr: str) -> Term:
    axis = Atom(u.attrs[attr])
    _named(u, axis, 0)
    u.sizes[attr] = axis
    return axis


# -- random numbers and losses -----------------------------------------------------------------------------------------
def _drawn(u: Use) -> Sequence[Dims]:
    out = tuple(Atom(n) for n in u.shapes[0])
    _noise(u, u.ins[0], out)
    u.sizes["shape"] = out
    return [out]


def _masked(u: Use) -> Sequence[Dims]:
    _noise(u, u.ins[1], u.ins[0])
    return [u.ins[0], u.ins[1]][: len(u.shapes)]


def _noise(u: Use, key: Dims, over: Dims) -> None:
    u.frozen(key[0], "is keyed by a seed and a step")
    for term in over:
        u.mixed(term, "draws other numbers for another shape")


def _multinomial(u: Use) -> Sequence[Dims]:
    x = u.ins[0]
    _noise(u, u.ins[1], x)
    u.result_ranges[0] = x[-1]
    return [(*x[:-1], u.fresh(u.attrs["samples"], "draws so many"))]


def _cross_entropy(u: Use) -> Sequence[Dims]:
    scores, targets, *weight = u.ins
    u.frozen(scores[-1], "reads it by number")
    for a, b in zip(scores, targets, strict=False):
        u.same(a, b)
    for dims in weight:
        u.same(dims[0], scores[-1])
    return [targets, targets]


_BACKWARD = "a gradient is taken anew from the edited program"
_UPDATE = "a step of training is taken down anew from the edited program"
_PLACE = "the place of an entry matters: "

AXES: Mapping[str, Rule | str] = {
    **dict.fromkeys(("cast", "copy", "stop_gradient", "scale_gradient", "assert_finite"), _identity),
    "junction": _junction,
    "reshape": _reshape,
    "unflatten": _unflatten,
    "flatten": _flatten,
    "permute": _permute,
    "expand": _expand,
    "squeeze": _squeeze,
    "unsqueeze": _unsqueeze,
    "slice": _slice,
    "pad_slice": _pad_slice,
    "concat": _concat,
    "tile": _tile,
    "repeat_interleave": _repeat,
    "diagonal": _diagonal,
    "last": _last,
    "size": _size,
    "iota": _iota,
    "flip": _bound(f"{_PLACE}it reads from the end", attr="axes"),
    "roll": _bound(f"{_PLACE}it moves entries along it", attr="axes"),
    "tril": _bound(f"{_PLACE}it keeps a triangle", every=2),
    "triu": _bound(f"{_PLACE}it keeps a triangle", every=2),
    "pad": _trailing("makes it longer"),
    "pad_backward": _BACKWARD,
    "sum": _sum,
    "prod": _reduced("multiplies over it"),
    "mean": _reduced("divides by its size"),
    "amax": _reduced("takes the largest over it"),
    "amin": _reduced("takes the smallest over it"),
    "any": _sum,
    "all": _reduced("asks for every place of it"),
    "logsumexp": _reduced("sums exponentials over it"),
    "argmax": _arg,
    "argmin": _arg,
    "cumsum": _along("sums up to each place of it"),
    "softmax": _along("takes a softmax over it"),
    "log_softmax": _along("takes a softmax over it"),
    "sort": _ordered,
    "topk": _ordered,
    "linear": _linear,
    "matmul": _matmul,
    "grouped_matmul": _grouped_matmul,
    "grouped_outer": _BACKWARD,
    "conv": _conv,
    "conv_transpose": _conv_transpose,
    "conv_weight": _BACKWARD,
    "unfold": _unfold,
    "fold": _fold,
    "max_pool": _trailing("slides a window over it"),
    "avg_pool": _trailing("slides a window over it"),
    "avg_pool_backward": _BACKWARD,
    "adaptive_avg_pool": _trailing("shares it out over windows"),
    "adaptive_avg_pool_backward": _BACKWARD,
    "interpolate": _trailing("resamples it"),
    "interpolate_backward": _BACKWARD,
    "rms_norm": _rms_norm,
    "layer_norm": _layer_norm,
    "group_norm": _group_norm,
    "batch_norm": _batch_norm,
    "batch_norm_train": _batch_norm,
    "rope_table": _rope_table,
    "rope_dynamic": _rope_dynamic,
    "rope_longer": _rope_longer,
    "rope": _rope,
    "sdpa": _sdpa,
    "sdpa_backward": _BACKWARD,
    "kv_append": _kv_append,
    "embedding": _embedding,
    "embedding_backward": _BACKWARD,
    "index": _index,
    "index_sum": _BACKWARD,
    "index_put": _index_update,
    "index_add": _index_update,
    "index_fill": _index_update,
    "gather": _gather,
    "scatter_sum": _BACKWARD,
    "scatter": _scatter,
    "scatter_add": _scatter,
    "one_hot": _one_hot,
    "bincount": _bincount,
    **dict.fromkeys(("uniform", "normal", "gumbel", "randint"), _drawn),
    **dict.fromkeys(("bernoulli", "dropout"), _masked),
    "multinomial": _multinomial,
    "cross_entropy": _cross_entropy,
    "cross_entropy_backward": _BACKWARD,
    **dict.fromkeys(("adam_step", "adamw_step", "sgd_step", "rmsprop_step", "ema_step", "unscale_check"), _UPDATE),
}
"""op -> its row, or why it has none. Elementwise ops need no line: their trait says all there is to say."""


def axes_row(op: Op) -> Rule | str:
    """The axes row of an op: its own cell, its line in the table, or what the elementwise trait says."""
    if op.axes is not None:
        return op.axes
    found = AXES.get(op.name)
    if found is not None:
        return found
    return broadcast if op.traits.elementwise else "its row says nothing of axes"
