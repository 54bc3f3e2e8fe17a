"""Gradient checkpoints: backward recomputes the inner values of a marked subgraph from its inputs.

The backward ops are unchanged; only their operands inside the subgraph are replaced by clones. So gradients keep their
bits, a clone of dropout draws the same mask (its stream is an attribute and its key an operand), and statistics are
assigned once, because assignments are not cloned. Decisions are kept, so that backward goes the way that forward went
also on devices that round differently the second time.
Source: Chen et al. 2016, "Training Deep Nets with Sublinear Memory Cost".
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from graphwright.graph import NodeId
from graphwright.ops import get
from graphwright.program.kinds import SOURCES
from graphwright.program.op_graph import Value
from graphwright.program.primitives import add_op

if TYPE_CHECKING:
    from graphwright.program.program import Program

BARRIER = "recall"  # a view by which clones read the subgraph's inputs, so that CSE cannot merge clones and originals


class Decisions:
    """The nodes of a program that decide: with an integer or bool result that depends on a float.

    Choices of experts, their runs and offsets, and comparisons of floats are such nodes; a mask made of positions alone
    and the key that a dropout passes on are not.
    """

    def __init__(self, program: Program) -> None:
        self.program = program
        self._from_floats: dict[Value, bool] = {}

    def __contains__(self, node: NodeId) -> bool:
        specs = self.program.specs(node)
        return any(not spec.dtype.is_float and self._depends(Value(node, k)) for k, spec in enumerate(specs))

    def _depends(self, value: Value) -> bool:
        """Return True if a value depends on a float."""
        p, known, stack = self.program, self._from_floats, [value]
        while stack:
            at = stack[-1]
            reads = self._reads(at)
            floats = any(p.specs(v.node)[v.port].dtype.is_float for v in reads)
            unknown = [] if floats else [v for v in reads if v not in known]
            if unknown:
                stack += unknown
            else:
                known[stack.pop()] = floats or any(known[v] for v in reads)
        return known[value]

    def _reads(self, value: Value) -> Sequence[Value]:
        """Return the operands on whose entries a value depends."""
        p = self.program
        if p.op(value.node) in SOURCES:
            return ()
        reads, traits = p.operands(value.node), get(p.op(value.node)).traits
        passed = [operand for result, operand in traits.passes if result == value.port]
        return [reads[i] for i in passed] if passed else reads[1:] if traits.valueless else reads


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
        self._decisions = Decisions(program)

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
        """Return True if a value is stored.

        A forward node outside its checkpoint reads it, or its node decides, or its op updates state.
        """
        if value not in self._retained:
            p, group = self.program, self._groups[value.node]
            readers = {p.graph.target(e) for e in p.out_edges(value.node) if p.edge_value(e) == value}
            outside = {n for n in readers - self.backward if self._groups.get(n) != group}
            kept = value.node in self._decisions or get(p.op(value.node)).traits.update
            self._retained[value] = bool(outside) or kept
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
