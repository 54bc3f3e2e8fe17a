"""Primitive changes of an op graph, for edits, builders and derived programs; user code calls `program.edit`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from graphwright.array import Spec
from graphwright.errors import CycleError
from graphwright.graph import EdgeId, Graph, NodeId, OnlineOrder, Relabelled
from graphwright.ops import get
from graphwright.program.kinds import ASSIGN, SOURCES, STORED
from graphwright.program.tombstones import ForwardNeighbours, edges_against
from graphwright.program.weights import rekey_weight

if TYPE_CHECKING:
    from graphwright.program.op_graph import OpGraph, Value
    from graphwright.program.program import Program


def insert_node(
    p: OpGraph, op: str, attrs: Mapping[str, Any], name: str, specs: tuple[Spec, ...], seq: int | None = None,
    handle: NodeId | None = None, after: NodeId | None = None, before: NodeId | None = None,
) -> NodeId:  # fmt: skip
    """Add an unconnected node.

    Args:
        seq: creation number; by default the next one.
        handle: handle of a removed node to restore; by default a new handle.
        after, before: nodes after or before which to insert the node in the topological order.
    """
    number = p._seq if seq is None else seq
    restored = p.tombstones.restore(p.graph, handle)
    node = restored
    if restored is None:
        node = Graph.add_node(p.graph, op=op, attrs=MappingProxyType(dict(attrs)), name=name, specs=specs, seq=number)
        p._seq = max(p._seq, number + 1)
    _reorder(p, lambda: p.order_labels.insert(node, after=after, before=before, created=number))
    p._names[name] = node
    p._kinds.setdefault(op, {})[node] = None
    list_key(p, node)
    if restored is not None:
        p._unsorted.add(op)
    touch(p, node)
    return node


def delete_node(p: OpGraph, node: NodeId) -> None:
    """Remove an unconnected node; its handle can be restored."""
    _unlist(p, node)
    _reorder(p, lambda: p.order_labels.remove(node))
    p.tombstones.add(node, Graph.remove_node(p.graph, node))


def discard(p: OpGraph, nodes: Sequence[NodeId]) -> None:
    """Permanently remove nodes and all their edges; no other node may read the removed nodes."""
    _reorder(p, lambda: p.order_labels.remove(*nodes))
    for node in nodes:
        _unlist(p, node)
        p.back_edges.difference_update(edge.edge for edge in Graph.remove_node(p.graph, node).edges)


def insert_edge(p: OpGraph, src: Value, dst: NodeId, port: int | None = None, handle: EdgeId | None = None) -> EdgeId:
    """Add an edge, or restore that of `handle`; by default at the next port. On CycleError nothing is changed."""
    if port is None:
        port = int(p.graph.node(dst, "next_port"))
    fits = _admit_edge(p, src.node, dst)
    edge = p.tombstones.restore(p.graph, handle)
    if edge is None:
        edge = Graph.add_edge(p.graph, src.node, dst, src_port=src.port, dst_port=port)
    if not fits:
        p.back_edges.add(edge)
    if port >= p.graph.node(dst, "next_port"):
        Graph.set_node(p.graph, dst, next_port=port + 1)
    touch(p, dst)
    return edge


def delete_edge(p: OpGraph, edge: EdgeId) -> None:
    """Remove an edge; its handle can be restored."""
    dst = p.graph.target(edge)
    p.tombstones.add(edge, Graph.remove_edge(p.graph, edge))
    p.back_edges.discard(edge)
    touch(p, dst)


def move_edge(p: OpGraph, edge: EdgeId, src: Value) -> None:
    """Change the source of an edge. Raises: CycleError; then nothing is changed."""
    dst = p.graph.target(edge)
    fits = _admit_edge(p, src.node, dst)
    p.tombstones.rewire(p.graph, edge, src.node)
    (p.back_edges.discard if fits else p.back_edges.add)(edge)
    Graph.set_edge(p.graph, edge, src_port=src.port)
    touch(p, dst)


def set_ports(p: OpGraph, node: NodeId, edges: Sequence[EdgeId], first: int = 0) -> None:
    """Give edges into a node the consecutive ports from `first` on, in the given order; no edit is recorded."""
    for port, edge in enumerate(edges, first):
        if p.edge_port(edge) != port:
            Graph.set_edge(p.graph, edge, dst_port=port)
    Graph.set_node(p.graph, node, next_port=first + len(edges))
    touch(p, node)


def update_node(p: OpGraph, node: NodeId, **columns: Any) -> None:
    """Change the attrs, specs or name of a node."""
    if "name" in columns:
        del p._names[p.path(node)]
        p._names[columns["name"]] = node
        for edge in p.graph.out_edges(node):
            touch(p, p.graph.target(edge))
    if "attrs" in columns:
        columns["attrs"] = MappingProxyType(dict(columns["attrs"]))
        _unlist_key(p, node)
    Graph.set_node(p.graph, node, **columns)
    if "attrs" in columns:
        list_key(p, node)
    touch(p, node)


def rekey(p: Program, old: str, new: str) -> None:
    """Rename the key of a weight, in the table of weights and in the nodes that read it."""
    rekey_weight(p.weights, old, new)
    for node in p.readers(old):
        update_node(p, node, attrs={**p.attrs(node), "key": new})


def set_outputs(p: OpGraph, outputs: Mapping[str, Value]) -> None:
    """Declare the outputs, by name and in order."""
    p._outputs = dict(outputs)
    p._structure.touch_outputs()


def set_output(p: OpGraph, name: str, value: Value) -> None:
    """Declare one more output."""
    set_outputs(p, {**p._outputs, name: value})


def release_name(p: OpGraph, node: NodeId) -> None:
    """Free the name of a node that is about to be removed."""
    if p._names.get(name := p.path(node)) == node:
        del p._names[name]


def claim_name(p: OpGraph, node: NodeId, name: str) -> None:
    """Give a node whose name was freed by `release_name` a free name."""
    p._names[name] = node
    if p.path(node) != name:
        Graph.set_node(p.graph, node, name=name)
    touch(p, node)


def add_op(
    p: OpGraph, op: str, operands: Sequence[Value], attrs: Mapping[str, Any], name: str, after: NodeId | None = None
) -> NodeId:
    """Add an op node with edges and inferred specs, after `after` in the topological order; no edit is recorded."""
    row = get(op)
    full = row.complete(attrs, name)
    specs = row.specs([p.specs(v.node)[v.port] for v in operands], full, name)
    node = insert_node(p, op, full, name, specs, after=after)
    for port, operand in enumerate(operands):
        insert_edge(p, operand, node, port)
    return node


def add_source(
    p: OpGraph, kind: str, name: str, spec: Spec, attrs: Mapping[str, Any], before: NodeId | None = None
) -> NodeId:
    """Add an input, param, const or state node, before `before` in the topological order; no edit is recorded."""
    assert kind in SOURCES
    return insert_node(p, kind, attrs, name, (spec,), before=before)


def add_assign(p: OpGraph, target: Value, value: Value, name: str) -> NodeId:
    """Add a node that assigns `value` to the state or param `target` at the end of a step."""
    node = insert_node(p, ASSIGN, {}, name, ())
    insert_edge(p, target, node, 0)
    insert_edge(p, value, node, 1)
    return node


def restore_order(p: OpGraph, record: Relabelled[NodeId]) -> Relabelled[NodeId]:
    """Revert a recorded change of the topological order; return the record that repeats the change if restored."""
    _note_moved(p, record)
    return p.order_labels.restore(record)


def set_order(p: OpGraph, graph: Graph, labels: Mapping[NodeId, tuple[int, int]]) -> None:
    """Replace the graph and its topological order, given as sort keys `labels`; edges against it become back edges."""
    p.graph, p.back_edges = graph, edges_against(graph, labels.__getitem__)
    p.order_labels = OnlineOrder.from_labels(ForwardNeighbours(graph, p.back_edges), labels)


def find_back_edges(p: OpGraph, valid: bool) -> None:
    """Recompute the back edges after the order labels were restored; a valid program has no back edges."""
    p.back_edges.clear()
    if not valid:
        p.back_edges |= edges_against(p.graph, p.order_labels.key)


def order_back_edges(p: OpGraph) -> None:
    """Reorder nodes so that back edges go forwards. Raises: CycleError if some back edges still close a cycle."""
    cycle: CycleError | None = None
    for edge in sorted(p.back_edges):
        p.back_edges.discard(edge)
        try:
            _order_edge(p, *p.graph.endpoints(edge))
        except CycleError as error:
            p.back_edges.add(edge)
            cycle = cycle or error
    if cycle is not None:
        raise cycle


def copy_into(p: OpGraph, twin: OpGraph) -> None:
    """Copy nodes, edges, order and names into an empty graph; handles stay valid."""
    set_order(twin, Graph.copy(p.graph), {n: p.order_labels.key(n) for n in p.nodes()})
    twin._seq = p._seq
    twin._names, twin._outputs = dict(p._names), dict(p._outputs)
    twin._kinds = {kind: dict(nodes) for kind, nodes in p._kinds.items()}
    twin._unsorted = set(p._unsorted)
    twin._keyed, twin._keys = {key: set(nodes) for key, nodes in p._keyed.items()}, p._keys
    twin._structure = p._structure.copy(twin)


def _reorder(p: OpGraph, change: Callable[[], Relabelled[NodeId]], *, moves: bool = False) -> None:
    """Call `change`, which changes the topological order, and log the record that it returns.

    In undo, redo and roll-back do nothing: they restore logged orders. `moves`: whether existing nodes may move.
    """
    if p.tombstones.mode == "edit":
        record = change()
        if record and moves:
            _note_moved(p, record)
        if record and p.order_log is not None:
            p.order_log.append(record)


def _note_moved(p: OpGraph, record: Relabelled[NodeId]) -> None:
    for node, _, _ in record.before:
        p._note(node)


def touch(p: OpGraph, node: NodeId) -> None:
    """Mark a node as changed, in the structure hash and in the sets that `OpGraph.follow` returned."""
    p._structure.touch(node)
    p._note(node)


def _admit_edge(p: OpGraph, src: NodeId, dst: NodeId) -> bool:
    """Reorder nodes so that an edge goes forwards; return False if it closes a cycle that the open edit admits."""
    try:
        _order_edge(p, src, dst)
    except CycleError:
        if not p.admits_cycles:
            raise
        return False
    return True


def _order_edge(p: OpGraph, src: NodeId, dst: NodeId) -> None:
    """Reorder nodes so that an edge goes forwards. Raises: CycleError with the path; then no order changes."""
    try:
        _reorder(p, lambda: p.order_labels.add_edge(src, dst), moves=True)
    except CycleError as error:
        names = [p.path(n) for n in error.path]
        fix = "cut an edge on the path, or e.connect(src, junction, delay=1)"
        got = " -> ".join([*names, names[0]])
        where = f"{p.path(src)} -> {p.path(dst)}"
        raise CycleError("the edge would close a cycle", path=error.path, where=where, got=got, fix=fix) from error


def _unlist(p: OpGraph, node: NodeId) -> None:
    p._structure.forget(node)
    p._note(node)
    release_name(p, node)
    del p._kinds[p.op(node)][node]
    _unlist_key(p, node)


def list_key(p: OpGraph, node: NodeId) -> None:
    """Add a param, const or state node to the index of nodes by checkpoint key; do nothing for other nodes."""
    if p.op(node) in STORED:
        p._keyed.setdefault(p.key(node), set()).add(node)
        p._keys = None


def _unlist_key(p: OpGraph, node: NodeId) -> None:
    if p.op(node) in STORED:
        key = p.key(node)
        p._keyed[key].discard(node)
        if not p._keyed[key]:
            del p._keyed[key]
        p._keys = None
