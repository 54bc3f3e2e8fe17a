"""Pictures as plain values: shapes with attributes, and their SVG text.

Drawings of programs, pictures of genomes and charts all become shapes; no other module of the package writes SVG.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

_HIDDEN = frozenset({"Cc", "Cf", "Cs", "Cn", "Co", "Zl", "Zp"})


def clean(text: str) -> str:
    r"""Make every character visible: control characters, direction marks and what XML forbids become `\u{...}`."""
    if text.isascii() and text.isprintable():
        return text
    return "".join(c if c == " " or unicodedata.category(c) not in _HIDDEN else f"\\u{{{ord(c):x}}}" for c in text)


def escaped(value: str) -> str:
    """A string as text or attribute value of XML and HTML."""
    return escape(clean(value), quote=True)


@dataclass(frozen=True, slots=True)
class Shape:
    """One SVG element.

    Attributes:
        tag: name of the element.
        attrs: attributes in the order in which they are written.
        content: text and inner shapes.
        title: text shown while the pointer is over the shape; empty for none.
    """

    tag: str
    attrs: dict[str, Any]
    content: tuple[Shape | str, ...] = ()
    title: str = ""

    def __str__(self) -> str:
        values = "".join(f' {name}="{_value(value)}"' for name, value in self.attrs.items())
        inside = "".join(escaped(part) if isinstance(part, str) else str(part) for part in self.content)
        if self.title:
            inside = "<title>" + "\n".join(map(escaped, self.title.split("\n"))) + f"</title>{inside}"
        return f"<{self.tag}{values}>{inside}</{self.tag}>" if self.content or self.title else f"<{self.tag}{values}/>"


def shape(tag: str, *content: Shape | str, title: str = "", **attrs: Any) -> Shape:
    """Make a shape. In attribute names `_` stands for `-`, a final `_` is dropped; attributes of None are left out."""
    named = {
        name if name[-1].isupper() else name.rstrip("_").replace("_", "-"): value
        for name, value in attrs.items()
        if value is not None
    }
    return Shape(tag, named, content, title)


def label(x: float, y: float, words: str, anchor: str | None = None, **attrs: Any) -> Shape:
    """Text whose baseline starts at x, y; `anchor` is `middle` or `end`."""
    return shape("text", words, x=x, y=y, text_anchor=anchor, **attrs)


def points(corners: Iterable[tuple[float, float]]) -> str:
    """Corners as the `points` of a polyline or polygon, rounded to a tenth of a pixel."""
    return " ".join(f"{x:.1f},{y:.1f}" for x, y in corners)


def picture(width: float, height: float, shapes: Sequence[Shape], style: str) -> str:
    """An SVG document of shapes under a style sheet."""
    size = f'viewBox="0 0 {width:g} {height:g}" width="{width:g}" height="{height:g}" role="img"'
    body = "\n".join(map(str, shapes))
    return f'<svg xmlns="http://www.w3.org/2000/svg" {size}><style>{style}</style>\n{body}\n</svg>\n'


def _value(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else escaped(str(value))
