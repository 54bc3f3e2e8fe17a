"""A picture as SVG: self-contained, text that can be selected, a `<title>` on everything, light and dark by CSS."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from typing import TYPE_CHECKING, Any

from graphwright.program.draw.layout import BUDGET, compose
from graphwright.program.draw.legend import legend
from graphwright.program.draw.overlay import drawn_places, overlay_of
from graphwright.program.draw.style import LINE, css, text, tips

if TYPE_CHECKING:
    from graphwright.program.draw.layout import Box, Edge, Group, Layout
    from graphwright.program.draw.legend import Legend
    from graphwright.program.draw.overlay import Overlay, Remark, Remarks
    from graphwright.program.program import Program

ROUND = 5
"""Radius of the corners of lines, in pixels."""


def to_svg(
    program: Program,
    expanded: Set[str] | None = None,
    diff: Program | None = None,
    overlay: Mapping[Any, float | Remark] | None = None,
    *,
    level: int | None = None,
    fold: bool = False,
    params: bool = False,
    budget: int = BUDGET,
    scale: str = "linear",
) -> str:
    """A program as an SVG document.

    Args:
        program: what to draw.
        expanded, level, fold, params, budget: which groups are open and what is drawn; see `layout`.
        diff: an earlier program; what was added, removed and changed since is marked.
        overlay: numbers by node or path, drawn as colours with a legend; `scale` is `linear` or `log`. Or remarks by
            node: `found.overlay()` of a diagnosis.
    """
    made = compose(program, expanded, budget, level=level, fold=fold, params=params, diff=diff).layout()
    colours = None if overlay is None else overlay_of(program, drawn_places(made), overlay, scale)
    return render(made, legend(made, colours, diff is not None), colours, diff is not None)


def render(picture: Layout, below: Legend, overlay: Overlay | Remarks | None = None, diff: bool = False) -> str:
    """A layout and its legend as an SVG document."""
    width, height = max(picture.width, below.width), picture.height + below.height
    left = (width - picture.width) // 2
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" class="gw{" gw-diff" if diff else ""}" width="{width}" '
        f'height="{height}" viewBox="0 0 {width} {height}"><style>{css()}</style>{tips()}',
        f'<rect class="gw-paper" width="{width}" height="{height}"/>',
        f'<g class="gw-all" transform="translate({left} 0)">',
    ]
    parts += [frame(group, overlay) for group in picture.groups.values()]
    parts += [line(edge, picture.boxes[edge.dst]) for edge in picture.edges]
    parts += [heading(group) for group in picture.groups.values()]  # over the lines
    parts += [box(b, overlay) for b in picture.boxes.values()]
    parts += ["</g>", f'<g class="gw-legend" transform="translate(0 {picture.height})">', *below.body, "</g></svg>"]
    return "\n".join(parts)


def frame(group: Group, overlay: Overlay | Remarks | None = None) -> str:
    """The frame of an open group, tinted if it has a value of its own."""
    colour = overlay.colour(f"{group.path}.") if overlay is not None and group.path in overlay.own else None
    fill = f' style="fill:{colour[0]};fill-opacity:.3"' if colour else ""
    return (
        f'<g class="gw-f" data-path="{text(group.path)}"><title>{text(group.path)}</title>'
        f'<rect x="{group.x}" y="{group.y}" width="{group.w}" height="{group.h}" rx="8"{fill}/></g>'
    )


def heading(group: Group) -> str:
    """The name on the frame of an open group."""
    return (
        f'<text class="gw-n gw-s gw-h" data-path="{text(group.path)}" x="{group.x + 10}" y="{group.y + 16}">'
        f"{text(group.title)}</text>"
    )


def box(b: Box, overlay: Overlay | Remarks | None) -> str:
    """A node or a closed group."""
    classes = f"gw-b gw-{b.family}-box" + (f" gw-{b.mark}" if b.mark else "")
    place = f"{b.path}." if b.kind == "group" else b.path
    colour = overlay.colour(place) if overlay is not None else None
    if overlay is not None and overlay.everywhere and colour is None:
        classes += " gw-none"
    fill = f' style="fill:{colour[0]}"' if colour else ""
    ink = f' style="fill:{colour[1]}"' if colour else ""
    note = overlay.note(place) if overlay is not None else ""
    tip = b.tip + (f"\n{note}" if note else "")
    tip += f"\n{b.mark}" if b.mark else ""
    round_ = b.h // 2 if b.kind in ("junction", "input") else 4 if b.kind != "group" else 8
    shape = f'<rect x="{b.x}" y="{b.y}" width="{b.w}" height="{b.h}" rx="{round_}"{fill}/>'
    if b.repeat > 1:
        shape = f'<rect x="{b.x + 4}" y="{b.y + 4}" width="{b.w}" height="{b.h}" rx="{round_}"/>' + shape
    x, y = b.x + b.w // 2, b.y + 17 - (b.kind == "junction")
    words = "".join(
        f'<text class="gw-{"s" if k else "n"}" x="{x}" y="{y + LINE * k}" text-anchor="middle"{ink}>{text(line)}</text>'
        for k, line in enumerate(b.lines)
    )
    title = "\n".join(text(s) for s in tip.split("\n"))
    return f'<g class="{classes}" data-path="{text(b.path)}"><title>{title}</title>{shape}{words}</g>'


def line(edge: Edge, target: Box) -> str:
    """An edge, with its count where it stands for several."""
    style = edge.mark or edge.kind
    mark = f" gw-{edge.mark}" if edge.mark else ""
    ports = ", ".join(f"{a} → {b}" for a, b in edge.ports[:8]) + (", …" if len(edge.ports) > 8 else "")
    title = f"{text(edge.src)} → {text(edge.dst)}\n{edge.kind}{', ' + edge.mark if edge.mark else ''}\nports {ports}"
    many = ""
    if edge.count > 1:
        (x, y) = edge.points[-1]
        side = ("-5", "end") if 2 * x <= 2 * target.x + target.w else ("5", "start")
        many = (
            f'<text class="gw-s gw-c" x="{x}" y="{y - 7}" dx="{side[0]}" text-anchor="{side[1]}">×{edge.count}</text>'
        )
    return (
        f'<g class="gw-e gw-{edge.kind}{mark}"><title>{title}</title>'
        f'<path d="{path_data(edge.points)}" marker-end="url(#gw-tip-{style})"/>{many}</g>'
    )


def path_data(points: Sequence[tuple[int, int]]) -> str:
    """Path data of a line with rounded corners."""
    parts = [f"M{points[0][0]} {points[0][1]}"]
    for (ax, ay), (bx, by), (cx, cy) in zip(points, points[1:], points[2:], strict=False):
        r = min(ROUND, (abs(bx - ax) + abs(by - ay)) // 2, (abs(cx - bx) + abs(cy - by)) // 2)
        before = (bx - r * _sign(bx - ax), by - r * _sign(by - ay))
        after = (bx + r * _sign(cx - bx), by + r * _sign(cy - by))
        parts.append(f"L{before[0]} {before[1]}Q{bx} {by} {after[0]} {after[1]}")
    parts.append(f"L{points[-1][0]} {points[-1][1]}")
    return "".join(parts)


def _sign(value: int) -> int:
    return (value > 0) - (value < 0)
