"""Pictures by kinds of node: the style of each is read back; a GRU letter by letter (`FREEZE_PICTURES=1` writes it)."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest

import graphwright as gw
from graphwright import evolve as ev
from graphwright.evolve import mutations as m
from graphwright.evolve.neurons.program import founder
from graphwright.evolve.pictures import structure
from graphwright.ops import OPS, op
from graphwright.ops.activation import Activation

SVG = "{http://www.w3.org/2000/svg}"
SHAPES = {  # kind: shape, corners, is it round?, hue of its outline
    "input": ("ellipse", None, "blue"),
    "target": ("ellipse", None, "orange"),
    "param": ("rect", "0", "green"),
    "op": ("rect", "8", "yellow"),
    "junction": ("polygon", 4, "cyan"),
    "activation": ("polygon", 4, "orange"),
    "loss": ("polygon", 8, "red"),
    "state": ("rect", "8", "purple"),
}
HUES = {"red": (350, 10), "orange": (15, 35), "yellow": (36, 60), "green": (110, 150), "cyan": (180, 195),
        "blue": (205, 220), "purple": (255, 275)}  # fmt: skip


def trained() -> gw.Program:
    """A network with every kind of node, its loss included."""
    b = gw.Builder("all kinds")
    x, y = b.input("x", (3, 2)), b.input("y", (3, 1))
    h = b.tanh(b.linear(x, b.param("in.weight", np.ones((4, 2), np.float32)), name="hidden"), name="act")
    total = b.junction(b.linear(h, b.param("out.weight", np.ones((1, 4), np.float32)), name="out"), name="total")
    b.output(b.bce_with_logits(total, y, name="loss"), "l")
    p = b.build()
    with p.edit("memory and a gate") as e:
        e.connect("out", "total", delay=1)
        shut = e.gate(e.connect("out", "total"), "scale")
        e.set_gate(shut, "closed")
    return p


def genome() -> gw.Program:
    links = [
        (5, 0, 3, True, 0.5),
        (6, 1, 3, False, -4.0),
        (7, 2, 3, True, -2.0),
        (8, 0, 4, True, 9.5),
        (9, 4, 3, True, 0.0),
    ]
    nodes = (ev.NodeGene(3, "tanh"), ev.NodeGene(4, "relu"))
    return founder(ev.Genome(2, 1, nodes, tuple(ev.LinkGene(i, s, d, 0, o, w) for i, s, d, o, w in links)))


def read(text: str) -> tuple[dict[str, Any], dict[tuple[str, str], Any]]:
    root: Any = ElementTree.fromstring(text)
    boxes = {g.get("data-path"): g for g in root.iter(f"{SVG}g")}
    edges = {(e.get("data-src"), e.get("data-dst")): e for e in root.iter(f"{SVG}path")}
    return boxes, edges


def hue(colour: str) -> str:
    """The name of a colour's hue."""
    r, g, b = (int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5))
    top, low = max(r, g, b), min(r, g, b)
    turn = {r: (g - b) / (top - low) % 6, g: (b - r) / (top - low) + 2, b: (r - g) / (top - low) + 4}[top] * 60
    return next(n for n, (a, z) in HUES.items() if (a <= turn <= z) or (a > z and (turn >= a or turn <= z)))


def test_each_kind_has_its_shape_and_colour():
    boxes, edges = read(structure(trained()))
    paths = {"input": "x", "target": "y", "param": "in.weight", "op": "hidden", "junction": "total",
             "activation": "act", "loss": "loss"}  # fmt: skip
    paths["state"] = next(path for path, g in boxes.items() if g.get("class") == "state")
    for kind, (shape, corners, colour) in SHAPES.items():
        g = boxes[paths[kind]]
        assert g.get("class") == kind
        found = g.find(f"{SVG}{shape}")
        assert found is not None, kind
        if shape == "rect":
            assert found.get("rx") == corners
        if shape == "polygon":
            assert len(found.get("points").split()) == corners
        fill, line = found.get("fill"), found.get("stroke")
        assert {hue(line), hue(fill)} <= {colour, *(("yellow", "orange") if colour in ("yellow", "orange") else ())}
        assert hue(line) == colour
        assert bool(found.get("stroke-dasharray")) == (kind == "state")
    points = [tuple(map(float, p.split(","))) for p in boxes["total"].find(f"{SVG}polygon").get("points").split()]
    assert points[1][0] - points[0][0] < points[2][0] - points[3][0]  # a trapezium stands on its long side
    late = [e for (src, dst), e in edges.items() if paths["state"] in (src, dst)]
    assert late
    assert {e.get("class") for e in late} == {"edge delay"}
    assert {(hue(e.get("stroke")), e.get("stroke-dasharray")) for e in late} == {("purple", "6 3")}


