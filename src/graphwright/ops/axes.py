"""Axis equations: which dimensions of an op's operands and results must be resized together.

The `axes` field of an op's definition is a function that takes one `AxesUse` and returns the dimensions of the results
as terms. It also unifies terms, which makes them one dimension, names the attributes that are sizes, and marks
dimensions: `summed` if removing zero units changes no result, `mixed` if it changes one, `frozen` if the size is fixed.
Dimensions are unified by these rules alone, never because their sizes or names are equal.

A term is an atom, a product of terms (as of a reshape, slowest-varying first) or a concatenation of terms. Unifying
works by union-find: an atom links to the term that it was found to equal. Unified terms have equal sizes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np

from graphwright.array import DType
from graphwright.array import sizes as named
from graphwright.array.sizes import Dim
from graphwright.errors import ShapeError

_Dim = TypeVar("_Dim")


# -- terms -------------------------------------------------------------------------------------------------------------
class Atom:
    """A dimension not split into factors or parts so far. `link` is the term that it was found to equal, if any."""

    __slots__ = ("link", "size")

    def __init__(self, size: Dim) -> None:
        self.size = size
        self.link: Term | None = None


@dataclass(frozen=True, slots=True)
class Product:
    """A dimension split into factors as by a reshape, slowest-varying first; no factor has size 1."""

    factors: tuple[Term, ...]


@dataclass(frozen=True, slots=True)
class Concatenation:
    """Parts concatenated along one dimension."""

    parts: tuple[Term, ...]


Term = Atom | Product | Concatenation
IndexMap = Mapping[Atom, np.ndarray]
"""Atom -> the old index of each new entry along it, or -1 for a new entry."""


def size(term: Term) -> Dim:
    """Return the size of a term: an int, or a name if the size is named."""
    if isinstance(term, Atom):
        return term.size
    if isinstance(term, Concatenation):
        return sum(known(part) for part in term.parts)
    sizes = [size(factor) for factor in term.factors]
    return named.product(sizes)


def known(term: Term) -> int:
    """Return the size of a term, which must not be a named size."""
    n = size(term)
    assert isinstance(n, int)
    return n


def product(*terms: Term) -> Term:
    """Return the product of terms, flattened and without factors of size 1."""
    flat: list[Term] = []
    for term in map(resolve, terms):
        flat += term.factors if isinstance(term, Product) else [term]
    kept = [term for term in flat if size(term) != 1]
    return Product(tuple(kept)) if len(kept) > 1 else kept[0] if kept else flat[0] if flat else Atom(1)


def chain(*terms: Term) -> Term:
    """Return the concatenation of terms, flattened and without parts of size 0."""
    flat: list[Term] = []
    for term in map(resolve, terms):
        flat += term.parts if isinstance(term, Concatenation) else [term]
    kept = [term for term in flat if size(term) != 0]
    return Concatenation(tuple(kept)) if len(kept) > 1 else kept[0] if kept else Atom(0)


def resolve(term: Term) -> Term:
    """Replace each atom of a term by the term that it links to, recursively."""
    if isinstance(term, Atom):
        if term.link is None:
            return term
        term.link = found = resolve(term.link)
        return found
    if isinstance(term, Product):
        factors = [resolve(f) for f in term.factors]
        return term if all(a is b for a, b in zip(factors, term.factors, strict=True)) else product(*factors)
    parts = [resolve(p) for p in term.parts]
    return term if all(a is b for a, b in zip(parts, term.parts, strict=True)) else chain(*parts)


def atoms(term: Term) -> Iterator[Atom]:
    """Yield the atoms of a resolved term in order; an atom that occurs twice is yielded twice."""
    if isinstance(term, Atom):
        yield term
    else:
        for inner in term.factors if isinstance(term, Product) else term.parts:
            yield from atoms(inner)


def same(a: Term, b: Term) -> bool:
    """Unify two dimensions: they resize together. Return False if sizes differ or splits conflict (2 × 3 and 3 × 2)."""
    a, b = resolve(a), resolve(b)
    if a is b or a == b:
        return True
    if size(a) != size(b):
        return False
    if isinstance(a, Atom) or isinstance(b, Atom):
        atom, other = (a, b) if isinstance(a, Atom) else (b, a)
        if isinstance(a, Atom) and isinstance(b, Atom):
            b.link = a
            return True
        if not isinstance(other, Atom) and any(x is atom for x in atoms(other)):
            return False
        atom.link = other  # pyright: ignore[reportAttributeAccessIssue]  # one of the two is an atom
        return True
    if isinstance(a, Product) and isinstance(b, Product):
        return match_factors(list(a.factors), list(b.factors))
    if isinstance(a, Concatenation) and isinstance(b, Concatenation):
        return _chains(list(a.parts), list(b.parts))
    whole, split = (a, b) if isinstance(a, Concatenation) else (b, a)
    assert isinstance(whole, Concatenation)
    assert isinstance(split, Product)
    return _chain_of_products(whole, split)


def match_factors(left: list[Term], right: list[Term]) -> bool:
    """Unify the factors of two products, last first, splitting the larger of a pair; matched factors leave the lists.

    Return False on a conflict; the lists then end with the pair that does not fit.
    """
    while left and right:
        f, g = resolve(left.pop()), resolve(right.pop())
        if isinstance(f, Product) or isinstance(g, Product):  # it was split in the meantime
            left += f.factors if isinstance(f, Product) else [f]
            right += g.factors if isinstance(g, Product) else [g]
            continue
        m, n = size(f), size(g)
        if m == n:
            if same(f, g):
                continue
        elif m and n and (major := _quotient(m, n)) is not None:
            if same(f, product(major, g)):
                left.append(major)
                continue
        elif m and n and (major := _quotient(n, m)) is not None and same(g, product(major, f)):
            right.append(major)
            continue
        left.append(f)
        right.append(g)
        return False
    return True  # sizes are equal, so remaining terms have size 1


def _quotient(m: Dim, n: Dim) -> Atom | None:
    """Return a dimension of size m / n, if n divides m; both may be named sizes, such as 2*B and 2."""
    if isinstance(m, int) and isinstance(n, int):
        return None if m % n else Atom(m // n)
    found = named.divided(named.Size.of(m), named.Size.of(n))
    return None if found is None else Atom(found.dim)


def _chains(left: list[Term], right: list[Term]) -> bool:
    """Cut two concatenations at the part boundaries of both and unify the pieces. Return False if impossible."""
    while left and right:
        p, q = resolve(left.pop(0)), resolve(right.pop(0))
        if isinstance(p, Concatenation) or isinstance(q, Concatenation):
            left[:0] = p.parts if isinstance(p, Concatenation) else [p]
            right[:0] = q.parts if isinstance(q, Concatenation) else [q]
            continue
        m, n = known(p), known(q)
        if m != n:
            large, least, rest = (p, n, left) if m > n else (q, m, right)
            cut = _cut(large, least)
            if cut is None:
                return False
            rest.insert(0, cut[1])
            p, q = (cut[0], q) if m > n else (p, cut[0])
        if not same(p, q):
            return False
    return True


def _cut(term: Term, at: int) -> tuple[Term, Term] | None:
    """Split a dimension into the terms before and after index `at`.

    Return None if the term is a product a × r and `at` is no multiple of the size of r.
    """
    if isinstance(term, Atom):
        head, tail = Atom(at), Atom(known(term) - at)
        term.link = Concatenation((head, tail))
        return head, tail
    if isinstance(term, Product):
        major, *rest = term.factors
        inner = known(product(*rest))
        cut = None if at % inner else _cut(resolve(major), at // inner)
        return None if cut is None else (product(cut[0], *rest), product(cut[1], *rest))
    before: list[Term] = []
    for i, part in enumerate(term.parts):
        if at < known(part):
            cut = _cut(part, at) if at else None
            if at and cut is None:
                return None
            head, tail = cut if cut is not None else (None, part)
            return chain(*before, *([head] if head is not None else [])), chain(tail, *term.parts[i + 1 :])
        before.append(part)
        at -= known(part)
    return None


def _chain_of_products(whole: Concatenation, split: Product) -> bool:
    """Unify a concatenation with a product a × r: its part i becomes aᵢ × r, and a becomes a₁ + a₂ + ...

    Return False if the size of a part is no multiple of the size of r.
    """
    major, *rest = split.factors
    inner = known(product(*rest))
    majors: list[Term] = []
    for part in whole.parts:
        if known(part) % inner:
            return False
        majors.append(Atom(known(part) // inner))
        if not same(part, product(majors[-1], *rest)):
            return False
    return same(major, chain(*majors))


def spread(term: Term, indices: IndexMap) -> np.ndarray:
    """Return for each entry of a resized dimension its old index, -1 for a new entry; `indices` has this for atoms."""
    if isinstance(term, Atom):
        found = indices.get(term)
        return np.arange(known(term)) if found is None else found
    if isinstance(term, Concatenation):
        pieces, start = [], 0
        for part in term.parts:
            piece = spread(part, indices)
            pieces.append(np.where(piece < 0, -1, piece + start))
            start += known(part)
        return np.concatenate(pieces)
    result = np.zeros(1, np.int64)
    for factor in term.factors:
        minor = spread(factor, indices)
        grid = result[:, None] * known(factor) + minor
        result = np.where((result[:, None] < 0) | (minor < 0), -1, grid).reshape(-1)
    return result


def resized(term: Term, indices: IndexMap) -> Dim:
    """Return the size of a dimension after each atom in `indices` was resized to the length of its index array."""
    if isinstance(term, Atom):
        return len(indices[term]) if term in indices else term.size
    sizes = [resized(t, indices) for t in (term.factors if isinstance(term, Product) else term.parts)]
    return named.product(sizes) if isinstance(term, Product) else named.total(sizes)


def text(term: Term, names: Mapping[Atom, str]) -> str:
    """Format a term, such as `heads × 16` or `q + k + v`; an atom without a name is written as its size."""
    if isinstance(term, Atom):
        return names.get(term, str(term.size))
    if isinstance(term, Product):
        return " × ".join(
            f"({text(f, names)})" if isinstance(f, Concatenation) else text(f, names) for f in term.factors
        )
    return " + ".join(text(p, names) for p in term.parts)


# -- one use of an op --------------------------------------------------------------------------------------------------
Dims = tuple[Term, ...]


@dataclass(frozen=True, slots=True)
class OrNone:
    """The range of integers that index an axis or are -1, which `dispatch` reads as no index, `index` as the last."""

    axis: Term


Range = Term | OrNone
"""The axis that integers index."""


@dataclass(frozen=True, slots=True)
class AxisFact:
    """A property of a dimension that an op's `axes` function states.

    It is `frozen` (its size cannot change), `summed` (zero units can be removed), `mixed` (removing a unit is not the
    same as setting it to zero), or of a `kind`, such as heads; `end` marks an axis of the program's inputs or outputs.
    """

    fact: str  # `frozen`, `end` (of the program), `mixed`, `summed` or `kind`
    term: Term  # the dimension
    text: str = ""  # the reason, or which kind
    ends: tuple[tuple[int, int], ...] = ()  # (operand, dimension) pairs that a sum runs over


@dataclass(frozen=True, slots=True)
class Correction:
    """The rescaling that keeps an RMS norm exact when zero units are removed along `term`.

    When the size goes from D to d, the attribute `attr` (eps) is multiplied by D/d, and w + `offset` by √(D/d), where w
    is operand number `port`.
    """

    term: Term
    port: int
    attr: str
    offset: float


@dataclass(slots=True)
class AxesUse:
    """One use of an op in a program: the argument of its `axes` function."""

    ins: Sequence[Dims]  # dimensions of the operands
    shapes: Sequence[tuple[Dim, ...]]  # of the results
    attrs: Mapping[str, Any]  # of the op
    stored: Sequence[bool]  # per operand, whether it is a stored weight, casts apart
    ranges: Sequence[Range | None]  # per operand, the axis that its integers index, if known
    tables: Sequence[bool] = ()  # per operand, whether it is a constant of the program, which an edit can change
    dtypes: Sequence[DType] = ()  # of the operands
    notes: list[AxisFact] = field(default_factory=list)  # stated by the `axes` function, as `corrections`
    corrections: list[Correction] = field(default_factory=list)
    # (axis, operand) pairs: the operand's integers index the axis
    lookups: list[tuple[Term, int]] = field(default_factory=list)
    sizes: dict[str, Any] = field(default_factory=dict)  # attribute -> the term, or terms, whose size it is
    result_ranges: dict[int, Range | None] = field(default_factory=dict)  # per result, as `ranges`
    # (axis, first, width): unit u of the axis is the group of operands first + u·width to first + (u + 1)·width - 1
    groups: list[tuple[Atom, int, int]] = field(default_factory=list)

    def same(self, a: Term, b: Term) -> None:
        """Unify two dimensions, or freeze both if their sizes differ or their splits conflict."""
        if not same(a, b):
            for term in (a, b):
                self.frozen(term, "splits it at boundaries that do not fit together")

    def frozen(self, term: Term, why: str) -> None:
        """State that the size of a dimension cannot change; `why` completes the sentence "the op ..."."""
        self.notes.append(AxisFact("frozen", term, why))

    def mixed(self, term: Term, why: str) -> None:
        """State that removing a unit of a dimension is not the same as setting it to zero; `why` as for `frozen`."""
        self.notes.append(AxisFact("mixed", term, why))

    def summed(self, term: Term, *ends: tuple[int, int]) -> None:
        """State that the op sums over a dimension: zero units are removable. `ends`: (operand, axis) pairs summed."""
        ends = tuple((port, dim % len(self.ins[port])) for port, dim in ends)
        self.notes.append(AxisFact("summed", term, "", ends))

    def kind(self, term: Term, name: str) -> None:
        """State the kind of a dimension: heads, channels, neurons, ..."""
        self.notes.append(AxisFact("kind", term, name))

    def counts(self, axis: Atom, first: int, width: int) -> None:
        """State that an axis counts groups of `width` operands, from operand `first` on."""
        self.groups.append((axis, first, width))

    def fresh(self, n: Dim, why: str = "") -> Term:
        """Return a new independent dimension; it is frozen if a reason is given."""
        made = Atom(n)
        if why:
            self.frozen(made, why)
        return made


AxesRule = Callable[[AxesUse], Sequence[Dims]]


def common_range(a: Range | None, b: Range | None) -> Range | None:
    """Return the range of integers that are from range a or from range b; None if it is not known to be one axis."""
    if a is None or b is None:
        return None
    optional = isinstance(a, OrNone) or isinstance(b, OrNone)
    left, right = (resolve(r.axis if isinstance(r, OrNone) else r) for r in (a, b))
    return None if left != right else OrNone(left) if optional else left


def broadcast(u: AxesUse) -> Sequence[Dims]:
    """Return the dimensions of an elementwise op's results; unify aligned operand dimensions, except broadcast ones."""
    return [broadcast_dims(u, u.ins, shape) for shape in u.shapes]


