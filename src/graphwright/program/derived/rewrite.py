"""Deriving a program from another, node by node: how a cache, a padding mask or a gradient get into a graph.

A derived program shares the variables of its source and has no journal; it is made again when the source has another
version. It is a view of the one graph, never a second model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING

from graphwright.graph import EdgeId, NodeId
from graphwright.program.kinds import ASSIGN, INPUT, STORED
from graphwright.program.op_graph import Value
from graphwright.program.validate import refuse_broken

if TYPE_CHECKING:
    from graphwright.program.program import Program

Emit = Callable[["Program", NodeId, list[Value]], "Value | None"]


def rewrite(
    p: Program,
    name: str,
    handlers: Mapping[str, Emit],
    start: Callable[[Program], Mapping[Value | EdgeId, Value] | None] | None = None,
) -> tuple[Program, dict[Value, Value]]:
    """Copy all inputs and what the outputs need into a new program; ops with a handler are emitted by it.

    Args:
        handlers: op -> function of (new program, old node, new operands) that adds nodes and returns the result, or
            None to copy the node as it is.
        start: called with the empty program, to add inputs and states first; gives what stands in the place of values
            of the old program, or of what edges carry.
    Returns: the program and the map from old values to new ones. Raises: InvalidProgram.
    """
    refuse_broken(p)
    new = p.empty(name)
    new.source = (p, p.version)
    swaps = (start(new) if start is not None else None) or {}
    values: dict[Value, Value] = {}
    needed = p.reachable([*p.outputs(), *p.assigns()])
    for node in p.order():
        if node not in needed and p.op(node) != INPUT:
            continue
        op, path = p.op(node), p.path(node)
        operands = [swaps.get(e) or values[p.edge_value(e)] for e in p.in_edges(node)]
        made = handlers[op](new, node, operands) if op in handlers else None
        if made is not None:
            values[Value(node)] = swaps.get(Value(node), made)
            continue
        if op == ASSIGN:  # writes the state itself, whatever stands for its value
            new.add_assign(Value(new.node(p.path(p.operands(node)[0]))), operands[1], path)
            continue
        if op in STORED:
            new.weights.add(p.key(node), p.weights[p.key(node)])
        fresh = new.insert_node(op, p.attrs(node), path, p.specs(node))
        for edge, operand in zip(p.in_edges(node), operands, strict=True):
            new.insert_edge(operand, fresh, p.edge_port(edge))
        for port in range(len(p.specs(node))):
            values[Value(node, port)] = swaps.get(Value(node, port), Value(fresh, port))
    new.set_outputs({label: values[v] for label, v in zip(p.output_names(), p.outputs(), strict=True)})
    return new, values


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
