"""Blocks without the residual path that their siblings have, or that the architecture gives them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from graphwright.graph import NodeId
from graphwright.program import Program, Value
from graphwright.surgery.findings.diagnosis import Diagnosis
from graphwright.surgery.findings.finding import Finding, Severity
from graphwright.surgery.findings.kinds import finding
from graphwright.surgery.findings.residual_paths import around, bridges, carried
from graphwright.surgery.findings.sources import shifted, template


@finding("missing_residual")
def missing_residual(d: Diagnosis) -> Iterator[Finding]:
    """Junctions without an identity path around their branch, where most siblings or the architecture have one."""
    found = {f.identity: f for f in (*_among_siblings(d), *_against_architecture(d))}
    yield from found.values()


def _against_architecture(d: Diagnosis) -> Iterator[Finding]:
    """Paths that the model has as it was opened, between nodes that both have."""
    if d.model is None or d.model.checkpoint is None:
        return
    p, source = d.program, d.model.original
    paths = {p.path(n): n for n in p.nodes()}
    for junction in source.junctions():
        path = around(source, junction)
        here = paths.get(source.path(junction))
        start = None if path is None else paths.get(source.path(path[0]))
        if here is None or start is None or not p.is_junction(here) or carried(p, start, here):
            continue
        if p.specs(start)[0] == p.spec(here):
            what = f"no identity path leads from {p.path(start)}, as one does in the architecture"
            yield _finding(p, here, Value(start), what, {"architecture": d.model.arch.name})


def _among_siblings(d: Diagnosis) -> Iterator[Finding]:
    p = d.program
    paths = {p.path(n): n for n in p.nodes()}
    known = {n: around(p, n) for n in p.junctions()}
    groups: dict[str, list[NodeId]] = {}
    for junction in known:
        groups.setdefault(template(p.path(junction))[0], []).append(junction)
    for junction in known:
        others = [n for n in groups[template(p.path(junction))[0]] if n != junction]
        alike = [(n, found) for n in others if (found := known[n]) is not None]
        if not alike or len(alike) < d.limits.siblings * len(others):
            continue
        for sibling, (source, branch) in alike:
            entry = _entry(p, paths, junction, sibling, source, branch)
            if entry is None:
                continue
            if not carried(p, entry.node, junction):
                name = p.path(sibling)
                what = f"no identity path leads from {p.path(entry)} around its branch, as one does at {name}"
                witness = {"sibling": name, "siblings_with": len(alike), "siblings": len(others)}
                yield _finding(p, junction, entry, what, witness)
            break


def _entry(
    p: Program, paths: dict[str, NodeId], junction: NodeId, sibling: NodeId, source: NodeId, branch: NodeId
) -> Value | None:
    """What the branch into a junction starts from: what its first node reads, as the sibling's reads the source."""
    first = paths.get(shifted(p.path(branch), p.path(sibling), p.path(junction)))
    if first is None or p.op(first) != p.op(branch):
        return None
    port = next(p.edge_port(e) for e in p.in_edges(branch) if p.graph.source(e) == source)
    entry = next((p.edge_value(e) for e in p.in_edges(first) if p.edge_port(e) == port), None)
    return entry if entry is not None and p.specs(entry.node)[entry.port] == p.spec(junction) else None


def _finding(p: Program, junction: NodeId, entry: Value, what: str, witness: dict[str, Any]) -> Finding:
    return Finding.of(
        p,
        "missing_residual",
        Severity.WARNING,
        what,
        junction,
        entry.node,
        witness={"block": f"{p.path(entry)} .. {p.path(junction)}", **witness},
        fixes=bridges(p, entry, junction),
    )
