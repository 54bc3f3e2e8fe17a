"""A program as SVG, as one HTML page, and as Graphviz DOT.

The SVG is self-contained, with selectable text, light and dark by CSS. On the page, which works offline, groups open
and close, details show on hover, and a text outline stands beside. DOT has a cluster per module and is sorted by name,
so that two texts can be compared line by line.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

from graphwright.errors import UsageError
from graphwright.files import StrPath, atomic_write
from graphwright.program.draw.groups import ROOT
from graphwright.program.draw.layout import GAP, PAD, PIN, STEP, TITLE, common, compose
from graphwright.program.draw.scene import CHANGED, MIXED, statistics
from graphwright.program.draw.shapes import Shape, clean, escaped, shape
from graphwright.program.draw.style import (
    EDGES,
    FAMILIES,
    FONT,
    LEVELS,
    LINE,
    MARKS,
    ColourTarget,
    css,
    drawn_targets,
    overlay_of,
    shade,
    short,
    text_width,
    tips,
)

if TYPE_CHECKING:
    from graphwright.program.draw.arrange import Arrangement
    from graphwright.program.draw.groups import Net
    from graphwright.program.draw.layout import Box, Composition, DrawnEdge, Group, PictureLayout, PictureOptions
    from graphwright.program.draw.style import NodeNote, Overlay
    from graphwright.program.program import Program

ROUND = 5  # radius of the corners of lines, in pixels
CELL = 240  # budget of a picture in a notebook cell: below 200 kB, and at most a few screens


def to_svg(
    program: Program,
    overlay: Mapping[Any, float | NodeNote] | None = None,
    scale: str = "linear",
    **options: Unpack[PictureOptions],
) -> str:
    """Draw a program as an SVG document.

    Args:
        overlay: numbers by node or path, drawn as colours with a legend; or notes by node, such as
            `found.overlay()` of a diagnosis.
        scale: scale of the numbers, `linear` or `log`.
        options: see `PictureOptions`.
    """
    made = compose(program, **options).layout()
    colours = overlay_of(program, drawn_targets(made), overlay, scale)
    diff = options.get("diff") is not None
    return render(made, legend(made, colours, diff), colours, diff)


def notebook(program: Program) -> str:
    """Draw a program for a notebook cell: a line of text and the picture in a box that scrolls."""
    return (
        f"<div><p><code>{escaped(repr(program))}</code></p>"
        f'<div style="max-height:600px;overflow:auto">{to_svg(program, budget=CELL)}</div></div>'
    )


def written(picture: str, path: StrPath | None) -> str:
    """Return a picture; if a path is given, also write it there atomically. Raises: UnwritableTarget."""
    if path is not None:
        atomic_write(path, picture.encode())
    return picture


def render(made: PictureLayout, below: Legend, overlay: Overlay, diff: bool) -> str:
    """Write a layout and its legend as an SVG document."""
    width, height = max(made.width, below.width), made.height + below.height
    left = (width - made.width) // 2
    parts: list[Any] = [
        f'<svg xmlns="http://www.w3.org/2000/svg" class="gw{" gw-diff" if diff else ""}" width="{width}" '
        f'height="{height}" viewBox="0 0 {width} {height}"><style>{css()}</style>{tips()}',
        f'<rect class="gw-paper" width="{width}" height="{height}"/>',
        f'<g class="gw-all" transform="translate({left} 0)">',
    ]
    parts += [frame(group, overlay) for group in made.groups.values()]
    parts += [line(edge, made.boxes[edge.dst]) for edge in made.edges]
    for g in made.groups.values():  # above the lines
        parts.append(shape("text", g.title, class_="gw-n gw-s gw-h", data_path=g.path, x=g.x + 10, y=g.y + 16))
    parts += [box(b, overlay) for b in made.boxes.values()]
    parts += ["</g>", f'<g class="gw-legend" transform="translate(0 {made.height})">']
    parts += ["".join(map(str, row)) for row in below.rows]
    return "\n".join(map(str, [*parts, "</g></svg>"]))


def frame(group: Group, overlay: Overlay) -> Shape:
    """The frame of an open group, tinted if the group has a value of its own."""
    colour = overlay.colours.get(f"{group.path}.") if group.path in overlay.own else None
    fill = f"fill:{colour[0]};fill-opacity:.3" if colour else None
    rect = shape("rect", x=group.x, y=group.y, width=group.w, height=group.h, rx=8, style=fill)
    return shape("g", rect, title=group.path, class_="gw-f", data_path=group.path)


def box(b: Box, overlay: Overlay) -> Shape:
    """A node or a closed group."""
    classes = f"gw-b gw-{b.family}-box" + (f" gw-{b.mark}" if b.mark else "")
    colour, note = overlay.colours.get(b.target), overlay.notes.get(b.target)
    if overlay.levels is None and colour is None:
        classes += " gw-none"
    fill, ink = (f"fill:{colour[0]}", f"fill:{colour[1]}") if colour else (None, None)
    radius = b.h // 2 if b.kind in ("junction", "input") else 4 if b.kind != "group" else 8
    outline = [shape("rect", x=b.x, y=b.y, width=b.w, height=b.h, rx=radius, style=fill)]
    if b.repeat > 1:
        outline.insert(0, shape("rect", x=b.x + 4, y=b.y + 4, width=b.w, height=b.h, rx=radius))
    x, y = b.x + b.w // 2, b.y + 17 - (b.kind == "junction")
    words = [
        shape("text", line, class_=f"gw-{'s' if k else 'n'}", x=x, y=y + LINE * k, text_anchor="middle", style=ink)
        for k, line in enumerate(b.lines)
    ]
    title = "\n".join(part for part in (b.tip, note, b.mark) if part)
    return shape("g", *outline, *words, title=title, class_=classes, data_path=b.path)


def line(edge: DrawnEdge, target: Box) -> Shape:
    """An edge, with its count where it stands for several."""
    mark = f" gw-{edge.mark}" if edge.mark else ""
    ports = ", ".join(f"{a} → {b}" for a, b in edge.ports[:8]) + (", …" if len(edge.ports) > 8 else "")
    title = f"{edge.src} → {edge.dst}\n{edge.kind}{', ' + edge.mark if edge.mark else ''}\nports {ports}"
    drawn = [shape("path", d=path_data(edge.points), marker_end=f"url(#gw-tip-{edge.mark or edge.kind})")]
    if edge.count > 1:
        x, y = edge.points[-1]
        side = ("-5", "end") if 2 * x <= 2 * target.x + target.w else ("5", "start")
        many = f"×{edge.count}"
        drawn.append(shape("text", many, class_="gw-s gw-c", x=x, y=y - 7, dx=side[0], text_anchor=side[1]))
    return shape("g", *drawn, title=title, class_=f"gw-e gw-{edge.kind}{mark}")


def path_data(points: Sequence[tuple[int, int]]) -> str:
    """The path data of a line with rounded corners."""
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


# -- legend ------------------------------------------------------------------------------------------------------------
_ROW, _BAR = 22, 160


@dataclass(slots=True)
class Legend:
    """The legend below a picture: shapes per row, and its size."""

    rows: list[tuple[Shape, ...]] = field(default_factory=list)
    width: int = 0
    height: int = 0

    def add(self, shapes: Sequence[Sequence[Shape]], width: int) -> None:
        """Append shapes that share a row of the legend."""
        self.rows += [tuple(entry) for entry in shapes]
        self.width, self.height = max(self.width, width), self.height + _ROW

    def samples(self, words: Iterable[str], wide: int, draw: Callable[[int, int, str], Shape]) -> None:
        """Append a row of words, each after its sample, which is `wide` pixels and drawn at a top left."""
        x, shapes = 16, []
        for word in words:
            text = shape("text", word, class_="gw-s", x=x + wide, y=self.height + 15)
            shapes.append([draw(x, self.height, word), text])
            x += wide + text_width(word) + 20
        if shapes:
            self.add(shapes, x)

    def note(self, words: str) -> None:
        """Append a row of text."""
        self.add([[shape("text", words, class_="gw-s", x=16, y=self.height + 15)]], 32 + text_width(words))


def legend(made: PictureLayout, overlay: Overlay, diff: bool, hidden: Collection[str] = ()) -> Legend:
    """Make the legend of a picture, with its top left at 0, 0: kinds of edge, marks, overlay, closed groups.

    `hidden` are the kinds of edge inside closed groups.
    """
    found = Legend(height=8)
    used = {e.kind for e in made.edges}.union(hidden)
    found.samples([k for k in EDGES if k in used], 40, _line_sample)
    found.samples(MARKS if diff else (), 40, _line_sample)
    if overlay.levels is None:
        _colour_scale(found, overlay)
    else:
        found.samples([LEVELS[level][0] for level in overlay.levels], 20, _level_sample)
    if made.collapsed:
        names = ", ".join(short(p, 40) for p in made.collapsed[:3])
        more = f" and {len(made.collapsed) - 3} more" if len(made.collapsed) > 3 else ""
        found.note(f"closed to stay within the budget: {names}{more}")
    found.height += 8
    return found


def _line_sample(x: int, y: int, kind: str) -> Shape:
    line = shape("path", d=f"M{x} {y + _ROW // 2}H{x + 32}", marker_end=f"url(#gw-tip-{kind})")
    return shape("g", line, class_=f"gw-e gw-{kind}")


def _level_sample(x: int, y: int, word: str) -> Shape:
    fill = next(fill for name, fill, _ in LEVELS if name == word)
    return shape("rect", x=x, y=y + 4, width=14, height=14, rx=3, fill=fill, stroke="#555e69")


def _colour_scale(found: Legend, overlay: Overlay) -> None:
    if overlay.low is None or overlay.high is None:
        found.note("overlay: no finite value")
        return
    y, low, high = found.height + 4, repr(overlay.low), repr(overlay.high)
    left = 16 + text_width(low) + 8
    stops = [shape("stop", offset=k / 8, stop_color=shade(k / 8)[0]) for k in range(9)]
    kind = ", log scale" if overlay.logarithmic else ""
    name = f"gw-scale-{'log' if overlay.logarithmic else 'linear'}"
    text = shape("text", low, class_="gw-s", x=16, y=y + 11)
    bar = shape("rect", x=left, y=y, width=_BAR, height=14, fill=f"url(#{name})")
    end = shape("text", f"{high}{kind}", class_="gw-s", x=left + _BAR + 8, y=y + 11)
    drawn = shape("g", text, bar, end, class_="gw-scale", data_min=low, data_max=high)
    found.add([[shape("linearGradient", *stops, id=name), drawn]], left + _BAR + 24 + text_width(high + kind))
    found.note("hatched: no value")


def outline(made: Composition) -> str:
    """Write the outline: nested `<details>`, one per group, and a line per node."""
    tree, scene = made.view.tree, made.view.scene
    out: list[str] = []
    opened = {at for at, top in enumerate(made.view.shown_as()) if top < 0}
    stack = [(child, False) for child in reversed(tree.modules[ROOT].children)]
    while stack:
        child, leaving = stack.pop()
        if leaving:
            out.append("</details>")
        elif child >= 0:
            node = scene.nodes[child]
            words = " ".join((node.op, *(repr(s) for s in node.specs), *((node.mark,) if node.mark else ())))
            name = node.path.rpartition(".")[2]
            out.append(f'<p title="{escaped(node.path)}">{escaped(name)} <small>{escaped(words)}</small></p>')
        else:
            group = tree.modules[~child]
            show = " open" if ~child in opened else ""
            inside = " · ".join(group.lines[1:])
            out.append(f"<details{show}><summary>{escaped(group.title)} <small>{escaped(inside)}</small></summary>")
            stack.append((child, True))
            stack += [(c, False) for c in reversed(group.children)]
    return "\n".join(out)


_STYLE = f"""
:root{{color-scheme:light dark;--paper:#fff;--ink:#1b1f24;--line:#d5dae0}}
@media(prefers-color-scheme:dark){{:root{{--paper:#0f1318;--ink:#e6e9ed;--line:#343b44}}}}
body{{margin:0;font:14px {FONT};background:var(--paper);color:var(--ink);display:grid;height:100vh;
grid-template:auto 1fr/minmax(220px,24%) 1fr minmax(220px,22%)}}
header{{grid-column:1/4;padding:8px 16px;border-bottom:1px solid var(--line);display:flex;gap:12px;align-items:center}}
h1{{font-size:16px;margin:0}}
nav,main,aside{{overflow:auto;padding:12px}}
nav{{border-right:1px solid var(--line)}}
aside{{border-left:1px solid var(--line)}}
nav details,nav p{{margin:2px 0 2px 14px}}
nav p{{white-space:nowrap}}
nav small{{opacity:.7}}
svg{{display:block;margin:auto}}
.gw-group-box,.gw-f,.gw-h{{cursor:pointer}}
pre{{white-space:pre-wrap;overflow-wrap:anywhere;font:13px ui-monospace,monospace;margin:0}}
@media(max-width:900px){{body{{display:block;height:auto}}}}
"""


def to_html(
    program: Program,
    overlay: Mapping[Any, float | NodeNote] | None = None,
    scale: str = "linear",
    **options: Unpack[PictureOptions],
) -> str:
    """Draw a program as one HTML page without outside references; see `to_svg` for the arguments."""
    made = compose(program, **options)
    diff = options.get("diff") is not None
    drawn = made.layout()
    colours = overlay_of(program, drawn_targets(drawn), overlay, scale)
    nodes = made.view.scene.nodes
    targets = [ColourTarget(node.path, node.members) for node in nodes]
    for group in made.view.tree.modules:  # hidden ones too
        targets.append(ColourTarget(f"{group.path}.", [n for i in group.members for n in nodes[i].members]))
    every = overlay_of(program, targets, overlay, scale)
    entries, blame = _blame(program)
    below = legend(drawn, colours, diff, set(made.kinds))
    data = {
        "sizes": {"PAD": PAD, "TITLE": TITLE, "GAP": GAP, "STEP": STEP, "PIN": PIN, "LINE": LINE, "ROUND": ROUND},
        "open": [at for at, top in enumerate(made.view.shown_as()) if top < 0],
        "overlay": every.levels is None,
        "legend": [below.width, below.height],
        "entries": entries,
        **_content(made, every, blame, statistics(program)),
    }
    picture = render(drawn, below, colours, diff)
    packed = json.dumps(data, separators=(",", ":"), ensure_ascii=True).replace("<", "\\u003c")
    script = Path(__file__).with_name("page.js").read_text("utf-8")
    name = escaped(program.name)
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{name}</title>'
        '<meta name="viewport" content="width=device-width"><style>'
        f"{_STYLE}</style></head><body><header><h1>{name}</h1><span>{escaped(repr(program))}</span>"
        '<button id="gw-reset">reset</button><button id="gw-open">open all</button>'
        '<button id="gw-close">close all</button></header>'
        f'<nav aria-label="Nodes as text">{outline(made)}</nav><main id="gw-picture">{picture}</main>'
        '<aside><pre id="gw-details">Point at a box for its details. Click a closed group to open it, '
        "the frame of an open one to close it.</pre></aside>"
        f'<script type="application/json" id="gw-data">{packed}</script><script>{script}</script></body></html>\n'
    )


def _content(
    made: Composition, overlay: Overlay, blame: dict[str, list[int]], values: Mapping[str, str]
) -> dict[str, Any]:
    """Collect nodes, groups and arrangements for `page.js`; equal groups share an arrangement."""
    scene, tree = made.view.scene, made.view.tree
    pins = {c: m.arrangement.pins[k] for m in tree.modules for k, c in enumerate(m.children)}
    nodes = []
    for i, node in enumerate(scene.nodes):
        names = (node.path, *(key for *_, key in node.weights))
        edits = sorted({e for name in names for e in blame.get(name, ())})
        weights = [*((name, key) for name, _, key in node.weights), ("values", node.attrs.get("key"))]
        lines = [clean(f"{name}: {values[key]}") for name, key in weights if key in values]
        nodes.append(_box(made.node_box(i, pins=pins[i]), overlay, edits, lines))
    shared: dict[int, int] = {}
    arrangements, modules = [], []
    for at, module in enumerate(tree.modules):
        arrangement = module.arrangement
        if shared.setdefault(id(arrangement), len(arrangements)) == len(arrangements):
            arrangements.append(_plain(arrangement, module.nets))
        wires = []
        for wire in arrangement.wires:
            edges = module.nets[wire.net].edges[wire.target]
            mark = common([scene.edges[e].mark for e in edges], CHANGED)
            wires.append([common([made.kinds[e] for e in edges], MIXED), len(edges), mark])
        title = module.title if at != ROOT else ""
        tint = {"tint": True} if module.path in overlay.own else {}
        shown = {
            "parent": module.parent,
            "children": module.children,
            "title": title,
            "wires": wires,
            "arrangement": shared[id(arrangement)],
            "titleWidth": text_width(title),
            "repeat": module.repeat,
        }
        modules.append(_box(made.group_box(module), overlay, blame.get(module.path, [])) | tint | shown)
    return {"nodes": nodes, "modules": modules, "arrangements": arrangements}


def _box(box: Box, overlay: Overlay, blame: list[int], lines: Sequence[str] = ()) -> dict[str, Any]:
    """A box as `page.js` draws it; `blame` are indices of journal entries."""
    note = overlay.notes.get(box.target)
    found = {
        "path": clean(box.path),
        "kind": box.kind,
        "family": box.family,
        "lines": box.lines,
        "tip": "\n".join((box.tip, *lines, *(map(clean, note.split("\n")) if note else ()))),
        "half": -box.x,
        "height": box.h,
    }
    more = {"mark": box.mark, "colour": overlay.colours.get(box.target), "blame": blame}
    return found | {name: value for name, value in more.items() if value}


def _plain(a: Arrangement, nets: Sequence[Net]) -> dict[str, Any]:
    wires = [[nets[w.net].child, nets[w.net].targets[w.target][0], w.xs, w.bends] for w in a.wires]
    names = ("rank", "lane", "rows", "channels", "gutters", "ends", "steps")
    return {name: getattr(a, name) for name in names} | {"wires": wires}


def _blame(program: Program) -> tuple[list[str], dict[str, list[int]]]:
    """Journal entries as text, and by path or checkpoint key the indices of the entries whose edits name it."""
    entries: list[str] = []
    found: dict[str, list[int]] = {}
    for number, entry in enumerate(program.journal):
        line = f", {entry.line}" if entry.line else ""
        entries.append(clean(f"{entry.seq} {entry.time[:19]} {entry.author}: {entry.why}{line}"))
        named: set[str] = set()
        stack: list[Any] = list(entry.edits)
        while stack:
            record = stack.pop()
            if isinstance(record, dict):
                named.update(v for k in ("path", "dst", "key", "name") if isinstance(v := record.get(k), str))
                stack.extend(record.values())
            elif isinstance(record, list):
                stack.extend(record)
        for name in named:
            found.setdefault(name, []).append(number)
    return entries, found


_DOT_LINES = {"data": ("green", "solid"), "attention": ("blue", "solid"), "residual": ("red", "dashed"),
          "state": ("purple", "dotted")}  # fmt: skip
"""Kind of edge -> colour and line."""


def to_dot(
    program: Program,
    color: str | Mapping[Any, float | NodeNote] | None = "family",
    scale: str = "linear",
    **options: Unpack[PictureOptions],
) -> str:
    """Draw a program as DOT text, top-down.

    Attention edges are solid blue, data edges green, residual dashed red, state dotted purple, removed grey.

    Args:
        color: `"family"` fills boxes by their family, None leaves them white; a mapping of numbers by node or path is
            drawn as colours, a mapping of notes as severities with tooltips.
        scale: scale of the numbers, `linear` or `log`.
        options: see `PictureOptions`.
    """
    if isinstance(color, str) and color != "family":
        raise UsageError("unknown colouring of a DOT picture", expected='"family", None or a mapping', got=color)
    picture = compose(program, **options).layout()
    overlay = overlay_of(program, drawn_targets(picture), color if isinstance(color, Mapping) else None, scale)
    inside: dict[str, list[str]] = {path: [] for path in ("", *picture.groups)}
    for path in sorted(picture.boxes):
        inside[picture.boxes[path].parent].append(path)
    children: dict[str, list[str]] = {path: [] for path in inside}
    for path in sorted(picture.groups):
        children[picture.groups[path].parent].append(path)
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
        path, depth, leaving = stack.pop()
        pad = "  " * depth
        if leaving:
            out.append("  " * (depth - 1) + "}")
            continue
        if path:
            group = picture.groups[path]
            out.append("  " * (depth - 1) + f"subgraph {quoted('cluster_' + path)} {{")
            out += [f"{pad}label={quoted(group.title)};", f"{pad}color={quoted('#b9c0c8')};"]
            stack.append((path, depth, True))
        out += [pad + _dot_node(picture.boxes[p], overlay, color == "family") for p in inside[path]]
        stack += [(child, depth + 1, False) for child in reversed(children[path])]
    out += ["  " + _dot_edge(edge) for edge in picture.edges]
    return "\n".join([*out, "}", ""])


def quoted(value: str) -> str:
    """A DOT string, with quotes, backslashes and invisible characters escaped."""
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
    colour, style = ("grey", "dotted") if gone else _DOT_LINES[edge.kind]
    facts = {"color": quoted(colour), "style": quoted(style), "class": quoted(f"{edge.kind} {edge.mark}".rstrip())}
    if edge.mark and not gone:
        facts["color"], facts["penwidth"] = quoted(MARKS[edge.mark][0]), '"2.5"'
    if edge.count > 1:
        facts["label"] = quoted(f"×{edge.count}")
    if edge.back:
        facts["constraint"] = '"false"'
    return f"{quoted(edge.src)} -> {quoted(edge.dst)} [{', '.join(f'{k}={v}' for k, v in facts.items())}];"
