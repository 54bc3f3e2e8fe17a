"""Activation patching: a program in which some values come from outside instead of being computed.

Source: Vig et al. 2020, "Investigating Gender Bias in Language Models Using Causal Mediation Analysis", section 3.
"""

from __future__ import annotations

from collections.abc import Iterable

from graphwright.graph import EdgeId, NodeId
from graphwright.program.derived.rewrite import rewrite
from graphwright.program.kinds import INPUT
from graphwright.program.program import Program, Value

Place = NodeId | Value | EdgeId | str
_KEPT = 8  # patched programs kept per program


def place(p: Program, ref: Place) -> Value | EdgeId:
    """A node's first result, a value, or an edge: by handle, by name, or as `"source -> target"`.

    Raises: UnknownNode, UnknownEdge, StaleHandle.
    """
    if isinstance(ref, EdgeId) or (isinstance(ref, str) and "->" in ref):
        edge = p.edge(ref)
        p.graph.endpoints(edge)  # raises StaleHandle
        return edge
    return p.value(ref)


def feed_name(p: Program, at: Value | EdgeId) -> str:
    """The input for a value put in place: `patch.<path>`, `patch.<path>.<port>` or `patch.<source -> target>`."""
    port = f".{at.port}" if isinstance(at, Value) and at.port else ""
    return f"patch.{p.path(at)}{port}"


def patched(p: Program, refs: Iterable[Place]) -> Program:
    """The program with an input more per place, whose value stands there; it shares all variables.

    Made again when the program has another version; a plan of it is stale then.
    """
    places = list(dict.fromkeys(place(p, ref) for ref in refs))
    known: dict[tuple, Program] = p.derived.setdefault("patched", {})
    key = (p.version, *places)
    if key not in known:
        for old in [k for k in known if k[0] != p.version] or list(known)[: len(known) >= _KEPT]:
            del known[old]
        known[key] = _derive(p, places)
    return known[key]


def _derive(p: Program, places: list[Value | EdgeId]) -> Program:
    def inputs(new: Program) -> dict[Value | EdgeId, Value]:
        added = {}
        for at in places:
            carried = p.edge_value(at) if isinstance(at, EdgeId) else at
            added[at] = Value(new.add_source(INPUT, feed_name(p, at), p.specs(carried.node)[carried.port], {}))
        return added

    return rewrite(p, f"{p.name} (patched)", {}, inputs)[0]
