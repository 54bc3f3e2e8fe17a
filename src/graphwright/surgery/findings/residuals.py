"""Rules about residual paths: missing residual paths, and redundant edges into junctions."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from graphwright.graph import EdgeId, NodeId
from graphwright.ops import traits
from graphwright.program.editing.replace import redirect
from graphwright.program.editing.transaction import Transaction
from graphwright.program.kinds import PARAM
from graphwright.program.op_graph import Value
from graphwright.program.weights import as_array
from graphwright.surgery.findings.blocks import around, passes_sum, unbypassed
from graphwright.surgery.findings.diagnosis import Diagnosis, Probe, stepped
from graphwright.surgery.findings.finding import Finding, Fix, Severity, cut
from graphwright.surgery.findings.wiring import BLOCK_NUMBER, shifted, template
from graphwright.surgery.walks import depends

if TYPE_CHECKING:
    from graphwright.program.program import Program
    from graphwright.program.run import Run


def has_identity_path(p: Program, source: NodeId, target: NodeId) -> bool:
    """Return whether `source` reaches the junction `target` through sums, casts and scalar factors only."""
    return depends(p, target, source, lambda n: passes_sum(p, n))


def gated(e: Transaction, source: Value, junction: NodeId) -> None:
    """Connect a value to a junction through a trainable scalar gate that starts at 0."""
    e.gate(e.connect(source, junction), "scale", init=0.0)


def missing_residual(d: Diagnosis) -> Iterator[Finding]:
    """Report branches without an identity path around them, unlike most siblings or the original model.

    Siblings are junctions whose paths differ in numbers, and branches of blocks of equal structure.
    """
    found = {f.identity: f for f in (*_among_blocks(d), *_among_siblings(d), *_against_architecture(d))}
    yield from found.values()


def _against_architecture(d: Diagnosis) -> Iterator[Finding]:
    """Report identity paths of the original model that the program lacks although it has both of their ends."""
    if d.model is None or d.model.checkpoint is None:
        return
    p, source = d.program, d.model.original
    paths = {p.path(n): n for n in p.nodes()}
    for junction in source.junctions():
        path = around(source, junction)
        here = paths.get(source.path(junction))
        start = None if path is None else paths.get(source.path(path[0]))
        if here is None or start is None or not p.is_junction(here) or has_identity_path(p, start, here):
            continue
        if p.specs(start)[0] == p.spec(here):
            what = f"the identity path of the architecture from {p.path(start)} is missing"
            yield _missing(p, here, Value(start), what, {"architecture": d.model.arch.name})


def _among_blocks(d: Diagnosis) -> Iterator[Finding]:
    """Report branches of repeated blocks whose input does not bypass them; a fix may insert the sum that is missing."""
    p = d.program
    for branch in unbypassed(p, d.limits.siblings):
        name = p.path(branch.sibling)
        what = f"no identity path from {p.path(branch.entry)} around the branch, unlike at {name}"
        end = branch.end.node if branch.junction is None else branch.junction
        witness = {"sibling": name, "siblings_with": branch.bypassed, "siblings": branch.others}
        yield _missing(p, end, branch.entry, what, witness)


def _among_siblings(d: Diagnosis) -> Iterator[Finding]:
    p = d.program
    paths = {p.path(n): n for n in p.nodes()}
    known = {n: around(p, n) for n in p.junctions()}
    groups: dict[str, list[NodeId]] = {}
    for junction in known:
        groups.setdefault(template(p.path(junction), BLOCK_NUMBER)[0], []).append(junction)
    for junction in known:
        others = [n for n in groups[template(p.path(junction), BLOCK_NUMBER)[0]] if n != junction]
        with_path = {n: found for n in others if (found := known[n]) is not None}
        if len(with_path) < d.limits.siblings * len(others):
            continue
        entries = ((n, _entry(p, paths, junction, n, *ends)) for n, ends in with_path.items())
        sibling, entry = next(((n, entry) for n, entry in entries if entry is not None), (None, None))
        if sibling is not None and entry is not None and not has_identity_path(p, entry.node, junction):
            name = p.path(sibling)
            what = f"no identity path from {p.path(entry)} around the branch, unlike at {name}"
            yield _missing(p, junction, entry, what,
                           {"sibling": name, "siblings_with": len(with_path), "siblings": len(others)})  # fmt: skip


def _entry(
    p: Program, paths: dict[str, NodeId], junction: NodeId, sibling: NodeId, source: NodeId, branch: NodeId
) -> Value | None:
    """Return the input of a junction's branch that corresponds to `source`, the input of the sibling's branch.

    `branch` is the first node of the sibling's branch; `paths` maps paths to nodes. Return None if the branches start
    with different ops, the input does not have the junction's spec, or the junction does not end its branch.
    """
    first = paths.get(shifted(p.path(branch), p.path(sibling), p.path(junction), BLOCK_NUMBER))
    if first is None or p.op(first) != p.op(branch) or not depends(p, junction, first):
        return None
    port = next(p.edge_port(e) for e in p.in_edges(branch) if p.graph.source(e) == source)
    entry = next((p.edge_value(e) for e in p.in_edges(first) if p.edge_port(e) == port), None)
    return entry if entry is not None and p.specs(entry.node)[entry.port] == p.spec(junction) else None


def _missing(p: Program, end: NodeId, entry: Value, what: str, witness: dict[str, Any]) -> Finding:
    """Return a finding with two fixes: an edge through a gate at 0, which changes no output, and an ungated edge.

    The branch ends in the node `end`. If `end` is a junction, the edge enters it, else a junction inserted after it.
    """
    ends, ops = f"{p.path(entry)} -> {p.path(end)}", 0 if p.is_junction(end) else 1
    fixes = (
        Fix(f"connect {ends} through a gate at 0", lambda e: gated(e, entry, _junction(e, end)), 1, 1 + ops, 1,
            keeps_function=True),
        Fix(f"connect {ends}", lambda e: e.connect(entry, _junction(e, end)), edges=1, ops=ops),
    )  # fmt: skip
    return Finding.of(p, "missing_residual", Severity.WARNING, what, end, entry.node, fixes=fixes,
                      witness={"block": f"{p.path(entry)} .. {p.path(end)}", **witness})  # fmt: skip


def _junction(e: Transaction, end: NodeId) -> NodeId:
    """Return a node if it is a junction, else a new junction through which all its readers read its first result."""
    p = e.program
    if p.is_junction(end):
        return end
    made = e.add("junction", end, name=p.free_name(f"{p.path(end)}.out"))
    redirect(e, {Value(end): Value(made)})
    return made


_SCREEN = 1e-4
"""Share of the largest |⟨dL/dy, m⟩| below which an edge is tested by a run."""
_MOST = 64
"""Largest number of runs."""


def redundant(d: Diagnosis) -> Iterator[Finding]:
    """Report edges into junctions that do not affect any output.

    Candidates have a small |⟨dL/dy, m⟩|, where m is the edge's value and y the junction's. A run with m = 0 decides.
    """
    p, probe = d.program, d.probe
    if probe is None or probe.loss is None or not p.valid:
        return
    run = probe.run(p)
    reached = [n for n in p.junctions()
               if p.graph.in_degree(n) > 1 and Value(n) in run.values and p.spec(n).dtype.is_float]  # fmt: skip
    slopes = probe.gradients(p, [Value(n) for n in reached])
    weight: dict[EdgeId, float] = {}
    for node in reached:
        for edge in p.in_edges(node):
            message = run.value(p.edge_value(edge)).to_numpy("float64")
            weight[edge] = abs(float((slopes[Value(node)] * message).sum()))
    top = max(weight.values(), default=0.0)
    suspects = sorted((e for e, x in weight.items() if x <= _SCREEN * top), key=weight.__getitem__)[:_MOST]
    for edge in stepped(probe.step, "testing edges", suspects):
        if not _starts_at_zero(p, edge) and (moved := _moved(p, probe, run, edge)) < d.limits.redundant:
            yield Finding.of(p, "redundant", Severity.INFO, "the edge affects no output", p.graph.source(edge),
                             edges=(edge,), where=p.path(edge), got=f"{moved:.3g} of the largest entry",
                             witness={"moved": moved, "edge": p.path(edge)},
                             fixes=(cut(p, edge, keeps=True),))  # fmt: skip


def _moved(p: Program, probe: Probe, run: Run, edge: EdgeId) -> float:
    """Return the largest change of any output, relative to that output's largest entry, if the edge's value is 0."""
    value = run.value(p.edge_value(edge))
    feeds = {name: x for name, x in probe.inputs.items() if name in p.input_names()}
    zero = as_array(np.zeros(value.shape, np.float32), value.dtype)
    without = p.fork().run(feeds, keep="outputs", patch={edge: zero})
    moved = 0.0
    for value in p.outputs():
        before, after = run.value(value).to_numpy("float64"), without.value(value).to_numpy("float64")
        moved = max(moved, float(np.abs(before - after).max() / max(np.abs(before).max(), 1e-30)))
    return moved


def _starts_at_zero(p: Program, edge: EdgeId) -> bool:
    """Return True if training can make a zero edge nonzero: a gate, trained scalar or zero matrix scales it."""
    node = p.graph.source(edge)
    operands = p.operands(node)
    factors = [v.node for v in operands] if traits(p.op(node)).multiplies else []
    if any(traits(p.op(n)).gates or (p.op(n) == PARAM and p.spec(n).size == 1) for n in factors):
        return True
    matrix = traits(p.op(node)).contracts == "out_in" and p.op(operands[1].node) == PARAM
    return matrix and not p.weights.array(p.key(operands[1].node)).to_numpy("float32").any()
