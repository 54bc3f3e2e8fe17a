"""Losses that take logits and are fed probabilities: softmax is then applied twice, and training all but stops."""

from __future__ import annotations

from collections.abc import Iterator

from graphwright.surgery.findings.diagnosis import Diagnosis
from graphwright.surgery.findings.finding import Finding, Severity
from graphwright.surgery.findings.kinds import finding
from graphwright.surgery.findings.mend import rewired

SQUASHED = {"cross_entropy": "softmax", "bce_with_logits": "sigmoid"}
"""Losses of logits, and the op each applies itself."""


@finding("double_softmax")
def double_softmax(d: Diagnosis) -> Iterator[Finding]:
    """A softmax that feeds `cross_entropy`, or a sigmoid that feeds `bce_with_logits`.

    Scores in [0, 1] bound the loss of K classes from below by ln(1 + (K - 1)/e), and flatten its gradient.
    """
    p, w = d.program, d.wiring
    for i, node in enumerate(w.nodes):
        scores = p.in_edges(node)[0] if w.ops[i] in SQUASHED and p.in_edges(node) else None
        if scores is None or p.edge_port(scores) != 0:
            continue
        squash = p.graph.source(scores)
        if p.op(squash) == SQUASHED[w.ops[i]] and p.operands(squash):
            yield Finding.of(
                p,
                "double_softmax",
                Severity.WARNING,
                f"takes logits and is fed the result of a {p.op(squash)}",
                node,
                squash,
                edges=(scores,),
                witness={"loss": p.path(node), "from": p.path(squash)},
                fixes=(rewired(p, scores, p.operands(squash)[0], keeps=False),),
            )
