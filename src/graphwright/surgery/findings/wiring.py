"""The graph of a program as lists for fast walks; siblings in repeated blocks; candidate values for empty ports."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from graphwright.array import Spec
from graphwright.errors import GraphwrightError
from graphwright.graph import NodeId
from graphwright.ops import OPS, get, traits
from graphwright.program.kinds import ASSIGN, INPUT, PARAM, SOURCES, STATE
from graphwright.program.op_graph import Value
from graphwright.surgery.walks import flood

if TYPE_CHECKING:
    from graphwright.program.program import Program


_NUMBER = re.compile(r"(?<![^.])[0-9]+(?![^.])")
"""A segment of a path that is a number."""
BLOCK_NUMBER = re.compile(r"(?:(?<![^.])|(?<=[A-Za-z]))[0-9]+(?![^.])")
"""A number that is a segment of a path or ends one, as in `block3`."""


class Wiring:
    """The graph of a program as lists for fast walks. Nodes are indices 0..n-1 in topological order.

    Attributes:
        nodes, at: list of handles by index, and dict from handle to index.
        ops: name of the op, or kind, of each node.
        after, before: indices of the readers and of the operands of each node, without repetition.
        next_values: dict from the index of a state or param to the index of the node with its next value.
        outputs: indices of the nodes that compute outputs of the program.
    """

    def __init__(self, p: Program) -> None:
        self.nodes: list[NodeId] = p.order()
        self.at = {node: i for i, node in enumerate(self.nodes)}
        self.ops = [p.op(node) for node in self.nodes]
        self.after = [[self.at[r] for r in p.graph.successors(node)] for node in self.nodes]
        self.before: list[list[int]] = [[] for _ in self.nodes]
        for i, readers in enumerate(self.after):
            for j in readers:
                self.before[j].append(i)
        self.outputs = {self.at[v.node] for v in p.outputs() if v.node in self.at}
        pairs = [[self.at[v.node] for v in p.operands(node)] for node in p.assigns()]
        self.next_values = {pair[0]: pair[1] for pair in pairs if len(pair) == 2}

    def unread(self, i: int) -> bool:
        """Return whether a node has no reader, is not an output, and assigns no state."""
        return not self.after[i] and i not in self.outputs and self.ops[i] != ASSIGN

    def passes(self, i: int) -> bool:
        """Return whether a node's result depends on the values of its operands, not only on their shapes."""
        return not traits(self.ops[i]).valueless

    def reached(self) -> set[int]:
        """Return the indices of the nodes that the values of the inputs affect, in this step or a later one."""
        states: dict[int, list[int]] = {}
        for state, value in self.next_values.items():
            states.setdefault(value, []).append(state)
        inputs = [i for i, op in enumerate(self.ops) if op == INPUT]
        return set(flood(inputs, lambda i: filter(self.passes, (*self.after[i], *states.get(i, ())))))

    def reaching(self, goals: Iterable[int]) -> set[int]:
        """Return the indices of the nodes whose values affect the goals, in this step or a later one."""
        return set(flood(goals, lambda i: [*(self.before[i] if self.passes(i) else ()), *self.assigned(i)]))

    def assigned(self, i: int) -> list[int]:
        """Return a list of the node whose value a state or param has in the next step; empty for other nodes."""
        return [self.next_values[i]] if i in self.next_values else []

    def cone(self, ends: Iterable[int]) -> list[int]:
        """Return the nodes `ends` and all nodes that only these nodes use, without inputs, latest first."""
        order = [i for i in ends if self.ops[i] != INPUT]
        gone = set(order)
        for i in order:  # grows while it is walked
            for j in self.before[i]:
                free = j not in gone and j not in self.outputs and self.ops[j] not in (INPUT, ASSIGN)
                if free and gone.issuperset(self.after[j]):
                    gone.add(j)
                    order.append(j)
        return sorted(gone, reverse=True)


def least_arity(op: str) -> int:
    """Return the number of ports of an op that must have an edge."""
    if op == ASSIGN:
        return 2
    arity = get(op).arity
    return arity if isinstance(arity, int) else arity[0]


def template(path: str, number: re.Pattern[str] = _NUMBER) -> tuple[str, tuple[int, ...]]:
    """Return a path with `*` for numeric segments, and the numbers. Nodes of equal op and template are siblings."""
    return number.sub("*", path), tuple(map(int, number.findall(path)))


