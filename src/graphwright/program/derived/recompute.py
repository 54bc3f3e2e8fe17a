"""Gradient checkpoints: backward recomputes the inner values of a marked subgraph from its inputs.

The backward ops are unchanged; only their operands inside the subgraph are replaced by clones. So gradients keep their
bits, a clone of dropout draws the same mask (its stream is an attribute and its key an operand), and statistics are
assigned once, because assignments are not cloned.
Source: Chen et al. 2016, "Training Deep Nets with Sublinear Memory Cost".
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from graphwright.graph import NodeId
from graphwright.ops import get
from graphwright.program.op_graph import Value
from graphwright.program.primitives import add_op

if TYPE_CHECKING:
    from graphwright.program.program import Program

BARRIER = "recall"  # a view by which clones read the subgraph's inputs, so that CSE cannot merge clones and originals


class Recomputed:
    """The checkpointed subgraphs of a trace, and the clones of their nodes."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.group: Any = None  # the subgraph of nodes recorded now
        self._groups: dict[NodeId, Any] = {}
        self.backward: set[NodeId] = set()  # nodes of backward passes, clones included
        self._clones: dict[NodeId, NodeId] = {}
        self._barriers: dict[tuple[Any, Value], Value] = {}
        self._retained: dict[Value, bool] = {}

    def took(self, node: NodeId, *, backward: bool) -> None:
        """Record that a new node belongs to the backward pass, or else to the checkpoint that is traced now, if any."""
        if backward:
            self.backward.add(node)
        elif self.group is not None:
            self._groups[node] = self.group

    def read(self, value: Value) -> Value:
        """Return the value that backward reads: a recomputed clone if a checkpoint discards `value`, else `value`."""
        group = self._groups.get(value.node)
        if group is None or self._is_retained(value):
            return value
        self._clone(value.node, group)
        return Value(self._clones[value.node], value.port)

    def _is_retained(self, value: Value) -> bool:
        """Return True if a value is stored: a forward node outside its checkpoint reads it, or its op updates state."""
        if value not in self._retained:
            p, group = self.program, self._groups[value.node]
            readers = {p.graph.target(e) for e in p.out_edges(value.node) if p.edge_value(e) == value}
            outside = {n for n in readers - self.backward if self._groups.get(n) != group}
            self._retained[value] = bool(outside) or get(p.op(value.node)).traits.update
        return self._retained[value]

    def _clone(self, node: NodeId, group: Any) -> None:
        """Clone a node and all its ancestors inside the subgraph `group` that have no clone yet, in forward order."""
        p, found, stack = self.program, {node}, [node]
        while stack:
            for v in p.operands(stack.pop()):
                if self._groups.get(v.node) == group and v.node not in found and not self._is_retained(v):
                    found.add(v.node)
                    stack.append(v.node)
        for inner in sorted(found - self._clones.keys(), key=p.seq):
            operands = [self._operand(v, group) for v in p.operands(inner)]
            name = p.free_name(f"recompute.{p.path(inner)}")
            clone = self._clones[inner] = add_op(p, p.op(inner), operands, p.attrs(inner), name)
            self.backward.add(clone)

    def _operand(self, value: Value, group: Any) -> Value:
        if self._groups.get(value.node) == group and not self._is_retained(value):
            return Value(self._clones[value.node], value.port)
        known = self._barriers.get((group, value))
        if known is None:
            p = self.program
            node = add_op(p, BARRIER, [value], {}, p.free_name(f"recompute.{p.path(value.node)}"))
            self.backward.add(node)
            known = self._barriers[group, value] = Value(node)
        return known
