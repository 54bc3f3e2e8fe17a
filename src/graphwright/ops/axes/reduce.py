"""Axes of ops in which an axis ends, or every place of it depends on the others."""

from __future__ import annotations

from collections.abc import Sequence

from graphwright.ops.axes.use import Dims, Rule, Use, broadcast_dims
from graphwright.ops.rules import axes_of, axis_of
from graphwright.ops.terms import Atom, Term, size


def _reduce(u: Use) -> tuple[list[Term], Dims]:
    """The dimensions that go, and what is left."""
    x = u.ins[0]
    named = axes_of(u.attrs["axes"], len(x)) if "axes" in u.attrs else (axis_of(u.attrs["axis"], len(x)),)
    keep = u.attrs.get("keepdims", False)
    left = tuple(Atom(1) if a in named else t for a, t in enumerate(x) if keep or a not in named)
    return [x[a] for a in named], left


def sum_(u: Use) -> Sequence[Dims]:
    """Axes end here, and zeros leave no trace."""
    gone, left = _reduce(u)
    for term in gone:
        u.summed(term, (0, next(i for i, t in enumerate(u.ins[0]) if t is term)))
    return [left]


def reduced(why: str) -> Rule:
    """Axes end here, and zeros leave a trace."""

    def rule(u: Use) -> Sequence[Dims]:
        gone, left = _reduce(u)
        for term in gone:
            u.mixed(term, why)
        return [left]

    return rule


def along(why: str) -> Rule:
    """The operand's dimensions; along the axis, every place depends on the others."""

    def rule(u: Use) -> Sequence[Dims]:
        x = u.ins[0]
        u.mixed(x[axis_of(u.attrs["axis"], len(x))], why)
        for extra in u.ins[1:]:
            broadcast_dims(u, (x, extra), [size(t) for t in x])
        return [x]

    return rule


def ordered(u: Use) -> Sequence[Dims]:
    """Places in order of value, and their numbers."""
    x, at = u.ins[0], axis_of(u.attrs["axis"], len(u.ins[0]))
    u.mixed(x[at], "orders its places by value")
    dims = x
    if "k" in u.attrs:
        dims = (*x[:at], u.fresh(u.attrs["k"], "takes so many places"), *x[at + 1 :])
    u.result_ranges[1] = x[at]
    return [dims, dims]


def arg(u: Use) -> Sequence[Dims]:
    """The number of a place."""
    x, at = u.ins[0], axis_of(u.attrs["axis"], len(u.ins[0]))
    u.mixed(x[at], "compares its places")
    u.result_ranges[0] = x[at]
    return [(*x[:at], *x[at + 1 :])]
