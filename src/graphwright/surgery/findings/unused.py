"""Nodes without effect: those that nothing is connected to, and those whose results nothing reads."""

from __future__ import annotations

from collections.abc import Iterator

from graphwright.graph import NodeId
from graphwright.program import Program
from graphwright.program.editing.transaction import Transaction
from graphwright.program.kinds import INPUT, SOURCES, STORED, WRITE
from graphwright.surgery.findings.diagnosis import Diagnosis
from graphwright.surgery.findings.finding import Finding, Fix, Severity
from graphwright.surgery.findings.kinds import finding
from graphwright.surgery.findings.mend import removed


@finding("isolated")
def isolated(d: Diagnosis) -> Iterator[Finding]:
    """Nodes without any edge that are no output."""
    p, w = d.program, d.wiring
    for i, node in enumerate(w.nodes):
        alone = not w.before[i] and w.unread(i) and w.ops[i] not in STORED
        if alone and node not in d.claimed:
            fixes = (removed(p, [node], keeps=True),)
            yield Finding.of(p, "isolated", Severity.WARNING, "is connected to nothing", node, fixes=fixes)


@finding("dead_end")
def dead_end(d: Diagnosis) -> Iterator[Finding]:
    """Nodes whose results nothing reads, with what only they use.

    Where inputs lie in that cone it is the way to the outputs that is missing: see `unreachable`.
    """
    p, w = d.program, d.wiring
    needed = w.reaching([*w.outputs, *(i for i, op in enumerate(w.ops) if op == WRITE)])
    for i, node in enumerate(w.nodes):
        if w.ops[i] in SOURCES or not w.unread(i) or not w.before[i] or node in d.claimed:
            continue
        cone = w.cone([i])
        inside = set(cone)
        feeds = {j for k in cone for j in w.before[k]} - inside
        if any(w.ops[j] == INPUT and j not in needed for j in feeds):
            continue
        members = [w.nodes[j] for j in cone]
        yield Finding.of(
            p,
            "dead_end",
            Severity.WARNING,
            "computes what nothing reads",
            *members,
            witness={"cone": [p.path(n) for n in members]},
            fixes=(removed(p, members, keeps=True), _output(p, node)),
        )


def _output(p: Program, node: NodeId) -> Fix:
    def apply(e: Transaction) -> None:
        outputs = dict(zip(e.program.output_names(), e.program.outputs(), strict=True))
        e.set_outputs(**outputs, **{e.program.path(node): node})

    return Fix(f"make {p.path(node)} an output", apply, edges=1)