def broadcast_dims(u: AxesUse, operands: Sequence[Dims], shape: Sequence[Dim]) -> Dims:
    """Return the dimensions of a result of this shape; unify aligned operand dimensions, except broadcast ones."""
    result: list[Term] = []
    for back in range(len(shape), 0, -1):
        here = [dims[-back] for dims in operands if len(dims) >= back]
        full = [t for t in here if size(t) == shape[-back]] or [u.fresh(shape[-back])]
        for other in full[1:]:
            u.same(full[0], other)
        result.append(full[0])
    return tuple(result)


def identity(u: AxesUse) -> Sequence[Dims]:
    """Return the operand's dimensions for the result. If the operand's integers index an axis, the result's do, too."""
    u.result_ranges[0] = u.ranges[0]
    return [u.ins[0]]


def fixed_size(why: str, *, attr: str = "axis", last: int = 0) -> AxesRule:
    """Return an `axes` rule for an op whose results have the operand's dimensions, some of them frozen.

    The last `last` dimensions are frozen, or if `last` is 0, the dimensions that the attribute `attr` names.
    """

    def rule(u: AxesUse) -> Sequence[Dims]:
        x = u.ins[0]
        for axis in range(len(x) - last, len(x)) if last else axes_of(u.attrs[attr], len(x)):
            u.frozen(x[axis], why)
        return [x for _ in u.shapes]

    return rule


