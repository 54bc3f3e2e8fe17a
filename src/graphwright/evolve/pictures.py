"""Pictures of a run: a genome, fitness and species over generations, the Pareto front, ancestors; and of a Program.

Genomes: inputs are blue, the bias is green, hidden neurons are orange, outputs yellow. The width of a link shows the
magnitude of its weight, red a negative weight; closed links are dotted grey, delayed ones dashed purple.
Programs use the layout of `program.draw`, with a shape per kind of node: inputs are blue ellipses, targets orange
ellipses, params green boxes, ops yellow rounded boxes, junctions cyan trapezia, activations orange diamonds, losses red
octagons, states and delayed edges purple and dashed.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from html import escape
from math import log10
from typing import TYPE_CHECKING, Any

from graphwright.array import Spec
from graphwright.evolve.neurons.genomes import Genome
from graphwright.ops import traits
from graphwright.program import Program
from graphwright.program.draw import shapes as draw
from graphwright.program.draw.layout import Box, Composition, DrawnEdge, compose
from graphwright.program.draw.page import html_page
from graphwright.program.draw.scene import SceneNode
from graphwright.program.draw.shapes import Shape, label, picture, shape
from graphwright.program.draw.style import LINE, count, name_of, short
from graphwright.program.draw.svg import path_data
from graphwright.program.kinds import ASSIGN, CONST, INPUT, PARAM, STATE

if TYPE_CHECKING:
    from graphwright.evolve.layers.engine import LayerResult
    from graphwright.evolve.neurons.engine import NeuronGeneration
    from graphwright.evolve.neurons.lineage import IndividualKey, Lineage

FILLS = {
    "input": ("#cfe3ff", "#0969da"),
    "target": ("#ffe0c2", "#bc4c00"),
    "param": ("#d3f3d8", "#1a7f37"),
    "op": ("#fff3b8", "#9a6700"),
    "junction": ("#c5f1f5", "#0b7285"),
    "activation": ("#ffe0c2", "#bc4c00"),
    "loss": ("#ffd7d5", "#cf222e"),
    "state": ("#eee2fb", "#8250df"),
    "group": ("#f6f8fa", "#57606a"),
}
"""Kind of node -> (fill colour, outline colour)."""

_PAINTS: draw.Paints = {
    "text": {"font_size": 12, "fill": "#24292f"},
    "name": {"font_weight": "bold"},
    **{f"{kind}-shape": {"fill": fill, "stroke": line} for kind, (fill, line) in FILLS.items()},
    "state-shape": {"fill": FILLS["state"][0], "stroke": FILLS["state"][1], "stroke_dasharray": "6 3"},
    "frame": {"fill": "none", "stroke": "#d0d7de"},
    "edge": {"fill": "none", "stroke": "#57606a"},
    "delay": {"stroke": "#8250df", "stroke_dasharray": "6 3"},
    "closed": {"stroke": "#8c959f", "stroke_dasharray": "2 3"},
}
_LINK = re.compile(r"^n(\d+)\.l\d+$")
_STEP = re.compile(r"\.step\.[^.]+$")


def structure(program: Program, *, fold: bool = True) -> str:
    """Draw a program as SVG.

    Args:
        program: the program; params and consts are drawn as nodes.
        fold: draw consecutive equal groups once, such as the steps of an unrolled cell, as `step.[0-3]`.
    """
    groups = compose(program, fold=fold, params=True, level=99).view.tree.modules
    opened = {g.path for g in groups if not _STEP.search(g.path)}
    composed = compose(program, expanded=opened, fold=fold, params=True)
    nodes = composed.view.scene.nodes
    kinds = [_kind(composed, i) for i in range(len(nodes))]
    roomy = ("activation", "loss", "input", "target", "junction")
    composed.roomy = {i for i, kind in enumerate(kinds) if kind in roomy}
    composed.view.labels[:] = [node_label(program, node) for node in nodes]
    made, by_path = composed.layout(), {node.path: kind for node, kind in zip(nodes, kinds, strict=True)}
    weights, closed = _weights(program), _closed(program)
    shapes: list[Shape] = []
    for g in made.groups.values():
        shapes.append(shape("rect", class_="frame", x=g.x, y=g.y, width=g.w, height=g.h, rx=8))
        shapes.append(label(g.x + 10, g.y + 16, g.title))
    shapes += [_line(edge, by_path, weights, closed) for edge in made.edges]
    drawn = {(edge.src, edge.dst) for edge in made.edges}
    for a, b in closed.items():  # links without an edge are straight lines between their ends
        if {a, b} <= made.boxes.keys() and (a, b) not in drawn:
            src, dst = made.boxes[a], made.boxes[b]
            line = f"M{src.x + src.w // 2} {src.y + src.h}L{dst.x + dst.w // 2} {dst.y}"
            shapes.append(_path(a, b, "closed", line, weights.get(a)))
    shapes += [_box(box, by_path.get(path, "group")) for path, box in made.boxes.items()]
    return picture(made.width, made.height, shapes, _PAINTS)


def node_label(program: Program, node: SceneNode) -> tuple[str, ...]:
    """Return the lines of a node's label: name, op, shapes (`?` for a named size), number of weights, output names."""
    members = [n for n in node.members if program.op(n) != ASSIGN]
    params = {v.node for n in members for v in program.operands(n) if program.op(v.node) == PARAM}
    if node.op == PARAM:
        params = set(members)
    numbers = sum(program.spec(n).size for n in params)
    shapes = [", ".join(map(_shape, node.specs[:2]))] if node.specs else []
    ends = [f"⇒ {', '.join(node.outputs)}"] if node.outputs else []
    counts = [f"{count(numbers)} param{'s' * (numbers != 1)}"] if numbers else []
    return short(name_of(node.path)), node.op, *map(short, shapes), *counts, *ends


