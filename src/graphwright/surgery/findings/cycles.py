"""Cycles: nodes that wait for each other. A loop over time goes through a state, and is none."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from graphwright.graph import EdgeId, NodeId
from graphwright.graph.analysis import strongly_connected_components
from graphwright.program import Program
from graphwright.program.editing.transaction import Transaction
from graphwright.surgery.findings.diagnosis import Diagnosis
from graphwright.surgery.findings.finding import Finding, Fix, Severity
from graphwright.surgery.findings.kinds import finding
from graphwright.surgery.findings.mend import rewired
from graphwright.surgery.findings.sources import best_source


@finding("cycle")
def cycle(d: Diagnosis) -> Iterator[Finding]:
    """The shortest cycle of each strongly connected component."""
    p = d.program
    if not p.loose:  # every edge goes forwards in the order
        return
    for component in strongly_connected_components(p.graph):
        if len(component) == 1 and not p.graph.has_edge(component[0], component[0]):
            continue
        edges = shortest_cycle(p, component)
        nodes = tuple(p.graph.source(e) for e in edges)
        names = [p.path(n) for n in nodes]
        yield Finding.of(
            p,
            "cycle",
            Severity.CRITICAL,
            "nodes depend on each other",
            *nodes,
            edges=edges,
            got=" -> ".join([*names, names[0]]),
            witness={"path": names},
            fixes=tuple(_fixes(d, edges)),
        )


def shortest_cycle(p: Program, component: Sequence[NodeId]) -> tuple[EdgeId, ...]:
    """The edges of a shortest cycle within a strongly connected component, the one that closes it last."""
    inside = set(component)
    best: list[EdgeId] = []
    loose = [e for e in sorted(p.loose) if set(p.graph.endpoints(e)) <= inside]
    for closing in loose or [e for n in component for e in p.graph.out_edges(n) if p.graph.target(e) in inside]:
        goal, start = p.graph.endpoints(closing)
        came: dict[NodeId, EdgeId | None] = {start: None}
        queue = [start]
        for node in queue:
            if node == goal:
                break
            for edge in p.graph.out_edges(node):
                after = p.graph.target(edge)
                if after in inside and after not in came:
                    came[after] = edge
                    queue.append(after)
        if goal not in came:
            continue
        path, node = [closing], goal
        while (edge := came[node]) is not None:
            path.append(edge)
            node = p.graph.source(edge)
        if not best or len(path) < len(best):
            best = path
    return tuple(best[::-1])


def _fixes(d: Diagnosis, edges: tuple[EdgeId, ...]) -> Iterator[Fix]:
    """Cut an edge into a junction, the one that closed the cycle first; else let a port read something earlier."""
    p = d.program
    cuttable = [e for e in edges if p.is_junction(p.graph.target(e)) and p.graph.in_degree(p.graph.target(e)) > 1]
    cuttable.sort(key=lambda e: e not in p.loose)
    for edge in cuttable[:1]:
        yield Fix(f"cut {p.path(edge)}", lambda e, edge=edge: e.cut(edge), edges=1, keeps_function=edge in p.loose)
        if not p.spec(p.edge_value(edge)).symbolic:
            yield Fix(f"delay {p.path(edge)} by one step", lambda e, edge=edge: _delay(e, edge), edges=1, ops=2)
    for edge in (e for e in edges if e in p.loose and e not in cuttable):
        source = best_source(p, d.wiring, p.graph.target(edge), p.edge_port(edge))
        if source is not None:
            yield rewired(p, edge, source, keeps=True)


def _delay(e: Transaction, edge: EdgeId) -> None:
    source, target = e.program.edge_value(edge), e.program.graph.target(edge)
    e.cut(edge)
    e.connect(source, target, delay=1)
