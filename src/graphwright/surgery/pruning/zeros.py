"""Removal of units that contribute nothing, and of nodes that no output needs; the function stays the same.

A unit contributes nothing if all linear maps that read the unit have zero weights for it, or if its value is zero for
every input: zero rows of weights produce zeros; sums, products and functions with f(0) = 0, elementwise, preserve them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from graphwright.ops import get, traits
from graphwright.ops.axes import atoms
from graphwright.program.axes.axes import KINDS
from graphwright.program.axes.solve_axes import origin
from graphwright.program.kinds import INPUT, PARAM, SOURCES
from graphwright.program.op_graph import Value
from graphwright.surgery.errors import NothingToPrune
from graphwright.surgery.pruning.plan import TOOL
from graphwright.surgery.pruning.prunable import PrunableAxis, Where, prunable, unit_indices

if TYPE_CHECKING:
    from graphwright.program.program import Program


def remove_zeros(p: Program, where: Where | None = None) -> dict[str, int]:
    """Remove units that contribute exactly nothing, and nodes that no output needs, in one edit.

    Only zero terms of sums are removed, so results change at most by rounding, because sums run in another order. An
    axis keeps at least one unit.

    Args:
        p: the program, edited in place.
        where: pattern or nodes whose axes are examined; by default everything.
    Returns: dict from axis name to number of removed units, and from `nodes` to number of removed nodes.
    """
    removed: dict[str, int] = {}
    needed = p.reachable([*p.outputs(), *p.assigns()])
    dead = [n for n in p.nodes() if n not in needed and p.op(n) != INPUT]
    with p.edit("remove zero units", author="pass", tool=TOOL) as e:
        if dead:
            e.remove(sorted(dead, key=p.order_labels.key, reverse=True))
            removed["nodes"] = len(dead)
        seen: set[str] = set()
        while (axis := next((a for a in _axes(p, where) if a.name not in seen), None)) is not None:
            seen.add(axis.name)
            units = np.flatnonzero(idle(p, axis))[: axis.size - 1]
            if len(units):
                e.cut_units(axis.group.units(units))
                removed[axis.name] = len(units)
    return removed


def idle(p: Program, axis: PrunableAxis) -> np.ndarray:
    """Return a mask [units] of the units that contribute nothing to any linear map that reads the axis."""
    zero = _zeros(p, axis)
    found = np.ones(axis.size, bool)
    for c in axis.consumers:
        unread = np.asarray((c.matrix(p) == 0).all(axis=0))
        found &= unread[c.columns].all(axis=1) | zero.get(c.x, np.zeros(axis.size, bool))
    return found


def _axes(p: Program, where: Where | None) -> list[PrunableAxis]:
    """Return the prunable axes except grouped query heads, as their kv groups and queries are axes of their own."""
    try:
        return [a for a in prunable(p, where, (*KINDS, "units")) if len(a.group.atoms) == 1]
    except NothingToPrune:
        return []


def _zeros(p: Program, axis: PrunableAxis) -> dict[Value, np.ndarray]:
    """Map values that have the axis to a mask [units] of the units whose entries are zero for every input."""
    dims, found = axis.group.axes.solution.dims, {}
    along = {m.value for m in axis.group.members}
    for node in sorted({v.node for v in along}, key=p.order_labels.key):
        value, op, operands = Value(node), p.op(node), p.operands(node)
        if op in SOURCES or value not in along:
            continue
        ins = [found.get(v) for v in operands]
        known = [z for z in ins if z is not None]
        made: np.ndarray | None = None
        if traits(op).contracts:
            made = _zero_rows(p, axis, operands, op)
        elif traits(op).annihilated:
            made = np.logical_or.reduce(known) if known else None
        elif traits(op).attention:
            made = found.get(operands[2])
        elif known and len(known) == len(ins):
            row = get(op)
            keeps_zero = row.traits.keeps_zero or row.view is not None or row.traits.convert
            made = np.logical_and.reduce(known) if keeps_zero else None
        if made is not None and any(a in axis.group.atoms for t in dims[value] for a in atoms(t)):
            found[value] = made
    return found


def _zero_rows(p: Program, axis: PrunableAxis, operands: Sequence[Value], op: str) -> np.ndarray | None:
    """Return a mask [units]: matrix row and bias of a linear map are zero for the unit; None if either is no param."""
    dims, found = axis.group.axes.solution.dims, np.ones(axis.size, bool)
    for port, operand in enumerate(operands[1:]):
        source = origin(p, operand)
        if source is None or p.op(source) != PARAM:
            return None
        dim = (1 if traits(op).contracts == "in_out" else 0) if port == 0 else 0
        term = dims[Value(source)][dim]
        if not set(axis.group.atoms) <= set(atoms(term)):
            return None
        w = np.moveaxis(p.weights.array(p.key(source)).to_numpy("float32"), dim, 0)
        empty = ~(w.reshape(len(w), -1) != 0).any(axis=1)
        found &= empty[unit_indices(axis.group, term)].all(axis=1)
    return found
