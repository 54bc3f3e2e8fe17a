"""The modules of a scene as a tree of groups, and the nets that join the children of each group.

A net is one source with all its readers, as seen inside one group: it starts at a child or enters through the group's
top, and ends at children or leaves through the bottom. What stands here depends on the group's content alone, so equal
modules have equal nets and one hash.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from hashlib import blake2b

from graphwright.program.draw.scene import Scene

ROOT = 0
OUTSIDE = -1


@dataclass(slots=True)
class Net:
    """One source inside one group.

    Attributes:
        node: place of the source in `Scene.nodes`.
        child, slot: the child it starts at and which of that child's exits it is; child is OUTSIDE for an entry.
        targets: (child, entry of that child) for each reader; child is OUTSIDE for the exit.
        edges: per target, places in `Scene.edges` of the edges that run there.
    """

    node: int
    child: int = OUTSIDE
    slot: int = 0
    targets: list[tuple[int, int]] = field(default_factory=list)
    edges: list[list[int]] = field(default_factory=list)


@dataclass(slots=True)
class Module:
    """One group.

    Attributes:
        path: dotted path; empty for the whole program.
        segment: last part of the path.
        parent, place: its parent in `Tree.modules`, and its place among the parent's children.
        children: places in `Scene.nodes`, or ~place in `Tree.modules`, by creation of their first node.
        entries, exits: sources outside that are read inside, in order of use; sources inside that are read outside.
        nets: by source child, entries first.
        hash: equal for modules of equal content: ops, attributes, labels, wiring, relative names.
    """

    path: str
    segment: str
    parent: int
    place: int
    depth: int
    children: list[int] = field(default_factory=list)
    entries: list[int] = field(default_factory=list)
    exits: list[int] = field(default_factory=list)
    nets: list[Net] = field(default_factory=list)
    hash: bytes = b""


@dataclass(slots=True)
class Tree:
    """All groups, parents before children; `home[i]` and `place[i]` say where node i of the scene hangs."""

    modules: list[Module]
    home: list[int]
    place: list[int]
    by_path: dict[str, int]

    def chain(self, node: int) -> list[int]:
        """The groups a node is in, innermost first, the root last."""
        found, at = [], self.home[node]
        while at != ROOT:
            found.append(at)
            at = self.modules[at].parent
        found.append(ROOT)
        return found


def grow(scene: Scene) -> Tree:
    """The tree of a scene, without nets. A node whose path is also that of a group lies in this group."""
    prefixes: set[str] = set()
    for node in scene.nodes:
        path = node.path
        cut = path.rfind(".")
        while cut >= 0 and (prefix := path[:cut]) not in prefixes:
            prefixes.add(prefix)
            cut = prefix.rfind(".")
    root = Module("", "", ROOT, 0, 0)
    tree = Tree([root], [], [], {"": ROOT})
    for i, node in enumerate(scene.nodes):
        path = node.path if node.path in prefixes else node.path.rpartition(".")[0]
        home = tree.by_path.get(path)
        if home is None:
            home = _open(tree, path)
        children = tree.modules[home].children
        tree.home.append(home)
        tree.place.append(len(children))
        children.append(i)
    return tree


def _open(tree: Tree, path: str) -> int:
    missing = []
    while path not in tree.by_path:
        missing.append(path)
        path = path.rpartition(".")[0]
    at = tree.by_path[path]
    for path in reversed(missing):
        parent = tree.modules[at]
        place = len(tree.modules)
        tree.modules.append(Module(path, path.rpartition(".")[2], at, len(parent.children), parent.depth + 1))
        parent.children.append(~place)
        tree.by_path[path] = at = place
    return at


def wire(scene: Scene, tree: Tree) -> None:
    """Fill in entries, exits and nets of every group. O(edges · depth)."""
    modules = tree.modules
    nets: list[dict[int, Net]] = [{} for _ in modules]
    ends: list[dict[tuple[int, int], int]] = [{} for _ in modules]
    entries: list[dict[int, int]] = [{} for _ in modules]
    exits: list[dict[int, None]] = [{} for _ in modules]

    def join(group: int, node: int, child: int, edge: int) -> None:
        net = nets[group].get(node)
        if net is None:
            net = nets[group][node] = Net(node)
        place = ends[group].get((node, child))
        if place is None:
            ends[group][node, child] = len(net.targets)
            net.targets.append((child, 0))
            net.edges.append([edge])
        else:
            net.edges[place].append(edge)

    for number, (src, _, dst, _, _) in enumerate(scene.edges):
        up, down = tree.home[src], tree.home[dst]
        up_child, down_child = tree.place[src], tree.place[dst]
        below: list[tuple[int, int]] = []
        while up != down:
            if modules[up].depth >= modules[down].depth:
                exits[up][src] = None
                join(up, src, OUTSIDE, number)
                up, up_child = modules[up].parent, modules[up].place
            else:
                below.append((down, down_child))
                down, down_child = modules[down].parent, modules[down].place
        if up_child != down_child:
            join(up, src, down_child, number)
        for group, child in below:
            entries[group].setdefault(src, len(entries[group]))
            join(group, src, child, number)
    for group, module in enumerate(modules):
        module.entries, module.exits = list(entries[group]), sorted(exits[group])
    exit_slot = [{node: k for k, node in enumerate(m.exits)} for m in modules]
    for group, module in enumerate(modules):
        _finish(tree, group, list(nets[group].values()), entries, exit_slot)
        module.nets.sort(key=lambda n: (n.child, n.slot))


def _finish(
    tree: Tree, group: int, nets: list[Net], entries: list[dict[int, int]], exits: list[dict[int, int]]
) -> None:
    """Name the source child of each net, and the slots of children that are groups themselves."""
    module = tree.modules[group]
    for net in nets:
        slot = entries[group].get(net.node)
        if slot is not None:
            net.slot = slot
        else:
            at, net.child = tree.home[net.node], tree.place[net.node]
            while at != group:
                net.slot, net.child = exits[at][net.node], tree.modules[at].place
                at = tree.modules[at].parent
        for k, (child, _) in enumerate(net.targets):
            if child == OUTSIDE:
                net.targets[k] = (child, exits[group][net.node])
            elif (inner := module.children[child]) < 0:
                net.targets[k] = (child, entries[~inner][net.node])
        order = sorted(range(len(net.targets)), key=lambda k: (net.targets[k][0] == OUTSIDE, net.targets[k]))
        net.targets, net.edges = [net.targets[k] for k in order], [net.edges[k] for k in order]
    module.nets = nets


def digest(scene: Scene, tree: Tree, labels: list[tuple[str, ...]]) -> None:
    """Hash every group, children first. `labels` are the texts of the nodes."""
    for module in reversed(tree.modules):
        parts: list[object] = [len(module.entries), len(module.exits)]
        for child in module.children:
            if child < 0:
                inner = tree.modules[~child]
                parts.append((inner.segment, inner.hash))
            else:
                node = scene.nodes[child]
                attrs = [(k, v) for k, v in node.attrs.items() if k != "key"]  # a key holds the full path
                if node.attrs.get("axis") == 1 and str(node.attrs.get("start")) == module.segment:
                    attrs.remove(("start", node.attrs["start"]))  # each step of a loop reads its own step of a sequence
                parts.append((labels[child], node.path.rpartition(".")[2], node.op, attrs, node.mark))
        parts.extend((n.child, n.slot, n.targets) for n in module.nets)
        module.hash = blake2b(repr(parts).encode("utf-8", "surrogatepass"), digest_size=16).digest()
