"""A program as Graphviz DOT: a cluster per module, sorted by name, so that two texts can be compared line by line."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from graphwright.errors import UsageError
from graphwright.program.draw.layout import compose
from graphwright.program.draw.overlay import NodeNotes, Overlay, drawn_targets, overlay_of
from graphwright.program.draw.shapes import clean
from graphwright.program.draw.style import FAMILIES, MARKS

if TYPE_CHECKING:
    from typing import Unpack

    from graphwright.program.draw.layout import Box, DrawnEdge, PictureLayout, PictureOptions
    from graphwright.program.draw.overlay import NodeNote
    from graphwright.program.program import Program

_LINE = {"data": "solid", "attention": "solid", "residual": "dashed", "state": "dotted"}
_COLOUR = {"data": "green", "attention": "blue", "residual": "red", "state": "purple"}


def to_dot(
    program: Program,
    color: str | Mapping[Any, float | NodeNote] | None = "family",
    scale: str = "linear",
    **options: Unpack[PictureOptions],
) -> str:
    """Draw a program as DOT text, top-down.

    Attention edges are solid blue, data edges green, residual dashed red, state dotted purple, removed grey.

    Args:
        program: what to draw.
        color: `"family"` fills boxes by their family, None leaves them white; a mapping of numbers by node or path is
            drawn as colours, a mapping of notes as severities with tooltips.
        scale: scale of the numbers, `linear` or `log`.
        options: see `PictureOptions`.
    """
    if isinstance(color, str) and color != "family":
        raise UsageError("unknown colouring of a DOT picture", expected='"family", None or a mapping', got=color)
    made = compose(program, **options).layout()
    colours = overlay_of(program, drawn_targets(made), color, scale) if isinstance(color, Mapping) else None
    return render(made, program.name, colours, fill=color == "family")


def render(picture: PictureLayout, name: str, overlay: Overlay | NodeNotes | None = None, fill: bool = True) -> str:
    """Write the boxes, groups and edges of a layout as DOT text; Graphviz positions them."""
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
    """A DOT string, with quotes, backslashes and invisible characters escaped."""
    return '"' + clean(value).replace("\\", "\\\\").replace('"', '\\"') + '"'


def _lines(lines: tuple[str, ...]) -> str:
    return '"' + "\\n".join(quoted(line)[1:-1] for line in lines) + '"'


def _node(box: Box, overlay: Overlay | NodeNotes | None, fill: bool) -> str:
    facts = {"label": _lines(box.lines), "tooltip": quoted(box.path)}
    target = f"{box.path}." if box.kind == "group" else box.path
    if isinstance(overlay, NodeNotes) and (note := overlay.note(target)):
        facts["tooltip"] = _lines((box.path, *note.split("\n")))
    style = ["rounded"] if box.kind in ("junction", "input", "group") else []
    colour = overlay.colour(target) if overlay is not None else (FAMILIES[box.family][0], "") if fill else None
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


def _edge(edge: DrawnEdge) -> str:
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
