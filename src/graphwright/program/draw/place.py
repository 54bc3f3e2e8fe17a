"""From an arrangement and the children's sizes to pixels, relative to the middle of the group's lane 0 and its top.

`page.js` does the same sums when a reader opens or closes a group; change both together.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from graphwright.program.draw.arrange import IN, LANE, TRACK, Arrangement, X
from graphwright.program.draw.tree import OUTSIDE, Net

PAD, TITLE, GAP, STEP, PIN = 16, 22, 24, 8, 12
"""Pixels: around the children, for a group's title, between boxes, between tracks, between pins."""

Points = list[tuple[int, int]]


@dataclass(slots=True)
class Size:
    """How far a child reaches left and right of the middle of its lane, its height, and where its pins are.

    `ins` and `outs` are None for a node: its pins are steps of PIN / 2 from the middle, its result leaves there.
    """

    left: int
    right: int
    height: int
    ins: Sequence[int] | None = None
    outs: Sequence[int] | None = None

    def pin(self, x: X) -> int:
        """Offset of a pin from the middle."""
        if x.kind == IN:
            return x.b * PIN // 2 if self.ins is None else self.ins[x.b]
        return 0 if self.outs is None else self.outs[x.b]


@dataclass(slots=True)
class Placed:
    """A group with pixels: its size as a child of the next group, the middle and top of each child, and its wires."""

    size: Size
    middles: list[int]
    tops: list[int]
    wires: list[Points]


def place(arrangement: Arrangement, nets: Sequence[Net], sizes: Sequence[Size], title: int) -> Placed:
    """Place the children of one group.

    Args:
        arrangement: rows, lanes and wires.
        nets: those of the group, for the ends of the wires.
        sizes: of the children.
        title: width of the group's title; 0 for the whole picture, which has none.
    """
    lane_x, track_x, left, right = _columns(arrangement, sizes)
    row_y, gutter_y, height = _rows(arrangement, sizes, TITLE if title else 0)
    left, right = left + PAD, right + PAD
    right = max(right, title + 2 * PAD - left)
    middles = [lane_x[k] for k in arrangement.lane]
    tops = [row_y[r] for r in arrangement.rank]

    def across(x: X) -> int:
        if x.kind == LANE:
            return lane_x.get(x.a, 0)
        if x.kind == TRACK:
            return track_x[x.a, x.b]
        return middles[x.a] + sizes[x.a].pin(x)

    wires = []
    for wire in arrangement.wires:
        net = nets[wire.net]
        target = net.targets[wire.target][0]
        y = 0 if net.child == OUTSIDE else tops[net.child] + sizes[net.child].height
        end = height if target == OUTSIDE else tops[target]
        points = [(across(wire.xs[0]), y)]
        for x, (gutter, track) in zip(wire.xs[1:], wire.bends, strict=True):
            level = gutter_y[gutter + 1] + track * STEP
            points += [(points[-1][0], level), (across(x), level)]
        points.append((points[-1][0], end))
        wires.append(straighten(points))
    ins, outs = [across(x) for x in arrangement.entries], [across(x) for x in arrangement.exits]
    return Placed(Size(left, right, height, ins, outs), middles, tops, wires)


def straighten(points: Points) -> Points:
    """The points without those that lie on the way between their neighbours."""
    kept: Points = []
    for x, y in points:
        if kept and kept[-1] == (x, y):
            continue
        if len(kept) > 1 and ((kept[-2][0] == kept[-1][0] == x) or (kept[-2][1] == kept[-1][1] == y)):
            kept[-1] = (x, y)
        else:
            kept.append((x, y))
    return kept


def _columns(a: Arrangement, sizes: Sequence[Size]) -> tuple[dict[int, int], dict[tuple[int, int], int], int, int]:
    """Middle of each lane, place of each track, and how far the group reaches to both sides of lane 0."""
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


def _rows(a: Arrangement, sizes: Sequence[Size], head: int) -> tuple[list[int], list[int], int]:
    """Top of each row, first track of each gutter, and the height of the whole."""
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