def resized_last(why: str) -> AxesRule:
    """Return an `axes` rule that freezes the last dimensions, as many as `kernel`, `sizes` or `widths` has entries."""

    def rule(u: AxesUse) -> Sequence[Dims]:
        x, rank = u.ins[0], len(u.attrs.get("kernel") or u.attrs.get("sizes") or u.attrs.get("widths") or ())
        lead = len(x) - rank
        moved = [i for i in range(lead, len(x)) if "widths" not in u.attrs or any(u.attrs["widths"][i - lead])]
        for i in moved:
            u.frozen(x[i], why)
        out = tuple(u.fresh(u.shapes[0][i], why) if i in moved else t for i, t in enumerate(x))
        return [out for _ in u.shapes]

    return rule


def along_axis(why: str) -> AxesRule:
    """Return an `axes` rule for an op that keeps the operand's dimensions and mixes all entries along one of them."""

    def rule(u: AxesUse) -> Sequence[Dims]:
        x = u.ins[0]
        u.mixed(x[axis_of(u.attrs["axis"], len(x))], why)
        for extra in u.ins[1:]:
            broadcast_dims(u, (x, extra), [size(t) for t in x])
        return [x]

    return rule


def indexed(u: AxesUse, axis: Term, port: int) -> None:
    """Unify `axis` with the axis that the integers of operand `port` index.

    If the latter is unknown or has a different size, or if an integer may be -1, freeze `axis`.
    """
    source = u.ranges[port]
    if source is not None and not isinstance(source, OrNone) and size(source) == size(axis):
        u.same(axis, source)
    else:
        u.frozen(axis, "reads it by index")


