"""Pictures of a run, by a layout of our own: the champion, fitness and species over generations, the family.

Inputs are blue, the bias and parameters green, hidden neurons orange, outputs yellow; links are as wide as their weight
is large, red where it is negative; closed links are dotted grey, delayed ones dashed purple.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from math import log10
from typing import TYPE_CHECKING, Any

from graphwright.evolve.blueprint import structure

if TYPE_CHECKING:
    from graphwright.evolve.genomes import Genome
    from graphwright.evolve.layers.result import LayerResult
    from graphwright.evolve.lineage import Key, Lineage
    from graphwright.evolve.neurons import Generation

__all__ = ["fitness", "front", "lineage", "network", "species", "structure"]

_STYLE = (
    "text{font:11px system-ui,sans-serif;fill:#24292f}.axis{stroke:#8c959f;fill:none}.small{font-size:9px;fill:#57606a}"
    ".input{fill:#cfe3ff;stroke:#0969da}.bias{fill:#d3f3d8;stroke:#1a7f37}.hidden{fill:#ffe0c2;stroke:#bc4c00}"
    ".output{fill:#fff3b8;stroke:#9a6700}.open{stroke:#57606a;fill:none}.minus{stroke:#cf222e;fill:none}"
    ".closed{stroke:#8c959f;fill:none;stroke-dasharray:2 3}.delay{stroke:#8250df;fill:none;stroke-dasharray:6 3}"
)
_COLOURS = (
    "#54aeff",
    "#fd8c73",
    "#4ac26b",
    "#c297ff",
    "#d4a72c",
    "#ff80c8",
    "#39c5cf",
    "#8c959f",
    "#e16f24",
    "#6fdd8b",
)
_GAP_X, _GAP_Y, _R = 110, 52, 15


def network(genome: Genome, names: Sequence[str] = ()) -> str:
    """A genome as SVG: layers from left to right by the longest way from the inputs."""
    depth = _depths(genome)
    columns: dict[int, list[int]] = {}
    for number in sorted(depth):
        columns.setdefault(depth[number], []).append(number)
    tallest = max(map(len, columns.values()))
    left = 35 + 6.2 * max(len(_kind(genome, n, names)[1]) for n in range(genome.inputs + 1))  # names stand beside
    place = {
        n: (left + _GAP_X * d, 40 + _GAP_Y * (i + (tallest - len(column)) / 2) + (-8 if d % 2 else 8))
        for d, column in columns.items()
        for i, n in enumerate(column)
    }
    width, height = left + 50 + _GAP_X * max(columns), 60 + _GAP_Y * tallest
    parts = []
    for link in genome.links:
        (x1, y1), (x2, y2) = place[link.src], place[link.dst]
        kind = "closed" if not link.open else "delay" if link.delay else "minus" if link.weight < 0 else "open"
        span = (x2 - x1) / _GAP_X
        bow = (16 * (span - 1)) * (1 if y1 > (height - 40) / 2 else -1)  # past the nodes between, away from the middle
        line = f"M{x1:g} {y1:g}Q{(x1 + x2) / 2:g} {(y1 + y2) / 2 + bow:g} {x2:g} {y2:g}"
        if link.delay:  # an arc above: it may lead back, or to itself
            line = f"M{x1:g} {y1 - _R:g}C{x1 - 20:g} {y1 - 60:g} {x2 + 20:g} {y2 - 60:g} {x2:g} {y2 - _R:g}"
        thick = 0.6 + 0.6 * min(abs(link.weight), 8)
        said = f"link {link.id}: {link.src} to {link.dst}, weight {link.weight:.4g}" + ("" if link.open else ", closed")
        parts.append(f'<path class="{kind}" d="{line}" stroke-width="{thick:.2f}"><title>{said}</title></path>')
    for number, (x, y) in place.items():
        kind, label = _kind(genome, number, names)
        said = kind if number <= genome.inputs else f"{kind} {number}: {genome.node(number).activation}"
        parts.append(f'<circle class="{kind}" cx="{x:g}" cy="{y:g}" r="{_R}"><title>{escape(said)}</title></circle>')
        at, anchor = (x - _R - 4, "end") if kind == "input" else (x, "middle")
        parts.append(f'<text x="{at:g}" y="{y + 4:g}" text-anchor="{anchor}">{escape(label)}</text>')
    return _svg(width, height, parts)


def fitness(log: Sequence[Generation]) -> str:
    """Best and median fitness by generation, as SVG."""
    log = _wide(log)
    best, median = [line.best for line in log], [line.median for line in log]
    finite = [v for v in (*best, *median) if abs(v) < float("inf")] or [0.0]
    low, high = min(finite), max(finite)
    parts = _axes(log, low, high)
    for k, (values, colour, name) in enumerate(((median, "#8c959f", "median"), (best, "#0969da", "best"))):
        parts.append(f'<text x="{110 - 45 * k}" y="12" style="fill:{colour}">{name}</text>')
        points = " ".join(
            f"{_x(i, len(values)):.1f},{_y(v, low, high):.1f}" for i, v in enumerate(values) if abs(v) < float("inf")
        )
        style = f'fill="none" stroke="{colour}" stroke-width="1.5"'
        parts.append(f'<polyline points="{points}" {style}><title>{name}</title></polyline>')
    return _svg(640, 240, parts)


def species(log: Sequence[Generation]) -> str:
    """Sizes of species by generation, stacked in order of age, as SVG."""
    log = _wide(log)
    numbers = sorted({n for line in log for n in line.species})
    total = max(sum(line.species.values()) for line in log)
    parts = _axes(log, 0, total)
    below = [0.0] * len(log)
    for n in numbers:
        above = [b + line.species.get(n, 0) for b, line in zip(below, log, strict=True)]
        span = [i for i, line in enumerate(log) if n in line.species]
        first, last = max(span[0] - 1, 0), min(span[-1] + 1, len(log) - 1)
        up = [f"{_x(i, len(log)):.1f},{_y(above[i], 0, total):.1f}" for i in range(first, last + 1)]
        down = [f"{_x(i, len(log)):.1f},{_y(below[i], 0, total):.1f}" for i in range(last, first - 1, -1)]
        colour = _COLOURS[n % len(_COLOURS)]
        parts.append(f'<polygon points="{" ".join(up + down)}" fill="{colour}"><title>species {n}</title></polygon>')
        below = above
    return _svg(640, 240, parts)


def front(result: LayerResult) -> str:
    """Metric over parameters (on a log scale) of all candidates, as SVG; those that nobody dominates are joined."""
    scored = [b for b in result.births if b.metric is not None]
    sizes, metrics = [log10(max(b.params, 1)) for b in scored], [b.metric or 0.0 for b in scored]
    low, high, left, right = min(metrics), max(metrics), min(sizes), max(sizes)

    def place(params: int, metric: float) -> tuple[float, float]:
        x = 60 + 550 * (log10(max(params, 1)) - left) / (right - left if right > left else 1)
        return x, _y(metric, low, high)

    parts = [
        '<path class="axis" d="M50 15V210H625"/>',
        f'<text class="small" x="45" y="24" text-anchor="end">{high:.4g}</text>',
        f'<text class="small" x="45" y="212" text-anchor="end">{low:.4g}</text>',
        f'<text class="small" x="50" y="224">{10**left:,.0f} parameters</text>',
        f'<text class="small" x="620" y="224" text-anchor="end">{10**right:,.0f} parameters</text>',
    ]
    chosen = sorted({(m.birth.params, m.metric) for m in result.pareto_front})
    points = " ".join(f"{x:.1f},{y:.1f}" for x, y in (place(*each) for each in chosen))
    parts.append(f'<polyline points="{points}" fill="none" stroke="#0969da"/>')
    numbers = {m.number for m in result.pareto_front}
    for b in scored:
        x, y = place(b.params, b.metric or 0.0)
        colour, r = ("#0969da", 4) if b.number in numbers else ("#8c959f", 2.5)
        said = escape(f"candidate {b}; {b.params:,} parameters")
        parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{r}" fill="{colour}"><title>{said}</title></circle>')
    return _svg(640, 240, parts)


def lineage(tree: Lineage, key: Key, title: str = "How it came to be") -> str:
    """An individual's line as a page: a row for each generation that changed it, with the network it led to."""
    rows, before = [], None
    for birth in tree.path(key):
        genome = tree.genome(birth.key)
        if before is not None and (genome.nodes, genome.links) == (before.nodes, before.links):
            continue
        structural = (
            before is None
            or [n.id for n in genome.nodes] != [n.id for n in before.nodes]
            or [e[:5] for e in genome.links] != [e[:5] for e in before.links]
        )
        picture = network(genome, tree.names) if structural else ""
        rows.append(
            f"<tr><td>{birth.key.generation}<td>{escape(str(birth).partition(': ')[2])}<td>{birth.species}"
            f"<td>{birth.fitness:.5g}<td>{picture}"
        )
        before = genome
    table = "\n".join(rows)
    return (
        '<!doctype html><meta charset="utf-8"><title>Lineage</title><style>body{font:14px system-ui,sans-serif}'
        "td,th{padding:4px 12px;vertical-align:top;text-align:left;border-top:1px solid #d0d7de}</style>\n"
        f"<h1>{escape(title)}</h1>\n"
        f"<table><tr><th>generation<th>what<th>species<th>fitness<th>structure\n{table}\n</table>\n"
    )


