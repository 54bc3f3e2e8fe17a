"""Protection from cuts: every output keeps a path from an input, every axis a unit, every choice an option."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from math import inf
from typing import TYPE_CHECKING

from graphwright.program.kinds import INPUT, SOURCES
from graphwright.structure.elements import edge_of
from graphwright.structure.errors import WouldDisconnect

if TYPE_CHECKING:
    from graphwright.graph import EdgeId, NodeId
    from graphwright.program import Program
    from graphwright.structure.elements import Element


@dataclass(frozen=True, slots=True)
class ProtectedElement:
    """An element whose proposed cut was not made.

    Attributes:
        name: of the element.
        reason: why it is needed.
    """

    name: str
    reason: str


def protect(
    p: Program,
    cuts: Sequence[Element],
    among: Sequence[Element],
    *,
    min_in: int = 1,
    keep: Collection[str] = (),
    strict: bool = False,
) -> tuple[list[Element], list[ProtectedElement]]:
    """The allowed cuts, and the protected elements.

    A disconnected output gets back the path whose smallest p is largest, ties by the order of edges.

    Args:
        min_in: smallest number of units per gated axis, and of options per choice.
        keep: names of protected elements, and of nodes that keep a path from an input.
        strict: raise instead of protecting.
    Raises: WouldDisconnect.
    """
    back: dict[str, str] = {e.name: "protected by name" for e in cuts if e.name in keep}
    going = {e.name: e for e in cuts if e.name not in back}
    for gate in {id(e.gate): e.gate for e in among}.values():
        mine = [e for e in among if e.gate is gate]
        if gate.over in ("units", "choice"):
            there = [e for e in mine if e.name not in going]
            short = max(0, min(min_in, len(mine)) - len(there))
            best = sorted((e for e in mine if e.name in going), key=lambda e: (-e.p, e.index))[:short]
            for e in best:
                back[e.name] = f"{gate.owner} keeps {min_in}"
                del going[e.name]
    required = [v.node for v in p.outputs()] + [p.node(n) for n in keep if n not in {e.name for e in among}]
    for node in required:
        while True:
            closed = _closed(p, going.values())
            path = widest(p, node, closed)
            if path is None:
                break
            for name in path:
                back[name] = f"{p.path(node)} would be unreachable"
                going.pop(name, None)
            if not path:
                break
    if back and strict:
        names = ", ".join(back)
        raise WouldDisconnect("protection forbids these cuts", where=p.name, got=names, fix='protection="keep"')
    return list(going.values()), [ProtectedElement(name, reason) for name, reason in back.items()]


def _closed(p: Program, going: Iterable[Element]) -> dict[EdgeId | NodeId, Element]:
    """Edges and sites that the cuts would close."""
    found: dict[EdgeId | NodeId, Element] = {}
    for e in going:
        if e.over in ("edges", "choice"):
            edge = edge_of(p, e)
            if edge is not None:
                found[edge] = e
        elif e.over in ("nodes", "layers"):
            found.update(dict.fromkeys(e.gate.sites, e))
    return found


def widest(p: Program, target: NodeId, closed: dict[EdgeId | NodeId, Element]) -> list[str] | None:
    """Names on the widest path from an input: the one whose smallest p is largest; None if it is open or missing.

    One sweep in topological order stores (width, previous edge) per node; open edges have infinite width. Ties prefer
    the more probable edge, then the first.
    """
    best: dict[NodeId, tuple[float, EdgeId | None]] = {}
    needed = p.reachable([target])
    for node in (n for n in p.order() if n in needed):
        if p.op(node) in SOURCES:
            if p.op(node) == INPUT:
                best[node] = (inf, None)
            continue
        rank, width, chosen = (-inf, -inf), -inf, None
        for edge in p.in_edges(node):
            before = best.get(p.graph.source(edge))
            if before is None:
                continue
            own = closed[edge].p if edge in closed else inf
            here = min(before[0], own)
            if (here, own) > rank:
                rank, width, chosen = (here, own), here, edge
        if chosen is not None:
            best[node] = (min(width, closed[node].p if node in closed else inf), chosen)
    if target not in best or best[target][0] == inf:
        return None
    names: dict[str, None] = {}
    node: NodeId | None = target
    while node is not None:
        edge = best[node][1]
        names |= {closed[at].name: None for at in (edge, node) if at is not None and at in closed}
        node = None if edge is None else p.graph.source(edge)
    return list(names)
