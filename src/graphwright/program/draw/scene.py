"""What a picture is made from: nodes and edges of a Program, read once into plain lists.

Invariant: nodes stand in order of creation, edges by their target and its port; names alone identify them, so two
programs can be put into one scene.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from graphwright.ops import OPS, traits
from graphwright.program.kinds import CONST, KINDS, PARAM, STATE, WRITE

if TYPE_CHECKING:
    from graphwright.array import Spec
    from graphwright.graph import NodeId
    from graphwright.program.program import Program


@dataclass(slots=True)
class SceneNode:
    """A node to draw.

    Attributes:
        path: dotted name; in a folded run the repeated segment is a range: `layers.[0-21].attn`.
        op: op or kind.
        attrs, specs: as in the Program.
        junction: takes any number of edges.
        weights: (last segment, spec, checkpoint key) of the params and consts that are drawn inside this node.
        outputs: names of the program's results that leave here.
        members: handles of the nodes that this one stands for; empty for a node that was removed.
        mark: `added`, `removed`, `changed` or empty.
    """

    path: str
    op: str
    attrs: Mapping[str, Any]
    specs: tuple[Spec, ...]
    junction: bool = False
    weights: list[tuple[str, Spec, str]] = field(default_factory=list)
    outputs: tuple[str, ...] = ()
    members: tuple[NodeId, ...] = ()
    mark: str = ""


class SceneEdge(NamedTuple):
    """An edge between places in `Scene.nodes`; `removed` edges come from the program that is compared with."""

    src: int
    src_port: int
    dst: int
    dst_port: int
    mark: str = ""


@dataclass(slots=True)
class Scene:
    """Nodes in order of creation and the edges between them; `repeats` counts the modules a folded group stands for."""

    nodes: list[SceneNode]
    edges: list[SceneEdge]
    repeats: dict[str, int] = field(default_factory=dict)


def read(program: Program) -> Scene:
    """All nodes and edges of a program."""
    graph = program.graph
    handles = sorted(graph.nodes(), key=lambda n: graph.node(n, "seq"))
    at = {n: i for i, n in enumerate(handles)}
    nodes = [
        SceneNode(
            program.path(n), program.op(n), program.attrs(n), program.specs(n), program.is_junction(n), members=(n,)
        )
        for n in handles
    ]
    for name, value in zip(program.output_names(), program.outputs(), strict=True):
        nodes[at[value.node]].outputs += (name,)
    edges = [
        SceneEdge(at[graph.source(e)], graph.edge(e, "src_port"), i, graph.edge(e, "dst_port"))
        for i, n in enumerate(handles)
        for e in program.in_edges(n)
    ]
    return Scene(nodes, edges)


def identities(scene: Scene) -> list[tuple[str, int, str, int]]:
    """What makes an edge the same in two programs: its ends, and which of several equal ones it is.

    Into an op that is the port; into a junction, whose ports are interchangeable, the count of equal edges before it.
    """
    seen: dict[tuple[int, int, int], int] = {}
    found = []
    for src, src_port, dst, dst_port, _ in scene.edges:
        slot = dst_port
        if scene.nodes[dst].junction:
            slot = seen.get((src, src_port, dst), 0)
            seen[src, src_port, dst] = slot + 1
        found.append((scene.nodes[src].path, src_port, scene.nodes[dst].path, slot))
    return found


def inside_readers(scene: Scene) -> Scene:
    """The scene with params and consts drawn inside the nodes that read them; those without reader stay."""
    nodes = scene.nodes
    read_by: dict[int, list[SceneEdge]] = {}
    for edge in scene.edges:
        if nodes[edge.src].op in (PARAM, CONST):
            read_by.setdefault(edge.src, []).append(edge)
    hidden = {i for i in read_by if not nodes[i].outputs}
    kept = [i for i in range(len(nodes)) if i not in hidden]
    at = {old: new for new, old in enumerate(kept)}
    drawn = [replace(nodes[i], weights=list(nodes[i].weights)) for i in kept]
    for src in sorted(hidden):
        weight = nodes[src]
        for edge in read_by[src]:
            reader = drawn[at[edge.dst]]
            gone = edge.mark == "removed" or weight.mark == "removed"
            if not (gone and reader.mark != "removed"):
                reader.weights.append((weight.path.rpartition(".")[2], weight.specs[0], weight.attrs["key"]))
            if not reader.mark and (weight.mark or edge.mark):
                reader.mark = "changed"
    edges = [e._replace(src=at[e.src], dst=at[e.dst]) for e in scene.edges if e.src not in hidden]
    return Scene(drawn, edges, scene.repeats)


def feedback(scene: Scene) -> Scene:
    """The scene with each write of a state drawn as an edge back into it: the state's box stands for both."""
    nodes, into = scene.nodes, {}
    for edge in scene.edges:
        if nodes[edge.dst].op == WRITE:
            into.setdefault(edge.dst, {})[edge.dst_port] = edge
    state_of = {write: ends[0].src for write, ends in into.items() if len(ends) == 2 and nodes[ends[0].src].op == STATE}
    kept = [i for i in range(len(nodes)) if i not in state_of]
    at = {old: new for new, old in enumerate(kept)}
    drawn = [nodes[i] for i in kept]
    for write, state in state_of.items():
        drawn[at[state]] = replace(drawn[at[state]], members=drawn[at[state]].members + nodes[write].members)
    edges = []
    for edge in scene.edges:
        if edge.dst not in state_of:
            edges.append(edge._replace(src=at[edge.src], dst=at[edge.dst]))
        elif edge.dst_port == 1:
            mark = nodes[edge.dst].mark or edge.mark
            edges.append(SceneEdge(at[edge.src], edge.src_port, at[state_of[edge.dst]], 0, mark))
    return Scene(drawn, sorted(edges, key=lambda e: (e.dst, e.dst_port)), scene.repeats)


