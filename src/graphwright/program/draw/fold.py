"""Fewer things to draw: runs of equal modules become one, long flat lists of nodes become bundles."""

from __future__ import annotations

import re
from dataclasses import replace

from graphwright.program.draw.scene import Scene, SceneEdge
from graphwright.program.draw.tree import ROOT, Tree
from graphwright.program.kinds import STATE

BUNDLE = "nodes"
"""Name of the groups that consecutive nodes are put into when there is no module to close."""

_NUMBERED = re.compile(r"(.*?)(0|[1-9]\d*)", re.DOTALL)


def runs(tree: Tree) -> dict[int, list[list[int]]]:
    """Per group, runs of two or more children that are equal groups numbered one after the other."""
    found: dict[int, list[list[int]]] = {}
    for at, module in enumerate(tree.modules):
        run: list[int] = []
        last: tuple[str, int, bytes] | None = None
        for child in (~c for c in module.children if c < 0):
            inner = tree.modules[child]
            match = _NUMBERED.fullmatch(inner.segment)
            key = (match[1], int(match[2]), inner.hash) if match and len(match[2]) < 10 else None
            if key is not None and last is not None and key == (last[0], last[1] + 1, last[2]):
                run.append(child)
                if len(run) == 2:
                    found.setdefault(at, []).append(run)
            else:
                run = [child]
            last = key
    return found


def folded(scene: Scene, tree: Tree) -> Scene:
    """The scene with each run of equal modules drawn once, as `layers.[0-21]`; edges within a run are left out."""
    found = runs(tree)
    stands_for: dict[int, tuple[int, str, int]] = {}  # module -> (first of its run, new segment, length)
    for lists in found.values():
        for run in lists:
            first, last = tree.modules[run[0]].segment, tree.modules[run[-1]].segment
            match = _NUMBERED.fullmatch(first)
            assert match is not None, "only numbered modules form runs"
            segment = f"{match[1]}[{match[2]}-{last[len(match[1]) :]}]"
            for member in run:
                stands_for[member] = (run[0], segment, len(run))
    if not stands_for:
        return scene
    paths, repeats = _new_paths(tree, stands_for)
    taken: dict[str, int] = {}
    nodes = []
    at = []
    for i, node in enumerate(scene.nodes):
        module = tree.modules[tree.home[i]]
        path = paths[tree.home[i]] + node.path[len(module.path) :] if module.path else node.path
        known = taken.get(path)
        if known is None:
            known = taken[path] = len(nodes)
            nodes.append(replace(node, path=path))
        else:
            nodes[known] = replace(nodes[known], members=nodes[known].members + node.members)
        at.append(known)
    edges: dict[SceneEdge, None] = {}
    for edge in scene.edges:
        if not _within_a_run(tree, edge, stands_for):
            edges[edge._replace(src=at[edge.src], dst=at[edge.dst])] = None
    return Scene(nodes, sorted(edges, key=lambda e: (e.dst, e.dst_port)), repeats)


def _new_paths(tree: Tree, stands_for: dict[int, tuple[int, str, int]]) -> tuple[list[str], dict[str, int]]:
    paths, repeats = [""], {}
    for at, module in enumerate(tree.modules[1:], start=1):
        head = paths[module.parent]
        _, segment, times = stands_for.get(at, (at, module.segment, 1))
        paths.append(f"{head}.{segment}" if head else segment)
        if times > 1:
            repeats[paths[at]] = times
    return paths, repeats


def _within_a_run(tree: Tree, edge: SceneEdge, stands_for: dict[int, tuple[int, str, int]]) -> bool:
    """True for an edge from one member of a run to another: drawn, it would be a loop."""
    ups = {tree.modules[m].parent: m for m in tree.chain(edge.src) if m != ROOT}
    for m in tree.chain(edge.dst):
        other = ups.get(tree.modules[m].parent) if m != ROOT else None
        if other is not None and other != m and m in stands_for and other in stands_for:
            return stands_for[m][0] == stands_for[other][0]
    return False


def bundled(scene: Scene, tree: Tree, size: int) -> Scene:
    """The scene with the root's children put into groups of `size` consecutive ones, in topological order."""
    order = _topological(scene)
    top = [ROOT]
    for module in tree.modules[1:]:
        top.append(len(top) if module.parent == ROOT else top[module.parent])
    units: dict[int, list[int]] = {}
    for i, home in enumerate(tree.home):
        units.setdefault(i if home == ROOT else ~top[home], []).append(i)
    ordered = sorted(units, key=lambda u: min(order[i] for i in units[u]))
    nodes, repeats = list(scene.nodes), dict(scene.repeats)
    taken = {m.segment for m in tree.modules if m.depth == 1}
    for start in range(0, len(ordered), size):
        part = ordered[start : start + size]
        name = f"{BUNDLE}[{start}-{start + len(part) - 1}]"
        while name in taken:
            name += "'"
        for unit in part:
            for i in units[unit]:
                nodes[i] = replace(nodes[i], path=f"{name}.{nodes[i].path}")
            if unit < 0:
                head = tree.modules[~unit].path
                moved = {p: n for p, n in scene.repeats.items() if p == head or p.startswith(f"{head}.")}
                repeats.update({f"{name}.{p}": n for p, n in moved.items()})
    return Scene(nodes, scene.edges, repeats)


def _topological(scene: Scene) -> list[int]:
    """Place of each node in an order along the edges; nodes on cycles come last."""
    waiting = [0] * len(scene.nodes)
    after: list[list[int]] = [[] for _ in scene.nodes]
    for edge in scene.edges:
        if scene.nodes[edge.dst].op != STATE:  # the step ends there
            waiting[edge.dst] += 1
            after[edge.src].append(edge.dst)
    ready = [i for i, n in enumerate(waiting) if not n]
    for i in ready:  # grows while it is walked
        for j in after[i]:
            waiting[j] -= 1
            if not waiting[j]:
                ready.append(j)
    place = [len(ready)] * len(scene.nodes)
    for k, i in enumerate(ready):
        place[i] = k
    return place
