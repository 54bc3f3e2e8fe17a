"""Edges into sums that could as well not be there, proved by a run without them."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from graphwright.graph import EdgeId
from graphwright.program import Program, Run, Value
from graphwright.program.editing.transaction import Transaction
from graphwright.program.kinds import PARAM
from graphwright.program.weights import as_array
from graphwright.surgery.findings.diagnosis import Diagnosis
from graphwright.surgery.findings.finding import Finding, Fix, Severity
from graphwright.surgery.findings.kinds import finding
from graphwright.surgery.findings.mend import sweep
from graphwright.surgery.findings.residual_paths import hands_on

_SCREEN = 1e-4
"""Share of the largest |<dL/dy, m>| below which an edge is worth a run."""
_MOST = 64
"""Runs of one diagnosis."""


@finding("redundant", reads="probe")
def redundant(d: Diagnosis) -> Iterator[Finding]:
    """Edges whose message moves no output: screened by |<dL/dy, m>|, then proved with zero in its place."""
    p, probe = d.program, d.probe
    if probe is None or probe.loss is None or not p.valid:
        return
    junctions = [n for n in p.junctions() if p.graph.in_degree(n) > 1]
    run = probe.run(p)
    reached = [n for n in junctions if Value(n) in run.values and p.spec(n).dtype.is_float]
    slopes = probe.gradients(p, [Value(n) for n in reached])
    weight: dict[EdgeId, float] = {}
    for node in reached:
        for edge in p.in_edges(node):
            message = run.value(p.edge_value(edge)).to_numpy("float64")
            weight[edge] = abs(float((slopes[Value(node)] * message).sum()))
    top = max(weight.values(), default=0.0)
    suspects = sorted((e for e, x in weight.items() if x <= _SCREEN * top), key=weight.__getitem__)[:_MOST]
    for at, edge in enumerate(suspects):
        probe.step("leaving edges out", at, len(suspects))
        if _waits(p, edge):
            continue
        moved = _moved(d, run, edge)
        if moved < d.limits.redundant:
            yield Finding.of(
                p,
                "redundant",
                Severity.INFO,
                "moves no output",
                p.graph.source(edge),
                edges=(edge,),
                where=p.path(edge),
                got=f"{moved:.3g} of the largest entry",
                witness={"moved": moved, "edge": p.path(edge)},
                fixes=(Fix(f"cut {p.path(edge)}", lambda e, edge=edge: _cut(e, edge), edges=1, keeps_function=True),),
            )


def _moved(d: Diagnosis, run: Run, edge: EdgeId) -> float:
    """Largest change of an output, as a share of its largest entry, with zero in place of what an edge carries."""
    p = d.program
    assert d.probe is not None
    carried = run.value(p.edge_value(edge))
    feeds = {name: x for name, x in d.probe.inputs.items() if name in p.input_names()}
    zero = as_array(np.zeros(carried.shape, np.float32), carried.dtype)
    without = p.fork().run(feeds, keep="outputs", patch={edge: zero})
    moved = 0.0
    for value in p.outputs():
        before, after = run.value(value).to_numpy("float64"), without.value(value).to_numpy("float64")
        moved = max(moved, float(np.abs(before - after).max() / max(np.abs(before).max(), 1e-30)))
    return moved


def _waits(p: Program, edge: EdgeId) -> bool:
    """Whether an edge was made to start at zero: behind a trained number that gates it, or a new zero matrix."""
    node = p.graph.source(edge)
    operands = p.operands(node)
    gated = hands_on(p, node) and p.op(node) == "mul"
    matrix = p.op(node) == "linear" and p.op(operands[1].node) == PARAM
    return gated or (matrix and not p.weights.array(p.key(operands[1].node)).to_numpy("float32").any())


def _cut(e: Transaction, edge: EdgeId) -> None:
    source = e.program.graph.source(edge)
    e.cut(edge)
    sweep(e, source)
