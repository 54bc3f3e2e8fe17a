"""`layout(program)`: the position of every box, frame and edge of a picture in whole pixels; pure and deterministic.

The row of a box is the length of the longest path to it, the residual trunk has its own lane, and equal modules share
an arrangement. The inside of a group depends on the group alone, so an edit moves nothing inside other groups.
"""

from __future__ import annotations

from collections.abc import Sequence, Set
from dataclasses import dataclass, field
from math import prod
from typing import TYPE_CHECKING, TypedDict, Unpack

from graphwright.errors import check_type
from graphwright.graph import NodeId
from graphwright.ops import result_names
from graphwright.program.draw.arrange import IN, LANE, TRACK, arrange
from graphwright.program.draw.groups import OUTSIDE, ROOT, view
from graphwright.program.draw.scene import (
    CHANGED,
    MIXED,
    SceneEdge,
    family,
    feedback,
    inside_readers,
    kinds,
    read,
    union,
)
from graphwright.program.draw.shapes import clean
from graphwright.program.draw.style import box_size, group_lines, text_width
from graphwright.program.kinds import KINDS
from graphwright.program.op_graph import OpGraph
from graphwright.signatures import keywords

if TYPE_CHECKING:
    from graphwright.program.draw.arrange import Arrangement, XPosition
    from graphwright.program.draw.groups import GroupTree, ModuleGroup, SceneView
    from graphwright.program.draw.scene import SceneNode
    from graphwright.program.program import Program

BUDGET = 2000  # default limit on the boxes, frames and edges of a picture


@dataclass(frozen=True, slots=True)
class Box:
    """The box of a picture for a node or for a closed group."""

    path: str  # path of the node or group; a range such as `layers.[0-21]` stands for a folded run
    kind: str  # `group`, `junction`, `op`, or the kind of the node (`input`, `param`, `const`, `state`, `write`)
    family: str  # the colour family; see `scene.family`
    lines: tuple[str, ...]  # the label
    tip: str  # further text, shown while the pointer is over the box
    x: int  # left
    y: int  # top
    w: int
    h: int
    rank: int  # row within the parent
    parent: str  # path of the group around the box; empty for none
    members: tuple[NodeId, ...]  # the nodes of the program that the box stands for
    mark: str = ""  # `added`, `removed`, `changed` or empty
    repeat: int = 1  # number of equal groups that the box stands for

    @property
    def target(self) -> str:
        """The name of the box in an `Overlay`: its path. A group's path gets a final dot, to differ from node paths."""
        return f"{self.path}." if self.kind == "group" else self.path


@dataclass(frozen=True, slots=True)
class DrawnEdge:
    """A line of a picture, which stands for all edges from one box to another."""

    src: str  # path of the box
    dst: str
    kind: str  # `data`, `attention`, `residual` or `state`; `data` if the edges differ
    count: int  # number of edges
    ports: tuple[tuple[str, int], ...]  # (name of the source's result, port of the target) of each edge
    points: tuple[tuple[int, int], ...]  # corners of the line, from the bottom of the source to the top of the target
    back: bool = False  # whether the line points up, because two closed groups read each other
    mark: str = ""  # `added`, `removed`, `changed` (some of the edges) or empty


@dataclass(frozen=True, slots=True)
class Group:
    """The frame of an open group: `rank` is its row within the parent; it stands for `repeat` equal groups."""

    path: str
    title: str
    x: int
    y: int
    w: int
    h: int
    rank: int
    parent: str
    repeat: int = 1


@dataclass(frozen=True, slots=True)
class PictureLayout:
    """The positions of everything in a picture."""

    boxes: dict[str, Box]  # by path; boxes in order of creation, groups with parents before children
    edges: tuple[DrawnEdge, ...]  # sorted by source and target
    groups: dict[str, Group]
    width: int  # of the whole picture
    height: int
    collapsed: tuple[str, ...]  # groups and runs that were closed, folded or bundled because of the budget
    arrangement_count: int = 0  # number of different arrangements; equal groups share one

    @property
    def elements(self) -> int:
        """The number of boxes, frames and edges, as the budget counts them."""
        return len(self.boxes) + len(self.groups) + len(self.edges)


class PictureKeywords(TypedDict, total=False):
    """The keyword arguments of `compose`, which all pictures have."""

    expanded: Set[str] | None
    level: int | None
    budget: int
    fold: bool
    params: bool
    diff: Program | None


