"""The modules of a scene as a tree of groups, the nets inside each group, and which groups a picture opens.

A group holds the nodes under one dotted path. A net is one source with all its readers inside one group. It starts at a
child of the group or enters through the top; it ends at children or leaves through the bottom. An entry is an outside
node read inside the group, an exit an inside node read outside. Nets depend only on the content of the group, so equal
modules have equal nets and equal hashes.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Set
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from itertools import groupby
from typing import TYPE_CHECKING

from graphwright.errors import UsageError, check_type
from graphwright.graph.analysis import kahn_order
from graphwright.program.draw.scene import Scene, data_readers
from graphwright.program.draw.style import name_of, node_lines, short
from graphwright.settings import Range

if TYPE_CHECKING:
    from graphwright.program.draw.arrange import Arrangement
    from graphwright.program.draw.scene import SceneEdge, SceneNode

ROOT = 0
OUTSIDE = -1


@dataclass(slots=True)
class Net:
    """A source node with all its readers inside one group."""

    node: int  # index of the source in `Scene.nodes`
    child: int = OUTSIDE  # the child where the net starts; OUTSIDE for an entry
    slot: int = 0  # index of the exit of that child, or of the entry
    targets: list[tuple[int, int]] = field(default_factory=list)  # (child, its entry) per reader; OUTSIDE for an exit
    edges: list[list[int]] = field(default_factory=list)  # per target, indices in `Scene.edges`


@dataclass(slots=True)
class ModuleGroup:
    """One group of the tree: the nodes and inner groups under one path."""

    path: str  # dotted path; empty for the whole program
    segment: str  # last part of the path
    parent: int  # index of the parent in `GroupTree.modules`
    position: int  # index among the children of the parent
    depth: int
    children: list[int] = field(default_factory=list)  # nodes, or ~index in `modules`, in order of their first node
    entries: list[int] = field(default_factory=list)  # outer sources that are read inside, in order of use
    exits: list[int] = field(default_factory=list)  # inner sources that are read outside
    nets: list[Net] = field(default_factory=list)  # sorted by source child, entries first
    hash: bytes = b""  # equal for modules of equal content: ops, attributes, labels, wiring and relative names
    repeat: int = 1  # number of equal groups that it stands for
    members: list[int] = field(default_factory=list)  # nodes inside, in subgroups too
    lines: tuple[str, ...] = ()  # its label while it is closed
    mark: str = ""  # in the difference of two programs
    arrangement: Arrangement = field(init=False)  # of its children; equal groups share one

    @property
    def title(self) -> str:
        """The text on the frame of the group."""
        return short(name_of(self.path)) + (f" × {self.repeat}" if self.repeat > 1 else "")


@dataclass(slots=True)
class GroupTree:
    """All module groups, parents before children. Node i of the scene is child `position[i]` of the group `home[i]`."""

    modules: list[ModuleGroup]
    home: list[int]
    position: list[int]
    by_path: dict[str, int]

    def chain(self, node: int) -> list[int]:
        """Return the groups around a node, innermost first, the root last."""
        found = [self.home[node]]
        while found[-1] != ROOT:
            found.append(self.modules[found[-1]].parent)
        return found

    def seat(self, item: int) -> tuple[int, int]:
        """Return (parent group, index among its children) of node `item`, or of the group ~`item` if `item` < 0."""
        if item >= 0:
            return self.home[item], self.position[item]
        return self.modules[~item].parent, self.modules[~item].position

    def legs(self, src: int, dst: int) -> tuple[list[tuple[int, int]], int]:
        """Return ((group, child) of each group that an edge passes through, the number of groups that it leaves).

        `src`, `dst`: nodes, or groups as ~index. `child`: where the edge ends in the group; OUTSIDE if it leaves it.
        """
        (up, _), (down, child) = self.seat(src), self.seat(dst)
        out, into = [], []
        while up != down:
            if self.modules[up].depth >= self.modules[down].depth:
                out.append((up, OUTSIDE))
                up = self.modules[up].parent
            else:
                into.append((down, child))
                down, child = self.seat(~down)
        return [*out, (up, child), *reversed(into)], len(out)


def grow(scene: Scene) -> GroupTree:
    """Build the tree of a scene, without nets. A node with the same path as a group belongs to that group."""
    prefixes: set[str] = set()
    for node in scene.nodes:
        prefix = node.path.rpartition(".")[0]
        while prefix and prefix not in prefixes:
            prefixes.add(prefix)
            prefix = prefix.rpartition(".")[0]
    tree = GroupTree([ModuleGroup("", "", ROOT, 0, 0)], [], [], {"": ROOT})
    for i, node in enumerate(scene.nodes):
        home = _group_at(tree, node.path if node.path in prefixes else node.path.rpartition(".")[0])
        children = tree.modules[home].children
        tree.home.append(home)
        tree.position.append(len(children))
        children.append(i)
        for group in tree.chain(i):
            tree.modules[group].members.append(i)
    for module in tree.modules:
        module.repeat = scene.repeats.get(module.path, 1)
    return tree


def _group_at(tree: GroupTree, path: str) -> int:
    """Return the index of the group with this path; add the group and those around it if they are missing."""
    missing = []
    while path not in tree.by_path:
        missing.append(path)
        path = path.rpartition(".")[0]
    at = tree.by_path[path]
    for path in reversed(missing):
        parent, number = tree.modules[at], len(tree.modules)
        tree.modules.append(ModuleGroup(path, path.rpartition(".")[2], at, len(parent.children), parent.depth + 1))
        parent.children.append(~number)
        tree.by_path[path] = at = number
    return at


def wire(scene: Scene, tree: GroupTree) -> None:
    """Set the nets of every group, its entries (outer sources read inside) and exits (inner sources read outside)."""
    joined: list[dict[int, dict[int, list[int]]]] = [{} for _ in tree.modules]  # source -> child -> edges
    entries: list[dict[int, int]] = [{} for _ in tree.modules]
    leaving: list[set[int]] = [set() for _ in tree.modules]
    for number, (src, _, dst, _, _) in enumerate(scene.edges):
        if src == dst:
            continue
        legs, left = tree.legs(src, dst)
        for k, (group, child) in enumerate(legs):
            if k < left:
                leaving[group].add(src)
            elif k > left:
                entries[group].setdefault(src, len(entries[group]))
            joined[group].setdefault(src, {}).setdefault(child, []).append(number)
    exits = [{node: k for k, node in enumerate(sorted(nodes))} for nodes in leaving]
    for group, module in enumerate(tree.modules):
        module.entries, module.exits = list(entries[group]), list(exits[group])
        for node, ends in joined[group].items():
            net = Net(node)
            if node in entries[group]:
                net.slot = entries[group][node]
            else:
                at, net.child = tree.seat(node)
                while at != group:
                    net.slot = exits[at][node]
                    at, net.child = tree.seat(~at)
            for child in sorted(ends, key=lambda child: (child == OUTSIDE, child)):
                inner = module.children[child]
                slot = exits[group][node] if child == OUTSIDE else entries[~inner][node] if inner < 0 else 0
                net.targets.append((child, slot))
                net.edges.append(ends[child])
            module.nets.append(net)
        module.nets.sort(key=lambda n: (n.child, n.slot))


def digest(scene: Scene, tree: GroupTree, labels: list[tuple[str, ...]]) -> None:
    """Hash every group, inner groups first; `labels` are the texts of the nodes."""
    for module in reversed(tree.modules):
        parts: list[object] = [len(module.entries), len(module.exits)]
        for child in module.children:
            if child < 0:
                inner = tree.modules[~child]
                parts.append((inner.segment, inner.hash))
            else:
                node = scene.nodes[child]
                attrs = [(k, v) for k, v in node.attrs.items() if k != "key"]  # a key contains the full path
                if node.attrs.get("axis") in (0, 1) and str(node.attrs.get("start")) == module.segment:
                    attrs.remove(("start", node.attrs["start"]))  # the element of a sequence that a step reads
                parts.append((labels[child], node.path.rpartition(".")[2], node.op, attrs, node.mark))
        parts.extend((n.child, n.slot, n.targets) for n in module.nets)
        module.hash = blake2b(repr(parts).encode("utf-8", "surrogatepass"), digest_size=16).digest()


BUNDLE = "nodes"  # name of the groups that `bundled` makes of consecutive nodes

_NUMBERED = re.compile(r"(.*?)(0|[1-9]\d*)", re.DOTALL)


def runs(tree: GroupTree) -> dict[int, list[list[int]]]:
    """Map each group to its runs: two or more equal inner groups with consecutive numbers (`block3`, `block4`)."""
    found: dict[int, list[list[int]]] = {}
    for at, module in enumerate(tree.modules):
        keys: dict[int, tuple[object, ...]] = {}
        for k, child in enumerate(~c for c in module.children if c < 0):
            inner = tree.modules[child]
            match = _NUMBERED.fullmatch(inner.segment)
            keys[child] = (match[1], int(match[2]) - k, inner.hash) if match and len(match[2]) < 10 else (child,)
        series = [list(run) for _, run in groupby(keys, keys.__getitem__)]
        if any(len(run) > 1 for run in series):
            found[at] = [run for run in series if len(run) > 1]
    return found


def folded(scene: Scene, tree: GroupTree) -> Scene:
    """Return a scene in which one module, such as `layers.[0-21]`, replaces each run of equal modules and its edges."""
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
    paths, repeats = [""], {}
    for at, module in enumerate(tree.modules[1:], start=1):
        _, segment, times = stands_for.get(at, (at, module.segment, 1))
        paths.append(f"{paths[module.parent]}.{segment}" if paths[module.parent] else segment)
        if times > 1:
            repeats[paths[at]] = times
    taken: dict[str, int] = {}
    nodes: list[SceneNode] = []
    index = []
    for i, node in enumerate(scene.nodes):
        module = tree.modules[tree.home[i]]
        path = paths[tree.home[i]] + node.path[len(module.path) :] if module.path else node.path
        index.append(taken.setdefault(path, len(nodes)))
        if index[i] == len(nodes):
            nodes.append(replace(node, path=path))
        else:
            nodes[index[i]] = replace(nodes[index[i]], members=nodes[index[i]].members + node.members)
    apart = [e for e in scene.edges if not _within_a_run(tree, e, stands_for)]
    edges = dict.fromkeys(e._replace(src=index[e.src], dst=index[e.dst]) for e in apart)
    return Scene(nodes, sorted(edges, key=lambda e: (e.dst, e.dst_port)), repeats)


def _within_a_run(tree: GroupTree, edge: SceneEdge, stands_for: dict[int, tuple[int, str, int]]) -> bool:
    """Return True if an edge joins two modules of one run, which `stands_for` maps to (first module of the run, ..)."""
    legs, left = tree.legs(edge.src, edge.dst)
    if left == 0 or left + 1 == len(legs):
        return False
    source, target = stands_for.get(legs[left - 1][0]), stands_for.get(legs[left + 1][0])
    return source is not None and target is not None and source[0] == target[0]


def bundled(scene: Scene, tree: GroupTree, size: int) -> Scene:
    """Return a scene in which every `size` top-level nodes or groups, in topological order, form a new group."""
    order = {i: k for k, i in enumerate(kahn_order(data_readers(scene)))}
    top = [ROOT]
    for module in tree.modules[1:]:
        top.append(len(top) if module.parent == ROOT else top[module.parent])
    units: dict[int, list[int]] = {}
    for i, home in enumerate(tree.home):
        units.setdefault(i if home == ROOT else ~top[home], []).append(i)
    ordered = sorted(units, key=lambda u: min(order.get(i, len(order)) for i in units[u]))
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


SMALL = 24  # number of nodes up to which all groups open; chosen by looking at pictures
FLAT = 200  # number of children of the root above which they are bundled by default, into half as many groups at most
LONG = 64  # length above which a run of equal groups is folded by default: steps of a loop, not the layers of a decoder
ROOMY = 60  # number of boxes up to which groups open by default where no module repeats


@dataclass(slots=True)
class SceneView:
    """A scene, its tree, the label of each node, the open groups, and the paths of groups closed for the budget."""

    scene: Scene
    tree: GroupTree
    labels: list[tuple[str, ...]]
    open: set[int]
    closed: tuple[str, ...] = ()

    def shown_as(self) -> list[int]:
        """Return, per group, the outermost closed group among the group and its ancestors; -1 if all are open."""
        top = [-1]
        for at, module in enumerate(self.tree.modules[1:], start=1):
            above = top[module.parent]
            top.append(above if above >= 0 else -1 if at in self.open else at)
        return top

    def visible(self) -> list[int]:
        """Return, per node, what is drawn for it: the node itself, or ~index of the closed group that hides it."""
        top = self.shown_as()
        return [i if top[home] < 0 else ~top[home] for i, home in enumerate(self.tree.home)]

    def elements(self) -> int:
        """Count the boxes, frames and edges to draw."""
        seen = self.visible()
        top = self.shown_as()
        joined = {(seen[e.src], seen[e.dst]) for e in self.scene.edges}
        return len(set(seen)) + top[1:].count(-1) + sum(a != b for a, b in joined)


def view(scene: Scene, expanded: Set[str] | None, level: int | None, fold: bool, budget: int) -> SceneView:
    """Choose the open groups of a scene. Raises: UsageError for invalid arguments, which `layout.compose` describes."""
    Range(16, whole=True).check("budget", budget)
    if level is not None:
        Range(whole=True).check("level", level)
    check_type("expanded", expanded, (Collection, type(None)), "a set of paths of groups")
    check_type("fold", fold, bool, "True or False")
    if expanded is not None and level is not None:
        raise UsageError("`expanded` and `level` are both given", fix="give one of them")
    found = _prepared(scene)
    if expanded is None and level is None:
        fold = fold or any(len(run) > LONG for series in runs(found.tree).values() for run in series)
    if fold:
        found = _prepared(folded(found.scene, found.tree))
    found.open = _wanted(found, expanded, level)
    if expanded is None and level is None and len(found.tree.modules[ROOT].children) > FLAT:
        found = _bundled(found, -(-len(found.tree.modules[ROOT].children) // (FLAT // 2)))
    return _within(found, expanded, level, fold, budget)


def _bundled(found: SceneView, size: int) -> SceneView:
    """Bundle the top-level nodes and groups in groups of `size`, all closed and listed in `closed`."""
    made = _prepared(bundled(found.scene, found.tree, size))
    made.open = {ROOT}
    made.closed = tuple(m.path for m in made.tree.modules[1:] if m.depth == 1)
    return made


def _prepared(scene: Scene) -> SceneView:
    tree = grow(scene)
    wire(scene, tree)
    labels = [node_lines(node) for node in scene.nodes]
    digest(scene, tree, labels)
    return SceneView(scene, tree, labels, set())


def _wanted(found: SceneView, expanded: Set[str] | None, level: int | None) -> set[int]:
    modules = found.tree.modules
    if level is not None:
        return {at for at, m in enumerate(modules) if m.depth < level} | {ROOT}
    if expanded is None:
        return _readable(found) | _marked(found)
    chosen = {ROOT}
    for at, module in enumerate(modules[1:], start=1):
        paths = [found.scene.nodes[c].path for c in module.children if c >= 0]
        one_node = len(paths) == len(module.children) <= 3 and module.path in paths  # `mid` with an inserted `mid.tanh`
        if module.parent in chosen and (module.path in expanded or one_node):
            chosen.add(at)
    return chosen


def _marked(found: SceneView) -> set[int]:
    """Return the groups that contain a difference between the two compared programs."""
    scene, tree = found.scene, found.tree
    marked = {i for i, node in enumerate(scene.nodes) if node.mark}
    marked.update(i for edge in scene.edges if edge.mark for i in (edge.src, edge.dst))
    return {at for i in marked for at in tree.chain(i)}


def _readable(found: SceneView) -> set[int]:
    """Choose the groups to open by default.

    In a small program all groups open. If modules repeat (the blocks of a decoder), the groups around them open and the
    repeated modules stay closed. Otherwise groups open while the number of boxes is at most `ROOMY`.
    """
    modules = found.tree.modules
    if len(found.scene.nodes) <= SMALL:
        return set(range(len(modules)))
    chosen = {ROOT}
    series = _numbered_parents(found)
    for at in series:
        up = modules[at].parent
        while up != ROOT and up not in series:
            up = modules[up].parent
        if up == ROOT and (ROOT not in series or at == ROOT):
            while at not in chosen:
                chosen.add(at)
                at = modules[at].parent
    if series:
        return chosen
    boxes = len(modules[ROOT].children)
    for at, module in enumerate(modules[1:], start=1):  # parents come first
        if module.parent in chosen and boxes + len(module.children) <= ROOMY:
            chosen.add(at)
            boxes += len(module.children)
    return chosen


def _numbered_parents(found: SceneView) -> set[int]:
    """Find the groups with two or more inner groups whose names end in a number, such as layers, blocks and experts."""
    counts: Counter[int] = Counter()
    for module in found.tree.modules[1:]:
        if module.segment[-1:].isdigit() or module.repeat > 1:
            counts[module.parent] += 1 + (module.repeat > 1)
    return {at for at, n in counts.items() if n > 1}


def _within(found: SceneView, expanded: Set[str] | None, level: int | None, fold: bool, budget: int) -> SceneView:
    """Close the deepest groups until the picture fits the budget; fold runs of equal groups before hiding them."""
    closed: list[str] = []
    while found.elements() > budget:
        modules = found.tree.modules
        top = found.shown_as()
        deepest = max((modules[at].depth for at in found.open if at != ROOT and top[at] < 0), default=0)
        series = runs(found.tree) if not fold else {}
        if any(at in series and (at == ROOT or top[at] < 0) and modules[at].depth == deepest for at in found.open):
            fold = True
            folding = [run for at in sorted(series) for run in series[at] if top[run[0]] in (-1, run[0])]
            closed.extend(f"{modules[run[0]].path} … {modules[run[-1]].path}" for run in folding)
            found = _prepared(folded(found.scene, found.tree))
            found.open = _wanted(found, expanded, level)
            continue
        if deepest:
            closing = sorted(at for at in found.open if modules[at].depth == deepest)
            closed.extend(modules[at].path for at in closing if top[at] < 0)
            found.open.difference_update(closing)
            continue
        size, most, whole = 2, len(modules[ROOT].children), found
        while found.elements() > budget and size < 2 * most:
            size = max(size * 2, 4 * most // budget)
            found = _bundled(whole, size)
        break
    found.closed = (*closed, *found.closed)
    return found
