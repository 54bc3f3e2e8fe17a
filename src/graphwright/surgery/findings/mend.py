"""Edits that several fixes are made of."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import prod

from graphwright.graph import EdgeId, NodeId
from graphwright.program import AxisGroup, Program, Value
from graphwright.program.editing.transaction import Transaction
from graphwright.program.readers import lead
from graphwright.surgery.findings.finding import Fix
from graphwright.surgery.findings.wiring import Wiring


def remove(e: Transaction, nodes: Iterable[NodeId]) -> None:
    """Remove those of some nodes that are still there."""
    e.remove([n for n in nodes if n in e.program.graph])


def sweep(e: Transaction, *ends: NodeId) -> None:
    """Remove those of some nodes that nothing reads, with all that only they use."""
    w = Wiring(e.program)
    dead = [w.at[n] for n in ends if n in w.at and w.unread(w.at[n])]
    remove(e, [w.nodes[i] for i in w.cone(dead)])


def rewired(p: Program, edge: EdgeId, source: Value, *, keeps: bool) -> Fix:
    """Let an edge read another value; what only the old one needed goes."""
    before = p.graph.source(edge)

    def apply(e: Transaction) -> None:
        e.rewire(edge, source)
        sweep(e, before)

    return Fix(f"rewire {p.path(edge)} to {p.path(source)}", apply, edges=1, keeps_function=keeps)


def bypassed(p: Program, node: NodeId, *, keeps: bool) -> Fix:
    """Let what reads a one-operand node read its operand, and remove it."""

    def apply(e: Transaction) -> None:
        (operand,) = e.program.operands(node)
        lead(e, Value(node), operand)
        sweep(e, node)

    return Fix(f"take {p.path(node)} ({p.op(node)}) out", apply, edges=1, keeps_function=keeps)


def removed(p: Program, nodes: Sequence[NodeId], *, keeps: bool) -> Fix:
    """Remove nodes."""
    more = f" and {len(nodes) - 1} nodes that only it uses" if len(nodes) > 1 else ""
    return Fix(f"remove {p.path(nodes[0])}{more}", lambda e: remove(e, nodes), edges=1, keeps_function=keeps)


def grown(group: AxisGroup, size: int) -> tuple[Fix, ...]:
    """Grow an axis by units that change nothing; none if it can't be grown."""
    if group.frozen or len(group.atoms) != 1:
        return ()
    more = size - group.size
    held = sum(prod(group.axes.program.weights.array(m.key).shape) for m in group.members if m.key is not None)
    what = f"grow {group.name} by {more}"
    return (Fix(what, lambda e: e.grow(group.name, more), parameters=held * more // group.size, keeps_function=True),)