def _shape(spec: Spec) -> str:
    kind = repr(spec).partition("[")[0]
    return f"{kind}[{', '.join('?' if isinstance(d, str) else str(d) for d in spec.shape)}]"


def _kind(made: Composition, i: int) -> str:
    """Return the kind by which node `i` is drawn, such as "junction" or "loss"."""
    scene = made.view.scene
    node = scene.nodes[i]
    if node.op == INPUT:
        readers = {(traits(scene.nodes[e.dst].op).loss, e.dst_port) for e in scene.edges if e.src == i}
        return "target" if (True, 1) in readers else "input"
    if node.op in (PARAM, CONST):
        return "param"
    if node.op in (STATE, ASSIGN):
        return "state"
    if node.junction:
        return "junction"
    return "loss" if traits(node.op).loss else "activation" if traits(node.op).activation else "op"


def _weights(program: Program) -> dict[str, float]:
    """Map the path of each multiplying node to the weight drawn on its edge: a scalar param or a `scale` gate."""
    found: dict[str, float] = {}
    for node in program.of_traits(multiplies=True):
        scalars = [v.node for v in program.operands(node) if program.op(v.node) == PARAM and program.spec(v).size == 1]
        if len(scalars) == 1:
            found[program.path(node)] = float(program.weights.array(program.key(scalars[0])).to_numpy().reshape(-1)[0])
    for gate in program.gates().values():
        if gate.facts.linear and gate.length == 1:
            logits = program.weights.array("gates.logits").to_numpy()
            found |= {program.path(site): float(logits[gate.offset]) for site in gate.sites}
    return found


def _closed(program: Program) -> dict[str, str]:
    """Map source to target path of each closed link: a cut link of a genome, or an edge after a closed gate."""
    found: dict[str, str] = {}
    for node in program.nodes():
        link = _LINK.match(program.path(node))
        if link and traits(program.op(node)).multiplies and not program.consumers(node):
            found[program.path(node)] = f"n{link[1]}.sum"
    for gate in program.gates().values():
        if set(gate.states) == {"closed"}:
            found |= {program.path(s): program.path(n) for s in gate.sites for n in program.consumers(s)}
    return found


def _line(edge: DrawnEdge, kinds: Mapping[str, str], weights: Mapping[str, float], closed: Mapping[str, str]) -> Shape:
    kind = "delay" if edge.kind == "state" else "closed" if closed.get(edge.src) == edge.dst else "open"
    weight = weights.get(edge.src) if kinds.get(edge.dst) == "junction" else None
    return _path(edge.src, edge.dst, kind, path_data(edge.points), weight)


def _path(src: str, dst: str, kind: str, line: str, weight: float | None) -> Shape:
    width = 1.5 if weight is None else 0.6 + 0.6 * min(abs(weight), 8.0)
    title = f"{src} → {dst}" + ("" if weight is None else f", weight {weight:.4g}") + (", closed" * (kind == "closed"))
    return shape("path", title=title, class_=f"edge {kind}", d=line, stroke_width=f"{width:.2f}", data_src=src,
                 data_dst=dst)  # fmt: skip


def _box(box: Box, kind: str) -> Shape:
    x, y = box.x + box.w // 2, box.y + (box.h - LINE * len(box.lines)) // 2 + 12
    words = [shape("text", line, class_=None if k else "name", x=x, y=y + LINE * k, text_anchor="middle")
             for k, line in enumerate(box.lines)]  # fmt: skip
    return shape("g", _outline(box, kind), *words, title=box.tip, class_=kind, data_path=box.path)


