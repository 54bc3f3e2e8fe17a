"""Probabilities of gates over training, as SVG."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

import numpy as np

_WIDE, _HIGH, _LEFT = 640, 220, 52
_FEW = 64  # gates that get a line each


def probabilities(values: np.ndarray, names: Sequence[str], kept: Sequence[bool], last: int) -> str:
    """A line per element, blue if it was kept, red if it was cut; with many of them the mean probability per group.

    Args:
        values: float [rows, elements]; names: of the elements; kept: which of them stayed; last: step of the last row.
    """
    rows, few = len(values), len(names) <= _FEW
    groups: dict[str, list[int]] = {}
    for i, name in enumerate(names):
        groups.setdefault(name.partition("[")[0], []).append(i)
    high = _HIGH + 50 + (0 if few else 18 * -(-len(groups) // 3))
    parts = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDE + _LEFT + 20} {high}" role="img">'
             "<style>text{font:12px system-ui,sans-serif;fill:#57606a}</style>"]  # fmt: skip
    for value in (0.0, 0.5, 1.0):
        at = 10 + _HIGH * (1 - value)
        parts.append(
            f'<path d="M{_LEFT} {at:g}h{_WIDE}" stroke="#d0d7de"/><text x="10" y="{at + 4:g}">{value:g}</text>'
        )
    series: dict[str, tuple[np.ndarray, str]] = {}
    if few:
        for i, name in enumerate(names):
            series[name] = values[:, i], "#0969da" if kept[i] else "#cf222e"
    else:
        for k, (group, members) in enumerate(groups.items()):
            hue = 360 * k // len(groups)
            series[group] = values[:, members].mean(1), f"hsl({hue} 60% 45%)"
    for name, (line, colour) in series.items():
        points = " ".join(f"{_LEFT + _WIDE * t / max(rows - 1, 1):.0f},{10 + _HIGH * (1 - v):.1f}"
                          for t, v in enumerate(line.tolist()))  # fmt: skip
        parts.append(f'<polyline fill="none" stroke="{colour}" stroke-width="1.4" opacity=".8" points="{points}">'
                     f"<title>{escape(name)}</title></polyline>")  # fmt: skip
    what = "probability of each gate: blue was kept, red was cut" if few else "mean probability of the gates of an axis"
    parts.append(f'<text x="{_LEFT}" y="{_HIGH + 34}">{what}; {last} steps</text>')
    for k, (name, (_, colour)) in enumerate(series.items() if not few else ()):
        x, y = _LEFT + _WIDE // 3 * (k % 3), _HIGH + 54 + 18 * (k // 3)
        parts.append(f'<text x="{x}" y="{y}" style="fill:{colour}">{escape(name)}</text>')
    return "\n".join([*parts, "</svg>"]) + "\n"
