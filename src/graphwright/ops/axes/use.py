"""One use of an op as its axes row sees it, and what the row can say."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from graphwright.array.spec import Dim
from graphwright.ops.terms import Atom, Term, same, size

Dims = tuple[Term, ...]


@dataclass(frozen=True, slots=True)
class Note:
    """What a row says of a dimension beside its joins.

    Attributes:
        fact: `frozen`, `end` (of the program), `mixed`, `summed` or `kind`.
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


def broadcast(u: Use) -> Sequence[Dims]:
    """Operands with broadcasting: equal dimensions join, one of size 1 joins nothing."""
    return [broadcast_dims(u, u.ins, shape) for shape in u.shapes]


def broadcast_dims(u: Use, operands: Sequence[Dims], shape: Sequence[Dim]) -> Dims:
    """The dimensions of a result of this shape: equal ones join, one of size 1 joins nothing."""
    result: list[Term] = []
    for back in range(len(shape), 0, -1):
        here = [dims[-back] for dims in operands if len(dims) >= back]
        full = [t for t in here if size(t) == shape[-back]] or [u.fresh(shape[-back])]
        for other in full[1:]:
            u.same(full[0], other)
        result.append(full[0])
    return tuple(result)
