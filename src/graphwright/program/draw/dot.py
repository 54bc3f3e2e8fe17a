"""A picture as Graphviz DOT: a cluster per module, all sorted by name, so that two texts can be compared by line."""

from __future__ import annotations

from collections.abc import Mapping, Set
from typing import TYPE_CHECKING, Any

from graphwright.errors import UsageError
from graphwright.program.draw.layout import BUDGET, compose
from graphwright.program.draw.overlay import Overlay, Remarks, drawn_places, overlay_of
from graphwright.program.draw.style import FAMILIES, MARKS, clean

if TYPE_CHECKING:
    from graphwright.program.draw.layout import Box, Edge, Layout
    from graphwright.program.draw.overlay import Remark
    from graphwright.program.program import Program

_LINE = {"data": "solid", "attention": "solid", "residual": "dashed", "state": "dotted"}
_COLOUR = {"data": "green", "attention": "blue", "residual": "red", "state": "purple"}


def to_dot(
    program: Program,
    level: int | None = None,
    color: str | Mapping[Any, float | Remark] | None = "family",
    diff: Program | None = None,
    expanded: Set[str] | None = None,
    *,
    fold: bool = False,
    params: bool = False,
    budget: int = BUDGET,
    scale: str = "linear",
) -> str:
    """A program as DOT text, top-down.

    Attention edges are solid blue, data green, residual dashed red, state dotted purple, removed ones dotted grey.

    Args:
        program: what to draw.
        level, expanded, fold, params, budget: which groups are open and what is drawn; see `layout`.
        color: `"family"` fills boxes by what they are, None leaves them white, a mapping of numbers by node or path is
            drawn as colours (`scale` is `linear` or `log`), one of remarks as severities with tooltips.
        diff: an earlier program; what was added, removed and changed since is marked.
    """
    if isinstance(color, str) and color != "family":
        raise UsageError("no such colouring", expected='"family", None or a mapping', got=color)
    made = compose(program, expanded, budget, level=level, fold=fold, params=params, diff=diff).layout()
    colours = overlay_of(program, drawn_places(made), color, scale) if isinstance(color, Mapping) else None
    return render(made, program.name, colours, fill=color == "family")


def render(picture: Layout, name: str, overlay: Overlay | Remarks | None = None, fill: bool = True) -> str:
    """A layout as DOT text; what the layout places is left to Graphviz."""
    inside: dict[str, list[str]] = {path: [] for path in ("", *picture.groups)}
    for path in sorted(picture.boxes):
        inside[picture.boxes[path].parent].append(path)
    children: dict[str, list[str]] = {path: [] for path in inside}
    for path in sorted(picture.groups):
        children[picture.groups[path].parent].append(path)
    out = [
        f"digraph {quoted(name)} {{",
        '  rankdir="TB";',
        '  node [shape="box", fontname="Arial", fontsize="11"];',
        '  edge [fontname="Arial", fontsize="9"];',
    ]
    if picture.collapsed:
        out.append(f"  label={quoted('closed: ' + ', '.join(picture.collapsed[:8]))};")
    if isinstance(overlay, Overlay) and overlay.low is not None:
        out.append(f"  // scale from {overlay.low!r} to {overlay.high!r}")
    stack: list[tuple[str, int, bool]] = [("", 1, False)]
    while stack:
        path, depth, leaving = stack.pop()
        pad = "  " * depth
        if leaving:
            out.append("  " * (depth - 1) + "}")
            continue
        if path:
            group = picture.groups[path]
            facts = {"label": quoted(group.title), "color": quoted("#b9c0c8")}
            out.append("  " * (depth - 1) + f"subgraph {quoted('cluster_' + path)} {{")
            out += [f"{pad}{key}={value};" for key, value in facts.items()]
            stack.append((path, depth, True))
        out += [pad + _node(picture.boxes[p], overlay, fill) for p in inside[path]]
        stack += [(child, depth + 1, False) for child in reversed(children[path])]
    out += ["  " + _edge(edge) for edge in picture.edges]
    return "\n".join([*out, "}", ""])


def quoted(value: str) -> str:
    """A DOT string: quotes and backslashes escaped, what cannot be seen spelt out."""
    return '"' + clean(value).replace("\\", "\\\\").replace('"', '\\"') + '"'


def _lines(lines: tuple[str, ...]) -> str:
    return '"' + "\\n".join(quoted(line)[1:-1] for line in lines) + '"'


def _node(box: Box, overlay: Overlay | Remarks | None, fill: bool) -> str:
    facts = {"label": _lines(box.lines), "tooltip": quoted(box.path)}
    place = f"{box.path}." if box.kind == "group" else box.path
    if isinstance(overlay, Remarks) and (note := overlay.note(place)):
        facts["tooltip"] = _lines((box.path, *note.split("\n")))
    style = ["rounded"] if box.kind in ("junction", "input", "group") else []
    colour = overlay.colour(place) if overlay is not None else (FAMILIES[box.family][0], "") if fill else None
    if colour and box.mark != "removed":
        style.append("filled")
        facts["fillcolor"] = quoted(colour[0])
        if colour[1]:
            facts["fontcolor"] = quoted(colour[1])
    if box.kind == "group":
        facts["peripheries"] = '"2"'
    if box.mark:
        facts["color"] = quoted(_colour(box.mark))
        facts["class"] = quoted(box.mark)
        facts["penwidth"] = '"2.5"'
        if box.mark == "removed":
            style.append("dotted")
    if style:
        facts["style"] = quoted(",".join(style))
    return f"{quoted(box.path)} [{', '.join(f'{k}={v}' for k, v in facts.items())}];"


def _edge(edge: Edge) -> str:
    gone = edge.mark == "removed"
    colour, style = ("grey", "dotted") if gone else (_COLOUR[edge.kind], _LINE[edge.kind])
    facts = {"color": quoted(colour), "style": quoted(style), "class": quoted(f"{edge.kind} {edge.mark}".rstrip())}
    if edge.mark and not gone:
        facts["color"], facts["penwidth"] = quoted(_colour(edge.mark)), '"2.5"'
    if edge.count > 1:
        facts["label"] = quoted(f"×{edge.count}")
    if edge.back:
        facts["constraint"] = '"false"'
    return f"{quoted(edge.src)} -> {quoted(edge.dst)} [{', '.join(f'{k}={v}' for k, v in facts.items())}];"


def _colour(mark: str) -> str:
    return MARKS[mark][0] if mark else ""