PAD, TITLE, GAP, STEP, PIN = 16, 22, 24, 8, 12
"""Pixels: margin around the children, height of a group's title, gap between boxes, between tracks, between pins."""

Points = list[tuple[int, int]]


@dataclass(slots=True)
class ChildExtent:
    """The pixels of a box or frame left and right of the middle of its lane (column), its height, and its pins.

    A pin is the point where a wire meets the box. `pins` are the offsets of a group's input and output pins from the
    middle; None for a node: its input pins are multiples of PIN / 2 from the middle, its output pin is in the middle.
    """

    left: int
    right: int
    height: int
    pins: tuple[Sequence[int], Sequence[int]] | None = None

    def pin(self, x: XPosition) -> int:
        """Return the horizontal offset of a pin, the point where a wire meets the box, from the middle."""
        if self.pins is not None:
            return self.pins[x.kind][x.b]
        return x.b * PIN // 2 if x.kind == IN else 0

    def area(self, x: int, y: int) -> tuple[int, int, int, int]:
        """Return left, top, width and height of the child if the middle of its lane is at x and its top at y."""
        return x - self.left, y, self.left + self.right, self.height


@dataclass(slots=True)
class PlacedGroup:
    """A group in pixels: its extent, x of the middle and y of the top of each child, and the points of each wire."""

    size: ChildExtent
    middles: list[int]
    tops: list[int]
    wires: list[Points]


def position_children(group: ModuleGroup, sizes: Sequence[ChildExtent], title: int) -> PlacedGroup:
    """Compute the positions of a group's children from their extents; `title`: width of its title, 0 without one."""
    arrangement = group.arrangement
    lane_x, track_x, left, right = _columns(arrangement, sizes)
    row_y, gutter_y, height = _rows(arrangement, sizes, TITLE if title else 0)
    left, right = left + PAD, right + PAD
    right = max(right, title + 2 * PAD - left)
    middles = [lane_x[k] for k in arrangement.lane]
    tops = [row_y[r] for r in arrangement.rank]

    def across(x: XPosition) -> int:
        if x.kind == LANE:
            return lane_x.get(x.a, 0)
        if x.kind == TRACK:
            return track_x[x.a, x.b]
        return middles[x.a] + sizes[x.a].pin(x)

    wires = []
    for wire in arrangement.wires:
        net = group.nets[wire.net]
        target = net.targets[wire.target][0]
        y = 0 if net.child == OUTSIDE else tops[net.child] + sizes[net.child].height
        end = height if target == OUTSIDE else tops[target]
        points = [(across(wire.xs[0]), y)]
        for x, (gutter, track) in zip(wire.xs[1:], wire.bends, strict=True):
            level = gutter_y[gutter + 1] + track * STEP
            points += [(points[-1][0], level), (across(x), level)]
        points.append((points[-1][0], end))
        wires.append(straighten(points))
    came, went = ([across(x) for x in end] for end in arrangement.ends)
    return PlacedGroup(ChildExtent(left, right, height, (came, went)), middles, tops, wires)


def straighten(points: Points) -> Points:
    """Remove repeated points, and points where a line of horizontal and vertical segments does not turn."""
    kept: Points = []
    for x, y in points:
        if kept and kept[-1] == (x, y):
            continue
        if len(kept) > 1 and ((kept[-2][0] == kept[-1][0] == x) or (kept[-2][1] == kept[-1][1] == y)):
            kept[-1] = (x, y)
        else:
            kept.append((x, y))
    return kept


