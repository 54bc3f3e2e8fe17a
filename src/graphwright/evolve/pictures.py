"""Pictures of a run: a genome, fitness and species over generations, the Pareto front, and a line of ancestors.

Inputs are blue, bias and parameters green, hidden neurons orange, outputs yellow. Links are as wide as their weight is
large and red where it is negative; closed links are dotted grey, delayed ones dashed purple.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from math import log10
from typing import TYPE_CHECKING

from graphwright.evolve.blueprint import structure
from graphwright.program.draw.shapes import COLOURS, STYLE, PlotArea, areas, chart, label, lines, picture, points, shape

if TYPE_CHECKING:
    from graphwright.evolve.layers.result import LayerResult
    from graphwright.evolve.neurons.engine import NeuronGeneration
    from graphwright.evolve.neurons.genomes import Genome
    from graphwright.evolve.neurons.lineage import IndividualKey, Lineage

__all__ = ["fitness", "front", "lineage_page", "network", "species", "structure"]

_STYLE = (
    "text{font:11px system-ui,sans-serif;fill:#24292f}"
    ".input{fill:#cfe3ff;stroke:#0969da}.bias{fill:#d3f3d8;stroke:#1a7f37}.hidden{fill:#ffe0c2;stroke:#bc4c00}"
    ".output{fill:#fff3b8;stroke:#9a6700}.open{stroke:#57606a;fill:none}.minus{stroke:#cf222e;fill:none}"
    ".closed{stroke:#8c959f;fill:none;stroke-dasharray:2 3}.delay{stroke:#8250df;fill:none;stroke-dasharray:6 3}"
)
_GAP_X, _GAP_Y, _R = 110, 52, 15


def network(genome: Genome, names: Sequence[str] = ()) -> str:
    """Draw a genome as SVG: layers from left to right by the longest path from the inputs."""
    depth = _depths(genome)
    columns: dict[int, list[int]] = {}
    for number in sorted(depth):
        columns.setdefault(depth[number], []).append(number)
    tallest = max(map(len, columns.values()))
    left = 35 + 6.2 * max(len(_kind(genome, n, names)[1]) for n in range(genome.inputs + 1))  # room for input names
    position = {
        n: (left + _GAP_X * d, 40 + _GAP_Y * (i + (tallest - len(column)) / 2) + (-8 if d % 2 else 8))
        for d, column in columns.items()
        for i, n in enumerate(column)
    }
    width, height = left + 50 + _GAP_X * max(columns), 60 + _GAP_Y * tallest
    shapes = []
    for link in genome.links:
        (x1, y1), (x2, y2) = position[link.src], position[link.dst]
        kind = "closed" if not link.open else "delay" if link.delay else "minus" if link.weight < 0 else "open"
        span = (x2 - x1) / _GAP_X
        bow = (16 * (span - 1)) * (1 if y1 > (height - 40) / 2 else -1)  # around the nodes between, to the outside
        line = f"M{x1:g} {y1:g}Q{(x1 + x2) / 2:g} {(y1 + y2) / 2 + bow:g} {x2:g} {y2:g}"
        if link.delay:  # an arc above: it may go back, or to its own source
            line = f"M{x1:g} {y1 - _R:g}C{x1 - 20:g} {y1 - 60:g} {x2 + 20:g} {y2 - 60:g} {x2:g} {y2 - _R:g}"
        thick = f"{0.6 + 0.6 * min(abs(link.weight), 8):.2f}"
        title = f"link {link.id}: {link.src} to {link.dst}, weight {link.weight:.4g}" + (", closed" * (not link.open))
        shapes.append(shape("path", title=title, class_=kind, d=line, stroke_width=thick))
    for number, (x, y) in position.items():
        kind, name = _kind(genome, number, names)
        title = kind if number <= genome.inputs else f"{kind} {number}: {genome.node(number).activation}"
        shapes.append(shape("circle", title=title, class_=kind, cx=x, cy=y, r=_R))
        start, anchor = (x - _R - 4, "end") if kind == "input" else (x, "middle")
        shapes.append(label(start, y + 4, name, anchor))
    return picture(width, height, shapes, _STYLE)


def fitness(log: Sequence[NeuronGeneration]) -> str:
    """Draw best and median fitness by generation as SVG."""
    series = {"median": ([line.median for line in log], "#8c959f"), "best": ([line.best for line in log], "#0969da")}
    names = [label(110 - 45 * k, 12, name, style=f"fill:{c}") for k, (name, (_, c)) in enumerate(series.items())]
    return chart([*lines(series, f"generation {log[-1].generation}"), *names])


def species(log: Sequence[NeuronGeneration]) -> str:
    """Draw the sizes of species by generation as SVG, stacked in order of age."""
    numbers = sorted({n for line in log for n in line.species})
    series = {f"species {n}": ([line.species.get(n, 0) for line in log], COLOURS[n % len(COLOURS)]) for n in numbers}
    return chart(areas(series, f"generation {log[-1].generation}"))


def front(result: LayerResult) -> str:
    """Draw metric over parameters (log scale) of all candidates as SVG, with a line along the Pareto front."""
    scored = [(b, log10(max(b.params, 1)), b.metric) for b in result.births if b.metric is not None]
    sizes, metrics = [size for _, size, _ in scored], [metric for _, _, metric in scored]
    area = PlotArea((min(sizes), max(sizes)), (min(metrics), max(metrics)))
    shapes = area.axes(f"{10 ** max(sizes):,.0f} parameters", f"{10 ** min(sizes):,.0f} parameters")
    numbers = {m.number for m in result.pareto_front}
    chosen = sorted({(size, metric) for b, size, metric in scored if b.number in numbers})
    shapes.append(shape("polyline", points=points(area.point(*p) for p in chosen), fill="none", stroke="#0969da"))
    for b, size, metric in scored:
        x, y = area.point(size, metric)
        colour, r = ("#0969da", 4) if b.number in numbers else ("#8c959f", 2.5)
        title = f"candidate {b}; {b.params:,} parameters"
        shapes.append(shape("circle", title=title, cx=f"{x:.1f}", cy=f"{y:.1f}", r=r, fill=colour))
    return chart(shapes, style=STYLE)


def lineage_page(tree: Lineage, key: IndividualKey, title: str) -> str:
    """Draw the ancestors of an individual as an HTML page: a row per change, with the resulting network."""
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
        drawn = network(genome, tree.names) if structural else ""
        rows.append(
            f"<tr><td>{birth.key.generation}<td>{escape(str(birth).partition(': ')[2])}<td>{birth.species}"
            f"<td>{birth.fitness:.5g}<td>{drawn}"
        )
        before = genome
    table = "\n".join(rows)
    return (
        '<!doctype html><meta charset="utf-8"><title>Lineage</title><style>body{font:14px system-ui,sans-serif}'
        "td,th{padding:4px 12px;vertical-align:top;text-align:left;border-top:1px solid #d0d7de}</style>\n"
        f"<h1>{escape(title)}</h1>\n"
        f"<table><tr><th>generation<th>change<th>species<th>fitness<th>structure\n{table}\n</table>\n"
    )


def _depths(genome: Genome) -> dict[int, int]:
    """The column of each node: the longest path over links without delay; all outputs are in the last column."""
    depth = dict.fromkeys(range(genome.inputs + 1), 0) | {n.id: 1 for n in genome.nodes}
    links = [link for link in genome.links if not link.delay]
    for _ in range(len(genome.nodes)):
        for link in links:
            depth[link.dst] = max(depth[link.dst], depth[link.src] + 1)
    last = max(depth.values())
    return depth | dict.fromkeys((n.id for n in genome.nodes[: genome.outputs]), last)


def _kind(genome: Genome, number: int, names: Sequence[str]) -> tuple[str, str]:
    """The kind of a node and its label."""
    if number < genome.inputs:
        return "input", (names[number] if number < len(names) else f"x{number}")[:20]
    if number == genome.inputs:
        return "bias", "1"
    if number <= genome.inputs + genome.outputs:
        return "output", f"y{number - genome.inputs - 1}"
    return "hidden", str(number)