def _outline(box: Box, kind: str) -> Shape:
    """Return the outline of a node of this kind with the size of `box`: an ellipse, rectangle or polygon."""
    x, y, w, h = box.x, box.y, box.w, box.h
    if kind in ("input", "target"):
        return shape("ellipse", class_=f"{kind}-shape", cx=x + w / 2, cy=y + h / 2, rx=w / 2, ry=h / 2)
    corners = {
        "junction": [(0.15, 0), (0.85, 0), (1, 1), (0, 1)],
        "activation": [(0.5, 0), (1, 0.5), (0.5, 1), (0, 0.5)],
        "loss": [(0.2, 0), (0.8, 0), (1, 0.3), (1, 0.7), (0.8, 1), (0.2, 1), (0, 0.7), (0, 0.3)],
    }.get(kind)
    if corners is None:
        return shape("rect", class_=f"{kind}-shape", x=x, y=y, width=w, height=h, rx=0 if kind == "param" else 8)
    return shape("polygon", class_=f"{kind}-shape", points=" ".join(f"{x + a * w:g},{y + b * h:g}" for a, b in corners))


_GENOME_PAINTS: draw.Paints = {
    "text": {"font_size": 11, "fill": "#24292f"},
    "path": {"fill": "none"},
    "input": {"fill": "#cfe3ff", "stroke": "#0969da"},
    "bias": {"fill": "#d3f3d8", "stroke": "#1a7f37"},
    "hidden": {"fill": "#ffe0c2", "stroke": "#bc4c00"},
    "output": {"fill": "#fff3b8", "stroke": "#9a6700"},
    "open": {"stroke": "#57606a"},
    "minus": {"stroke": "#cf222e"},
    "closed": {"stroke": "#8c959f", "stroke_dasharray": "2 3"},
    "delay": {"stroke": "#8250df", "stroke_dasharray": "6 3"},
}
_GAP_X, _GAP_Y, _R = 110, 52, 15


def network(genome: Genome, names: Sequence[str] = ()) -> str:
    """Draw a genome as SVG; the column of a node is the length of the longest path from an input to it."""
    depth = _depths(genome)
    columns: dict[int, list[int]] = {}
    for number in sorted(depth):
        columns.setdefault(depth[number], []).append(number)
    tallest = max(map(len, columns.values()))
    left = 35 + 6.2 * max(len(_gene(genome, n, names)[1]) for n in range(genome.inputs + 1))  # room for input names
    position = {n: (left + _GAP_X * d, 40 + _GAP_Y * (i + (tallest - len(column)) / 2) + (-8 if d % 2 else 8))
                for d, column in columns.items() for i, n in enumerate(column)}  # fmt: skip
    width, height = left + 50 + _GAP_X * max(columns), 60 + _GAP_Y * tallest
    shapes = []
    for link in genome.links:
        (x1, y1), (x2, y2) = position[link.src], position[link.dst]
        kind = "closed" if not link.open else "delay" if link.delay else "minus" if link.weight < 0 else "open"
        span = (x2 - x1) / _GAP_X
        bow = (16 * (span - 1)) * (1 if y1 > (height - 40) / 2 else -1)  # curved outwards, around the nodes in between
        line = f"M{x1:g} {y1:g}Q{(x1 + x2) / 2:g} {(y1 + y2) / 2 + bow:g} {x2:g} {y2:g}"
        if link.delay:  # an arc above: it may go back, or to its own source
            line = f"M{x1:g} {y1 - _R:g}C{x1 - 20:g} {y1 - 60:g} {x2 + 20:g} {y2 - 60:g} {x2:g} {y2 - _R:g}"
        thick = f"{0.6 + 0.6 * min(abs(link.weight), 8):.2f}"
        title = f"link {link.id}: {link.src} to {link.dst}, weight {link.weight:.4g}" + (", closed" * (not link.open))
        shapes.append(shape("path", title=title, class_=kind, d=line, stroke_width=thick))
    for number, (x, y) in position.items():
        kind, name = _gene(genome, number, names)
        title = kind if number <= genome.inputs else f"{kind} {number}: {genome.node(number).activation}"
        shapes.append(shape("circle", title=title, class_=kind, cx=x, cy=y, r=_R))
        start, anchor = (x - _R - 4, "end") if kind == "input" else (x, "middle")
        shapes.append(label(start, y + 4, name, anchor))
    return picture(width, height, shapes, _GENOME_PAINTS)