DATA, ATTENTION, RESIDUAL, RECURRENT, MIXED = "data", "attention", "residual", "state", "data"

_ATTENDS = frozenset(n for n, row in OPS.items() if row.traits.attention or traits(row.traits.backward_of).attention)
_ADDS = frozenset(n for n, row in OPS.items() if row.traits.sums)
"""Ops that attend, and ops that add two operands as a junction does."""

_FAR = 600
"""Nodes that are looked at to tell a shortcut from a short branch; past them it is taken for a shortcut."""


def kinds(scene: Scene) -> list[str]:
    """Kind of each edge.

    `residual` is an edge into a sum that jumps over a branch: its source is also, further up, a source of another
    operand. `attention` leads into an op that attends, `state` from a state, back into one, or into the write of one.
    """
    nodes, edges = scene.nodes, scene.edges
    into: list[list[int]] = [[] for _ in nodes]
    fan_out = [0] * len(nodes)
    for edge in edges:
        if nodes[edge.dst].op != STATE:  # the step ends there
            into[edge.dst].append(edge.src)
            fan_out[edge.src] += 1
    level = _levels(len(nodes), into)
    found = []
    for edge in edges:
        src, dst = nodes[edge.src], nodes[edge.dst]
        if src.op == STATE or dst.op in (STATE, WRITE):
            found.append(RECURRENT)
        elif dst.op in _ATTENDS:
            found.append(ATTENTION)
        elif (
            (dst.junction or dst.op in _ADDS)
            and fan_out[edge.src] > 1
            and _jumps(edge.src, into[edge.dst], into, level)
        ):
            found.append(RESIDUAL)
        else:
            found.append(DATA)
    return found


def _levels(n: int, into: list[list[int]]) -> list[int]:
    after: list[list[int]] = [[] for _ in range(n)]
    waiting = [len(sources) for sources in into]
    for i, sources in enumerate(into):
        for j in sources:
            after[j].append(i)
    level = [0] * n
    ready = [i for i in range(n) if not waiting[i]]
    for i in ready:  # grows while it is walked
        for j in after[i]:
            level[j] = max(level[j], level[i] + 1)
            waiting[j] -= 1
            if not waiting[j]:
                ready.append(j)
    return level


def _jumps(src: int, operands: list[int], into: list[list[int]], level: list[int]) -> bool:
    """True if `src` leads to another of the operands."""
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
    """What a box is coloured by: `source`, `state`, `sum`, `attention`, `weight`, `view`, `pointwise` or `op`."""
    if node.op in KINDS:
        return "state" if node.op in (STATE, WRITE) else "source"
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


MOST = 1 << 24
"""Entries of the largest weight that is looked at: a tenth of a second."""


def statistics(program: Program) -> dict[str, str]:
    """Checkpoint key -> a line. Weights that lie untouched in a file are not read for it."""
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
