"""Pictures of shapes: every element has its colours as attributes, which renderers without style sheets read."""

from __future__ import annotations

from runpy import run_path
from types import SimpleNamespace
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest

import graphwright as gw
from graphwright import evolve as ev
from graphwright.evolve import pictures
from graphwright.program.draw.shapes import PAINTS, chart, label, picture, shape
from graphwright.structure.report import probabilities

SVG = "{http://www.w3.org/2000/svg}"


def painted(text: str) -> Any:
    """Parse a picture, and check the paint of each of its elements."""
    root = ElementTree.fromstring(text)
    assert "<style" not in text
    assert "var(" not in text
    assert root.get("font-family")
    for e in root.iter():
        tag = e.tag.removeprefix(SVG)
        if tag in ("path", "polyline"):
            assert (e.get("fill"), (e.get("stroke") or "")[:1]) == ("none", "#"), e.attrib
        elif tag not in ("svg", "g", "title"):
            assert e.get("fill", "")[:1] == "#" or e.get("stroke"), (tag, e.attrib)
            assert tag != "text" or e.get("font-size")
        assert e.get("style") is None
    paper = root.find(f"{SVG}rect")
    assert paper is not None
    assert (paper.get("fill"), paper.get("width")) == ("#ffffff", root.get("width"))
    return root


def runs() -> dict[str, str]:
    link = ev.LinkGene(4, 0, 2, 0, False, -1.0)
    genome = ev.Genome(1, 1, (ev.NodeGene(2, "tanh"),), (link, ev.LinkGene(3, 1, 2, 1, True, 2.0)))
    lines = [SimpleNamespace(median=0.1 * k, best=0.2 * k, species={0: 3, k: 2}, generation=k) for k in range(4)]
    births = [SimpleNamespace(params=10**k, metric=0.1 * k, number=k) for k in range(1, 4)]
    log: Any = lines
    result: Any = SimpleNamespace(births=births, pareto_front=births[:2])
    values, names = np.random.default_rng(0).random((5, 70)), [f"axis {k % 7}[{k}]" for k in range(70)]
    return {
        "network": pictures.network(genome),
        "fitness": pictures.fitness(log),
        "species": pictures.species(log),
        "front": pictures.front(result),
        "gates": probabilities(values[:, :3], names[:3], [True, False, True], 5),
        "axes": probabilities(values, names, [True] * 70, 5),
        "structure": pictures.structure(gw.open("bundled").program),
    }


@pytest.mark.parametrize("name", ["network", "fitness", "species", "front", "gates", "axes", "structure"])
def test_pictures_need_no_style_sheet(name):
    painted(runs()[name])


def test_pictures_of_the_docs_need_no_style_sheet(pytestconfig):
    script = run_path(str(pytestconfig.rootpath / "scripts" / "pictures.py"))
    for text in (script["house"](), script["ladder"](), script["diff"](), script["bars"]({"a": 1e-3, "b": 1.0}, "x")):
        painted(text)


def test_own_attributes_precede_the_class_and_the_class_the_tag():
    group = shape("g", label(1, 2, "in a group", class_="small"), class_="axis")
    root = painted(chart([label(1, 2, "own", fill="#123456", class_="small"), label(1, 2, "tag"), group]))
    own, tag, inner = root.iter(f"{SVG}text")
    assert (own.get("fill"), own.get("font-size")) == ("#123456", str(PAINTS["small"]["font_size"]))
    assert tag.get("fill") == PAINTS["text"]["fill"]
    assert inner.get("fill") == PAINTS["small"]["fill"]
    assert root.find(f"{SVG}g").get("stroke") == PAINTS["axis"]["stroke"]
    last = painted(picture(9, 9, [label(1, 2, "x", class_="a b")], {"a": {"fill": "#aaaaaa"}, "b": {"fill": "#bbbbbb"},
                                                                    "text": {"font_size": 9}}))  # fmt: skip
    assert last.find(f"{SVG}text").get("fill") == "#bbbbbb"
