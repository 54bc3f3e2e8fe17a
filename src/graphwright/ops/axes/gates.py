"""Axes of gates: the logits are the parts behind one another, and so are the rows of the table."""

from __future__ import annotations

from collections.abc import Sequence

from graphwright.ops.axes.use import Dims, Use
from graphwright.ops.terms import Atom, chain


def gate(u: Use) -> Sequence[Dims]:
    """A dimension per part."""
    parts = tuple(Atom(n) for n in u.attrs["sizes"])
    u.same(u.ins[0][0], chain(*parts))
    u.same(u.ins[1][0], u.ins[0][0])
    u.sizes["sizes"] = parts
    for term in (u.ins[1][1], u.ins[2][0], u.ins[3][0]):
        u.frozen(term, "reads it by number")
    return [(part,) for part in parts]
