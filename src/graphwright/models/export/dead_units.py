"""Units that a weight switches off, such as dead experts: an export leaves them out."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np

from graphwright.array import bool_
from graphwright.graph import NodeId
from graphwright.ops import traits
from graphwright.program.kinds import CONST
from graphwright.program.op_graph import Value

if TYPE_CHECKING:
    from graphwright.program.program import Program


def without_dead_units(p: Program) -> Program:
    """Return the program, or a copy without its dead units: experts or heads that a bool state [E] switches off.

    Each reader of the state replaces the scores of these units by -∞; no assignment is among them.
    """
    dead = {p.key(n): found for n in _switches(p) if not (found := p.weights.array(p.key(n)).to_numpy()).all()}
    if not dead:
        return p
    twin = p.fork()
    with twin.edit("leave out dead units") as e:
        for key, alive in dead.items():
            axes = twin.axes().of(key, 0)
            if len(axes) == 1 and not axes[0].frozen and alive.any():
                e.cut_units(axes[0].units(np.flatnonzero(~alive)))
    return twin


def _switches(p: Program) -> Iterator[NodeId]:
    """Yield the states bool [E] that only mask scores."""
    for node in p.states():
        spec, readers = p.spec(node), p.out_edges(node)
        masks = (_masks(p, p.graph.target(edge), p.edge_port(edge)) for edge in readers)
        if spec.dtype is bool_ and len(spec.shape) == 1 and readers and all(masks):
            yield node


def _masks(p: Program, node: NodeId, port: int) -> bool:
    """Return True if the op replaces the scores by -∞ where operand `port` is false."""
    row, operands = traits(p.op(node)), p.operands(node)
    if row.excludes_minus_infinity:
        return port == 1
    selects = row.elementwise and port == 0 and row.fixed == (0,) and len(operands) == 3
    return selects and _is_minus_infinity(p, operands[2])


def _is_minus_infinity(p: Program, value: Value) -> bool:
    array = p.weights.array(p.key(value.node)) if p.op(value.node) == CONST else None
    return array is not None and array.dtype.is_float and bool((array.to_numpy("float32") == -np.inf).all())
