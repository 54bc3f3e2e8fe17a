"""What an empty port most likely read: a value that fits, that nothing else reads, as in the blocks that are alike."""

from __future__ import annotations

from collections.abc import Iterator

from graphwright.array import Spec
from graphwright.errors import GraphwrightError
from graphwright.graph import NodeId
from graphwright.ops import OPS, get
from graphwright.program import Program, Value
from graphwright.program.kinds import PARAM, SOURCES, STATE, WRITE
from graphwright.surgery.findings.wiring import Wiring, least_arity


def template(path: str) -> tuple[str, tuple[int, ...]]:
    """A path with its numbered segments as `*`, and the numbers: blocks of one template are siblings."""
    numbers: list[int] = []
    segments = []
    for segment in path.split("."):
        if segment.isascii() and segment.isdigit():
            numbers.append(int(segment))
            segment = "*"
        segments.append(segment)
    return ".".join(segments), tuple(numbers)


def siblings(p: Program, node: NodeId) -> list[NodeId]:
    """Other nodes of its op and template, in order of creation."""
    own, numbers = template(p.path(node))
    if not numbers:
        return []
    return [n for n in p.of_kind(p.op(node)) if n != node and template(p.path(n))[0] == own]


def shifted(path: str, of: str, to: str) -> str:
    """A path seen from `of`, as the same place seen from its sibling `to`: numbers move by as much."""
    by = [b - a for a, b in zip(template(of)[1], template(to)[1], strict=True)]
    segments, k = path.split("."), 0
    for i, segment in enumerate(segments):
        if segment.isascii() and segment.isdigit():
            segments[i] = str(int(segment) + (by[k] if k < len(by) else 0))
            k += 1
    return ".".join(segments)


def empty_places(p: Program, w: Wiring) -> Iterator[tuple[NodeId, int]]:
    """(node, port) of ports without their edge, and of junctions that something reads and that have none."""
    for i, node in enumerate(w.nodes):
        op = w.ops[i]
        if op in SOURCES or (op != WRITE and op not in OPS):
            continue
        if p.is_junction(node):
            if not w.before[i] and not w.unread(i):
                yield node, 0
            continue
        ports = {p.edge_port(e) for e in p.graph.in_edges(node)}
        if not ports and w.unread(i):
            continue  # it is isolated
        last = max((*ports, least_arity(op) - 1))
        yield from ((node, port) for port in range(last + 1) if port not in ports)


def fits(p: Program, node: NodeId, port: int, spec: Spec) -> bool:
    """Whether an operand of this spec at a port gives the node the results that it has."""
    if p.is_junction(node):
        return p.spec(node) == spec
    ins = {p.edge_port(e): p.specs(v.node)[v.port] for e in p.in_edges(node) for v in [p.edge_value(e)]}
    ins[port] = spec
    if p.op(node) == WRITE:
        return len(ins) == 2 and ins[0] == ins[1]
    if set(ins) != set(range(len(ins))):
        return False
    try:
        return get(p.op(node)).specs([ins[k] for k in range(len(ins))], p.attrs(node)) == p.specs(node)
    except GraphwrightError:
        return False


def best_source(p: Program, w: Wiring, node: NodeId, port: int, *, unread: bool = False) -> Value | None:
    """The value that most likely belongs at a port.

    What fits is ranked: values that nothing reads, what the port of a sibling reads, the nearest in the order.

    Args:
        unread: only values that nothing reads.
    """
    here = w.at[node]
    later = set(w.flood([here], w.after))
    numbered, plain = _as_siblings(p, node, port)
    best: tuple[tuple, Value] | None = None
    known: dict[Spec, bool] = {}
    for i, source in enumerate(w.nodes):
        if i in later or w.ops[i] == WRITE:
            continue
        dead = w.unread(i)
        if unread and not dead:
            continue
        if p.op(node) == WRITE and port == 0 and w.ops[i] not in (PARAM, STATE):
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
    """What the same port of siblings reads, as seen from here: with numbers in the path, and without."""
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
