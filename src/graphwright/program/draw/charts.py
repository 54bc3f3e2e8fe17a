"""Charts as shapes: lines over steps or generations, stacked areas, points, and bars.

Every chart shares one plot area, with the ends of both axes as labels.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import isfinite

from graphwright.program.draw.shapes import Shape, label, picture, points, shape

WIDTH, HEIGHT = 640, 240
"""Pixels of a chart without its legend."""
STYLE = (
    "text{font:11px system-ui,sans-serif;fill:#24292f}.axis{stroke:#8c959f;fill:none}.small{font-size:9px;fill:#57606a}"
)
COLOURS = (
    "#54aeff", "#fd8c73", "#4ac26b", "#c297ff", "#d4a72c", "#ff80c8", "#39c5cf", "#8c959f", "#e16f24", "#6fdd8b",
)  # fmt: skip
"""Colours of series that have none of their own, used in turn."""
_LEFT, _RIGHT, _TOP, _BOTTOM = 50, 620, 20, 210


@dataclass(frozen=True, slots=True)
class PlotArea:
    """Data ranges mapped to the pixels of a chart; a range of one number puts everything at its start."""

    x: tuple[float, float]
    y: tuple[float, float]

    def point(self, x: float, y: float) -> tuple[float, float]:
        """The pixel of a data point."""
        (left, right), (low, high) = self.x, self.y
        across = (x - left) / (right - left) if right > left else 0.0
        up = (y - low) / (high - low) if high > low else 0.0
        return _LEFT + (_RIGHT - _LEFT) * across, _BOTTOM - (_BOTTOM - _TOP) * up

    def axes(self, right: str, left: str = "") -> list[Shape]:
        """Both axes, with the ends of the y range and labels for the ends of the x range."""
        low, high = self.y
        found = [
            shape("path", class_="axis", d=f"M{_LEFT} 15V{_BOTTOM}H{_RIGHT + 5}"),
            label(45, 24, f"{high:.4g}", "end", class_="small"),
            label(45, 212, f"{low:.4g}", "end", class_="small"),
            label(_RIGHT, 224, right, "end", class_="small"),
        ]
        return [*found, label(_LEFT, 224, left, class_="small")] if left else found


def lines(
    series: Mapping[str, tuple[Sequence[float], str]], x_label: str, y: tuple[float, float] | None = None
) -> list[Shape]:
    """Lines over equally spaced steps.

    Args:
        series: name -> values and colour. Infinite values are left out; a single value is drawn twice.
        x_label: label of the last step.
        y: range of the y axis; by default that of the values.
    """
    finite = [v for values, _ in series.values() for v in values if isfinite(v)] or [0.0]
    area = PlotArea((0, max(len(values) for values, _ in series.values()) - 1), y or (min(finite), max(finite)))
    found = area.axes(x_label)
    for name, (values, colour) in series.items():
        corners = [area.point(step, v) for step, v in enumerate(values) if isfinite(v)]
        if len(corners) == 1:
            corners.append((float(_RIGHT), corners[0][1]))
        found.append(
            shape("polyline", title=name, points=points(corners), fill="none", stroke=colour, stroke_width=1.5)
        )
    return found


def areas(series: Mapping[str, tuple[Sequence[float], str]], x_label: str) -> list[Shape]:
    """Stacked areas over equally spaced steps: name -> values and colour. A series of zeros at a step has no area."""
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
    """Names in their colours, three to a row, below a chart."""
    return [
        label(_LEFT + WIDTH // 3 * (k % 3), top + 18 * (k // 3), name, style=f"fill:{colour}")
        for k, (name, colour) in enumerate(names.items())
    ]


def chart(shapes: Sequence[Shape], height: float = HEIGHT, style: str = STYLE) -> str:
    """The SVG document of a chart."""
    return picture(WIDTH, height, shapes, style)
