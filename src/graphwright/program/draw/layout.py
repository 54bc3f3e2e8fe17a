"""`layout(program)`: where every box, frame and edge of a picture lies, in whole pixels. Pure and deterministic.

Rows follow the longest path, the residual trunk has a lane of its own, equal modules are arranged once and stamped.
What lies inside a group depends on the group alone, so an edit moves nothing inside the groups it does not touch.
"""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass
from typing import TYPE_CHECKING

from graphwright.graph import NodeId

if TYPE_CHECKING:
    from graphwright.program.program import Program

BUDGET = 2000
"""Boxes, frames and edges that a picture has at most unless told otherwise."""


@dataclass(frozen=True, slots=True)
class Box:
    """A node, or a closed group.

    Attributes:
        path: of the node or group; ranges such as `layers.[0-21]` stand for a folded run.
        kind: `group`, `junction`, `op`, or the node's kind (`input`, `param`, `const`, `state`, `write`).
        family: what it is coloured by.
        lines: the label.
        tip: more text, for hovering.
        x, y, w, h: left, top, width, height.
        rank: row within the parent.
        parent: path of the group around it; empty for none.
        members: the program's nodes that it stands for.
        mark: `added`, `removed`, `changed` or empty.
        repeat: how many equal groups it stands for.
    """

    path: str
    kind: str
    family: str
    lines: tuple[str, ...]
    tip: str
    x: int
    y: int
    w: int
    h: int
    rank: int
    parent: str
    members: tuple[NodeId, ...]
    mark: str = ""
    repeat: int = 1


@dataclass(frozen=True, slots=True)
class Edge:
    """All edges between two boxes.

    Attributes:
        src, dst: paths of the boxes.
        kind: `data`, `attention`, `residual` or `state`; `data` if they differ.
        count: how many.
        ports: (source's result, target's port) of each, as drawn between these boxes.
        points: corners of the line, from the bottom of the source to the top of the target.
        back: a return arc: two closed groups read each other, this one leads up.
        mark: `added`, `removed`, `changed` (some of them) or empty.
    """

    src: str
    dst: str
    kind: str
    count: int
    ports: tuple[tuple[int, int], ...]
    points: tuple[tuple[int, int], ...]
    back: bool = False
    mark: str = ""


@dataclass(frozen=True, slots=True)
class Group:
    """The frame of an open group; `rank` is its row within its parent, `repeat` how many equal groups it stands for."""

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
class Layout:
    """A picture without ink.

    Attributes:
        boxes, groups: by path; boxes by creation, groups with parents before children.
        edges: by source and target.
        width, height: of the whole.
        collapsed: groups and runs that were closed, folded or bundled because of the budget.
        arranged: number of groups that were arranged; those equal to one of them were stamped.
    """

    boxes: dict[str, Box]
    edges: tuple[Edge, ...]
    groups: dict[str, Group]
    width: int
    height: int
    collapsed: tuple[str, ...]
    arranged: int = 0

    @property
    def elements(self) -> int:
        """Boxes, frames and edges: what the budget counts."""
        return len(self.boxes) + len(self.groups) + len(self.edges)


def layout(
    program: Program,
    expanded: Set[str] | None = None,
    budget: int = BUDGET,
    *,
    level: int | None = None,
    fold: bool = False,
    params: bool = False,
    diff: Program | None = None,
) -> Layout:
    """Lay a program out.

    Groups come from dotted names. Params and consts are drawn inside the nodes that read them.

    Args:
        program: what to draw.
        expanded: paths of the groups to open. By default small programs open altogether, others down to where modules
            repeat: the blocks of a decoder, each one box.
        budget: most boxes, frames and edges; beyond it the deepest groups close first, runs of equal ones fold, and
            what has no groups is bundled.
        level: instead of `expanded`: open every group above this depth.
        fold: draw runs of equal numbered groups once, as `layers.[0-21]`; by default runs of more than 64.
        params: draw params and consts as boxes of their own.
        diff: an earlier program; what it alone has is drawn too, and differences are marked.
    Raises: UsageError for a budget below 16, or for both `expanded` and `level`.
    """
    from graphwright.program.draw.compose import compose

    return compose(program, expanded, budget, level=level, fold=fold, params=params, diff=diff).layout()