# -- axis numbers ------------------------------------------------------------------------------------------------------
def axis_of(axis: int, rank: int) -> int:
    """Normalise an axis to 0..rank-1. Raises: ShapeError if it is out of range."""
    if not -rank <= axis < rank:
        expected = f"-{rank}..{rank - 1}" if rank else "none, as there are no axes"
        raise ShapeError("the axis is out of range", expected=expected, got=axis)
    return axis % rank


def axes_of(axes: int | Iterable[int] | None, rank: int) -> tuple[int, ...]:
    """Normalise axes to sorted indices 0..rank-1; None means all. Raises: ShapeError for an invalid axis.

    A scalar has no axes, but takes axis 0 or -1 as torch does, which select nothing.
    """
    if axes is None:
        return tuple(range(rank))
    found = [axis_of(a, rank or 1) for a in (axes if isinstance(axes, Iterable) else (axes,))]
    if len(set(found)) < len(found):
        raise ShapeError("an axis is given twice", expected="different axes", got=axes)
    return tuple(sorted(found)) if rank else ()


def others(axes: int | tuple[int, ...] | None, rank: int) -> tuple[int, ...]:
    """Return the axes that `axes` does not name, in order. Raises: ShapeError if an axis is out of range."""
    named = axes_of(axes, rank)
    return tuple(a for a in range(rank) if a not in named)


def spliced(dims: Sequence[_Dim], axis: int, *new: _Dim) -> tuple[_Dim, ...]:
    """Return `dims` with entry number `axis` replaced by `new`. Raises: ShapeError if the axis is out of range."""
    at = axis_of(axis, len(dims))
    return (*dims[:at], *new, *dims[at + 1 :])
