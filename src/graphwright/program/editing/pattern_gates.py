"""Adding and removing gates on the edges of attention patterns, inside an open edit.

The attentions over a pattern get an operand with the gate's values. An element of the gate is a slot, to which the
column `gate` of the pattern's edges refers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from graphwright.array import float64
from graphwright.array.formulas.gates import GATE_KINDS
from graphwright.errors import UsageError
from graphwright.ops import traits
from graphwright.patterns import GateNotAllowed
from graphwright.program import gates as g
from graphwright.program.editing.edits import RemoveEdge
from graphwright.program.editing.gate_slots import allocate, free_unread
from graphwright.program.errors import DeadGate

if TYPE_CHECKING:
    from graphwright.graph import NodeId
    from graphwright.program.editing.transaction import Transaction
    from graphwright.program.program import Program


def attentions(p: Program, key: str) -> list[NodeId]:
    """Return the attentions that read the pattern at a key, in topological order."""
    tables = {n: traits(p.op(n)).table for n in p.order() if traits(p.op(n)).attention}
    return [n for n, at in tables.items() if at is not None and p.key(p.operands(n)[at].node) == key]


def gate_edges(
    e: Transaction, key: str, kind: str, where: str, inits: np.ndarray, costs: np.ndarray, group: str | None
) -> NodeId:
    """Give the attentions over a pattern an operand of gates, with one element per slot of the pattern.

    Args:
        key: key of the pattern, whose edges name the slots.
        where: "exp" or "weight", see the op `block_sdpa`.
        inits, costs: initial logit and cost of each slot.
    Returns: the handle of the gate. Raises: GateNotAllowed, UsageError if there is no attention, or if it has gates.
    """
    p, sites, facts = e.program, attentions(e.program, key), GATE_KINDS[kind]
    if facts.linear and where == "exp":
        raise GateNotAllowed(kind)
    if facts.one_of:
        raise UsageError("the options of a choice share a softmax, which edges of a pattern do not", where=key,
                         got=f"gates of kind {kind!r}", fix='kind="sigmoid"')  # fmt: skip
    if not sites or any(g.gates_edges(p, site) for site in sites):
        what = "the edges of this pattern have gates already" if sites else "no attention reads this pattern"
        raise UsageError(what, where=key, fix="e.ungate(handle)" if sites else None)
    if not np.isfinite(inits).all():
        raise DeadGate(
            "the gate would have no gradient: an initial logit is not finite", got=inits[~np.isfinite(inits)]
        )
    wide = all(p.spec(site).dtype is float64 for site in sites)
    (part,) = allocate(e, [len(inits)], kind, inits, costs, group, wide=wide)
    if part.node in e.touched:
        e.spec(part)
    for site in sites:
        e.add_edge(part, site, len(p.operands(site)))
        e.set_attr(site, optional=(*p.attrs(site)["optional"], "gates"), where=where)
        e.touched[site] = None
    return sites[0]


def ungate_edges(e: Transaction, found: g.Gate) -> None:
    """Remove the gates of a pattern's edges, which then have weight 1."""
    p = e.program
    pattern = p.patterns[found.owner]
    with pattern.edit("remove gates") as pe:
        pe.set(pattern.edges["gate"] >= 0, gate=-1)
    for site in found.sites:
        at = g.gated_operand(p, site)
        part = p.operands(site)[at]
        e.do(RemoveEdge(next(edge for edge in p.in_edges(site) if p.edge_port(edge) == at)))
        e.set_attr(site, optional=tuple(name for name in p.attrs(site)["optional"] if name != "gates"), where="exp")
        e.touched[site] = None
        free_unread(e, part)
