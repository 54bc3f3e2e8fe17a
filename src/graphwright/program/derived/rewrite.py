"""Copy a program node by node with changes: to add a cache, a padding mask, or an input that replaces a value.

The copy shares the variables of its source, has no journal, and is stale once the source has a different version.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from graphwright.graph import EdgeId, NodeId
from graphwright.ops import traits
from graphwright.program.kinds import ASSIGN, INPUT, STORED
from graphwright.program.op_graph import Value
from graphwright.program.primitives import add_assign, add_source, insert_edge, insert_node, set_outputs
from graphwright.program.validate import refuse_broken
from graphwright.program.weights import add_weight

if TYPE_CHECKING:
    from graphwright.program.program import Program

Emit = Callable[["Program", NodeId, list[Value]], "Value | None"]
Swaps = Mapping[Value | EdgeId, Value]


def rewrite(
    p: Program,
    name: str,
    attention: Emit | None = None,
    start: Callable[[Program], Swaps | None] | None = None,
    before: Callable[[Program, NodeId, Mapping[Value, Value]], Swaps] | None = None,
) -> tuple[Program, dict[Value, Value]]:
    """Copy all inputs, and the nodes that outputs and assignments depend on, into a new program.

    Args:
        attention: called at every attention, of routed heads too, with (new program, old node, new operands); it adds
            nodes and returns the result, or returns None to copy the node unchanged.
        start: called with the empty program to add inputs and states first; returns replacements, a dict from values or
            edges of the old program to the values of the new program that are read instead.
        before: called with (new program, old node, dict from old to new values) before each node is copied; returns
            further replacements.
    Returns: the new program, and a dict from old values to new values. Raises: InvalidProgram.
    """
    refuse_broken(p)
    new = p.empty(name)
    new.source = (p, p.plan_version)
    swaps = dict((start(new) if start is not None else None) or {})
    values: dict[Value, Value] = {}
    needed = p.reachable([*p.outputs(), *p.assigns()])
    for node in p.order():
        if node not in needed and p.op(node) != INPUT:
            continue
        if before is not None:
            swaps.update(before(new, node, values))
        op, path = p.op(node), p.path(node)
        operands = [swaps.get(e) or values[p.edge_value(e)] for e in p.in_edges(node)]
        attends = traits(op).attention or traits(op).routed_heads
        made = attention(new, node, operands) if attention is not None and attends else None
        if made is not None:
            values[Value(node)] = swaps.get(Value(node), made)
            continue
        if op == ASSIGN:  # the target is the copied state, even if a replacement of its value is read elsewhere
            add_assign(new, Value(new.node(p.path(p.operands(node)[0]))), operands[1], path)
            continue
        copy = copy_node(p, node, new, path, operands)
        for port in range(len(p.specs(node))):
            values[Value(node, port)] = swaps.get(Value(node, port), Value(copy, port))
    set_outputs(new, {label: values[v] for label, v in zip(p.output_names(), p.outputs(), strict=True)})
    return new, values


def copy_node(p: Program, node: NodeId, new: Program, name: str, operands: Iterable[Value]) -> NodeId:
    """Copy a node of `p` into the program `new`, under a name and with new operands; a source shares its variable."""
    if p.op(node) in STORED:
        add_weight(new.weights, p.key(node), p.weights[p.key(node)])
    copy = insert_node(new, p.op(node), p.attrs(node), name, p.specs(node))
    for edge, operand in zip(p.in_edges(node), operands, strict=True):
        insert_edge(new, operand, copy, p.edge_port(edge))
    return copy


def part_for(p: Program, wanted: Sequence[Value], known: Collection[Value] = ()) -> tuple[Program, dict[Value, str]]:
    """Copy the nodes that compute values from inputs, weights and known values into a new program.

    Returns: the new program, with all inputs of `p` and an input for each known value that is read; its outputs `0`,
    `1`, ... are the values `wanted`. And a dict from known values that are read to their inputs' names.
    """
    refuse_broken(p)
    new = p.empty(f"{p.name} (part)")
    beyond = {v.node for v in known}
    needed = p.reachable(wanted, beyond) - beyond
    read = {p.edge_value(e) for node in needed for e in p.in_edges(node)}.union(wanted).intersection(known)
    names = {v: new.free_name(feed_name(p, v)) for v in known if v in read}
    values = {v: Value(add_source(new, INPUT, name, p.specs(v.node)[v.port], {})) for v, name in names.items()}
    needed |= {*p.inputs()} - beyond
    for node in (n for n in p.order() if n in needed):
        copy = copy_node(p, node, new, p.path(node), [values[p.edge_value(e)] for e in p.in_edges(node)])
        values |= {Value(node, port): Value(copy, port) for port in range(len(p.specs(node)))}
    set_outputs(new, {str(i): values[v] for i, v in enumerate(wanted)})
    return new, names


PatchPoint = NodeId | Value | EdgeId | str
_CACHED = 8  # patched programs per program


def patch_point(p: Program, ref: PatchPoint) -> Value | EdgeId:
    """Resolve a reference to the first result of a node, to a value, or to an edge (`"source -> target"` or handle).

    Raises: UnknownNode, UnknownEdge, StaleHandle.
    """
    if isinstance(ref, EdgeId) or (isinstance(ref, str) and "->" in ref):
        edge = p.edge(ref)
        p.graph.endpoints(edge)  # raises StaleHandle
        return edge
    return p.value(ref)


def feed_name(p: Program, at: Value | EdgeId) -> str:
    """Return the name of the input for a patch: `patch.<path>` or `patch.<source -> target>`."""
    return f"patch.{p.path(at)}"


def patched(p: Program, refs: Iterable[PatchPoint]) -> Program:
    """Return a copy of the program with an additional input in place of each of these values; variables are shared.

    The copy is cached until the program is edited; an edit also makes the plans of the copy stale.
    """
    points = list(dict.fromkeys(patch_point(p, ref) for ref in refs))
    cached: dict[tuple, Program] = p.derived.setdefault("patched", {})
    key = (p.plan_version, *points)
    if key not in cached:
        for old in [k for k in cached if k[0] != p.plan_version] or list(cached)[: len(cached) >= _CACHED]:
            del cached[old]

        def inputs(new: Program) -> Swaps:
            values = {at: p.edge_value(at) if isinstance(at, EdgeId) else at for at in points}
            specs = {at: p.specs(v.node)[v.port] for at, v in values.items()}
            return {at: Value(add_source(new, INPUT, feed_name(p, at), spec, {})) for at, spec in specs.items()}

        cached[key] = rewrite(p, f"{p.name} (patched)", None, inputs)[0]
    return cached[key]
