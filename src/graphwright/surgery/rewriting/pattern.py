"""Occurrences of a pattern, a small program, in a program.

A pattern input stands for any value of its spec, and a const for a const of equal value. Every other node stands for a
node of the same op and attributes. Sums and products match in either order of their operands, and a sum of two also
matches a junction with two edges.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from graphwright.graph import NodeId
from graphwright.ops import traits
from graphwright.program.kinds import CONST, INPUT
from graphwright.program.op_graph import Value

if TYPE_CHECKING:
    from graphwright.program.program import Program

Occurrence = Mapping[Value, Value]
"""Value of the pattern -> value of the program."""
_Pairs = Sequence[tuple[Value, Value]]


def occurrences(
    p: Program, pattern: Program, known: Occurrence | None = None, *, exact: bool = True
) -> Iterator[Occurrence]:
    """Yield the occurrences of a pattern in `p`, in topological order of the node of its first output.

    Args:
        known: values of the pattern that are known to stand for values of `p`.
        exact: False compares ops only, and neither attributes nor specs.
    """
    matcher = _Matcher(p, pattern, exact)
    yield from matcher.outputs(pattern.outputs(), known or {})


def removable(p: Program, pattern: Program, found: Occurrence) -> list[NodeId]:
    """Return the nodes of an occurrence that nothing needs once the readers of its outputs read other values.

    Consts and the values of pattern inputs are not among them.
    """
    nodes = dict.fromkeys(have.node for want, have in found.items() if pattern.op(want.node) not in (INPUT, CONST))
    replaced = {found[v] for v in pattern.outputs()}
    outputs = set(p.outputs())

    def needed(node: NodeId) -> bool:
        results = [Value(node, port) for port in range(len(p.specs(node)))]
        inner = [v for v in results if v not in replaced]
        return any(v in outputs or any(m not in nodes for m in p.consumers(v)) for v in inner)

    while stay := [n for n in nodes if needed(n)]:
        for n in stay:
            del nodes[n]
    return list(nodes)


class _Matcher:
    """Backtracking search; `found` maps pattern values to program values and is never changed in place."""

    def __init__(self, p: Program, pattern: Program, exact: bool) -> None:
        self.p, self.pattern, self.exact = p, pattern, exact

    def outputs(self, wanted: Sequence[Value], found: Occurrence) -> Iterator[Occurrence]:
        """Match the outputs one after the other, each at every node of its op that is consistent with `found`."""
        if not wanted:
            yield found
            return
        first, rest = wanted[0], wanted[1:]
        candidates = [found[first]] if first in found else self.candidates(first)
        for have in candidates:
            before = {k: v for k, v in found.items() if k != first}
            for more in self.value(first, have, before):
                yield from self.outputs(rest, more)

    def candidates(self, want: Value) -> list[Value]:
        op = self.pattern.op(want.node)
        nodes = list(self.p.of_kind(op))
        if traits(op).sums:
            nodes += self.p.junctions()
        return [Value(n, want.port) for n in sorted(nodes, key=self.p.order_labels.key)]

    def value(self, want: Value, have: Value, found: Occurrence) -> Iterator[Occurrence]:
        """Yield `found` extended by all ways in which `want` stands for `have`."""
        p, pattern = self.p, self.pattern
        if want in found:
            if found[want] == have:
                yield found
            return
        if self.exact and pattern.spec(want) != p.spec(have):
            return
        op, other = pattern.op(want.node), p.op(have.node)
        if op == INPUT:
            yield {**found, want: have}
        elif op == CONST:
            if other == CONST and (not self.exact or self._equal_consts(want.node, have.node)):
                yield {**found, want: have}
        elif want.port == have.port and self._same_op(want.node, have.node):
            results = {Value(want.node, k): Value(have.node, k) for k in range(len(pattern.specs(want.node)))}
            wanted, given = pattern.operands(want.node), p.operands(have.node)
            orders = [given]
            if (traits(op).sums or traits(op).multiplies) and len(given) == 2 and given[0] != given[1]:
                orders.append(given[::-1])
            for order in orders:
                yield from self.all(list(zip(wanted, order, strict=True)), {**found, **results})

    def all(self, pairs: _Pairs, found: Occurrence) -> Iterator[Occurrence]:
        if not pairs:
            yield found
            return
        for more in self.value(*pairs[0], found):
            yield from self.all(pairs[1:], more)

    def _same_op(self, want: NodeId, have: NodeId) -> bool:
        p, pattern = self.p, self.pattern
        op, other = pattern.op(want), p.op(have)
        if len(p.in_edges(have)) != len(pattern.in_edges(want)):
            return False
        if op != other:
            return traits(op).sums and p.is_junction(have)
        return not self.exact or dict(p.attrs(have)) == dict(pattern.attrs(want))

    def _equal_consts(self, want: NodeId, have: NodeId) -> bool:
        ours = self.pattern.weights.array(self.pattern.key(want))
        theirs = self.p.weights.array(self.p.key(have))
        return ours is theirs or (ours.spec == theirs.spec and ours.tobytes() == theirs.tobytes())
