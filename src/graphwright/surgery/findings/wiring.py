"""The graph of a program as lists for fast walks, siblings in repeated blocks, and sources for empty ports."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from graphwright.errors import GraphwrightError
from graphwright.ops import OPS, get
from graphwright.program import Value
from graphwright.program.kinds import ASSIGN, INPUT, KINDS, PARAM, SOURCES, STATE

if TYPE_CHECKING:
    from graphwright.array import Spec
    from graphwright.graph import NodeId
    from graphwright.program import Program

VALUELESS = frozenset(name for name, row in OPS.items() if row.traits.valueless)
"""Ops whose result depends on the shape of their operands, not on the values."""


class Wiring:
    """Nodes as 0..n-1 in topological order, with their operands and readers.

    Attributes:
        nodes, at: handles by number, and numbers by handle.
        ops: op or kind of each.
        after, before: numbers of readers and of operands, each once.
        carried: state or param -> the node that is its value in the next step.
        outputs: numbers of nodes with a result of the program.
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
        """Whether a node is an op."""
        return self.ops[i] not in KINDS

    def unread(self, i: int) -> bool:
        """Whether a node has no reader, is no output, and assigns no state."""
        return not self.after[i] and i not in self.outputs and self.ops[i] != ASSIGN

    def passes(self, i: int) -> bool:
        """Whether a node's result depends on the values of its operands."""
        return self.ops[i] not in VALUELESS

    def differentiable(self, i: int) -> bool:
        """Whether a gradient passes through a node."""
        if self.ops[i] in KINDS:
            return self.ops[i] != ASSIGN
        row = OPS.get(self.ops[i])
        return row is not None and (row.vjp is not None or row.traits.opaque)

    def flood(self, start: Iterable[int], lists: Sequence[Sequence[int]]) -> list[int]:
        """The start and all nodes reachable along the lists, breadth first."""
        order = list(dict.fromkeys(start))
        seen = set(order)
        for i in order:  # grows while it is walked
            fresh = [j for j in lists[i] if j not in seen]
            seen.update(fresh)
            order += dict.fromkeys(fresh)
        return order

    def reached(self) -> set[int]:
        """Nodes that the values of the inputs affect, in this step or a later one."""
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
        """Nodes whose values affect the goals, in this step or a later one."""
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
        """Unread nodes and everything that only they use, latest first; inputs are never removed."""
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
    """Number of ports of an op that must have an edge."""
    if op == ASSIGN:
        return 2
    arity = get(op).arity
    return arity if isinstance(arity, int) else arity[0]


def template(path: str) -> tuple[str, tuple[int, ...]]:
    """A path with its numbered segments as `*`, and the numbers; nodes of one template are siblings."""
    numbers: list[int] = []
    segments = []
    for segment in path.split("."):
        if segment.isascii() and segment.isdigit():
            numbers.append(int(segment))
            segment = "*"
        segments.append(segment)
    return ".".join(segments), tuple(numbers)


def siblings(p: Program, node: NodeId) -> list[NodeId]:
    """Other nodes with the same op and template, in order of creation."""
    own, numbers = template(p.path(node))
    if not numbers:
        return []
    return [n for n in p.of_kind(p.op(node)) if n != node and template(p.path(n))[0] == own]


def shifted(path: str, of: str, to: str) -> str:
    """A path relative to `of`, translated to its sibling `to`: numbers shift by the same amount."""
    by = [b - a for a, b in zip(template(of)[1], template(to)[1], strict=True)]
    segments, k = path.split("."), 0
    for i, segment in enumerate(segments):
        if segment.isascii() and segment.isdigit():
            segments[i] = str(int(segment) + (by[k] if k < len(by) else 0))
            k += 1
    return ".".join(segments)


def empty_ports(p: Program, w: Wiring) -> Iterator[tuple[NodeId, int]]:
    """(node, port) of ports that lack an edge, and of junctions that are read but have no edge."""
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
    """Whether a node with an operand of this spec at a port has the results that it has now."""
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
    """The value that most likely belongs at a port.

    Fitting values are ranked: unread values first, then what siblings read at this port, then the nearest in the order.

    Args:
        unread: only values that nothing reads.
    """
    here = w.at[node]
    later = set(w.flood([here], w.after))
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
    """Values that siblings read at this port, translated to this node: with numbers in the path, and without."""
    numbered: set[tuple[str, int]] = set()
    plain: set[tuple[str, int]] = set()
    path = p.path(node)
    for other in siblings(p, node):
        for edge in p.in_edges(other):
            if p.edge_port(edge) == port:
                value = p.edge_value(edge)
                read = p.path(value)
                to = numbered if template(read)[1] else plain
                to.add((shifted(read, p.path(other), path), value.port))
    return numbered, plain
