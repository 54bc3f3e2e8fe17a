"""The picture of a life: loss and other figures over steps, and a line for each expert that was born, died or reborn.

Everything is drawn from the log, and for an open segment from its figures so far.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import isfinite
from typing import TYPE_CHECKING, Any

from graphwright.lifecycle.log import Event, LifeLog
from graphwright.program.draw.shapes import COLOURS, PAINTS, Shape, label, picture, points, shape

if TYPE_CHECKING:
    from graphwright.lifecycle.figures import Figures

_LEFT, _RIGHT, _TOP = 84.0, 640.0, 34.0
_PANEL, _GAP, _ROW = 84.0, 22.0, 13.0  # pixels: height of a chart, space below it, height of an expert's line
_MOST = 48
"""Experts that are drawn, those with the latest events first."""
_BEGINS = {"expert_born": "#1a7f37", "expert_reborn": "#8250df"}
_ENDS = {"expert_died": "#cf222e", "expert_retired": "#57606a"}
_LINES = {"alarm": ("#cf222e", "4 3"), "edit": ("#0969da", "1 3"), "merge": ("#8250df", "6 2"),
          "fork": ("#1a7f37", "6 2"), "restore": ("#8c959f", "1 2"), "segment_start": ("#d0d7de", None),
          "fault": ("#bc4c00", "2 2"), "rename": ("#57606a", "8 2"), "compaction": ("#57606a", "1 5"),
          "export": ("#9a6700", "8 2")}  # fmt: skip
"""Events that are drawn as vertical lines -> colour and dashes."""

_WORDS = {"loss": "loss", "pi": "PI, predictive integrity", "d": "d, deviation of PI from its average",
          "rho": "ρ, latch of alarms", "k": "k, experts per token", "gradient": "norm of gradients"}  # fmt: skip
"""Figures that a controller often has -> what is written above their charts, in this order."""
_SPANS = ("#54aeff", "#b6e3ff")
"""Colours of the lives of one expert, in turn."""


@dataclass(slots=True)
class LifeLine:
    """The lives of one expert: spans of steps, of which the last may be open, and its events."""

    name: str
    spans: list[tuple[int, int | None]] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)


def life_lines(log: LifeLog) -> list[LifeLine]:
    """Return the lives of all experts that have events, in the order of their first event."""
    found: dict[str, LifeLine] = {}
    for event in log.of(*_BEGINS, *_ENDS):
        line = found.setdefault(str(event.facts.get("name")), LifeLine(str(event.facts.get("name"))))
        open_since = line.spans.pop()[0] if line.spans and line.spans[-1][1] is None else None
        if open_since is None and not line.events and event.kind != "expert_born":
            open_since = 0  # it lived from the beginning
        if open_since is not None:
            line.spans.append((open_since, event.step))
        if event.kind in _BEGINS:
            line.spans.append((event.step, None))
        line.events.append(event)
    return list(found.values())


def curves(log: LifeLog, running: Figures | None) -> dict[str, list[tuple[float, float]]]:
    """Return each figure as (step, value) pairs, in the order of charts: of all segments, `running` included."""
    found: dict[str, list[tuple[float, float]]] = {}
    rows = [p for e in log.of("segment_end") for p in e.facts.get("curve", {}).get("points", [])]
    for row in [*rows, *([] if running is None or running.ended else running.curve.points)]:
        values = dict(row)
        step = values.pop("step")
        for name, value in values.items():
            if isinstance(value, int | float) and isfinite(value):
                found.setdefault(name, []).append((step, value))
    order = {name: i for i, name in enumerate(_WORDS)}
    return dict(sorted(found.items(), key=lambda row: (order.get(row[0], len(order)), row[0])))


def draw(log: LifeLog, title: str, age: int, running: Figures | None) -> str:
    """Return the picture as SVG."""
    series, lines = curves(log, running), life_lines(log)
    shown = sorted(lines, key=lambda line: line.events[-1].seq)[-_MOST:]
    shown = [line for line in lines if line in shown]
    last = max(age, 1)
    bottom = _TOP + (_PANEL + _GAP) * len(series) + (_ROW * len(shown) + _GAP if shown else 0)
    found = [label(_LEFT, 18, f"{title}, {age:,} steps", font_weight="bold"), *_events(log, last, bottom - _GAP)]
    top = _TOP
    for i, (name, values) in enumerate(series.items()):
        found += _panel(name, values, COLOURS[i % len(COLOURS)], last, top)
        top += _PANEL + _GAP
    for i, line in enumerate(shown):
        found += _lives(line, last, top + _ROW * (i + 0.5))
    if len(lines) > len(shown):
        found.append(label(_LEFT, bottom - 8, f"{len(lines) - len(shown)} more experts", class_="small"))
    found.append(label(_RIGHT, bottom - 8, f"step {age:,}", "end", class_="small"))
    marks = [kind for kind in _LINES if kind != "segment_start" and log.of(kind)]
    kinds = [*marks, *(kind for kind in (*_BEGINS, *_ENDS) if log.of(kind))]
    for i, kind in enumerate(kinds):
        colour = _LINES[kind][0] if kind in _LINES else (_BEGINS | _ENDS)[kind]
        x, y = _LEFT + 140 * (i % 4), bottom + 12 + 16 * (i // 4)
        dashes = _LINES.get(kind, (None, None))[1]
        found.append(
            shape("line", x1=x, x2=x + 16, y1=y - 4, y2=y - 4, stroke=colour, stroke_dasharray=dashes)
            if kind in _LINES else shape("circle", cx=x + 8, cy=y - 4, r=3.5, fill=colour)
        )  # fmt: skip
        found.append(label(x + 21, y, f"{kind.replace('_', ' ')} ({len(log.of(kind))})", fill=colour))
    return picture(_RIGHT + 20, bottom + 20 + 16 * (-(-len(kinds) // 4)), found, PAINTS)


def _x(step: float, last: int) -> float:
    return _LEFT + (_RIGHT - _LEFT) * step / last


def _events(log: LifeLog, last: int, bottom: float) -> Iterator[Shape]:
    for event in log.of(*_LINES):
        colour, dashes = _LINES[event.kind]
        x, why = _x(event.step, last), event.facts.get("why") or event.facts.get("reason") or ""
        text = f"{event.kind.replace('_', ' ')} at step {event.step}" + (f": {why}" if why else "")
        yield shape("line", title=text, x1=x, x2=x, y1=_TOP - 6, y2=bottom, stroke=colour, stroke_dasharray=dashes,
                    class_=f"event-{event.kind}")  # fmt: skip


def _panel(name: str, values: Sequence[tuple[float, float]], colour: str, last: int, top: float) -> Iterable[Shape]:
    low, high = min(v for _, v in values), max(v for _, v in values)
    span = high - low or 1.0
    corners = [(_x(s, last), top + _PANEL - (_PANEL - 6) * (v - low) / span) for s, v in values]
    if len(corners) == 1:
        corners.append((corners[0][0] + 2, corners[0][1]))
    yield shape("path", class_="axis", d=f"M{_LEFT:g} {top:g}V{top + _PANEL:g}H{_RIGHT:g}")
    yield label(_LEFT - 5, top + 10, f"{high:.4g}", "end", class_="small")
    yield label(_LEFT - 5, top + _PANEL, f"{low:.4g}", "end", class_="small")
    yield shape("polyline", title=name, points=points(corners), fill="none", stroke=colour, stroke_width=1.5)
    yield label(_LEFT + 5, top - 1, _WORDS.get(name, name), fill=colour)


def _lives(line: LifeLine, last: int, y: float) -> Iterable[Shape]:
    yield label(_LEFT - 5, y + 3, ".".join(line.name.split(".")[-3:])[-16:], "end", class_="small")
    for i, (start, end) in enumerate(line.spans):
        x1, x2 = _x(start, last), _x(last if end is None else end, last)
        text = f"{line.name}: from step {start} " + ("on" if end is None else f"to {end}")
        yield shape("line", title=text, x1=x1, x2=max(x2, x1 + 1), y1=y, y2=y, stroke=_SPANS[i % 2], stroke_width=5)
    for event in line.events:
        colour = (_BEGINS | _ENDS)[event.kind]
        text = f"{line.name}: {event.kind.replace('_', ' ')} at step {event.step}{_reason(event.facts)}"
        yield shape(
            "circle", title=text, cx=_x(event.step, last), cy=y, r=3.5, fill=colour, class_=f"event-{event.kind}"
        )


def _reason(facts: Mapping[str, Any]) -> str:
    return f" ({facts['reason']})" if facts.get("reason") else ""
