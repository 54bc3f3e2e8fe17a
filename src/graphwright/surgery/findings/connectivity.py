"""Rules about connectivity: cycles, disconnected parts, unreachable outputs, unread nodes, empty ports.

A recurrence over steps passes through a state and does not count as a cycle.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from graphwright.graph import EdgeId, NodeId
from graphwright.graph.analysis import connected_components, strongly_connected_components
from graphwright.program.editing.transaction import Transaction
from graphwright.program.kinds import ASSIGN, INPUT, KINDS, SOURCES, STORED
from graphwright.surgery.findings.diagnosis import Diagnosis
from graphwright.surgery.findings.finding import Finding, Fix, Severity, remove, remove_unread_cone, removed, rewired
from graphwright.surgery.findings.wiring import best_source, empty_ports, fits
from graphwright.surgery.walks import flood, shortest_path

if TYPE_CHECKING:
    from graphwright.program.op_graph import Value
    from graphwright.program.program import Program


def cycle(d: Diagnosis) -> Iterator[Finding]:
    """Report a shortest cycle of each strongly connected component."""
    p = d.program
    if not p.back_edges:  # no edge goes backwards in the topological order
        return
    for component in strongly_connected_components(p.graph):
        if len(component) == 1 and not p.graph.has_edge(component[0], component[0]):
            continue
        edges = shortest_cycle(p, component)
        nodes = tuple(p.graph.source(e) for e in edges)
        names = [p.path(n) for n in nodes]
        yield Finding.of(p, "cycle", Severity.CRITICAL, "the nodes depend on each other in a cycle", *nodes,
                         edges=edges, got=" -> ".join([*names, names[0]]), witness={"path": names},
                         fixes=tuple(_fixes(d, edges)))  # fmt: skip


def shortest_cycle(p: Program, component: Sequence[NodeId]) -> tuple[EdgeId, ...]:
    """Return the edges of a shortest cycle of a strongly connected component, in order."""
    inside = set(component)
    back = [e for e in sorted(p.back_edges) if set(p.graph.endpoints(e)) <= inside]
    cycles: list[list[EdgeId]] = []
    for closing in back or [e for n in component for e in p.graph.out_edges(n) if p.graph.target(e) in inside]:
        end, start = p.graph.endpoints(closing)
        path = shortest_path(p, start, end, lambda e: p.graph.target(e) in inside)
        cycles += [] if path is None else [[*reversed(path), closing]]
    return tuple(min(cycles, key=len))


def _fixes(d: Diagnosis, edges: tuple[EdgeId, ...]) -> Iterator[Fix]:
    """Yield fixes of a cycle: cut an edge into a junction, delay the edge by a step, or rewire a back edge."""
    p = d.program
    cuttable = [e for e in edges if p.is_junction(p.graph.target(e)) and p.graph.in_degree(p.graph.target(e)) > 1]
    cuttable.sort(key=lambda e: e not in p.back_edges)
    for edge in cuttable[:1]:
        yield Fix(f"cut {p.path(edge)}", lambda e, edge=edge: e.cut(edge), edges=1, keeps_function=edge in p.back_edges)
        if not p.spec(value := p.edge_value(edge)).symbolic:
            target = p.graph.target(edge)

            def delay(e: Transaction, edge: EdgeId = edge, source: Value = value, target: NodeId = target) -> None:
                e.cut(edge)
                e.connect(source, target, delay=1)

            yield Fix(f"delay {p.path(edge)} by one step", delay, edges=1, ops=2)
    for edge in (e for e in edges if e in p.back_edges and e not in cuttable):
        source = best_source(p, d.wiring, p.graph.target(edge), p.edge_port(edge))
        if source is not None:
            yield rewired(p, edge, source, keeps=True)


def components(d: Diagnosis) -> Iterator[Finding]:
    """Report connected components other than the main one, except integer counters that affect no output."""
    p, w = d.program, d.wiring
    parts = [[w.at[n] for n in part] for part in connected_components(p.graph)]
    parts = [sorted(part) for part in parts if any(w.ops[i] not in KINDS for i in part)]
    parts.sort(key=lambda part: (-len(w.outputs.intersection(part)), -len(part), part[0]))
    for part in parts[1:]:
        nodes = [w.nodes[i] for i in part]
        if not w.outputs.intersection(part) and not any(s.dtype.is_float for n in nodes for s in p.specs(n)):
            continue  # for example a counter of batches
        outputs = [name for name, v in zip(p.output_names(), p.outputs(), strict=True) if v.node in nodes]

        def apply(e: Transaction, nodes: list[NodeId] = nodes, outputs: list[str] = outputs) -> None:
            if outputs:
                rest = zip(e.program.output_names(), e.program.outputs(), strict=True)
                e.set_outputs(**{name: v for name, v in rest if name not in outputs})
            remove(e, nodes)

        what = f"remove the {len(nodes)} nodes connected to {p.path(nodes[0])}"
        yield Finding.of(p, "components", Severity.ERROR, "this part is not connected to the main network", *nodes,
                         witness={"nodes": len(nodes), "outputs": outputs},
                         fixes=(Fix(what, apply, edges=1, keeps_function=not outputs),))  # fmt: skip


def unreachable(d: Diagnosis) -> Iterator[Finding]:
    """Report an output that depends on no input; if all outputs depend on inputs, report inputs without effect."""
    p, w = d.program, d.wiring
    inputs = [i for i, op in enumerate(w.ops) if op == INPUT]
    if not inputs or not w.outputs:
        return
    reached, reaching = w.reached(), w.reaching(w.outputs)
    ends = {name: w.at[v.node] for name, v in zip(p.output_names(), p.outputs(), strict=True)}
    idle = [i for i in inputs if i not in reaching]
    if cut_off := [pair for pair in ends.items() if pair[1] not in reached]:
        name, i = cut_off[0]
        yield _unreachable(d, f"no input affects the output {name!r}", w.nodes[i], idle or inputs, [i], reached)
    else:
        for i in idle:
            yield _unreachable(d, "the input affects no output", w.nodes[i], [i], w.outputs, reached)


def _unreachable(
    d: Diagnosis, what: str, about: NodeId, starts: list[int], ends: Iterable[int], reached: set[int]
) -> Finding:
    p, w = d.program, d.wiring
    ahead = [i for i in flood(starts, w.after.__getitem__) if i in reached and w.ops[i] != ASSIGN]
    frontier = [i for i in ahead if i not in w.outputs and not any(j in reached for j in w.after[i])]
    nodes = [w.nodes[i] for i in frontier]
    return Finding.of(p, "unreachable", Severity.ERROR, what, about, *(n for n in nodes if n != about),
                      witness={"frontier": [p.path(n) for n in nodes]},
                      fixes=_reconnect(d, frontier, set(flood(ends, w.before.__getitem__)), reached))  # fmt: skip


def _reconnect(d: Diagnosis, frontier: list[int], later: set[int], reached: set[int]) -> tuple[Fix, ...]:
    """Return (fix,) to connect what inputs reach with what outputs depend on; () if no reader fits.

    All are node indices. A reader in `later` of a value that is not in `reached` (which inputs affect) reads the
    nearest node of `frontier` with a fitting spec instead.
    """
    p, w = d.program, d.wiring
    found: list[tuple[int, int, Value]] = []
    for last in frontier:
        earlier = set(flood([last], w.before.__getitem__))
        spec = p.specs(w.nodes[last])[0]
        for i in sorted(later - earlier):
            for edge in p.in_edges(w.nodes[i]):
                value = p.edge_value(edge)
                cut_off = w.at[value.node] not in reached and p.op(value.node) not in STORED
                if cut_off and fits(p, w.nodes[i], p.edge_port(edge), spec):
                    found.append((abs(i - last), last, value))
    if not found:
        return ()
    _, nearest, value = min(found, key=lambda each: each[:2])
    last = w.nodes[nearest]
    edges = [e for e in p.out_edges(value.node) if p.edge_value(e) == value and p.graph.target(e) != last
             and w.at[p.graph.target(e)] in later]  # fmt: skip

    def apply(e: Transaction) -> None:
        for edge in edges:
            e.rewire(edge, last)
        remove_unread_cone(e, value.node)

    return (Fix(f"let {p.path(p.graph.target(edges[0]))} read {p.path(last)}", apply, edges=len(edges)),)


def isolated(d: Diagnosis) -> Iterator[Finding]:
    """Report nodes that have no edges and are no outputs of the program."""
    p, w = d.program, d.wiring
    for i, node in enumerate(w.nodes):
        alone = not w.before[i] and w.unread(i) and w.ops[i] not in STORED
        if alone and node not in d.claimed:
            fixes = (removed(p, [node], keeps=True),)
            yield Finding.of(p, "isolated", Severity.WARNING, "the node is connected to nothing", node, fixes=fixes)


def dead_end(d: Diagnosis) -> Iterator[Finding]:
    """Report each node whose result nothing reads, together with the nodes that only this node uses.

    If only such nodes read an input of the program, the rule `unreachable` reports the input instead.
    """
    p, w = d.program, d.wiring
    needed = w.reaching([*w.outputs, *(i for i, op in enumerate(w.ops) if op == ASSIGN)])
    for i, node in enumerate(w.nodes):
        if w.ops[i] in SOURCES or not w.unread(i) or not w.before[i] or node in d.claimed:
            continue
        cone = w.cone([i])
        inside = set(cone)
        feeds = {j for k in cone for j in w.before[k]} - inside
        if any(w.ops[j] == INPUT and j not in needed for j in feeds):
            continue
        members = [w.nodes[j] for j in cone]

        def output(e: Transaction, node: NodeId = node) -> None:
            outputs = dict(zip(e.program.output_names(), e.program.outputs(), strict=True))
            e.set_outputs(**outputs, **{e.program.path(node): node})

        fixes = removed(p, members, keeps=True), Fix(f"make {p.path(node)} an output", output, edges=1)
        yield Finding.of(p, "dead_end", Severity.WARNING, "nothing reads the result", *members, fixes=fixes,
                         witness={"cone": [p.path(n) for n in members]})  # fmt: skip


def orphan_source(d: Diagnosis) -> Iterator[Finding]:
    """Report ports without an edge, and junctions without an incoming edge (their value is zero)."""
    p, w = d.program, d.wiring
    for node, port in empty_ports(p, w):
        path, source, at = p.path(node), best_source(p, w, node, port), None if p.is_junction(node) else port
        fixes = []
        if source is not None:  # a node with an empty port did not run, so that filling it keeps the function
            fixes.append(Fix(f"connect {p.path(source)} to {path}",
                             lambda e, source=source, node=node, at=at: e.connect(source, node, at),
                             edges=1, keeps_function=at is not None))  # fmt: skip
        witness = {"port": port, "nearest": None if source is None else p.path(source)}
        if at is not None:
            yield Finding.of(p, "orphan_source", Severity.ERROR, f"port {port} has no edge", node,
                             where=f"{path}, port {port}", witness=witness, fixes=tuple(fixes))  # fmt: skip
            continue
        if source is None or source.node not in d.claimed:
            fixes += _without(p, node)
        yield Finding.of(p, "orphan_source", Severity.WARNING, "the junction has no edge, so it is zero", node,
                         witness=witness, fixes=tuple(fixes))  # fmt: skip


def _without(p: Program, node: NodeId) -> list[Fix]:
    """Return [fix] to remove a junction without edges; [] unless all its readers are sums of further operands."""
    readers = p.consumers(node)
    plain = readers and all(p.is_junction(n) and p.graph.in_degree(n) > 1 for n in readers)
    if not plain or any(v.node == node for v in p.outputs()):
        return []
    return [Fix(f"remove {p.path(node)}, a zero term of sums", lambda e: e.remove(node), edges=1, keeps_function=True)]