def _columns(
    a: Arrangement, sizes: Sequence[ChildExtent]
) -> tuple[dict[int, int], dict[tuple[int, int], int], int, int]:
    """Return x of each lane's middle and of each track, and the extents left and right of the middle of lane 0."""
    wide: dict[int, tuple[int, int]] = {0: (0, 0)}
    for lane, size in zip(a.lane, sizes, strict=True):
        left, right = wide.get(lane, (0, 0))
        wide[lane] = max(left, size.left), max(right, size.right)
    lane_x, track_x = {0: 0}, {}
    reach = [wide[0][0], wide[0][1]]
    for side, sign in ((1, 1), (0, -1)):
        cursor = reach[side]
        last = max([sign * lane for lane in wide] + [sign * c + (sign > 0) for c in a.channels])
        for k in range(1, last + 1):
            lane, channel = sign * k, k - 1 if sign > 0 else -k
            tracks = a.channels.get(channel, 0)
            for t in range(tracks):
                track_x[channel, t] = sign * (cursor + STEP * t + PIN)
            used = wide.get(lane)
            cursor += (2 * PIN if used else PIN // 2) + STEP * tracks if tracks else GAP if used else 0
            if used:
                lane_x[lane] = sign * (cursor + used[1 - side])
                cursor += used[0] + used[1]
        reach[side] = cursor
    return lane_x, track_x, reach[0], reach[1]


def _rows(a: Arrangement, sizes: Sequence[ChildExtent], head: int) -> tuple[list[int], list[int], int]:
    """Compute the top of each row, the y of the first line in each gutter (gap between rows), and the total height."""
    heights = [0] * a.rows
    for row, size in zip(a.rank, sizes, strict=True):
        heights[row] = max(heights[row], size.height)
    row_y, gutter_y = [], [head + STEP]
    y = head + (GAP - STEP if not a.gutters[0] else 2 * STEP + STEP * a.gutters[0])
    for row, tall in enumerate(heights):
        row_y.append(y)
        y += tall
        gutter_y.append(y + STEP)
        tracks = a.gutters[row + 1]
        y += max(GAP, 2 * STEP + STEP * tracks) if row + 1 < a.rows else PAD + STEP * tracks
    return row_y, gutter_y, y


@dataclass(slots=True)
class Composition:
    """Everything that a picture is made of; `layout()` computes the boxes and edges of its open groups."""

    view: SceneView  # scene, tree and open groups
    kinds: list[str]  # kind of each edge of the scene
    arrangement_count: int  # number of different arrangements
    roomy: set[int] = field(default_factory=set)  # nodes whose shape needs more room around its text than a box does
    _placed: dict[int, PlacedGroup] = field(default_factory=dict)

    # -- sizes -------------------------------------------------------------------------------------------------------
    def node_size(self, node: int, pins: int = 0) -> ChildExtent:
        """Compute the extent of a node's box, wide enough for pins up to `pins` · PIN / 2 from the middle."""
        w, h = box_size(self.view.labels[node], self.view.scene.nodes[node].junction)
        if node in self.roomy:
            w, h = w * 7 // 10 * 2, h * 3 // 4 * 2
        w = max(w, (pins + 2) * PIN)
        return ChildExtent(w // 2, w // 2, h)

    def closed_size(self, group: ModuleGroup) -> ChildExtent:
        """Compute the extent of a closed group, drawn as one box."""
        w, h = box_size(group.lines, junction=False)
        came, went = ([s * PIN for s in side] for side in group.arrangement.steps)
        half = max([w // 2, *(abs(x) + PIN for x in (*came, *went))])
        return ChildExtent(half, half, h, (came, went))

    def sizes(self, group: ModuleGroup) -> list[ChildExtent]:
        """Return the extents of a group's children, open or closed as they are now."""
        found = []
        for k, child in enumerate(group.children):
            if child >= 0:
                found.append(self.node_size(child, group.arrangement.pins[k]))
            elif ~child in self._placed:
                found.append(self._placed[~child].size)
            else:
                found.append(self.closed_size(self.view.tree.modules[~child]))
        return found

    def _position_all(self) -> None:
        modules, top = self.view.tree.modules, self.view.shown_as()
        stamped: dict[tuple, PlacedGroup] = {}
        for at in range(len(modules) - 1, -1, -1):
            if top[at] < 0:
                group = modules[at]
                title = text_width(group.title) if at != ROOT else 0
                inner = [~c for c in group.children if c < 0]
                inside = (id(self._placed[g]) if g in self._placed else modules[g].lines for g in inner)
                key = (group.hash, title, *inside)
                if key not in stamped:
                    stamped[key] = position_children(group, self.sizes(group), title)
                self._placed[at] = stamped[key]

    # -- the layout --------------------------------------------------------------------------------------------------
    def layout(self) -> PictureLayout:
        """Compute boxes, edges and frames in whole pixels."""
        self._position_all()
        tree = self.view.tree
        root = self._placed[ROOT].size
        origin: dict[int, tuple[int, int]] = {ROOT: (root.left, 0)}
        boxes: list[tuple[int, Box]] = []
        groups: dict[str, Group] = {}
        for at in sorted(self._placed):  # parents first
            group, placed = tree.modules[at], self._placed[at]
            x0, y0 = origin[at]
            for k, child in enumerate(group.children):
                x, y, rank = x0 + placed.middles[k], y0 + placed.tops[k], group.arrangement.rank[k]
                if child >= 0:
                    boxes.append((child, self.node_box(child, x, y, group.arrangement.pins[k], rank, group.path)))
                    continue
                inner = tree.modules[~child]
                if ~child in self._placed:
                    origin[~child] = (x, y)
                    area = self._placed[~child].size.area(x, y)
                    groups[inner.path] = Group(inner.path, inner.title, *area, rank, group.path, inner.repeat)
                else:
                    boxes.append((inner.members[0], self.group_box(inner, x, y, rank, group.path)))
        boxes.sort(key=lambda item: item[0])
        drawn = {box.path: box for _, box in boxes}
        width, edges, closed = root.left + root.right, tuple(self._edges(origin)), self.view.closed
        return PictureLayout(drawn, edges, groups, width, root.height, closed, self.arrangement_count)

    def node_box(self, node: int, x: int = 0, y: int = 0, pins: int = 0, rank: int = 0, parent: str = "") -> Box:
        """Make the box of a node whose middle is at x and whose top is at y."""
        n, area = self.view.scene.nodes[node], self.node_size(node, pins).area(x, y)
        kind = "junction" if n.junction else n.op if n.op in KINDS else "op"
        return Box(n.path, kind, family(n), self.view.labels[node], tip(n), *area, rank, parent, n.members, n.mark)

    def group_box(self, group: ModuleGroup, x: int = 0, y: int = 0, rank: int = 0, parent: str = "") -> Box:
        """Make the box of a closed group whose middle is at x and whose top is at y."""
        members = tuple(m for i in group.members for m in self.view.scene.nodes[i].members)
        shown, area = "\n".join((clean(group.path), *group.lines[1:])), self.closed_size(group).area(x, y)
        return Box(group.path, "group", "group", group.lines, shown, *area, rank, parent, members, group.mark,
                   group.repeat)  # fmt: skip

    # -- edges -------------------------------------------------------------------------------------------------------
    def _edges(self, origin: dict[int, tuple[int, int]]) -> list[DrawnEdge]:
        scene, tree = self.view.scene, self.view.tree
        shown = self.view.visible()
        merged: dict[tuple[int, int], list[int]] = {}
        for number, edge in enumerate(scene.edges):
            a, b = shown[edge.src], shown[edge.dst]
            if a != b:
                merged.setdefault((a, b), []).append(number)
        wires: dict[int, dict[tuple[int, int], int]] = {}  # group -> (source, target child) -> number of the wire
        for at in self._placed:
            group = tree.modules[at]
            nets = [(group.nets[wire.net], wire.target) for wire in group.arrangement.wires]
            wires[at] = {(net.node, net.targets[target][0]): k for k, (net, target) in enumerate(nets)}
        found = []
        for (a, b), numbers in merged.items():
            some = [scene.edges[n] for n in numbers]
            legs, left = tree.legs(a, b)
            route = [(group, wires[group][some[0].src, child]) for group, child in legs]
            points: Points = []
            for group, wire in route:
                x0, y0 = origin[group]
                points += [(x0 + x, y0 + y) for x, y in self._placed[group].wires[wire]]
            meeting, wire = route[left]
            back = tree.modules[meeting].arrangement.wires[wire].back
            kind = common([self.kinds[n] for n in numbers], MIXED)
            mark = common([e.mark for e in some], CHANGED)
            ports, corners = tuple((self._result(e), e.dst_port) for e in some), tuple(straighten(points))
            found.append(DrawnEdge(self._path(a), self._path(b), kind, len(some), ports, corners, back, mark))
        return sorted(found, key=lambda e: (e.src, e.dst))

    def _result(self, edge: SceneEdge) -> str:
        source = self.view.scene.nodes[edge.src]
        names = result_names(source.op, len(source.specs))
        return names[edge.src_port] if edge.src_port < len(names) else str(edge.src_port)

    def _path(self, shown: int) -> str:
        return self.view.scene.nodes[shown].path if shown >= 0 else self.view.tree.modules[~shown].path


def common(values: Sequence[str], otherwise: str) -> str:
    """Return the common value if all values are equal, else `otherwise`."""
    return values[0] if len(set(values)) == 1 else otherwise


def tip(node: SceneNode) -> str:
    """Describe a node for its tooltip: path, op, results, attributes and weights, a line each."""
    lines = [clean(node.path), clean(node.op)]
    names = result_names(node.op, len(node.specs))
    lines += [f"result {name} {spec!r}" if names[1:] else f"result {spec!r}"
              for name, spec in zip(names, node.specs, strict=True)]  # fmt: skip
    lines += [clean(f"{name} = {value}") for name, value in node.attrs.items()]
    lines += [clean(f"{name}: {spec}, key {key}") for name, spec, key in node.weights]
    if len(node.members) > 1:
        lines.append(f"stands for {len(node.members)} nodes")
    return "\n".join(line if len(line) <= 8192 else line[:8192] + "…" for line in lines)


def compose(
    program: Program, *, expanded: Set[str] | None = None, level: int | None = None, budget: int = BUDGET,
    fold: bool = False, params: bool = False, diff: Program | None = None,
) -> Composition:  # fmt: skip
    """Read and arrange a program.

    Dotted names divide the nodes into groups. An open group is drawn as a frame around its contents, a closed one as a
    single box. By default all groups of a small program are open; in a larger one repeated modules, such as the blocks
    of a decoder, are closed.

    Args:
        expanded: paths of the groups to open; a group opens only if the groups around it are open.
        level: instead of `expanded`: open every group above this depth.
        budget: maximum number of boxes, frames and edges. Beyond it the deepest groups are closed, runs of equal groups
            are folded, and nodes outside of groups are bundled.
        fold: draw runs of equal numbered groups once, as `layers.[0-21]`; by default only runs of more than 64.
        params: draw params and consts as boxes of their own, not inside the nodes that read them.
        diff: an earlier program to compare with; its removed nodes and edges are drawn too, and differences are marked.
    Raises: UsageError for a budget below 16, or for both `expanded` and `level`.
    """
    check_type("params", params, bool, "True or False")
    if diff is not None:
        check_type("diff", diff, OpGraph, "a Program, such as program.at(-1)")
    scene = read(program) if diff is None else union(program, diff)
    if not params:
        scene = feedback(inside_readers(scene))
    chosen = view(scene, expanded, level, fold, budget)
    scene, tree = chosen.scene, chosen.tree
    arrangement_count = _arrange_all(tree)
    inside: list[set[str]] = [{scene.nodes[i].mark for i in group.members} for group in tree.modules]
    for edge in scene.edges:
        if edge.mark:
            for at in set(tree.chain(edge.src)).intersection(tree.chain(edge.dst)):
                inside[at].add(edge.mark)
    for group, marks in zip(tree.modules, inside, strict=True):
        group.mark = common([*marks], CHANGED if marks - {""} else "")
        ends = [i for i in group.members if scene.nodes[i].outputs]
        specs = [repr(scene.nodes[i].specs[0]) for i in dict.fromkeys((*group.exits, *ends)) if scene.nodes[i].specs]
        weights = {key: spec for i in group.members for _, spec, key in scene.nodes[i].weights}  # a tied one once
        numbers = sum(prod(d for d in spec.shape if isinstance(d, int)) for spec in weights.values())
        outputs = [name for i in ends for name in scene.nodes[i].outputs]
        group.lines = group_lines(group.title, len(group.members), numbers, specs, outputs)
    return Composition(chosen, kinds(scene), arrangement_count)


@keywords(compose)
def layout(program: Program, **options: Unpack[PictureKeywords]) -> PictureLayout:
    """Compute the layout of a program; see `compose` for the options."""
    return compose(program, **options).layout()


def _arrange_all(tree: GroupTree) -> int:
    known: dict[bytes, Arrangement] = {}
    for group in reversed(tree.modules):
        if group.hash not in known:
            inner = [None if c >= 0 else tree.modules[~c].arrangement for c in group.children]
            known[group.hash] = arrange(group.nets, inner, len(group.entries), len(group.exits))
        group.arrangement = known[group.hash]
    return len(known)
