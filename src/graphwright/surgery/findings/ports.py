"""Ports without their edge, and junctions that sum nothing."""

from __future__ import annotations

from collections.abc import Iterator

from graphwright.graph import NodeId
from graphwright.program import Program, Value
from graphwright.surgery.findings.diagnosis import Diagnosis
from graphwright.surgery.findings.finding import Finding, Fix, Severity
from graphwright.surgery.findings.kinds import finding
from graphwright.surgery.findings.sources import best_source, empty_places


@finding("orphan_source")
def orphan_source(d: Diagnosis) -> Iterator[Finding]:
    """Each port that misses its edge, and each junction that is zero because nothing enters it."""
    p, w = d.program, d.wiring
    for node, port in empty_places(p, w):
        junction = p.is_junction(node)
        source = best_source(p, w, node, port)
        lost = source is not None and source.node in d.claimed
        fixes = [_connect(p, source, node, port, junction)] if source is not None else []
        if junction and not lost:
            fixes += _without(p, node)
        yield Finding.of(
            p,
            "orphan_source",
            Severity.WARNING if junction else Severity.ERROR,
            "sums nothing, and is zero" if junction else f"port {port} has no edge",
            node,
            where=p.path(node) if junction else f"{p.path(node)}, port {port}",
            witness={"port": port, "nearest": None if source is None else p.path(source)},
            fixes=tuple(fixes),
        )


def _connect(p: Program, source: Value, node: NodeId, port: int, junction: bool) -> Fix:
    return Fix(
        f"connect {p.path(source)} to {p.path(node)}",
        lambda e: e.connect(source, node, None if junction else port),
        edges=1,
        keeps_function=not junction,  # what misses a port did not run
    )


def _without(p: Program, node: NodeId) -> list[Fix]:
    """Where only sums read a zero, it can go."""
    readers = p.consumers(node)
    plain = readers and all(p.is_junction(n) and p.graph.in_degree(n) > 1 for n in readers)
    if not plain or any(v.node == node for v in p.outputs()):
        return []
    return [Fix(f"remove {p.path(node)}, a zero among sums", lambda e: e.remove(node), edges=1, keeps_function=True)]
