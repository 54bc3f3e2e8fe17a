"""Identity paths around a branch: finding one, and making one that leaves the function as it is."""

from __future__ import annotations

from graphwright.graph import NodeId
from graphwright.ops import OPS
from graphwright.program import Program, Value
from graphwright.program.editing.transaction import Transaction
from graphwright.program.kinds import CONST, KINDS, PARAM
from graphwright.surgery.findings.finding import Fix

GATE = "gate"
"""The op that makes the values of all gates of a program."""
_FAR = 400
"""Nodes of a branch that are looked at before it counts as having another start."""


def hands_on(p: Program, node: NodeId) -> bool:
    """Whether a node's result is the sum of what it reads, up to a cast or a factor that is one number."""
    op = p.op(node)
    row = None if op in KINDS else OPS.get(op)
    if row is None:
        return False
    gated = op == "mul" and any(p.op(v.node) in (PARAM, CONST, GATE) and _one(p, v) for v in p.operands(node))
    return row.traits.convert or row.traits.sums or row.traits.nary or gated


def _one(p: Program, value: Value) -> bool:
    return p.specs(value.node)[value.port].size == 1


def carried(p: Program, source: NodeId, target: NodeId) -> bool:
    """Whether a value reaches a sum by identity edges, past other sums, casts and gates."""
    stack, seen = [target], {target}
    while stack:
        for value in p.operands(stack.pop()):
            if value.node == source:
                return True
            if value.node not in seen and hands_on(p, value.node):
                seen.add(value.node)
                stack.append(value.node)
    return False


def around(p: Program, junction: NodeId) -> tuple[NodeId, NodeId] | None:
    """(source, first node of the branch) of an identity path into a sum, around its branch; None if there is none."""
    operands = [v.node for v in p.operands(junction)]
    for source in operands:
        starts = [n for n in operands if n != source]
        came = _back(p, starts, source)
        if came is not None:
            return source, came
    return None


def _back(p: Program, starts: list[NodeId], source: NodeId) -> NodeId | None:
    """The node through which a walk back from the ends of a branch first meets its source."""
    order, seen = list(starts), set(starts)
    for node in order:  # grows while it is walked
        if len(order) > _FAR:
            return None
        for value in p.operands(node):
            if value.node == source:
                return node
            if value.node not in seen:
                seen.add(value.node)
                order.append(value.node)
    return None


def bridges(p: Program, source: Value, junction: NodeId) -> tuple[Fix, ...]:
    """The identity path that is missing: gated at zero, so that nothing changes until it is trained, or open."""
    ends = f"{p.path(source)} -> {p.path(junction)}"
    return (
        Fix(f"connect {ends} through a gate at 0", lambda e: gated(e, source, junction), 1, 1, 1, keeps_function=True),
        Fix(f"connect {ends}", lambda e: e.connect(source, junction), edges=1),
    )


def gated(e: Transaction, source: Value, junction: NodeId) -> None:
    """An edge that multiplies by a trained number, which starts at 0."""
    e.gate(e.connect(source, junction), "scale", init=0.0)
