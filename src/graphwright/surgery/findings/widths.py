"""Bottlenecks: a value that everything passes, and that is far narrower than what lies before and behind it."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby
from math import ceil

from graphwright.graph import NodeId
from graphwright.graph.dominance import dominators
from graphwright.program import Program, Value
from graphwright.program.paths import matches
from graphwright.surgery.findings.diagnosis import Diagnosis
from graphwright.surgery.findings.finding import Finding, Fix, Severity
from graphwright.surgery.findings.gradients import roots
from graphwright.surgery.findings.kinds import finding
from graphwright.surgery.findings.mend import grown


@finding("bottleneck")
def bottleneck(d: Diagnosis) -> Iterator[Finding]:
    """Dominators of a result whose features are fewer than a share of those of both neighbours in the chain."""
    p, w = d.program, d.wiring
    seen: set[NodeId] = set()
    for start in p.inputs() if p.valid else ():
        above = dominators(p.graph, start)
        for end in roots(d):
            chain: list[tuple[int, NodeId]] = []
            node = w.nodes[end] if w.nodes[end] in above else None
            while node is not None:
                width = features(p, node)
                chain += [(width, node)] if width else []
                node = above.get(node)
            steps = [(width, [n for _, n in run][-1]) for width, run in groupby(chain, key=lambda step: step[0])]
            for behind, (width, node), before in zip(steps, steps[1:], steps[2:], strict=False):
                least = d.limits.width * min(behind[0], before[0])
                declared = any(matches(pattern, p.path(node)) for pattern in d.limits.declared)
                if width < least and node not in seen and not declared:
                    seen.add(node)
                    yield _finding(p, node, width, ceil(least), (before, behind))


def features(p: Program, node: NodeId) -> int:
    """Channels of a floating value: its last axis, of a convolution the second one; 0 for what has none.

    Other values of four axes are heads, or images on their way between convolutions.
    """
    specs = p.specs(node)
    if len(specs) != 1 or not specs[0].dtype.is_float or len(specs[0].shape) < 2:
        return 0
    axis = _axis(p, node)
    size = 0 if axis is None else specs[0].shape[axis]
    return size if isinstance(size, int) else 0


def _axis(p: Program, node: NodeId) -> int | None:
    rank = len(p.spec(node).shape)
    return rank - 1 if rank < 4 else 1 if p.op(node) in ("conv", "conv_transpose") else None


def _finding(
    p: Program, node: NodeId, width: int, least: int, sides: tuple[tuple[int, NodeId], tuple[int, NodeId]]
) -> Finding:
    (wide_before, before), (wide_behind, behind) = sides
    return Finding.of(
        p,
        "bottleneck",
        Severity.INFO,
        f"all that reaches the results passes {width} features",
        node,
        before,
        behind,
        expected=f"{least} or more",
        got=str(width),
        witness={"widths": [wide_before, width, wide_behind]},
        fixes=_widen(p, node, least - width),
    )


def _widen(p: Program, node: NodeId, more: int) -> tuple[Fix, ...]:
    """Grow the axis by units that change nothing, where it can be grown."""
    dim = _axis(p, node)
    for group in p.axes().values():
        if any(m.value == Value(node) and m.dim == dim for m in group.members) and not group.mixed:
            return grown(group, group.size + more)
    return ()
