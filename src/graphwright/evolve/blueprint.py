"""A Program as SVG with a shape per kind of node, on the layout of every picture of a Program.

Inputs are blue ellipses, targets orange ones, params green boxes, ops yellow and rounded, junctions cyan trapezia,
activations orange diamonds, losses red octagons, states and delayed edges purple and dashed. A link is as wide as its
weight is large; a closed one is dotted grey.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING

from graphwright.ops import OPS, traits
from graphwright.program.draw.layout import compose
from graphwright.program.draw.output import path_data
from graphwright.program.draw.shapes import Shape, label, shape
from graphwright.program.draw.shapes import picture as document
from graphwright.program.draw.style import LINE, count, name_of, short
from graphwright.program.kinds import ASSIGN, CONST, INPUT, PARAM, STATE

if TYPE_CHECKING:
    from graphwright.array import Spec
    from graphwright.program import Program
    from graphwright.program.draw.layout import Box, Composition, DrawnEdge
    from graphwright.program.draw.scene import SceneNode

_ACTIVATIONS = frozenset(
    ("relu", "leaky_relu", "elu", "tanh", "sigmoid", "gelu", "silu", "softplus", "sech", "sin", "abs", "sign", "step",
     "exp", "softmax", "log_softmax")
)  # fmt: skip
_LOSSES = frozenset(name for name, row in OPS.items() if row.traits.loss)
"""Tables of this picture alone."""

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
"""Kind of node -> fill and outline."""

_STYLE = (
    "text{font:12px Arial,'Liberation Sans',Helvetica,sans-serif;fill:#24292f}.name{font-weight:bold}"
    + "".join(f".{kind} .shape{{fill:{fill};stroke:{line}}}" for kind, (fill, line) in FILLS.items())
    + ".state .shape{stroke-dasharray:6 3}.frame{fill:none;stroke:#d0d7de}.edge{fill:none;stroke:#57606a}"
    ".delay{stroke:#8250df;stroke-dasharray:6 3}.closed{stroke:#8c959f;stroke-dasharray:2 3}"
)
_LINK = re.compile(r"^n(\d+)\.l\d+$")
_STEP = re.compile(r"\.step\.[^.]+$")


def structure(program: Program, *, fold: bool = True) -> str:
    """Draw a program as SVG.

    Args:
        program: what to draw; params and consts are separate nodes.
        fold: draw runs of equal numbered groups once, the steps of an unrolled cell as `step.[0-3]`.
    """
    groups = compose(program, fold=fold, params=True, level=99).view.tree.modules
    opened = {g.path for g in groups if not _STEP.search(g.path)}
    made = compose(program, expanded=opened, fold=fold, params=True)
    nodes = made.view.scene.nodes
    kinds = [_kind(made, i) for i in range(len(nodes))]
    made.roomy = {i for i, kind in enumerate(kinds) if kind in ("activation", "loss", "input", "target", "junction")}
    for i, node in enumerate(nodes):
        made.view.labels[i] = node_label(program, node)
    picture, by_path = made.layout(), {node.path: kind for node, kind in zip(nodes, kinds, strict=True)}
    weights, closed = _weights(program), _closed(program)
    shapes: list[Shape] = []
    for g in picture.groups.values():
        shapes.append(shape("rect", class_="frame", x=g.x, y=g.y, width=g.w, height=g.h, rx=8))
        shapes.append(label(g.x + 10, g.y + 16, g.title))
    shapes += [_line(edge, by_path, weights, closed) for edge in picture.edges]
    drawn = {(edge.src, edge.dst) for edge in picture.edges}
    shapes += [
        _closed_link(picture.boxes[src], picture.boxes[dst], weights.get(src))
        for src, dst in closed.items()
        if {src, dst} <= picture.boxes.keys() and (src, dst) not in drawn
    ]
    shapes += [_box(box, by_path.get(path, "group")) for path, box in picture.boxes.items()]
    return document(picture.width, picture.height, shapes, _STYLE)


def node_label(program: Program, node: SceneNode) -> tuple[str, ...]:
    """The lines of a label: name, op, shapes with `?` for symbolic sizes, number of params, results."""
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
    """The key of `FILLS` for a node of the scene."""
    scene = made.view.scene
    node = scene.nodes[i]
    if node.op == INPUT:
        readers = {(scene.nodes[e.dst].op in _LOSSES, e.dst_port) for e in scene.edges if e.src == i}
        return "target" if (True, 1) in readers else "input"
    if node.op in (PARAM, CONST):
        return "param"
    if node.op in (STATE, ASSIGN):
        return "state"
    if node.junction:
        return "junction"
    return "loss" if node.op in _LOSSES else "activation" if node.op in _ACTIVATIONS else "op"


def _weights(program: Program) -> dict[str, float]:
    """The weights of edges by the path of their source: products with a scalar param, and gates of kind `scale`."""
    found: dict[str, float] = {}
    for node in program.of_kind("mul"):
        scalars = [v.node for v in program.operands(node) if program.op(v.node) == PARAM and program.spec(v).size == 1]
        if len(scalars) == 1:
            found[program.path(node)] = float(program.weights.array(program.key(scalars[0])).to_numpy().reshape(-1)[0])
    for gate in program.gates().values():
        if gate.kind == "scale" and gate.length == 1:
            logits = program.weights.array("gates.logits").to_numpy()
            found |= {program.path(site): float(logits[gate.offset]) for site in gate.sites}
    return found


def _closed(program: Program) -> dict[str, str]:
    """The closed links, from path to path: links of a genome without an edge, and closed gates."""
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


def _closed_link(src: Box, dst: Box, weight: float | None) -> Shape:
    """A link without an edge, as a straight line between its ends."""
    line = f"M{src.x + src.w // 2} {src.y + src.h}L{dst.x + dst.w // 2} {dst.y}"
    return _path(src.path, dst.path, "closed", line, weight)


def _path(src: str, dst: str, kind: str, line: str, weight: float | None) -> Shape:
    width = 1.5 if weight is None else 0.6 + 0.6 * min(abs(weight), 8.0)
    title = f"{src} → {dst}" + ("" if weight is None else f", weight {weight:.4g}") + (", closed" * (kind == "closed"))
    return shape("path", title=title, class_=f"edge {kind}", d=line, stroke_width=f"{width:.2f}", data_src=src,
                 data_dst=dst)  # fmt: skip


def _box(box: Box, kind: str) -> Shape:
    x, y = box.x + box.w // 2, box.y + (box.h - LINE * len(box.lines)) // 2 + 12
    words = [
        shape("text", line, class_=None if k else "name", x=x, y=y + LINE * k, text_anchor="middle")
        for k, line in enumerate(box.lines)
    ]
    return shape("g", _outline(box, kind), *words, title=box.tip, class_=kind, data_path=box.path)


def _outline(box: Box, kind: str) -> Shape:
    """The ellipse, box, rounded box, trapezium, diamond or octagon that fills a box."""
    x, y, w, h = box.x, box.y, box.w, box.h
    if kind in ("input", "target"):
        return shape("ellipse", class_="shape", cx=x + w / 2, cy=y + h / 2, rx=w / 2, ry=h / 2)
    corners = {
        "junction": [(0.15, 0), (0.85, 0), (1, 1), (0, 1)],
        "activation": [(0.5, 0), (1, 0.5), (0.5, 1), (0, 0.5)],
        "loss": [(0.2, 0), (0.8, 0), (1, 0.3), (1, 0.7), (0.8, 1), (0.2, 1), (0, 0.7), (0, 0.3)],
    }.get(kind)
    if corners is None:
        return shape("rect", class_="shape", x=x, y=y, width=w, height=h, rx=0 if kind == "param" else 8)
    return shape("polygon", class_="shape", points=" ".join(f"{x + a * w:g},{y + b * h:g}" for a, b in corners))
