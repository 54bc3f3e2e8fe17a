"""Pictures: well-formed, the same twice, and showing the nodes and links that are there."""

from __future__ import annotations

import re
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest

from graphwright import evolve as ev
from graphwright.evolve import pictures
from narrow import WINDOW, width

SVG = "{http://www.w3.org/2000/svg}"


def run_of(**changes):
    x = np.random.default_rng(0).normal(size=(20, 3))
    task = ev.Task(x, (x[:, :1] > 0).astype(float), split="same", names=("a<b", "b & c", "c"))
    run = ev.Evolution(task, None, ev.NEAT(population=20, split_link=0.2, add_link=0.4, **changes), seed=1)
    run.run(30, target=2.0)
    return run


def test_a_network_shows_its_nodes_and_links():
    run = run_of(delays=0.5, toggle_link=0.1)
    for g in range(20):
        genome = run.individual(ev.IndividualKey(29, g)).genome
        text = pictures.network(genome, run.task.names)
        root: Any = ElementTree.fromstring(text)
        kinds = [c.get("class") for c in root.iter(f"{SVG}circle")]
        assert kinds.count("input") == 3
        assert kinds.count("hidden") == genome.hidden
        assert kinds.count("output") == 1
        drawn = {int(p.find(f"{SVG}title").text.split(":")[0][5:]): p for p in root.iter(f"{SVG}path")}
        assert set(drawn) == {e.id for e in genome.links}
        for e in genome.links:
            kind = "closed" if not e.open else "delay" if e.delay else "minus" if e.weight < 0 else "open"
            assert drawn[e.id].get("class") == kind
        assert text == pictures.network(genome, run.task.names)


def test_pictures_of_curves_and_species():
    run = run_of()
    for draw in (pictures.fitness, pictures.species):
        root = ElementTree.fromstring(draw(run.log))
        assert draw(run.log) == draw(run.log)
        assert root.get("width")
    areas: Any = ElementTree.fromstring(pictures.species(run.log)).iter(f"{SVG}polygon")
    shown = {p.find(f"{SVG}title").text for p in areas}
    assert shown == {f"species {n}" for line in run.log for n in line.species}


def test_the_lineage_page_is_written_with_escaped_names(tmp_path):
    run = run_of()
    text = run.lineage.to_html(tmp_path / "family.html")
    assert (tmp_path / "family.html").read_text(encoding="utf-8") == text
    assert text.count("<svg") >= 1
    assert "founder" in text
    assert "a&lt;b" in text
    assert re.search(r"<h1>Ancestors of individual \d+ of generation \d+</h1>", text)


@pytest.mark.browser
def test_the_lineage_page_fits_a_narrow_window(tmp_path):
    run_of().lineage.to_html(tmp_path / "family.html")
    assert width(tmp_path / "family.html") <= WINDOW


def test_genes_without_descendants_are_dropped():
    run = run_of()
    run.run(200, target=2.0)
    kept = [len(past.stored) for past in run.lineage.past]
    assert max(kept[:60]) <= 20
    assert sum(kept[:60]) < 0.5 * 60 * 20
    for g in range(20):
        assert run.lineage.path(ev.IndividualKey(run.generation, g))[0].fitter_parent is None
    assert run.lineage.replay(ev.IndividualKey(run.generation, 0)).valid
    assert all(run.lineage.genome(birth.key) for birth in run.lineage.champions())


def test_a_run_of_one_generation_can_be_drawn():
    run = ev.Evolution(ev.tasks.xor(), None, ev.NEAT(population=8), seed=1)
    run.run(1, target=2.0)
    for line in ElementTree.fromstring(ev.pictures.fitness(run.log)).iter(f"{SVG}polyline"):
        points = [tuple(map(float, p.split(","))) for p in line.get("points", "").split()]
        assert len({x for x, _ in points}) > 1
    for area in ElementTree.fromstring(ev.pictures.species(run.log)).iter(f"{SVG}polygon"):
        points = [tuple(map(float, p.split(","))) for p in area.get("points", "").split()]
        assert len({x for x, _ in points}) > 1