def fitness(log: Sequence[NeuronGeneration]) -> str:
    """Draw best and median fitness by generation as SVG."""
    series = {"median": ([line.median for line in log], "#8c959f"), "best": ([line.best for line in log], "#0969da")}
    names = [label(110 - 45 * k, 12, name, fill=c) for k, (name, (_, c)) in enumerate(series.items())]
    return draw.chart([*draw.lines(series, f"generation {log[-1].generation}"), *names])


def species(log: Sequence[NeuronGeneration]) -> str:
    """Draw the sizes of species by generation as SVG: stacked areas, oldest species first."""
    numbers, hues = sorted({n for line in log for n in line.species}), draw.COLOURS
    series = {f"species {n}": ([line.species.get(n, 0) for line in log], hues[n % len(hues)]) for n in numbers}
    return draw.chart(draw.areas(series, f"generation {log[-1].generation}"))


def front(result: LayerResult) -> str:
    """Draw the metric of all candidates over parameter counts (log scale) as SVG, with the Pareto front as a line."""
    scored = [(b, log10(max(b.params, 1)), b.metric) for b in result.births if b.metric is not None]
    sizes, metrics = [size for _, size, _ in scored], [metric for _, _, metric in scored]
    area = draw.PlotArea((min(sizes), max(sizes)), (min(metrics), max(metrics)))
    shapes = area.axes(f"{10 ** max(sizes):,.0f} parameters", f"{10 ** min(sizes):,.0f} parameters")
    numbers = {m.number for m in result.pareto_front}
    chosen = sorted({(size, metric) for b, size, metric in scored if b.number in numbers})
    shapes.append(shape("polyline", points=draw.points(area.point(*p) for p in chosen), fill="none", stroke="#0969da"))
    for b, size, metric in scored:
        x, y = area.point(size, metric)
        colour, r = ("#0969da", 4) if b.number in numbers else ("#8c959f", 2.5)
        title = f"candidate {b}; {b.params:,} parameters"
        shapes.append(shape("circle", title=title, cx=f"{x:.1f}", cy=f"{y:.1f}", r=r, fill=colour))
    return draw.chart(shapes)


def lineage_page(tree: Lineage, key: IndividualKey, title: str) -> str:
    """Draw the ancestors of an individual as an HTML page with one table row per change and the resulting network."""
    rows, before = [], None
    for birth in tree.path(key):
        genome = tree.genome(birth.key)
        if before is not None and (genome.nodes, genome.links) == (before.nodes, before.links):
            continue
        same = before is not None and _structure(genome) == _structure(before)
        cells = (birth.key.generation, escape(str(birth).partition(": ")[2]), birth.species, f"{birth.fitness:.5g}",
                 "" if same else network(genome, tree.names))  # fmt: skip
        rows.append(f"<tr><td>{'<td>'.join(map(str, cells))}")
        before = genome
    table = "\n".join(rows)
    style = (
        "body{font:14px system-ui,sans-serif}"
        "td,th{padding:4px 12px;vertical-align:top;text-align:left;border-top:1px solid #d0d7de}"
        "svg{max-width:100%;height:auto}"
        "@media(max-width:40rem){tr{display:flex;flex-wrap:wrap;border-top:1px solid #d0d7de}td,th{border:0}}"
    )
    head = "<tr><th>generation<th>change<th>species<th>fitness<th>structure"
    return html_page("Lineage", style, f"<h1>{escape(title)}</h1>\n<table>{head}\n{table}\n</table>\n")


def _structure(genome: Genome) -> tuple[Any, Any]:
    return [n.id for n in genome.nodes], [e[:5] for e in genome.links]


def _depths(genome: Genome) -> dict[int, int]:
    """Map each node to its column: the longest path over links without delay, or the last column for outputs."""
    depth = dict.fromkeys(range(genome.inputs + 1), 0) | {n.id: 1 for n in genome.nodes}
    links = [link for link in genome.links if not link.delay]
    for _ in range(len(genome.nodes)):
        for link in links:
            depth[link.dst] = max(depth[link.dst], depth[link.src] + 1)
    last = max(depth.values())
    return depth | dict.fromkeys((n.id for n in genome.nodes[: genome.outputs]), last)


def _gene(genome: Genome, number: int, names: Sequence[str]) -> tuple[str, str]:
    if number < genome.inputs:
        return "input", (names[number] if number < len(names) else f"x{number}")[:20]
    if number == genome.inputs:
        return "bias", "1"
    if number <= genome.inputs + genome.outputs:
        return "output", f"y{number - genome.inputs - 1}"
    return "hidden", str(number)
