"""A program as SVG: self-contained, with selectable text, in light and dark colours chosen by CSS."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Unpack

from graphwright.files import StrPath, atomic_write
from graphwright.program.draw.layout import compose
from graphwright.program.draw.shapes import Shape, escaped, shape
from graphwright.program.draw.style import (
    EDGES,
    FONT,
    LEVELS,
    LINE,
    MARKS,
    THEMES,
    box_paint,
    css,
    drawn_targets,
    line_paint,
    overlay_of,
    shade,
    short,
    text_width,
    tips,
)
from graphwright.signatures import keywords

if TYPE_CHECKING:
    from graphwright.program.draw.layout import Box, DrawnEdge, Group, PictureKeywords, PictureLayout
    from graphwright.program.draw.style import NodeNote, Overlay
    from graphwright.program.program import Program

ROUND = 5  # radius of the corners of lines, in pixels
CELL = 240  # budget of a picture in a notebook cell: below 200 kB, and at most a few screens


@keywords(compose)
def to_svg(
    program: Program, path: StrPath | None = None, *, overlay: Mapping[Any, float | NodeNote] | None = None,
    scale: str = "linear", **options: Unpack[PictureKeywords],
) -> str:  # fmt: skip
    """Draw a program as an SVG document.

    Args:
        path: the file to write, if any.
        overlay: numbers by node or path, drawn as colours with a legend; or notes by node, such as
            `found.overlay()` of a diagnosis.
        scale: scale of the numbers, `linear` or `log`.
        options: see `compose`.
    """
    made = compose(program, **options).layout()
    colours = overlay_of(program, drawn_targets(made), overlay, scale)
    diff = options.get("diff") is not None
    return written(render(made, legend(made, colours, diff), colours, diff), path)


def notebook(program: Program) -> str:
    """Draw a program for a notebook cell as HTML: a line of text, and the picture in a scrollable box."""
    return (
        f"<div><p><code>{escaped(repr(program))}</code></p>"
        f'<div style="max-height:600px;overflow:auto">{to_svg(program, budget=CELL)}</div></div>'
    )


def written(picture: str, path: StrPath | None) -> str:
    """Return the text of a picture; if a path is given, also write the file atomically. Raises: UnwritableTarget."""
    if path is not None:
        atomic_write(path, picture.encode())
    return picture


def render(made: PictureLayout, below: Legend, overlay: Overlay, diff: bool) -> str:
    """Write a layout and its legend as an SVG document."""
    width, height = max(made.width, below.width), made.height + below.height
    left = (width - made.width) // 2
    parts: list[Any] = [
        f'<svg xmlns="http://www.w3.org/2000/svg" class="gw{" gw-diff" if diff else ""}" width="{width}" '
        f'height="{height}" viewBox="0 0 {width} {height}" fill="{THEMES[0].ink}" '
        f'font-family="{FONT}" font-size="12"><style>{css()}</style>{tips()}',
        f'<rect class="gw-paper" width="{width}" height="{height}" fill="{THEMES[0].paper}"/>',
        f'<g class="gw-all" transform="translate({left} 0)">',
    ]
    parts += [frame(group, overlay) for group in made.groups.values()]
    unchanged = [line(edge, made.boxes[edge.dst]) for edge in made.edges if not edge.mark]
    parts += ['<g class="gw-unchanged">', *unchanged, "</g>"]  # faded as one, so that lines on lines stay pale
    parts += [line(edge, made.boxes[edge.dst]) for edge in made.edges if edge.mark]
    for g in made.groups.values():  # above the lines
        parts += _with_halo(g.title, "gw-n gw-s gw-h", {"data_path": g.path}, x=g.x + 10, y=g.y + 16)
    parts += [box(b, overlay) for b in made.boxes.values()]
    parts += ["</g>", f'<g class="gw-legend" transform="translate(0 {made.height})">']
    parts += ["".join(map(str, row)) for row in below.rows]
    return "\n".join(map(str, [*parts, "</g></svg>"]))


def frame(group: Group, overlay: Overlay) -> Shape:
    """Draw the frame of an open group, tinted if the overlay has a number for the group itself."""
    colour = overlay.colours.get(f"{group.path}.") if group.path in overlay.own else None
    fill = f"fill:{colour[0]};fill-opacity:.3" if colour else None
    light = {"fill": THEMES[0].frame, "fill_opacity": THEMES[0].opacity, "stroke": THEMES[0].line}
    rect = shape("rect", x=group.x, y=group.y, width=group.w, height=group.h, rx=8, style=fill, **light)
    return shape("g", rect, title=group.path, class_="gw-f", data_path=group.path)


def box(b: Box, overlay: Overlay) -> Shape:
    """Draw the box of a node or a closed group."""
    classes = f"gw-b gw-{b.family}-box" + (f" gw-{b.mark}" if b.mark else "")
    colour, note = overlay.colours.get(b.target), overlay.notes.get(b.target)
    if overlay.levels is None and colour is None:
        classes += " gw-none"
    fill, ink = (f"fill:{colour[0]}", f"fill:{colour[1]}") if colour else (None, None)
    radius = b.h // 2 if b.kind in ("junction", "input") else 4 if b.kind != "group" else 8
    light = box_paint(b.family, b.mark)
    outline = [shape("rect", x=b.x, y=b.y, width=b.w, height=b.h, rx=radius, style=fill, **light)]
    if b.repeat > 1:
        outline.insert(0, shape("rect", x=b.x + 4, y=b.y + 4, width=b.w, height=b.h, rx=radius, **light))
    x, y = b.x + b.w // 2, b.y + 17 - (b.kind == "junction")
    words = [
        shape("text", line, class_=f"gw-{'s' if k else 'n'}", x=x, y=y + LINE * k, text_anchor="middle", style=ink)
        for k, line in enumerate(b.lines)
    ]
    title = "\n".join(part for part in (b.tip, note, b.mark) if part)
    return shape("g", *outline, *words, title=title, class_=classes, data_path=b.path)


def line(edge: DrawnEdge, target: Box) -> Shape:
    """Draw an edge, with the number of edges if it stands for several."""
    mark = f" gw-{edge.mark}" if edge.mark else ""
    ports = ", ".join(f"{a} → {b}" for a, b in edge.ports[:8]) + (", …" if len(edge.ports) > 8 else "")
    title = f"{edge.src} → {edge.dst}\n{edge.kind}{', ' + edge.mark if edge.mark else ''}\nports {ports}"
    seen = edge.mark or edge.kind
    drawn = [shape("path", d=path_data(edge.points), marker_end=f"url(#gw-tip-{seen})", **line_paint(seen))]
    if edge.count > 1:
        x, y = edge.points[-1]
        side = ("-5", "end") if 2 * x <= 2 * target.x + target.w else ("5", "start")
        many = f"×{edge.count}"
        drawn += _with_halo(many, "gw-s gw-c", {}, x=x, y=y - 7, dx=side[0], text_anchor=side[1])
    return shape("g", *drawn, title=title, class_=f"gw-e gw-{edge.kind}{mark}")


def _with_halo(words: str, classes: str, own: Mapping[str, str], **attrs: Any) -> list[Shape]:
    """Draw a text above its own outline in the colour of the paper; `paint-order` is unknown outside browsers."""
    paper = {"fill": THEMES[0].paper, "stroke": THEMES[0].paper, "stroke_width": 3}
    halo = shape("text", words, class_=f"{classes} gw-halo", aria_hidden="true", **attrs, **paper)
    return [halo, shape("text", words, class_=classes, **own, **attrs)]


def path_data(points: Sequence[tuple[int, int]]) -> str:
    """Return the SVG path data of a line with rounded corners."""
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
        """Append shapes that share a row of the legend, which is `width` pixels wide."""
        self.rows += [tuple(entry) for entry in shapes]
        self.width, self.height = max(self.width, width), self.height + _ROW

    def samples(self, words: Iterable[str], wide: int, draw: Callable[[int, int, str], Shape]) -> None:
        """Append a row of words; `draw(x, y, word)` makes the sample, `wide` pixels wide, to the left of each word."""
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
    """Make the legend of a picture, with its top left at 0, 0: kinds of edge, diff marks, overlay, closed groups.

    `hidden`: further kinds of edge to explain, such as those inside closed groups.
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
    line = shape("path", d=f"M{x} {y + _ROW // 2}H{x + 32}", marker_end=f"url(#gw-tip-{kind})", **line_paint(kind))
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
