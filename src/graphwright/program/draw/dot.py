"""A program as Graphviz DOT: a cluster per module, sorted by name, so that two texts can be compared line by line."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Unpack

from graphwright.errors import UsageError
from graphwright.program.draw.layout import compose
from graphwright.program.draw.shapes import clean
from graphwright.program.draw.style import FAMILIES, MARKS, drawn_targets, overlay_of
from graphwright.program.draw.svg import written
from graphwright.signatures import keywords

if TYPE_CHECKING:
    from graphwright.files import StrPath
    from graphwright.program.draw.layout import Box, DrawnEdge, PictureKeywords
    from graphwright.program.draw.style import NodeNote, Overlay
    from graphwright.program.program import Program

_LINES = {"data": ("green", "solid"), "attention": ("blue", "solid"), "residual": ("red", "dashed"),
          "state": ("purple", "dotted")}  # fmt: skip
"""Kind of edge -> colour and line."""


@keywords(compose)
def to_dot(
    program: Program, path: StrPath | None = None, *, color: str | Mapping[Any, float | NodeNote] | None = "family",
    scale: str = "linear", **options: Unpack[PictureKeywords],
) -> str:  # fmt: skip
    """Draw a program as DOT text, top-down.

    Attention edges are solid blue, data edges green, residual dashed red, state dotted purple, removed grey.

    Args:
        path: the file to write, if any.
        color: `"family"` fills boxes by their kind of op, None leaves them white. A mapping of numbers by node or path
            is drawn as a colour scale, a mapping of notes by node as severities with tooltips.
        scale: scale of the numbers, `linear` or `log`.
        options: see `compose`.
    """
    if isinstance(color, str) and color != "family":
        raise UsageError("unknown colouring of a DOT picture", expected='"family", None or a mapping', got=color)
    picture = compose(program, **options).layout()
    overlay = overlay_of(program, drawn_targets(picture), color if isinstance(color, Mapping) else None, scale)
    inside: dict[str, list[str]] = {name: [] for name in ("", *picture.groups)}
    for name in sorted(picture.boxes):
        inside[picture.boxes[name].parent].append(name)
    children: dict[str, list[str]] = {name: [] for name in inside}
    for name in sorted(picture.groups):
        children[picture.groups[name].parent].append(name)
    out = [
        f"digraph {quoted(program.name)} {{",
        '  rankdir="TB";',
        '  node [shape="box", fontname="Arial", fontsize="11"];',
        '  edge [fontname="Arial", fontsize="9"];',
    ]
    if picture.collapsed:
        out.append(f"  label={quoted('closed: ' + ', '.join(picture.collapsed[:8]))};")
    if overlay.low is not None:
        out.append(f"  // scale from {overlay.low!r} to {overlay.high!r}")
    stack: list[tuple[str, int, bool]] = [("", 1, False)]
    while stack:
        name, depth, leaving = stack.pop()
        pad = "  " * depth
        if leaving:
            out.append("  " * (depth - 1) + "}")
            continue
        if name:
            group = picture.groups[name]
            out.append("  " * (depth - 1) + f"subgraph {quoted('cluster_' + name)} {{")
            out += [f"{pad}label={quoted(group.title)};", f"{pad}color={quoted('#b9c0c8')};"]
            stack.append((name, depth, True))
        out += [pad + _dot_node(picture.boxes[p], overlay, color == "family") for p in inside[name]]
        stack += [(child, depth + 1, False) for child in reversed(children[name])]
    out += ["  " + _dot_edge(edge) for edge in picture.edges]
    return written("\n".join([*out, "}", ""]), path)


def quoted(value: str) -> str:
    """Return a quoted DOT string, with quotes, backslashes and invisible characters escaped."""
    return '"' + clean(value).replace("\\", "\\\\").replace('"', '\\"') + '"'


def _dot_lines(lines: tuple[str, ...]) -> str:
    return '"' + "\\n".join(quoted(line)[1:-1] for line in lines) + '"'


def _dot_node(box: Box, overlay: Overlay, fill: bool) -> str:
    note = overlay.notes.get(box.target)
    facts = {
        "label": _dot_lines(box.lines),
        "tooltip": _dot_lines((box.path, *note.split("\n"))) if note else quoted(box.path),
    }
    style = ["rounded"] if box.kind in ("junction", "input", "group") else []
    colour = overlay.colours.get(box.target) or ((FAMILIES[box.family][0], "") if fill else None)
    if colour and box.mark != "removed":
        style.append("filled")
        facts["fillcolor"] = quoted(colour[0])
        if colour[1]:
            facts["fontcolor"] = quoted(colour[1])
    if box.kind == "group":
        facts["peripheries"] = '"2"'
    if box.mark:
        facts |= {"color": quoted(MARKS[box.mark][0]), "class": quoted(box.mark), "penwidth": '"2.5"'}
        if box.mark == "removed":
            style.append("dotted")
    if style:
        facts["style"] = quoted(",".join(style))
    return f"{quoted(box.path)} [{', '.join(f'{k}={v}' for k, v in facts.items())}];"


def _dot_edge(edge: DrawnEdge) -> str:
    gone = edge.mark == "removed"
    colour, style = ("grey", "dotted") if gone else _LINES[edge.kind]
    facts = {"color": quoted(colour), "style": quoted(style), "class": quoted(f"{edge.kind} {edge.mark}".rstrip())}
    if edge.mark and not gone:
        facts["color"], facts["penwidth"] = quoted(MARKS[edge.mark][0]), '"2.5"'
    if edge.count > 1:
        facts["label"] = quoted(f"×{edge.count}")
    if edge.back:
        facts["constraint"] = '"false"'
    return f"{quoted(edge.src)} -> {quoted(edge.dst)} [{', '.join(f'{k}={v}' for k, v in facts.items())}];"
