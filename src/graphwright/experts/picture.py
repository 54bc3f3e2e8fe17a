"""Heat maps of the use of experts: layers by experts, pairs of experts chosen together, experts per token."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from graphwright.program.draw import shapes as draw
from graphwright.program.draw.shapes import Shape, label, picture, shape
from graphwright.program.draw.style import shade, text_width
from graphwright.program.draw.svg import written

if TYPE_CHECKING:
    from graphwright.experts.usage import Usage

_PAINTS: draw.Paints = {
    "text": {"font_size": 11, "fill": "#24292f"},
    "title": {"font_weight": "bold", "font_size": 12},
    "cell": {"stroke": "#ffffff", "stroke_width": 1},
    "dead": {"fill": "none", "stroke": "#cf222e", "stroke_dasharray": "3 2"},
}
_CELL, _LEAST, _MOST_WIDTH, _ROW, _GAP = 44, 7, 900, 24, 28
"""Pixels: width of a cell if there is room, its least width, the widest map, height of a row, gap between maps."""


def usage_picture(usages: Sequence[Usage], path: str | Path | None = None, *, names: Sequence[str] = ()) -> str:
    """Draw usages one below the other: shares of equal shares, and below them the experts per token.

    A cell is the tokens of an expert, relative to equal use of all experts of its layer: 1 is equal use. Dead experts
    have a red, dashed frame.
    """
    shapes: list[Shape] = []
    y, width = 8.0, 0.0
    largest = max((u.max_load for use in usages for u in use.layers.values()), default=1.0)
    for i, use in enumerate(usages):
        title = names[i] if i < len(names) else "use of experts, relative to equal use of all"
        rows = {name: u.share * len(u.share) for name, u in use.layers.items()}
        dead = {name: set(u.dead) for name, u in use.layers.items()}
        made, right, y = _map(rows, title, y, largest, dead)
        shapes += made
        width = max(width, right)
        made, right, y = _counts(use, y)
        shapes += made
        width = max(width, right)
    made, right, y = _scale(y, largest)
    return written(picture(max(width, right) + 12, y + 8, [*shapes, *made], _PAINTS), path)


def together_picture(use: Usage, layer: str, path: str | Path | None = None) -> str:
    """Draw how often two experts of a layer are chosen by the same token, relative to independent choices."""
    u = use[layer]
    p = u.count / max(u.tokens, 1)
    expected = np.maximum(np.outer(p, p) * u.tokens, 1e-12)
    lift = np.where(np.eye(len(p), dtype=bool), 0.0, u.together / expected)
    largest = float(lift.max(initial=1.0))
    rows = {str(e): lift[e] for e in range(len(p))}
    shapes, right, y = _map(rows, f"{layer}: chosen together, relative to independent choices", 8.0, largest, {})
    made, other, y = _scale(y, largest)
    return written(picture(max(right, other) + 12, y + 8, [*shapes, *made], _PAINTS), path)


def _map(
    rows: dict[str, np.ndarray], heading: str, y: float, largest: float, dead: dict[str, set[int]]
) -> tuple[list[Shape], float, float]:
    """Draw one row of cells per entry; return (shapes, right end, y below)."""
    left = 16 + max(map(text_width, rows), default=0)
    most = max(map(len, rows.values()), default=1)
    wide = min(max(_MOST_WIDTH // most, _LEAST), _CELL)
    shapes = [label(8, y + 12, heading, class_="title")]
    step = 1 if wide >= 20 else 8
    y += 22
    shapes += [label(left + (e + 0.5) * wide, y + 8, str(e), "middle") for e in range(0, most, step)]
    y += 14
    for name, values in rows.items():
        shapes.append(label(left - 6, y + _ROW / 2 + 4, name, "end"))
        for e, value in enumerate(values.tolist()):
            fill, ink = shade(value / largest if largest else 0.0)
            x, gone = left + e * wide, e in dead.get(name, ())
            title = f"{name}, expert {e}: {value:.3f}"
            shapes.append(shape("rect", class_="cell", x=x, y=y, width=wide, height=_ROW, fill=fill, title=title))
            if wide >= 30:
                shapes.append(label(x + wide / 2, y + _ROW / 2 + 4, f"{value:.2f}", "middle", fill=ink))
            if gone:
                shapes.append(shape("rect", class_="dead", x=x + 1.5, y=y + 1.5, width=wide - 3, height=_ROW - 3))
        y += _ROW
    return shapes, max(left + most * wide, 16 + 1.1 * text_width(heading)), y + _GAP / 2


def _counts(use: Usage, y: float) -> tuple[list[Shape], float, float]:
    """Draw the shares of tokens with 0, 1, 2, ... experts as a line of text per layer, if they differ."""
    lines = []
    for name, u in use.layers.items():
        some = np.flatnonzero(u.per_token)
        if len(some) > 1:
            parts = ", ".join(f"{k}: {u.per_token[k] / max(u.tokens, 1):.0%}" for k in some[:12].tolist())
            lines.append(f"{name}, tokens by number of experts: {parts}")
    shapes = [label(8, y + 12 + 16 * i, text) for i, text in enumerate(lines)]
    right = 16.0 + max(map(text_width, lines), default=0)
    return shapes, right, y + 16 * len(lines) + _GAP / 2


def _scale(y: float, largest: float) -> tuple[list[Shape], float, float]:
    """Draw the colours from 0 to the largest value."""
    shapes = [label(8, y + 12, "0")]
    for i in range(48):
        shapes.append(shape("rect", x=24 + 4 * i, y=y + 2, width=4, height=12, fill=shade(i / 47)[0]))
    shapes.append(label(24 + 4 * 48 + 6, y + 12, f"{largest:.2f}"))
    return shapes, 24 + 4 * 48 + 60, y + 20
