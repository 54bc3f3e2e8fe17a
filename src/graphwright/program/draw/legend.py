"""The legend under a picture: kinds of edge, marks of a difference, the scale of an overlay, what was closed."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from graphwright.program.draw.overlay import LEVELS, Remarks, shade
from graphwright.program.draw.style import EDGES, MARKS, short, text, text_width

if TYPE_CHECKING:
    from graphwright.program.draw.layout import Layout
    from graphwright.program.draw.overlay import Overlay

_ROW, _BAR = 22, 160


@dataclass(slots=True)
class Legend:
    """SVG of the legend, and the room that it needs."""

    body: list[str] = field(default_factory=list)
    width: int = 0
    height: int = 0


def legend(picture: Layout, overlay: Overlay | Remarks | None, diff: bool, hidden: Collection[str] = ()) -> Legend:
    """The legend of a picture, its top left at 0, 0; `hidden` are kinds of edge inside closed groups."""
    made = Legend(height=8)
    found = {e.kind for e in picture.edges}.union(hidden)
    kinds = [k for k in EDGES if k in found]
    _lines(made, [(k, EDGES[k][3]) for k in kinds])
    if diff:
        _lines(made, [(k, MARKS[k][3]) for k in MARKS])
    if isinstance(overlay, Remarks):
        _levels(made, overlay)
    elif overlay is not None:
        _scale(made, overlay)
    if picture.collapsed:
        names = ", ".join(short(p, 40) for p in picture.collapsed[:3])
        more = f" and {len(picture.collapsed) - 3} more" if len(picture.collapsed) > 3 else ""
        _say(made, f"closed to stay within the budget: {names}{more}")
    made.height += 8
    return made


def _lines(made: Legend, entries: list[tuple[str, str]]) -> None:
    x, y = 16, made.height + _ROW // 2
    for kind, word in entries:
        made.body.append(
            f'<g class="gw-e gw-{kind}"><path d="M{x} {y}H{x + 32}" marker-end="url(#gw-tip-{kind})"/></g>'
            f'<text class="gw-s" x="{x + 40}" y="{y + 4}">{word}</text>'
        )
        x += 40 + text_width(word) + 20
    if entries:
        made.width, made.height = max(made.width, x), made.height + _ROW


def _scale(made: Legend, overlay: Overlay) -> None:
    if overlay.low is None or overlay.high is None:
        _say(made, "overlay: no finite value")
        return
    y = made.height + 4
    low, high = repr(overlay.low), repr(overlay.high)
    left = 16 + text_width(low) + 8
    stops = "".join(f'<stop offset="{k / 8}" stop-color="{shade(k / 8)[0]}"/>' for k in range(9))
    kind = ", log scale" if overlay.logarithmic else ""
    name = f"gw-scale-{'log' if overlay.logarithmic else 'linear'}"
    made.body.append(
        f'<linearGradient id="{name}">{stops}</linearGradient><g class="gw-scale" data-min="{low}" data-max="{high}">'
        f'<text class="gw-s" x="16" y="{y + 11}">{low}</text>'
        f'<rect x="{left}" y="{y}" width="{_BAR}" height="14" fill="url(#{name})"/>'
        f'<text class="gw-s" x="{left + _BAR + 8}" y="{y + 11}">{high}{kind}</text></g>'
    )
    made.width, made.height = max(made.width, left + _BAR + 24 + text_width(high + kind)), made.height + _ROW
    _say(made, "hatched: no value")


def _levels(made: Legend, remarks: Remarks) -> None:
    x, y = 16, made.height + 4
    for level in remarks.levels:
        word, fill, _ = LEVELS[level]
        made.body.append(
            f'<rect x="{x}" y="{y}" width="14" height="14" rx="3" fill="{fill}" stroke="#555e69"/>'
            f'<text class="gw-s" x="{x + 20}" y="{y + 11}">{word}</text>'
        )
        x += 20 + text_width(word) + 20
    made.width, made.height = max(made.width, x), made.height + _ROW


def _say(made: Legend, words: str) -> None:
    made.body.append(f'<text class="gw-s" x="16" y="{made.height + 15}">{text(words)}</text>')
    made.width, made.height = max(made.width, 32 + text_width(words)), made.height + _ROW
