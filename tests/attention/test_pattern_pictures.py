"""Pictures of patterns draw exactly their edges, and those of two versions the journal."""

from __future__ import annotations

import re
from xml.etree import ElementTree

import numpy as np
import pytest

from block_edges import edges_of
from graphwright import patterns as pt
from graphwright.attention.picture import block_map, dot

SVG = "{http://www.w3.org/2000/svg}"


def cells(text):
    """Return {(plane, query, key): (class, fill, title)} of the cells of a map, by their position."""
    found, frames = {}, []
    for rect in ElementTree.fromstring(text).iter(f"{SVG}rect"):
        if rect.get("x") is None:  # the background
            continue
        where = tuple(float(rect.get(name, "nan")) for name in ("x", "y", "width"))
        title = rect.find(f"{SVG}title")
        if rect.get("class") == "frame":
            frames.append(where)
        elif title is not None:
            x, y, size = where
            plane = max(i for i, frame in enumerate(frames) if frame[1] <= y)
            pair = plane, round((y - frames[plane][1]) / size), round((x - frames[plane][0]) / size)
            assert f"query {pair[1]}, key {pair[2]}:" in (title.text or "")
            assert pair not in found
            found[pair] = (rect.get("class"), rect.get("fill"), title.text)
    return found


def changed():
    pattern = pt.star(257, 5, 9, 16, planes=2)
    with pattern.edit("scores") as e:
        e.set(pattern.edges(), score=np.linspace(0, 1, len(pattern)))
    old = pattern.copy()
    with pattern.edit("several") as e:
        e.cut(*edges_of(pattern, (9, 9, 1)))
        e.cut(*edges_of(pattern, (3, 0)))
        e.connect(9, 3, 1)
    return pattern, old


def test_map_has_a_cell_for_each_edge_darker_for_more_mass():
    pattern, _ = changed()
    found = cells(block_map(pattern))
    assert set(found) == set(map(tuple, pattern.pairs().tolist()))
    scores = dict(zip(map(tuple, pattern.pairs().tolist()), pattern.edges["score"], strict=True))
    light = {pair: sum(int(fill[i : i + 2], 16) for i in (1, 3, 5)) for pair, (_, fill, _) in found.items()}
    order = sorted(scores, key=scores.__getitem__)
    assert light[order[0]] != light[order[-1]]
    assert len(set(light.values())) > 5


def test_map_of_two_versions_shows_the_journal():
    pattern, old = changed()
    found = cells(block_map(pattern, since=old))
    assert {pair for pair, (style, *_) in found.items() if style == "added"} == {(1, 9, 3)}
    assert {pair for pair, (style, *_) in found.items() if style == "cut"} == {(1, 9, 9), (0, 3, 0)}
    assert {pair for pair, (style, *_) in found.items() if style != "cut"} == set(map(tuple, pattern.pairs().tolist()))


def test_dot_has_the_edges_of_a_plane(tmp_path):
    pattern, old = changed()
    text = dot(pattern, tmp_path / "pattern.dot", plane=1, since=old)
    assert (tmp_path / "pattern.dot").read_text() == text
    drawn = {(int(q), int(k)): look for k, q, look in re.findall(r"k(\d+) -> q(\d+) \[(.*)\];", text)}
    cut = {pair for pair, look in drawn.items() if "dotted" in look and "#8c959f" in look}
    assert cut == {(9, 9)}
    assert set(drawn) - cut == {(q, k) for plane, q, k in pattern.pairs().tolist() if plane == 1}
    assert {pair for pair, look in drawn.items() if "#1a7f37" in look} == {(9, 3)}


def test_empty_patterns_and_other_shapes():
    assert cells(block_map(pt.Pattern(64, 16))) == {}
    with pytest.raises(pt.PatternShape):
        block_map(pt.Pattern(64, 16), since=pt.Pattern(64, 8))
