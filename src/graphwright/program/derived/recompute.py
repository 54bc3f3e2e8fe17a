"""Gradient checkpoints: what backward reads of a marked subgraph is computed again, from what the subgraph reads.

The backward stays as it is, operation by operation; only its operands inside the subgraph are replaced by clones. So
gradients keep their bits, a clone of dropout draws the same mask (its stream is an attribute and its key an operand),
and statistics are written once, as writes are not cloned.
Source: Chen et al. 2016, "Training Deep Nets with Sublinear Memory Cost".
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from graphwright.ops import get
from graphwright.program.op_graph import Value

if TYPE_CHECKING:
    from graphwright.graph import NodeId
    from graphwright.program.program import Program

BARRIER = "recall"
"""A view through which clones read, so that no rewrite takes them for what was computed before."""


class Recomputed:
    """Which nodes of a trace are in a marked subgraph, and their clones.

    Attributes:
        group: the subgraph that nodes recorded now belong to; None for none.
    """

    def __init__(self, program: Program) -> None:
        self.program = program
        self.group: Any = None
        self._groups: dict[NodeId, Any] = {}
        self._backward: set[NodeId] = set()
        self._clones: dict[NodeId, NodeId] = {}
        self._recalled: dict[tuple[Any, Value], Value] = {}
        self._kept: dict[Value, bool] = {}

    def took(self, node: NodeId, *, backward: bool) -> None:
        """Told of each operation that was recorded."""
        if backward:
            self._backward.add(node)
        elif self.group is not None:
            self._groups[node] = self.group

    def read(self, value: Value) -> Value:
        """What backward reads instead of a value: a clone if it lies inside a subgraph."""
        group = self._groups.get(value.node)
        if group is None or self._is_kept(value):
            return value
        self._clone(value.node, group)
        return Value(self._clones[value.node], value.port)

    def _is_kept(self, value: Value) -> bool:
        """True for what lies on the border: the forward reads it outside, so it is there anyway."""
        if value not in self._kept:
            p, group = self.program, self._groups[value.node]
            readers = {p.graph.target(e) for e in p.out_edges(value.node) if p.edge_value(e) == value}
            outside = {n for n in readers - self._backward if self._groups.get(n) != group}
            self._kept[value] = bool(outside) or get(p.op(value.node)).traits.update
        return self._kept[value]

    def _clone(self, node: NodeId, group: Any) -> None:
        """Clone a node, and first what it reads inside the subgraph, in the order of the forward."""
        p, found, stack = self.program, {node}, [node]
        while stack:
            for v in p.operands(stack.pop()):
                if self._groups.get(v.node) == group and v.node not in found and not self._is_kept(v):
                    found.add(v.node)
                    stack.append(v.node)
        for inner in sorted(found - self._clones.keys(), key=p.seq):
            operands = [self._operand(v, group) for v in p.operands(inner)]
            name = p.free_name(f"recompute.{p.path(inner)}")
            clone = self._clones[inner] = p.add_op(p.op(inner), operands, p.attrs(inner), name)
            self._backward.add(clone)

    def _operand(self, value: Value, group: Any) -> Value:
        if self._groups.get(value.node) == group and not self._is_kept(value):
            return Value(self._clones[value.node], value.port)
        known = self._recalled.get((group, value))
        if known is None:
            p = self.program
            node = p.add_op(BARRIER, [value], {}, p.free_name(f"recompute.{p.path(value.node)}"))
            self._backward.add(node)
            known = self._recalled[group, value] = Value(node)
        return known
