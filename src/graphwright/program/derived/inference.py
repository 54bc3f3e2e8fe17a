"""The inference form of a program that was traced or built for training."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from graphwright.graph import NodeId
from graphwright.ops import get, traits
from graphwright.program.derived.rewrite import copy_node
from graphwright.program.kinds import INPUT
from graphwright.program.op_graph import Value
from graphwright.program.primitives import add_assign, insert_edge, insert_node, set_outputs
from graphwright.program.validate import refuse_broken

if TYPE_CHECKING:
    from graphwright.program.program import Program


def inference(p: Program) -> Program:
    """Return the program as it runs for inference: dropout is removed, batch norm uses its running statistics.

    The result shares the variables of `p`, so that it follows later training, and has no journal; derive it again after
    an edit of `p`. It has all inputs and outputs of `p`. Of the assignments it has those to states that an output
    depends on, except updates by training alone, such as those of running statistics and of keys of random numbers.

    Returns: a new program. Raises: InvalidProgram.
    """
    refuse_broken(p)
    replaced = {n: p.operands(n)[0] for n in p.nodes() if traits(p.op(n)).training_only}
    trained = {n for n in p.nodes() if n in replaced or traits(p.op(n)).inference}

    def read(value: Value) -> Value:
        while value.node in replaced and value.port == 0:
            value = replaced[value.node]
        return value

    def reached(values: Iterable[Value]) -> tuple[set[NodeId], bool]:
        """Return the nodes that values depend on, and whether one of them is computed in training alone."""
        stack, seen = [read(v) for v in values], set[Value]()
        while stack:
            if (value := stack.pop()) not in seen:
                seen.add(value)
                stack += map(read, p.operands(value.node))
        return {v.node for v in seen}, any(v.port and v.node in trained for v in seen)

    needed, _ = reached(p.outputs())
    waiting: list[tuple[NodeId, Value, Value]] = []
    for assign in p.assigns():
        state, new = p.operands(assign)
        waiting.append((assign, state, new))
    kept: set[NodeId] = set()
    while ready := [row for row in waiting if row[1].node in needed]:
        waiting = [row for row in waiting if row not in ready]
        for assign, _, new in ready:
            sources, training = reached([new])
            if not training:
                kept.add(assign)
                needed |= sources
    made = p.empty(f"{p.name} (inference)")
    made.source = (p, p.plan_version)
    values: dict[Value, Value] = {}
    for node in p.order():
        if node in kept:
            state, new = p.operands(node)
            add_assign(made, values[state], values[read(new)], p.path(node))
        if node not in needed and p.op(node) != INPUT:
            continue
        operands = [values[read(p.edge_value(e))] for e in p.in_edges(node)]
        if other := traits(p.op(node)).inference:
            attrs = {k: v for k, v in p.attrs(node).items() if k in get(other).attrs}
            copy = insert_node(made, other, attrs, p.path(node), p.specs(node)[:1])
            for edge, operand in zip(p.in_edges(node), operands, strict=True):
                insert_edge(made, operand, copy, p.edge_port(edge))
        else:
            copy = copy_node(p, node, made, p.path(node), operands)
        for port in range(len(made.specs(copy))):
            values[Value(node, port)] = Value(copy, port)
    set_outputs(made, {label: values[read(v)] for label, v in zip(p.output_names(), p.outputs(), strict=True)})
    return made
