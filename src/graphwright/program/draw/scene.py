"""The nodes and edges that a picture shows, read from one program or from two that are compared.

Invariant: nodes are in order of creation, edges in order of target and port. Only names identify nodes, so the nodes of
two programs can share one scene.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from graphwright.array import Spec
from graphwright.graph import NodeId
from graphwright.graph.analysis import kahn_order, longest_paths
from graphwright.ops import OPS, traits
from graphwright.program.diff import renames
from graphwright.program.hashing import encode_attrs
from graphwright.program.kinds import ASSIGN, CONST, KINDS, PARAM, PATTERN, STATE, STORED
from graphwright.program.patterns import pattern_at

if TYPE_CHECKING:
    from graphwright.program.program import Program

ADDED, REMOVED, CHANGED = "added", "removed", "changed"  # marks of a difference between two programs


@dataclass(slots=True)
class SceneNode:
    """A node to draw; `weights` are (last path segment, spec, checkpoint key) of params and consts drawn inside it."""

    path: str  # dotted name; in a folded run the repeated segment is a range: `layers.[0-21].attn`
    op: str  # op or kind
    attrs: Mapping[str, Any]
    specs: tuple[Spec, ...]
    junction: bool = False  # whether the node takes any number of edges
    weights: list[tuple[str, Spec, str]] = field(default_factory=list)
    outputs: tuple[str, ...] = ()  # names of the program's results that this node computes
    members: tuple[NodeId, ...] = ()  # handles of the nodes that this one stands for; empty for a removed node
    mark: str = ""  # `added`, `removed`, `changed` or empty
    note: str = ""  # shown in place of the specs; of an attention pattern its size


class SceneEdge(NamedTuple):
    """An edge between two indices of `Scene.nodes`; edges marked `removed` come from the earlier program."""

    src: int
    src_port: int
    dst: int
    dst_port: int
    mark: str = ""


@dataclass(slots=True)
class Scene:
    """The nodes and edges of a picture; `repeats` maps a folded group's path to the number of modules it stands for."""

    nodes: list[SceneNode]
    edges: list[SceneEdge]
    repeats: dict[str, int] = field(default_factory=dict)


def read(p: Program) -> Scene:
    """Read all nodes and edges of a program."""
    graph = p.graph
    handles = sorted(graph.nodes(), key=lambda n: graph.node(n, "seq"))
    index = {n: i for i, n in enumerate(handles)}
    nodes = [SceneNode(p.path(n), p.op(n), p.attrs(n), p.specs(n), p.is_junction(n), members=(n,)) for n in handles]
    for node, n in zip(nodes, handles, strict=True):
        if (pattern := pattern_at(p, n)) is not None:
            node.note = f"{pattern.tokens[0]} x {pattern.tokens[1]}, {len(pattern)} edges of {pattern.block}"
    for name, value in zip(p.output_names(), p.outputs(), strict=True):
        nodes[index[value.node]].outputs += (name,)
    ends = [(e, i) for i, n in enumerate(handles) for e in p.in_edges(n)]
    column = graph.edge
    edges = [SceneEdge(index[graph.source(e)], column(e, "src_port"), i, column(e, "dst_port")) for e, i in ends]
    return Scene(nodes, edges)


def union(program: Program, before: Program) -> Scene:
    """Read two programs into one scene; nodes and edges are marked as added, removed or changed since `before`.

    A node is changed if its name, op, attributes, specs, output names or stored values differ. A rewired port is drawn
    as one removed and one added edge.
    """
    now, old = read(program), read(before)
    renamed = renames(program, before)
    old.nodes = [replace(node, path=renamed.get(node.path, node.path)) for node in old.nodes]
    new_names = set(renamed.values())
    known = {node.path: node for node in old.nodes}
    nodes: list[SceneNode] = []
    for node in now.nodes:
        was, mark = known.get(node.path), ""
        if was is None:
            mark = ADDED
        elif node.path in new_names or _differ(program, before, node, was):
            mark = CHANGED
        nodes.append(replace(node, mark=mark))
    index = {node.path: i for i, node in enumerate(nodes)}
    for node in old.nodes:
        if node.path not in index:
            index[node.path] = len(nodes)
            nodes.append(replace(node, mark=REMOVED, members=(), outputs=()))
    keys, old_keys = _identities(now), _identities(old)
    existed, exists = set(old_keys), set(keys)
    edges = [e._replace(mark="" if k in existed else ADDED) for e, k in zip(now.edges, keys, strict=True)]
    gone = [(edge, key) for edge, key in zip(old.edges, old_keys, strict=True) if key not in exists]
    edges += [edge._replace(src=index[key[0]], dst=index[key[2]], mark=REMOVED) for edge, key in gone]
    return Scene(nodes, sorted(edges, key=lambda e: (e.dst, e.dst_port, e.mark == REMOVED)))