def _depths(genome: Genome) -> dict[int, int]:
    """Columns of a picture: longest way over links without delay; all outputs stand last."""
    depth = dict.fromkeys(range(genome.inputs + 1), 0) | {n.id: 1 for n in genome.nodes}
    links = [link for link in genome.links if not link.delay]
    for _ in range(len(genome.nodes)):
        for link in links:
            depth[link.dst] = max(depth[link.dst], depth[link.src] + 1)
    last = max(depth.values())
    return depth | dict.fromkeys((n.id for n in genome.nodes[: genome.outputs]), last)


def _kind(genome: Genome, number: int, names: Sequence[str]) -> tuple[str, str]:
    if number < genome.inputs:
        return "input", (names[number] if number < len(names) else f"x{number}")[:20]
    if number == genome.inputs:
        return "bias", "1"
    if number <= genome.inputs + genome.outputs:
        return "output", f"y{number - genome.inputs - 1}"
    return "hidden", str(number)


def _wide(log: Sequence[Generation]) -> Sequence[Generation]:
    """One generation twice, as a point has no width."""
    return [*log, *log] if len(log) == 1 else log


def _x(i: int, count: int) -> float:
    return 50 + 570 * i / max(count - 1, 1)


def _y(value: float, low: float, high: float) -> float:
    return 210 - 190 * (value - low) / (high - low if high > low else 1)


def _axes(log: Sequence[Generation], low: float, high: float) -> list[str]:
    end = log[-1].generation
    return [
        '<path class="axis" d="M50 15V210H625"/>',
        f'<text class="small" x="45" y="24" text-anchor="end">{high:.4g}</text>',
        f'<text class="small" x="45" y="212" text-anchor="end">{low:.4g}</text>',
        f'<text class="small" x="620" y="224" text-anchor="end">generation {end}</text>',
    ]


def _svg(width: float, height: float, parts: Sequence[Any]) -> str:
    body = "\n".join(parts)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}" width="{width:g}" '
        f'height="{height:g}"><style>{_STYLE}</style>\n{body}\n</svg>\n'
    )
