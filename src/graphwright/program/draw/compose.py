"""Puts the steps together: scene, tree, open groups, arrangement of each group, pixels of open ones, boxes, edges."""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass, field
from math import prod
from typing import TYPE_CHECKING

from graphwright.program.draw.arrange import Arrangement, Inner, arrange
from graphwright.program.draw.diff import CHANGED, union
from graphwright.program.draw.expand import View, view
from graphwright.program.draw.flow import MIXED, family, kinds
from graphwright.program.draw.labels import box_size, clean, group_lines, name_of, short, text_width
from graphwright.program.draw.layout import BUDGET, Box, Edge, Group, Layout
from graphwright.program.draw.place import PIN, Placed, Points, Size, place, straighten
from graphwright.program.draw.scene import SceneEdge, SceneNode, feedback, inside_readers, read
from graphwright.program.draw.tree import OUTSIDE, ROOT
from graphwright.program.kinds import KINDS

if TYPE_CHECKING:
    from graphwright.program.program import Program


@dataclass(slots=True)
class Composition:
    """Everything that a picture is made of; `layout()` gives the boxes and edges of its open groups.

    Attributes:
        view: scene, tree and open groups.
        kinds: kind of each edge of the scene.
        arrangements: per group; equal groups share one.
        lines: per group, its label when it is closed.
        marks: per group, what the difference of two programs does to it.
        roomy: nodes whose shape needs more room around its text than a box.
    """

    view: View
    kinds: list[str]
    arrangements: list[Arrangement]
    lines: list[tuple[str, ...]]
    marks: list[str]
    members: list[list[int]]
    arranged: int
    roomy: set[int] = field(default_factory=set)
    _placed: dict[int, Placed] = field(default_factory=dict)

    # -- sizes -------------------------------------------------------------------------------------------------------
    def node_size(self, node: int, pins: int = 0) -> Size:
        """Size of a node's box, wide enough for its pins."""
        w, h = box_size(self.view.labels[node], self.view.scene.nodes[node].junction)
        if node in self.roomy:
            w, h = w * 7 // 10 * 2, h * 3 // 4 * 2
        w = max(w, (pins + 2) * PIN)
        return Size(w // 2, w // 2, h)

    def closed_size(self, group: int) -> Size:
        """Size of a group drawn as one box."""
        a = self.arrangements[group]
        w, h = box_size(self.lines[group], junction=False)
        half = max([w // 2, *(abs(s) * PIN + PIN for s in (*a.entry_steps, *a.exit_steps))])
        return Size(half, half, h, [s * PIN for s in a.entry_steps], [s * PIN for s in a.exit_steps])

    def title(self, group: int) -> str:
        """Text on the frame of an open group."""
        module = self.view.tree.modules[group]
        repeat = self.view.scene.repeats.get(module.path, 1)
        return short(name_of(module.path)) + (f" × {repeat}" if repeat > 1 else "")

    def sizes(self, group: int) -> list[Size]:
        """Sizes of a group's children, as they are drawn now."""
        found = []
        for k, child in enumerate(self.view.tree.modules[group].children):
            if child >= 0:
                found.append(self.node_size(child, self.arrangements[group].pins[k]))
            elif ~child in self._placed:
                found.append(self._placed[~child].size)
            else:
                found.append(self.closed_size(~child))
        return found

    def _place_all(self) -> None:
        modules, top = self.view.tree.modules, self.view.shown_as()
        stamped: dict[tuple, Placed] = {}
        number: dict[int, int] = {}
        for at in range(len(modules) - 1, -1, -1):
            if top[at] >= 0:
                continue
            module = modules[at]
            title = text_width(self.title(at)) if at != ROOT else 0
            inside = tuple(number.get(~c, self.lines[~c]) for c in module.children if c < 0)
            key = (module.hash, title, inside)
            if key not in stamped:
                stamped[key] = place(self.arrangements[at], module.nets, self.sizes(at), title)
            self._placed[at] = stamped[key]
            number[at] = list(stamped).index(key) if len(stamped) < 64 else id(stamped[key])

    # -- the layout --------------------------------------------------------------------------------------------------
    def layout(self) -> Layout:
        """Boxes, edges and frames in whole pixels."""
        self._place_all()
        tree = self.view.tree
        root = self._placed[ROOT].size
        origin: dict[int, tuple[int, int]] = {ROOT: (root.left, 0)}
        boxes: list[tuple[int, Box]] = []
        groups: dict[str, Group] = {}
        for at in sorted(self._placed):  # parents first
            module, placed, arrangement = tree.modules[at], self._placed[at], self.arrangements[at]
            x0, y0 = origin[at]
            for k, child in enumerate(module.children):
                x, y, rank = x0 + placed.middles[k], y0 + placed.tops[k], arrangement.rank[k]
                if child >= 0:
                    size = self.node_size(child, arrangement.pins[k])
                    boxes.append((child, self._node_box(child, x, y, size, rank, module.path)))
                elif ~child in self._placed:
                    origin[~child] = (x, y)
                    groups[tree.modules[~child].path] = self._frame(~child, x, y, rank, module.path)
                else:
                    first = self.members[~child][0]
                    boxes.append((first, self._group_box(~child, x, y, rank, module.path)))
        boxes.sort(key=lambda item: item[0])
        return Layout(
            {box.path: box for _, box in boxes},
            tuple(self._edges(origin)),
            groups,
            root.left + root.right,
            root.height,
            self.view.closed,
            self.arranged,
        )

    def _node_box(self, node: int, x: int, y: int, size: Size, rank: int, parent: str) -> Box:
        n = self.view.scene.nodes[node]
        kind = "junction" if n.junction else n.op if n.op in KINDS else "op"
        return Box(
            n.path,
            kind,
            family(n),
            self.view.labels[node],
            tip(n),
            x - size.left,
            y,
            size.left + size.right,
            size.height,
            rank,
            parent,
            n.members,
            n.mark,
        )

    def _group_box(self, group: int, x: int, y: int, rank: int, parent: str) -> Box:
        path, size = self.view.tree.modules[group].path, self.closed_size(group)
        nodes = self.view.scene.nodes
        members = tuple(m for i in self.members[group] for m in nodes[i].members)
        return Box(
            path,
            "group",
            "group",
            self.lines[group],
            "\n".join((clean(path), *self.lines[group][1:])),
            x - size.left,
            y,
            size.left + size.right,
            size.height,
            rank,
            parent,
            members,
            self.marks[group],
            self.view.scene.repeats.get(path, 1),
        )

    def _frame(self, group: int, x: int, y: int, rank: int, parent: str) -> Group:
        path, size = self.view.tree.modules[group].path, self._placed[group].size
        return Group(
            path,
            self.title(group),
            x - size.left,
            y,
            size.left + size.right,
            size.height,
            rank,
            parent,
            self.view.scene.repeats.get(path, 1),
        )

    # -- edges -------------------------------------------------------------------------------------------------------
    def _edges(self, origin: dict[int, tuple[int, int]]) -> list[Edge]:
        scene, tree = self.view.scene, self.view.tree
        shown = self.view.visible()
        merged: dict[tuple[int, int], list[int]] = {}
        for number, edge in enumerate(scene.edges):
            a, b = shown[edge.src], shown[edge.dst]
            if a != b:
                merged.setdefault((a, b), []).append(number)
        wires = {
            at: {
                (net.node, t): (k, w)
                for k, (net, t, w) in enumerate(
                    (tree.modules[at].nets[wire.net], tree.modules[at].nets[wire.net].targets[wire.target][0], wire)
                    for wire in self.arrangements[at].wires
                )
            }
            for at in self._placed
        }
        found = []
        for (a, b), numbers in merged.items():
            some = [scene.edges[n] for n in numbers]
            points, back = self._route(some[0], a, b, wires, origin)
            all_kinds = {self.kinds[n] for n in numbers}
            kind = all_kinds.pop() if len(all_kinds) == 1 else MIXED
            ports = tuple((e.src_port, e.dst_port) for e in some)
            found.append(
                Edge(
                    self._path(a),
                    self._path(b),
                    kind,
                    len(some),
                    ports,
                    tuple(points),
                    back,
                    joint_mark([e.mark for e in some]),
                )
            )
        return sorted(found, key=lambda e: (e.src, e.dst))

    def _path(self, shown: int) -> str:
        return self.view.scene.nodes[shown].path if shown >= 0 else self.view.tree.modules[~shown].path

    def _route(
        self,
        edge: SceneEdge,
        a: int,
        b: int,
        wires: dict[int, dict],
        origin: dict[int, tuple[int, int]],
    ) -> tuple[Points, bool]:
        """Corners of an edge: out of the groups around its source, across, and into those around its target."""
        tree = self.view.tree
        up = tree.home[a] if a >= 0 else tree.modules[~a].parent
        down = tree.home[b] if b >= 0 else tree.modules[~b].parent
        child = tree.place[b] if b >= 0 else tree.modules[~b].place
        legs, tail = [], []
        while up != down:
            if tree.modules[up].depth >= tree.modules[down].depth:
                legs.append((up, OUTSIDE))
                up = tree.modules[up].parent
            else:
                tail.append((down, child))
                down, child = tree.modules[down].parent, tree.modules[down].place
        legs.append((up, child))
        back = wires[up][edge.src, child][1].back
        points: Points = []
        for group, target in (*legs, *reversed(tail)):
            x0, y0 = origin[group]
            points += [(x0 + x, y0 + y) for x, y in self._placed[group].wires[wires[group][edge.src, target][0]]]
        return straighten(points), back


def joint_mark(marks: list[str]) -> str:
    """The mark that all have; `changed` if only some do."""
    first = marks[0]
    if all(m == first for m in marks):
        return first
    return CHANGED


def tip(node: SceneNode) -> str:
    """Path, op, results, attributes and weights of a node, a line each."""
    lines = [clean(node.path), clean(node.op)]
    lines += [f"result {spec!r}" for spec in node.specs]
    lines += [clean(f"{name} = {value}") for name, value in node.attrs.items()]
    lines += [clean(f"{name}: {spec}, key {key}") for name, spec, key in node.weights]
    if len(node.members) > 1:
        lines.append(f"stands for {len(node.members)} nodes")
    return "\n".join(line if len(line) <= 8192 else line[:8192] + "…" for line in lines)


def compose(
    program: Program,
    expanded: Set[str] | None = None,
    budget: int = BUDGET,
    *,
    level: int | None = None,
    fold: bool = False,
    params: bool = False,
    diff: Program | None = None,
) -> Composition:
    """Read and arrange a program; see `layout` for the arguments."""
    scene = read(program) if diff is None else union(program, diff)
    if not params:
        scene = feedback(inside_readers(scene))
    chosen = view(scene, expanded, level, fold, budget)
    scene, tree = chosen.scene, chosen.tree
    members: list[list[int]] = [[] for _ in tree.modules]
    for i in range(len(scene.nodes)):
        for group in tree.chain(i):
            members[group].append(i)
    arrangements, arranged = _arrange_all(chosen)
    lines = [_group_lines(chosen, at, members[at]) for at in range(len(tree.modules))]
    marks = _marks(chosen, members)
    return Composition(chosen, kinds(scene), arrangements, lines, marks, members, arranged)


def _arrange_all(chosen: View) -> tuple[list[Arrangement], int]:
    modules = chosen.tree.modules
    known: dict[bytes, Arrangement] = {}
    found: dict[int, Arrangement] = {}
    for at in range(len(modules) - 1, -1, -1):
        module = modules[at]
        if module.hash not in known:
            inner = [None if c >= 0 else _pins(found[~c]) for c in module.children]
            known[module.hash] = arrange(module.nets, inner, len(module.entries), len(module.exits))
        found[at] = known[module.hash]
    return [found[at] for at in range(len(modules))], len(known)


def _pins(a: Arrangement) -> Inner:
    return Inner(a.entry_steps, a.exit_steps, a.main)


def _group_lines(chosen: View, at: int, members: list[int]) -> tuple[str, ...]:
    scene, module = chosen.scene, chosen.tree.modules[at]
    specs = [scene.nodes[i].specs[0] for i in module.exits if scene.nodes[i].specs]
    inside = {key: spec for i in members for _, spec, key in scene.nodes[i].weights}  # a tied weight is one
    numbers = sum(prod(d for d in spec.shape if isinstance(d, int)) for spec in inside.values())
    return group_lines(module.path, scene.repeats.get(module.path, 1), len(members), numbers, [repr(s) for s in specs])


def _marks(chosen: View, members: list[list[int]]) -> list[str]:
    scene, tree = chosen.scene, chosen.tree
    inside: list[set[str]] = [{scene.nodes[i].mark for i in some} for some in members]
    for edge in scene.edges:
        if edge.mark:
            ups = set(tree.chain(edge.src))
            for group in tree.chain(edge.dst):
                if group in ups:
                    inside[group].add(edge.mark)
    return [next(iter(found)) if len(found) == 1 else CHANGED if found - {""} else "" for found in inside]