def siblings(p: Program, node: NodeId) -> list[NodeId]:
    """Return the siblings of a node (see `template`) in order of creation; empty if the path has no number."""
    own, numbers = template(p.path(node))
    if not numbers:
        return []
    return [n for n in p.of_kind(p.op(node)) if n != node and template(p.path(n))[0] == own]


def shifted(path: str, of: str, to: str, number: re.Pattern[str] = _NUMBER) -> str:
    """Translate a path near the node `of` to the corresponding path near `of`'s sibling `to`.

    Its numbers change by the difference between those of `of` and `to`: with `of` = `layers.1.mlp` and `to` =
    `layers.3.mlp`, `layers.0.out` becomes `layers.2.out`.
    """
    by = iter([b - a for a, b in zip(template(of, number)[1], template(to, number)[1], strict=True)])
    return number.sub(lambda found: str(int(found[0]) + next(by, 0)), path)


def empty_ports(p: Program, w: Wiring) -> Iterator[tuple[NodeId, int]]:
    """Yield (node, port) for ports that lack an edge, and (node, 0) for junctions that are read but have no edge."""
    for i, node in enumerate(w.nodes):
        op = w.ops[i]
        if op in SOURCES or (op != ASSIGN and op not in OPS):
            continue
        if p.is_junction(node):
            if not w.before[i] and not w.unread(i):
                yield node, 0
            continue
        ports = {p.edge_port(e) for e in p.graph.in_edges(node)}
        if not ports and w.unread(i):
            continue  # reported as isolated
        last = max((*ports, least_arity(op) - 1))
        yield from ((node, port) for port in range(last + 1) if port not in ports)


def fits(p: Program, node: NodeId, port: int, spec: Spec) -> bool:
    """Return whether a node's results would have the same specs as now if the operand at a port had the given spec."""
    if p.is_junction(node):
        return p.spec(node) == spec
    ins = {p.edge_port(e): p.specs(v.node)[v.port] for e in p.in_edges(node) for v in [p.edge_value(e)]}
    ins[port] = spec
    if p.op(node) == ASSIGN:
        return len(ins) == 2 and ins[0] == ins[1]
    if set(ins) != set(range(len(ins))):
        return False
    try:
        return get(p.op(node)).specs([ins[k] for k in range(len(ins))], p.attrs(node)) == p.specs(node)
    except GraphwrightError:
        return False


def best_source(p: Program, w: Wiring, node: NodeId, port: int, *, unread: bool = False) -> Value | None:
    """Return the value that most likely belongs at a port; None if no value has a spec that fits.

    Values that fit are ranked: unread values first, then values that correspond to those that siblings read at this
    port, then the nearest in topological order.

    Args:
        unread: consider only values that nothing reads.
    """
    here = w.at[node]
    later = set(flood([here], w.after.__getitem__))
    numbered, plain = _as_siblings(p, node, port)
    best: tuple[tuple, Value] | None = None
    known: dict[Spec, bool] = {}
    for i, source in enumerate(w.nodes):
        if i in later or w.ops[i] == ASSIGN:
            continue
        dead = w.unread(i)
        if unread and not dead:
            continue
        if p.op(node) == ASSIGN and port == 0 and w.ops[i] not in (PARAM, STATE):
            continue
        for result, spec in enumerate(p.specs(source)):
            if spec not in known:
                known[spec] = fits(p, node, port, spec)
            if not known[spec]:
                continue
            at = (p.path(source), result)
            key = (not dead, at not in numbered, abs(i - here), at not in plain, result)
            if best is None or key < best[0]:
                best = key, Value(source, result)
    return None if best is None else best[1]


def _as_siblings(p: Program, node: NodeId, port: int) -> tuple[set[tuple[str, int]], set[tuple[str, int]]]:
    """Return two sets of (path, result index) that correspond to siblings' operands: numbered paths, and others."""
    found: tuple[set[tuple[str, int]], set[tuple[str, int]]] = set(), set()
    for other in siblings(p, node):
        for value in (p.edge_value(e) for e in p.in_edges(other) if p.edge_port(e) == port):
            read = p.path(value.node)
            found[not template(read)[1]].add((shifted(read, p.path(other), p.path(node)), value.port))
    return found
