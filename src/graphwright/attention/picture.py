"""Pictures of patterns: a map of blocks as SVG, and the bipartite graph as DOT; shaded by attention mass.

With an earlier version, edges that were cut since are dotted grey, and added ones are marked.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from graphwright.patterns import Pattern
from graphwright.patterns.table import FULL, RULE
from graphwright.program.draw import shapes as draw
from graphwright.program.draw.dot import quoted
from graphwright.program.draw.shapes import Shape, label, picture, shape
from graphwright.program.draw.style import shade
from graphwright.program.draw.svg import written

_PAINTS: draw.Paints = {
    "text": {"font_size": 11, "fill": "#24292f"},
    "title": {"font_weight": "bold", "font_size": 12},
    "frame": {"fill": "none", "stroke": "#d0d7de"},
    "added": {"stroke": "#1a7f37", "stroke_width": 2},
    "cut": {"fill": "none", "stroke": "#8c959f", "stroke_dasharray": "1 2"},
}
_WIDE, _LEAST, _MOST = 640, 3, 24
"""Pixels: width of a map if its cells can be that small, the least and the largest size of a cell."""
_KINDS = {FULL: "all pairs", RULE: "base rule"}


def block_map(pattern: Pattern, path: str | Path | None = None, *, since: Pattern | None = None) -> str:
    """Draw each plane as a map: a row per query block, a column per key block, a cell per edge.

    Args:
        pattern: its scores give the shades, relative to the largest; if all are 0, the cells have one colour.
        path: also write the SVG to this file.
        since: an earlier version: cells of edges that were cut since are dotted grey, added ones have a green frame.
    Returns: the SVG. Raises: PatternShape if blocks or planes of the versions differ; UnwritableTarget.
    """
    rows, columns = pattern.blocks
    size = min(max(_WIDE // columns, _LEAST), _MOST)
    shapes: list[Shape] = []
    for plane in range(pattern.planes):
        top = plane * (rows * size + 40) + 26
        shapes.append(label(8, top - 8, _title(pattern, plane), class_="title"))
        shapes.append(shape("rect", x=8, y=top, width=columns * size, height=rows * size, class_="frame"))
    for (plane, q, k), text, fill, style in _edges(pattern, since):
        at = {"x": 8 + k * size, "y": plane * (rows * size + 40) + 26 + q * size, "width": size, "height": size}
        shapes.append(shape("rect", title=text, **at, fill=fill, class_=style))
    height = pattern.planes * (rows * size + 40)
    width = max([columns * size, *(7 * len(_title(pattern, plane)) for plane in range(pattern.planes))]) + 16
    return written(picture(width, height, shapes, _PAINTS), path)


def dot(pattern: Pattern, path: str | Path | None = None, *, plane: int = 0, since: Pattern | None = None) -> str:
    """Write a plane as a DOT graph: key blocks, query blocks, and an edge for each pair, wider for more mass.

    Args and errors are those of `block_map`; edges that were cut are dotted grey, added ones green.
    """
    lines = ["digraph pattern {", "  rankdir=LR; node [shape=box, fontsize=10];"]
    drawn = [each for each in _edges(pattern, since) if each[0][0] == plane]
    lines += [f"  k{k} [label={quoted(f'key {k}')}];" for k in sorted({pair[2] for pair, *_ in drawn})]
    lines += [f"  q{q} [label={quoted(f'query {q}')}];" for q in sorted({pair[1] for pair, *_ in drawn})]
    scores = _scores(pattern)
    for (_, q, k), text, _, style in drawn:
        width = 1 + 4 * scores.get((plane, q, k), 0.0)
        look = {"cut": 'style=dotted, color="#8c959f"', "added": f'color="#1a7f37", penwidth={width:.2f}'}
        lines.append(f"  k{k} -> q{q} [tooltip={quoted(text)}, {look.get(style or '', f'penwidth={width:.2f}')}];")
    return written("\n".join([*lines, "}"]) + "\n", path)


def _edges(pattern: Pattern, since: Pattern | None) -> list[tuple[tuple[int, int, int], str, str | None, str | None]]:
    """Return (plane, query, key), tooltip, fill and style of each cell, those of cut edges included."""
    added: set[tuple[int, ...]] = set()
    removed: list[tuple[int, ...]] = []
    if since is not None:
        diff = since.diff(pattern)
        added, removed = set(map(tuple, diff.added.tolist())), list(map(tuple, diff.removed.tolist()))
    found: list[Any] = []
    for (plane, q, k), share, kind, score in zip(
        map(tuple, pattern.pairs().tolist()), _scores(pattern).values(), pattern.edges["kind"], pattern.edges["score"],
        strict=True,
    ):  # fmt: skip
        new = (plane, q, k) in added
        text = f"query {q}, key {k}: {_KINDS.get(kind, 'own mask')}, mass {score:.3g}{', added' if new else ''}"
        found.append(((plane, q, k), text, shade(share)[0], "added" if new else None))
    for plane, q, k in removed:
        found.append(((plane, q, k), f"query {q}, key {k}: cut", None, "cut"))
    return found


def _scores(pattern: Pattern) -> dict[tuple[int, ...], float]:
    """Return the score of each edge, relative to the largest; 0.6 for all if no edge has one."""
    scores = np.asarray(pattern.edges["score"], np.float64)
    largest = float(scores.max(initial=0.0))
    shares = scores / largest if largest > 0 else np.full(len(scores), 0.6)
    return dict(zip(map(tuple, pattern.pairs().tolist()), shares.tolist(), strict=True))


def _title(pattern: Pattern, plane: int) -> str:
    name = f"{pattern.name}, " if pattern.name else ""
    where = f"plane {plane}, " if pattern.planes > 1 else ""
    edges = int(np.count_nonzero(pattern.pairs()[:, 0] == plane))
    return f"{name}{where}{edges} edges: rows are query blocks, columns key blocks of {pattern.block} tokens"
