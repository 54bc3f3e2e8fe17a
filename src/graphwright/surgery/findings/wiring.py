"""The graph of a program as plain lists, so that the rules walk it without asking for each neighbour."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from graphwright.ops import get
from graphwright.ops.registry import OPS
from graphwright.program.kinds import ASSIGN, INPUT, KINDS

if TYPE_CHECKING:
    from graphwright.graph import NodeId
    from graphwright.program import Program

VALUELESS = frozenset(name for name, row in OPS.items() if row.traits.valueless)
"""Ops whose result depends on the shapes that they read, not on the values."""


class Wiring:
    """Nodes as 0..n-1 in topological order, with what each reads and what reads it.

    Attributes:
        nodes, at: handles by number, and back.
        ops: op or kind of each.
        after, before: numbers of readers and of what is read, each once.
        carried: state or param -> what it has in the next step.
        outputs: numbers of nodes that hold a result of the program.
    """

    def __init__(self, p: Program) -> None:
        self.nodes: list[NodeId] = p.order()
        self.at = {node: i for i, node in enumerate(self.nodes)}
        self.ops = [p.op(node) for node in self.nodes]
        self.after: list[list[int]] = [[] for _ in self.nodes]
        self.before: list[list[int]] = [[] for _ in self.nodes]
        self.carried: dict[int, int] = {}
        for i, node in enumerate(self.nodes):
            readers = dict.fromkeys(self.at[r] for r in p.graph.successors(node))
            self.after[i] = list(readers)
            for j in readers:
                self.before[j].append(i)
        self.outputs = {self.at[v.node] for v in p.outputs() if v.node in self.at}
        for node in p.assigns():
            ends = p.operands(node)
            if len(ends) == 2:
                self.carried[self.at[ends[0].node]] = self.at[ends[1].node]

    def is_op(self, i: int) -> bool:
        """True for what computes."""
        return self.ops[i] not in KINDS

    def unread(self, i: int) -> bool:
        """True for a node that nothing reads, no output, and no end of a step."""
        return not self.after[i] and i not in self.outputs and self.ops[i] != ASSIGN

    def passes(self, i: int) -> bool:
        """Whether a node's result depends on the values that it reads."""
        return self.ops[i] not in VALUELESS

    def differentiable(self, i: int) -> bool:
        """Whether a gradient goes through a node."""
        if self.ops[i] in KINDS:
            return self.ops[i] != ASSIGN
        row = OPS.get(self.ops[i])
        return row is not None and (row.vjp is not None or row.traits.opaque)

    def flood(self, start: Iterable[int], lists: Sequence[Sequence[int]]) -> list[int]:
        """The start and all that the lists lead to, nearest first."""
        order = list(dict.fromkeys(start))
        seen = set(order)
        for i in order:  # grows while it is walked
            fresh = [j for j in lists[i] if j not in seen]
            seen.update(fresh)
            order += dict.fromkeys(fresh)
        return order

    def reached(self) -> set[int]:
        """What the values of the inputs have an effect on, in this step or in a later one."""
        states = {value: [] for value in self.carried.values()}
        for state, value in self.carried.items():
            states[value].append(state)
        order = [i for i, op in enumerate(self.ops) if op == INPUT]
        seen = set(order)
        for i in order:  # grows while it is walked
            fresh = [j for j in (*self.after[i], *states.get(i, ())) if j not in seen]
            fresh = [j for j in fresh if self.passes(j)]
            seen.update(fresh)
            order += dict.fromkeys(fresh)
        return seen

    def reaching(self, goals: Iterable[int]) -> set[int]:
        """What has an effect on the goals by its value, in this step or in a later one."""
        order = list(dict.fromkeys(goals))
        seen = set(order)
        for i in order:  # grows while it is walked
            back = self.before[i] if self.passes(i) else []
            more = [self.carried[i]] if i in self.carried else []
            fresh = [j for j in (*back, *more) if j not in seen]
            seen.update(fresh)
            order += dict.fromkeys(fresh)
        return seen

    def cone(self, ends: Iterable[int]) -> list[int]:
        """Unread nodes with all that only they use, latest first; inputs stay, being the program's signature."""
        gone = dict.fromkeys(i for i in ends if self.ops[i] != INPUT)
        stack = list(gone)
        for i in stack:  # grows while it is walked
            for j in self.before[i]:
                free = j not in gone and j not in self.outputs and self.ops[j] not in (INPUT, ASSIGN)
                if free and all(k in gone for k in self.after[j]):
                    gone[j] = None
                    stack.append(j)
        return sorted(gone, reverse=True)


def least_arity(op: str) -> int:
    """How many ports of an op must have an edge."""
    if op == ASSIGN:
        return 2
    arity = get(op).arity
    return arity if isinstance(arity, int) else arity[0]
