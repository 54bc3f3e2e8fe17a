"""Two programs in one scene: what was added, removed and changed between them, and nothing else."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from graphwright.program.diff import renames
from graphwright.program.draw.scene import Scene, identities, read
from graphwright.program.hashing import encode_attrs
from graphwright.program.kinds import STORED

if TYPE_CHECKING:
    from graphwright.program.draw.scene import SceneNode
    from graphwright.program.program import Program

ADDED, REMOVED, CHANGED = "added", "removed", "changed"


def union(program: Program, before: Program) -> Scene:
    """The scene of `program` with what only `before` has put in as removed, and all differences marked.

    A node is changed if its name, op, attributes, specs, outputs or stored values differ. Edges are added or removed; a
    rewired port is one of each.
    """
    now, old = read(program), read(before)
    renamed = renames(program, before)
    old.nodes = [replace(node, path=renamed.get(node.path, node.path)) for node in old.nodes]
    fresh = set(renamed.values())
    known = {node.path: node for node in old.nodes}
    nodes: list[SceneNode] = []
    for node in now.nodes:
        was = known.get(node.path)
        mark = ADDED if was is None else CHANGED if node.path in fresh or _differ(program, before, node, was) else ""
        nodes.append(replace(node, mark=mark))
    at = {node.path: i for i, node in enumerate(nodes)}
    for node in old.nodes:
        if node.path not in at:
            at[node.path] = len(nodes)
            nodes.append(replace(node, mark=REMOVED, members=(), outputs=()))
    had = identities(old)
    had_set = set(had)
    has = identities(now)
    edges = [e._replace(mark="" if key in had_set else ADDED) for e, key in zip(now.edges, has, strict=True)]
    has_set = set(has)
    for edge, key in zip(old.edges, had, strict=True):
        if key not in has_set:
            edges.append(edge._replace(src=at[key[0]], dst=at[key[2]], mark=REMOVED))
    edges.sort(key=lambda e: (e.dst, e.dst_port, e.mark == REMOVED))
    return Scene(nodes, edges)


def _differ(program: Program, before: Program, node: SceneNode, was: SceneNode) -> bool:
    if (node.op, node.specs, node.outputs) != (was.op, was.specs, was.outputs):
        return True
    if encode_attrs(node.attrs) != encode_attrs(was.attrs):
        return True
    if node.op not in STORED:
        return False
    key, old_key = node.attrs["key"], was.attrs["key"]
    if program.weights.array(key) is before.weights.array(old_key):
        return False  # shared by a fork: no byte has to be read
    return program.weights.digest(key) != before.weights.digest(old_key)
