"""Axes of ops that move, join, split or leave out places."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from graphwright.array.spec import Dim
from graphwright.ops.axes.use import Dims, Rule, Use
from graphwright.ops.rules import axes_of, axis_of
from graphwright.ops.terms import Atom, Term, chain, product, size


def identity(u: Use) -> Sequence[Dims]:
    """The operand's dimensions, and what its integers name."""
    u.result_ranges[0] = u.ranges[0]
    return [u.ins[0]]


def junction(u: Use) -> Sequence[Dims]:
    """All operands have the same dimensions."""
    for other in u.ins[1:]:
        for a, b in zip(u.ins[0], other, strict=True):
            u.same(a, b)
    return [u.ins[0] if u.ins else tuple(u.fresh(n, "has no operand that says what it is") for n in u.shapes[0])]


def reshape(u: Use) -> Sequence[Dims]:
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


def unflatten(u: Use) -> Sequence[Dims]:
    """A dimension as a product."""
    x, at = u.ins[0], axis_of(u.attrs["axis"], len(u.ins[0]))
    parts = tuple(Atom(n) for n in u.attrs["sizes"])
    u.same(x[at], product(*parts))
    u.sizes["sizes"], u.result_ranges[0] = parts, u.ranges[0]
    return [(*x[:at], *parts, *x[at + 1 :])]


def flatten(u: Use) -> Sequence[Dims]:
    """A product as a dimension."""
    x = u.ins[0]
    a, b = (axis_of(u.attrs[k], len(x)) for k in ("start", "end"))
    u.result_ranges[0] = u.ranges[0]
    return [(*x[:a], product(*x[a : b + 1]), *x[b + 1 :])]


def permute(u: Use) -> Sequence[Dims]:
    """Dimensions in another order."""
    u.result_ranges[0] = u.ranges[0]
    return [tuple(u.ins[0][a] for a in u.attrs["axes"])]


def expand(u: Use) -> Sequence[Dims]:
    """New dimensions where the operand has size 1 or none."""
    u.result_ranges[0], x, shape = u.ranges[0], u.ins[0], u.shapes[0]
    lead = len(shape) - len(x)
    out = tuple(x[i - lead] if i >= lead and size(x[i - lead]) == n else Atom(n) for i, n in enumerate(shape))
    u.sizes["shape"] = out
    return [out]


def squeeze(u: Use) -> Sequence[Dims]:
    """Without dimensions of size 1."""
    x, u.result_ranges[0] = u.ins[0], u.ranges[0]
    left_out = axes_of(u.attrs["axes"], len(x))
    return [tuple(t for a, t in enumerate(x) if a not in left_out)]


def unsqueeze(u: Use) -> Sequence[Dims]:
    """With dimensions of size 1."""
    rank = len(u.shapes[0])
    added, rest = axes_of(u.attrs["axes"], rank), iter(u.ins[0])
    u.result_ranges[0] = u.ranges[0]
    return [tuple(Atom(1) if a in added else next(rest) for a in range(rank))]


def slice_(u: Use) -> Sequence[Dims]:
    """A dimension is what lies before, what is taken, and what lies behind."""
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


def pad_slice(u: Use) -> Sequence[Dims]:
    """Zeros before and behind, as parts of a chain."""
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


def concat(u: Use) -> Sequence[Dims]:
    """A chain of the operands'."""
    at = axis_of(u.attrs["axis"], len(u.ins[0]))
    for other in u.ins[1:]:
        for i, (a, b) in enumerate(zip(u.ins[0], other, strict=True)):
            if i != at:
                u.same(a, b)
    x = u.ins[0]
    return [(*x[:at], chain(*(dims[at] for dims in u.ins)), *x[at + 1 :])]


def tile(u: Use) -> Sequence[Dims]:
    """Copies × the dimension."""
    x, repeats = u.ins[0], u.attrs["repeats"]
    dims = (*(Atom(1) for _ in range(len(repeats) - len(x))), *x)
    copies = tuple(Atom(r) for r in repeats)
    u.sizes["repeats"] = copies
    return [tuple(t if size(c) == 1 else product(c, t) for c, t in zip(copies, dims, strict=True))]


def repeat(u: Use) -> Sequence[Dims]:
    """The dimension × copies."""
    x, copies = u.ins[0], Atom(u.attrs["repeats"])
    at = axis_of(u.attrs["axis"], len(x))
    u.sizes["repeats"] = copies
    return [(*x[:at], product(x[at], copies), *x[at + 1 :])]


def diagonal(u: Use) -> Sequence[Dims]:
    """Two dimensions that are one."""
    x = u.ins[0]
    a, b = (axis_of(axis, len(x)) for axis in u.attrs["axes"])
    rest = tuple(t for i, t in enumerate(x) if i not in (a, b))
    if u.attrs["offset"] == 0 and size(x[a]) == size(x[b]):
        u.same(x[a], x[b])
        return [(*rest, x[a])]
    for term in (x[a], x[b]):
        u.frozen(term, "reads a diagonal of it")
    return [(*rest, u.fresh(u.shapes[0][-1], "reads a diagonal"))]


def last(u: Use) -> Sequence[Dims]:
    """Its place is bound."""
    x, at = u.ins[0], axis_of(u.attrs["axis"], len(u.ins[0]))
    u.frozen(x[at], "reads its last place")
    return [(*x[:at], Atom(1), *x[at + 1 :])]


def bound(why: str, *, attr: str = "axis", every: int = 0) -> Rule:
    """Dimensions of the operand; those that an attribute names (or the last `every`) are frozen."""

    def rule(u: Use) -> Sequence[Dims]:
        x = u.ins[0]
        named = range(len(x) - every, len(x)) if every else axes_of(u.attrs[attr], len(x))
        for axis in named:
            u.frozen(x[axis], why)
        return [x for _ in u.shapes]

    return rule


def trailing(why: str) -> Rule:
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


def size_(u: Use) -> Sequence[Dims]:
    """A number that depends on the size."""
    u.mixed(u.ins[0][axis_of(u.attrs["axis"], len(u.ins[0]))], "reads its size")
    return [()]


def iota(u: Use) -> Sequence[Dims]:
    """Numbers of places; removing one shifts the others."""
    u.result_ranges[0] = axis = u.ins[0][axis_of(u.attrs["axis"], len(u.ins[0]))]
    u.mixed(axis, "numbers its places")
    return [(axis,)]
