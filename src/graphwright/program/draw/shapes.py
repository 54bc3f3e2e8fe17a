"""Pictures and charts as lists of shapes with attributes, and the SVG text of the shapes.

Drawings of programs, pictures of genomes and charts all become shapes; no other module of the package writes SVG.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from math import isfinite
from typing import Any

_HIDDEN = frozenset({"Cc", "Cf", "Cs", "Cn", "Co", "Zl", "Zp"})


def clean(text: str) -> str:
    r"""Replace control characters, direction marks and characters that XML forbids by visible `\u{...}` escapes."""
    if text.isascii() and text.isprintable():
        return text
    return "".join(c if c == " " or unicodedata.category(c) not in _HIDDEN else f"\\u{{{ord(c):x}}}" for c in text)


def escaped(value: str) -> str:
    """Escape a string for use as text or attribute value of XML and HTML."""
    return escape(clean(value), quote=True)


@dataclass(frozen=True, slots=True)
class Shape:
    """One SVG element."""

    tag: str  # name of the element
    attrs: dict[str, Any]  # attributes in the order in which they are written
    content: tuple[Shape | str, ...] = ()  # text and inner shapes
    title: str = ""  # text shown while the pointer is over the shape; empty for none

    def __str__(self) -> str:
        given = {k: f"{v:g}" if isinstance(v, float) else escaped(str(v)) for k, v in self.attrs.items()}
        values = "".join(f' {name}="{value}"' for name, value in given.items())
        inside = "".join(escaped(part) if isinstance(part, str) else str(part) for part in self.content)
        if self.title:
            inside = "<title>" + "\n".join(map(escaped, self.title.split("\n"))) + f"</title>{inside}"
        return f"<{self.tag}{values}>{inside}</{self.tag}>" if self.content or self.title else f"<{self.tag}{values}/>"


def shape(tag: str, *content: Shape | str, title: str = "", **attrs: Any) -> Shape:
    """Make an SVG element from keyword attributes: `shape("text", "hello", x=1, text_anchor="end", class_="small")`.

    In names `_` becomes `-` (`text-anchor`) and a final `_` is dropped. Attributes with the value None are omitted.
    """
    given = {name: value for name, value in attrs.items() if value is not None}
    named = {k.rstrip("_").replace("_", "-"): value for k, value in given.items()}
    return Shape(tag, named, content, title)


def label(x: float, y: float, words: str, anchor: str | None = None, **attrs: Any) -> Shape:
    """Make a text with its baseline at y; its start is at x, or its middle or end if `anchor` is "middle" or "end"."""
    return shape("text", words, x=x, y=y, text_anchor=anchor, **attrs)


def points(corners: Iterable[tuple[float, float]]) -> str:
    """Format corners as the `points` of a polyline or polygon, rounded to a tenth of a pixel."""
    return " ".join(f"{x:.1f},{y:.1f}" for x, y in corners)


FONT = "Arial, 'Liberation Sans', Helvetica, sans-serif"
Paints = Mapping[str, Mapping[str, Any]]  # tag or class -> attributes, named as in `shape`


def picture(width: float, height: float, shapes: Sequence[Shape], paints: Paints) -> str:
    """Make an SVG document of shapes on white paper.

    Args:
        width, height: in pixels.
        shapes: the shapes, the lowest first.
        paints: attributes by tag or class, for all shapes that do not state them. They are written into each shape, as
            renderers other than browsers read attributes but not always style sheets.
    """
    size = f'viewBox="0 0 {width:g} {height:g}" width="{width:g}" height="{height:g}" role="img"'
    paper = shape("rect", class_="paper", width=width, height=height, fill="#ffffff")
    body = "\n".join(str(_painted(s, paints)) for s in (paper, *shapes))
    return f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="{FONT}">\n{body}\n</svg>\n'


def _painted(given: Shape, paints: Paints) -> Shape:
    """Return a shape with the paints of its classes and of its tag; of several, the last class has precedence."""
    found: dict[str, Any] = {}
    for name in (given.tag, *str(given.attrs.get("class", "")).split()):
        found |= shape(given.tag, **paints.get(name, {})).attrs
    content = tuple(_painted(part, paints) if isinstance(part, Shape) else part for part in given.content)
    missing = {name: value for name, value in found.items() if name not in given.attrs}
    return Shape(given.tag, given.attrs | missing, content, given.title)


WIDTH, HEIGHT = 640, 240  # pixels of a chart without its legend
PAINTS: Paints = {
    "text": {"font_size": 11, "fill": "#24292f"},
    "axis": {"stroke": "#8c959f", "fill": "none"},
    "small": {"font_size": 9, "fill": "#57606a"},
}
"""Paints of a chart."""
COLOURS = (
    "#54aeff", "#fd8c73", "#4ac26b", "#c297ff", "#d4a72c", "#ff80c8", "#39c5cf", "#8c959f", "#e16f24", "#6fdd8b",
)  # fmt: skip
"""Colours of series that have none of their own, used in turn."""
Series = Mapping[str, tuple[Sequence[float], str]]  # name -> values and colour
_LEFT, _RIGHT, _TOP, _BOTTOM = 50, 620, 20, 210


@dataclass(frozen=True, slots=True)
class PlotArea:
    """The mapping from data ranges to the pixels of a chart; a range of one number maps to the left or bottom."""

    x: tuple[float, float]
    y: tuple[float, float]

    def point(self, x: float, y: float) -> tuple[float, float]:
        """Return the pixel of a data point."""
        (left, right), (low, high) = self.x, self.y
        across = (x - left) / (right - left) if right > left else 0.0
        up = (y - low) / (high - low) if high > low else 0.0
        return _LEFT + (_RIGHT - _LEFT) * across, _BOTTOM - (_BOTTOM - _TOP) * up

    def axes(self, right: str, left: str = "") -> list[Shape]:
        """Draw both axes, with the limits of y as numbers, and the labels `left` and `right` below the ends of x."""
        low, high = self.y
        found = [
            shape("path", class_="axis", d=f"M{_LEFT} 15V{_BOTTOM}H{_RIGHT + 5}"),
            label(45, 24, f"{high:.4g}", "end", class_="small"),
            label(45, 212, f"{low:.4g}", "end", class_="small"),
            label(_RIGHT, 224, right, "end", class_="small"),
        ]
        return [*found, label(_LEFT, 224, left, class_="small")] if left else found


def lines(series: Series, x_label: str, y: tuple[float, float] | None = None) -> list[Shape]:
    """Draw a line chart over equally spaced steps.

    Args:
        series: name -> values and colour. NaN and infinite values are left out; a single value is a horizontal line.
        x_label: label of the last step.
        y: range of the y axis; by default the range of the finite values.
    """
    finite = [v for values, _ in series.values() for v in values if isfinite(v)] or [0.0]
    area = PlotArea((0, max(len(values) for values, _ in series.values()) - 1), y or (min(finite), max(finite)))
    found = area.axes(x_label)
    for name, (values, colour) in series.items():
        corners = [area.point(step, v) for step, v in enumerate(values) if isfinite(v)]
        if len(corners) == 1:
            corners.append((float(_RIGHT), corners[0][1]))
        path = points(corners)
        found.append(shape("polyline", title=name, points=path, fill="none", stroke=colour, stroke_width=1.5))
    return found


def areas(series: Series, x_label: str) -> list[Shape]:
    """Draw stacked areas over equally spaced steps; `series` maps names to values (0: absent) and colour."""
    count = max(len(values) for values, _ in series.values())
    area = PlotArea((0, max(count - 1, 1)), (0, max(map(sum, zip(*(v for v, _ in series.values()), strict=True)))))
    found, base = area.axes(x_label), [0.0] * count
    for name, (values, colour) in series.items():
        top = [b + v for b, v in zip(base, values, strict=True)]
        present = [step for step, v in enumerate(values) if v]
        steps = range(max(present[0] - 1, 0), min(present[-1] + 1, count - 1) + 1)
        corners = [area.point(s, top[s]) for s in steps] + [area.point(s, base[s]) for s in reversed(steps)]
        if count == 1:
            corners = [area.point(0, top[0]), area.point(1, top[0]), area.point(1, base[0]), area.point(0, base[0])]
        found.append(shape("polygon", title=name, points=points(corners), fill=colour))
        base = top
    return found


def legend(names: Mapping[str, str], top: float) -> list[Shape]:
    """Draw names in their colours, three to a row, from the height `top` down."""
    return [
        label(_LEFT + WIDTH // 3 * (k % 3), top + 18 * (k // 3), name, fill=colour)
        for k, (name, colour) in enumerate(names.items())
    ]


def chart(shapes: Sequence[Shape], height: float = HEIGHT) -> str:
    """Make the SVG document of a chart."""
    return picture(WIDTH, height, shapes, PAINTS)
