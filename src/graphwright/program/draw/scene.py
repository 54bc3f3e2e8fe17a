"""What a picture is made from: nodes and edges of a Program, read once into plain lists.

Invariant: nodes stand in order of creation, edges by their target and its port; names alone identify them, so two
programs can be put into one scene.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NamedTuple

from graphwright.array import Spec
from graphwright.graph import NodeId
from graphwright.program.kinds import CONST, PARAM, STATE, WRITE

if TYPE_CHECKING:
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