def test_registered_activations_are_drawn_as_activations():
    @op("softsign")
    class Softsign(Activation):
        """x / (1 + |x|), elementwise."""

        vjp, onnx, emit, why = None, None, "F.softsign({0})", dict.fromkeys(("vjp", "onnx"), "it is only drawn")

    try:
        b = gw.Builder()
        b.output(b.softsign(b.input("x", ("B", 4)), name="act"), "y")
        assert read(structure(b.build()))[0]["act"].get("class") == "activation"
    finally:
        del OPS["softsign"]


def test_a_closed_gate_is_a_dotted_grey_link():
    p = trained()
    (gate,) = p.gates().values()
    _, edges = read(structure(p))
    link = edges[p.path(gate.handle), "total"]
    assert link.get("class") == "edge closed"
    assert np.ptp([int(v, 16) for v in re.findall("[0-9a-f]{2}", link.get("stroke"))]) < 32
    assert int(link.get("stroke-dasharray").split()[0]) <= 2


def test_links_are_drawn_wider_for_larger_weights():
    p = genome()
    boxes, edges = read(structure(p))
    width = {link: float(edges[f"n{dst}.l{link}", f"n{dst}.sum"].get("stroke-width"))
             for link, dst in ((5, 3), (6, 3), (7, 3), (8, 4), (9, 3))}  # fmt: skip
    assert width[9] < width[5] < width[7] < width[6] < width[8]
    assert width[7] - width[9] == pytest.approx(4 * (width[5] - width[9]), abs=0.02)
    assert edges["n3.l6", "n3.sum"].get("class") == "edge closed"
    drawn = set(edges) - {("n3.l6", "n3.sum")}
    graph = p.graph
    assert drawn == {(p.path(graph.source(e)), p.path(n)) for n in p.nodes() for e in p.in_edges(n)}
    assert set(boxes) == {p.path(n) for n in p.nodes()}
    assert structure(p) == structure(p)


def test_labels_have_name_type_shape_and_number_of_params():
    boxes, _ = read(structure(genome()))
    words = {path: [t.text for t in g.iter(f"{SVG}text")] for path, g in boxes.items()}
    assert words["x"] == ["x", "input", "f32[?, 2]"]
    assert words["n3.l5"] == ["l5", "mul", "f32[?, 1]", "1 param"]
    assert words["n3.l5.weight"] == ["weight", "param", "f32[]", "1 param"]
    assert words["n3.out"] == ["out", "tanh", "f32[?, 1]", "⇒ y"]
    boxes, _ = read(structure(trained()))
    assert [t.text for t in boxes["hidden"].iter(f"{SVG}text")] == ["hidden", "linear", "f32[3, 4]", "8 params"]


def gru(steps: int) -> gw.Program:
    b = gw.Builder("sequence")
    w = b.param("out.weight", np.ones((2, 2), np.float32))
    b.output(b.linear(b.input("x", (3, steps, 2)), w, name="out"), "y")
    p = b.build()
    with p.edit("in") as e:
        m.insert_cell(e, "out", np.random.default_rng(1), "gru", 4)
    return p


def test_an_unrolled_cell_is_drawn_folded_with_its_range_of_steps():
    made, file = structure(gru(20)), Path(__file__).with_name("golden") / "gru.svg"
    if os.environ.get("FREEZE_PICTURES"):
        file.parent.mkdir(exist_ok=True)
        file.write_text(made, "utf-8")
    assert made == file.read_text("utf-8")
    boxes, _ = read(made)
    steps = [path for path in boxes if ".step." in path]
    assert steps == ["b1.gru.step.[0-18]", "b1.gru.step.19"]
    assert boxes["b1.gru.step.[0-18]"].find(f"{SVG}text").text == "step.[0-18] × 19"
    assert len([path for path in read(structure(gru(20), fold=False))[0] if ".step." in path]) == 20
    lstm = gru(6)
    with lstm.edit("another") as e:
        m.cell_type(e, "b1.to", np.random.default_rng(0), "lstm")
    assert "b1.lstm.step.[0-4]" in read(structure(lstm))[0]
