"""Equal views of one value -> one node, so that a rule finds one value wherever code reads it."""

from __future__ import annotations

from graphwright.models.importing.recover.regions import VIEWS, Regions
from graphwright.program.op_graph import Value


def merge_views(s: Regions) -> None:
    """Let the readers of equal views, slices and casts of a value read the first of them."""
    known: dict[tuple[str, str, Value], Value] = {}
    for value in s.values("slice", "cast", *VIEWS):
        form = (s.p.op(value.node), repr(sorted(s.p.attrs(value.node).items())), s.p.operands(value.node)[0])
        first = known.setdefault(form, value)
        if first != value:
            s.replace(value, first)
