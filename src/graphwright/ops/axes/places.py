"""Axes whose places integers name, random numbers, and losses."""

from __future__ import annotations

from collections.abc import Sequence

from graphwright.array.spec import Dim
from graphwright.ops.axes.use import Dims, Use, broadcast_dims
from graphwright.ops.rules import axis_of
from graphwright.ops.terms import Atom, Term, size


def _named(u: Use, axis: Term, port: int) -> None:
    """Integers of an operand name places of an axis: join with the axis they came from, or freeze."""
    if (source := u.ranges[port]) is not None and size(source) == size(axis):
        u.same(axis, source)
    else:
        u.frozen(axis, "reads it by number")


def embedding(u: Use) -> Sequence[Dims]:
    """Rows are named by number, columns are the result's."""
    table, ids = u.ins
    _named(u, table[0], 1)
    if u.stored[0]:
        u.kind(table[0], "vocabulary")
        u.kind(table[1], "channels")
    return [(*ids, table[1])]


def index(u: Use) -> Sequence[Dims]:
    """Indexed axes are named by number; those of the index take their place."""
    x, *ids = u.ins
    start = axis_of(u.attrs["axis"], len(x))
    for port, axis in enumerate(x[start : start + len(ids)], 1):
        if len(ids) == 1 and len(ids[0]) == 1 and any(u.tables[1:]):
            u.lookups.append((axis, port))
        else:
            _named(u, axis, port)
    return [(*x[:start], *_places(u, ids, u.shapes[0], start, len(x) - start - len(ids)), *x[start + len(ids) :])]


def _places(u: Use, ids: Sequence[Dims], shape: Sequence[Dim], start: int, behind: int) -> Dims:
    return broadcast_dims(u, ids, shape[start : len(shape) - behind])


def index_update(u: Use) -> Sequence[Dims]:
    """The axes of what is written to; values lie at the places of the index."""
    x, *ids = u.ins
    start = axis_of(u.attrs["axis"], len(x))
    values: Dims = ids.pop(0) if "value" not in u.attrs else ()
    for port, axis in enumerate(x[start : start + len(ids)], len(u.ins) - len(ids)):
        _named(u, axis, port)
    for term in (t for dims in ids for t in dims):
        u.mixed(term, "writes by number in order")
    if values:
        rest = (*x[:start], *broadcast_dims(u, ids, _joined(ids)), *x[start + len(ids) :])
        broadcast_dims(u, (rest, values), [size(t) for t in rest])
    return [x]


def _joined(ids: Sequence[Dims]) -> list[Dim]:
    rank = max(map(len, ids))
    here = [[size(d[-back]) for d in ids if len(d) >= back] for back in range(rank, 0, -1)]
    return [next((n for n in sizes if n != 1), 1) for sizes in here]


def gather(u: Use) -> Sequence[Dims]:
    """One axis is named by number; the others are those of the index where it reads all."""
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


def scatter(u: Use) -> Sequence[Dims]:
    """One axis is written by number; the others are those of the index where it writes all."""
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


def one_hot(u: Use) -> Sequence[Dims]:
    """A last axis of the classes that integers name."""
    return [(*u.ins[0], _counted(u, "classes"))]


def bincount(u: Use) -> Sequence[Dims]:
    """An axis of what integers name; they themselves are counted."""
    for term in u.ins[0]:
        u.mixed(term, "counts over it")
    return [(_counted(u, "length"),)]


def _counted(u: Use, attr: str) -> Term:
    axis = Atom(u.attrs[attr])
    _named(u, axis, 0)
    u.sizes[attr] = axis
    return axis


def drawn(u: Use) -> Sequence[Dims]:
    """An axis for each size."""
    out = tuple(Atom(n) for n in u.shapes[0])
    noise(u, u.ins[0], out)
    u.sizes["shape"] = out
    return [out]


def masked(u: Use) -> Sequence[Dims]:
    """The axes of what is masked, and of the key."""
    noise(u, u.ins[1], u.ins[0])
    return [u.ins[0], u.ins[1]][: len(u.shapes)]


def noise(u: Use, key: Dims, over: Dims) -> None:
    """What every random op says: a key of two numbers, and other noise for another shape."""
    u.frozen(key[0], "is keyed by a seed and a step")
    for term in over:
        u.mixed(term, "draws other numbers for another shape")


def multinomial(u: Use) -> Sequence[Dims]:
    """Places of the last axis, drawn."""
    x = u.ins[0]
    noise(u, u.ins[1], x)
    u.result_ranges[0] = x[-1]
    return [(*x[:-1], u.fresh(u.attrs["samples"], "draws so many"))]


def choose(u: Use) -> Sequence[Dims]:
    """Texts stay apart; what is chosen among is named by number."""
    logits, *rest = u.ins
    for dims in rest:
        u.same(logits[0], dims[0])
        for term in dims[1:]:
            u.frozen(term, "is read by place")
    u.mixed(logits[1], "draws one of it")
    u.result_ranges[0] = logits[1]
    return [logits[:1], logits]


def cross_entropy(u: Use) -> Sequence[Dims]:
    """Classes are named by number, rows are the result's."""
    scores, targets, *weight = u.ins
    u.frozen(scores[-1], "reads it by number")
    for a, b in zip(scores, targets, strict=False):
        u.same(a, b)
    for dims in weight:
        u.same(dims[0], scores[-1])
    return [targets, targets]