def _differ(program: Program, before: Program, node: SceneNode, was: SceneNode) -> bool:
    if (node.op, node.specs, node.outputs) != (was.op, was.specs, was.outputs):
        return True
    if encode_attrs(node.attrs) != encode_attrs(was.attrs):
        return True
    if node.op not in STORED:
        return False
    key, old_key = node.attrs["key"], was.attrs["key"]
    if node.op != PATTERN and program.weights.array(key) is before.weights.array(old_key):
        return False  # a fork shares the array: no byte has to be read
    return program.weights.digest(key) != before.weights.digest(old_key)


def _identities(scene: Scene) -> list[tuple[str, int, str, int]]:
    """Return for each edge a key that is equal in both programs: source path and result, target path and port.

    The inputs of a junction are interchangeable, so for them the number of earlier edges between the same ends replaces
    the port.
    """
    seen: Counter[tuple[int, int, int]] = Counter()
    found = []
    for src, src_port, dst, dst_port, _ in scene.edges:
        slot = seen[src, src_port, dst] if scene.nodes[dst].junction else dst_port
        seen[src, src_port, dst] += 1
        found.append((scene.nodes[src].path, src_port, scene.nodes[dst].path, slot))
    return found


def inside_readers(scene: Scene) -> Scene:
    """Return a scene that lists params and consts inside the nodes that read them; those without readers stay nodes."""
    nodes = scene.nodes
    read_by: dict[int, list[SceneEdge]] = {}
    for edge in scene.edges:
        if nodes[edge.src].op in (PARAM, CONST):
            read_by.setdefault(edge.src, []).append(edge)
    hidden = {i for i in read_by if not nodes[i].outputs}
    shown = [i for i in range(len(nodes)) if i not in hidden]
    index = {old: new for new, old in enumerate(shown)}
    drawn = [replace(nodes[i], weights=list(nodes[i].weights)) for i in shown]
    for src in sorted(hidden):
        weight = nodes[src]
        for edge in read_by[src]:
            reader = drawn[index[edge.dst]]
            gone = REMOVED in (edge.mark, weight.mark)
            if not (gone and reader.mark != REMOVED):
                reader.weights.append((weight.path.rpartition(".")[2], weight.specs[0], weight.attrs["key"]))
            if not reader.mark and (weight.mark or edge.mark):
                reader.mark = CHANGED
    edges = [e._replace(src=index[e.src], dst=index[e.dst]) for e in scene.edges if e.src not in hidden]
    return Scene(drawn, edges, scene.repeats)


def feedback(scene: Scene) -> Scene:
    """Return a scene in which each assign node of a state is replaced by an edge from its value to the state."""
    nodes, into = scene.nodes, {}
    for edge in scene.edges:
        if nodes[edge.dst].op == ASSIGN:
            into.setdefault(edge.dst, {})[edge.dst_port] = edge
    state_of = {write: ends[0].src for write, ends in into.items() if len(ends) == 2 and nodes[ends[0].src].op == STATE}
    shown = [i for i in range(len(nodes)) if i not in state_of]
    index = {old: new for new, old in enumerate(shown)}
    drawn = [nodes[i] for i in shown]
    for write, state in state_of.items():
        node = drawn[index[state]]
        drawn[index[state]] = replace(node, members=node.members + nodes[write].members)
    edges = []
    for edge in scene.edges:
        if edge.dst not in state_of:
            edges.append(edge._replace(src=index[edge.src], dst=index[edge.dst]))
        elif edge.dst_port == 1:
            mark = nodes[edge.dst].mark or edge.mark
            edges.append(SceneEdge(index[edge.src], edge.src_port, index[state_of[edge.dst]], 0, mark))
    return Scene(drawn, sorted(edges, key=lambda e: (e.dst, e.dst_port)), scene.repeats)


