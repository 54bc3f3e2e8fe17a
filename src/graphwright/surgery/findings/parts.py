"""Parts that belong to no whole: networks side by side, and outputs that no input has an effect on."""

from __future__ import annotations

from collections.abc import Iterator

from graphwright.graph import EdgeId, NodeId
from graphwright.graph.analysis import connected_components
from graphwright.program import Program
from graphwright.program.editing.transaction import Transaction
from graphwright.program.kinds import INPUT, STORED, WRITE
from graphwright.surgery.findings.diagnosis import Diagnosis
from graphwright.surgery.findings.finding import Finding, Fix, Severity
from graphwright.surgery.findings.kinds import finding
from graphwright.surgery.findings.mend import remove, sweep
from graphwright.surgery.findings.sources import fits


@finding("components")
def components(d: Diagnosis) -> Iterator[Finding]:
    """Connected parts that hold ops beside the one that most outputs belong to; what only counts steps is none."""
    p, w = d.program, d.wiring
    parts = [[w.at[n] for n in part] for part in connected_components(p.graph)]
    parts = [sorted(part) for part in parts if any(w.is_op(i) for i in part)]
    parts.sort(key=lambda part: (-len(w.outputs.intersection(part)), -len(part), part[0]))
    for part in parts[1:]:
        nodes = [w.nodes[i] for i in part]
        if not w.outputs.intersection(part) and not any(s.dtype.is_float for n in nodes for s in p.specs(n)):
            continue  # a counter of batches, say
        outputs = [name for name, v in zip(p.output_names(), p.outputs(), strict=True) if v.node in nodes]
        yield Finding.of(
            p,
            "components",
            Severity.ERROR,
            "a network of its own beside the main one",
            *nodes,
            witness={"nodes": len(nodes), "outputs": outputs},
            fixes=(_remove(p, nodes, outputs),),
        )


def _remove(p: Program, nodes: list[NodeId], outputs: list[str]) -> Fix:
    def apply(e: Transaction) -> None:
        if outputs:
            rest = zip(e.program.output_names(), e.program.outputs(), strict=True)
            e.set_outputs(**{name: v for name, v in rest if name not in outputs})
        remove(e, nodes)

    what = f"remove the {len(nodes)} nodes around {p.path(nodes[0])}"
    return Fix(what, apply, edges=1, keeps_function=not outputs)


@finding("unreachable")
def unreachable(d: Diagnosis) -> Iterator[Finding]:
    """Outputs that no input has an effect on, and inputs without effect on any output."""
    p, w = d.program, d.wiring
    inputs = [i for i, op in enumerate(w.ops) if op == INPUT]
    if not inputs or not w.outputs:
        return
    reached, reaching = w.reached(), w.reaching(w.outputs)
    cut_off = [
        (name, w.at[v.node])
        for name, v in zip(p.output_names(), p.outputs(), strict=True)
        if w.at[v.node] not in reached
    ]
    idle = [i for i in inputs if i not in reaching]
    if cut_off:
        name, output = cut_off[0]
        starts = idle or inputs
        yield _finding(d, f"no input has an effect on the output {name!r}", w.nodes[output], starts, [output], reached)
    else:
        for i in idle:
            yield _finding(d, "has no effect on any output", w.nodes[i], [i], sorted(w.outputs), reached)


def _finding(d: Diagnosis, what: str, about: NodeId, starts: list[int], ends: list[int], reached: set[int]) -> Finding:
    p, w = d.program, d.wiring
    ahead = [i for i in w.flood(starts, w.after) if i in reached and w.ops[i] != WRITE]
    frontier = [i for i in ahead if i not in w.outputs and not any(j in reached for j in w.after[i])]
    nodes = [w.nodes[i] for i in frontier]
    fix = _reconnect(d, frontier, set(w.flood(ends, w.before)), reached)
    return Finding.of(
        p,
        "unreachable",
        Severity.ERROR,
        what,
        about,
        *(n for n in nodes if n != about),
        witness={"frontier": [p.path(n) for n in nodes]},
        fixes=() if fix is None else (fix,),
    )


def _reconnect(d: Diagnosis, frontier: list[int], behind: set[int], reached: set[int]) -> Fix | None:
    """Let the nearest port behind the gap that fits read the last node before it."""
    p, w = d.program, d.wiring
    best: tuple[int, int, int, list[EdgeId]] | None = None
    for last in frontier:
        earlier = set(w.flood([last], w.before))
        spec = p.specs(w.nodes[last])[0]
        for i in sorted(behind - earlier):
            for edge in p.in_edges(w.nodes[i]):
                source = w.at[p.graph.source(edge)]
                if source in reached or w.ops[source] in STORED or not fits(p, w.nodes[i], p.edge_port(edge), spec):
                    continue
                if best is None or (abs(i - last), last) < best[:2]:
                    value = p.edge_value(edge)
                    best = abs(i - last), last, source, [e for e in p.out_edges(value.node) if p.edge_value(e) == value]
    if best is None:
        return None
    last, source, edges = w.nodes[best[1]], w.nodes[best[2]], best[3]
    edges = [e for e in edges if p.graph.target(e) != last and w.at[p.graph.target(e)] in behind]

    def apply(e: Transaction) -> None:
        for edge in edges:
            e.rewire(edge, last)
        sweep(e, source)

    return Fix(f"let {p.path(p.graph.target(edges[0]))} read {p.path(last)}", apply, edges=len(edges))