DATA, ATTENTION, RESIDUAL, RECURRENT, MIXED = "data", "attention", "residual", "state", "data"

_ATTENDS = frozenset(n for n, row in OPS.items() if row.traits.attention or traits(row.traits.backward_of).attention)
"""Attention ops and their gradients."""

_FAR = 600  # nodes to visit before an edge is taken for a shortcut without further search


def data_readers(scene: Scene) -> list[list[int]]:
    """Return the readers of each node within one step; edges into a state are left out, as the next step reads them."""
    after: list[list[int]] = [[] for _ in scene.nodes]
    for edge in scene.edges:
        if scene.nodes[edge.dst].op != STATE:
            after[edge.src].append(edge.dst)
    return after


def kinds(scene: Scene) -> list[str]:
    """Return the kind of each edge: `residual`, `attention`, `state` or `data`.

    A `residual` edge enters a sum and bypasses a branch: its source is also an ancestor of another operand of the sum.
    An `attention` edge enters an attention op. A `state` edge leaves or enters a state, or enters its assign node.
    """
    nodes, edges = scene.nodes, scene.edges
    after = data_readers(scene)
    into: list[list[int]] = [[] for _ in nodes]
    for i, readers in enumerate(after):
        for j in readers:
            into[j].append(i)
    level = longest_paths(after, kahn_order(after))
    found = []
    for src, _, dst, _, _ in edges:
        op = nodes[dst].op
        adds = (nodes[dst].junction or traits(op).sums) and len(after[src]) > 1
        if nodes[src].op == STATE or op in (STATE, ASSIGN):
            found.append(RECURRENT)
        elif op in _ATTENDS:
            found.append(ATTENTION)
        else:
            found.append(RESIDUAL if adds and _bypasses(src, into[dst], into, level) else DATA)
    return found


def _bypasses(src: int, operands: list[int], into: list[list[int]], level: list[int]) -> bool:
    """Return True if `src` is an ancestor of another of the `operands`, or if the search exceeds `_FAR` nodes.

    `into`: sources of each node; `level`: length of the longest path to it.
    """
    seen = {i for i in operands if level[i] > level[src]}
    stack = sorted(seen)
    while stack:
        for j in into[stack.pop()]:
            if j == src:
                return True
            if level[j] > level[src] and j not in seen:
                seen.add(j)
                stack.append(j)
        if len(seen) > _FAR:
            return True
    return False


def family(node: SceneNode) -> str:
    """Return a node's colour family: `source`, `state`, `sum`, `attention`, `weight`, `view`, `pointwise` or `op`."""
    if node.op in KINDS:
        return "state" if node.op in (STATE, ASSIGN) else "source"
    row = OPS.get(node.op)
    if node.junction:
        return "sum"
    if node.op in _ATTENDS:
        return "attention"
    if any(spec.shape for _, spec, _ in node.weights):
        return "weight"
    if row is not None and row.view is not None:
        return "view"
    return "pointwise" if row is not None and row.traits.elementwise else "op"


MOST = 1 << 24  # size of the largest weight that `statistics` reads, in elements: a tenth of a second


def statistics(program: Program) -> dict[str, str]:
    """Return a dict from key of each floating-point weight to a text on its values; skip weights not yet read."""
    found = {}
    for key, variable in program.weights.items():
        array = variable.data
        if array.storage.touched and 0 < array.size <= MOST and array.dtype.is_float:
            values = array.to_numpy("float64").ravel()
            finite = values[np.isfinite(values)]
            line = f"{len(values) - len(finite)} not finite" if len(finite) < len(values) else ""
            if len(finite):
                numbers = f"mean {finite.mean():.3g}, std {finite.std():.3g}, largest {np.abs(finite).max():.3g}"
                line = f"{numbers}, {line}" if line else numbers
            found[key] = line
    return found
