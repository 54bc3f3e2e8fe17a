"""The block map of a pattern in the details of its node."""

from __future__ import annotations

import json

import numpy as np
import pytest

import graphwright as gw
from block_edges import edges_of
from graphwright import attention as at
from graphwright.program.draw.pattern_map import pattern_map


def details(page: str, path: str) -> str:
    """What the page shows when its reader points at a node."""
    packed = page.partition('id="gw-data">')[2].partition("</script>")[0]
    (node,) = [n for n in json.loads(packed)["nodes"] if n["path"] == path]
    return node["tip"]


def test_a_map_has_a_cell_for_each_edge():
    pattern = at.star(60, global_tokens=3, window=7, block=4, planes=2)
    pattern.cut(edges_of(pattern, (6, 6, 1)))
    _, *lines = pattern_map(pattern)
    assert lines[::16] == ["plane 0", "plane 1"]
    cells = np.array([[cell != "·" for cell in line] for line in lines if not line.startswith("plane")]).reshape(
        2, 15, 15
    )
    found = {(p, q, k) for p, q, k in np.argwhere(cells).tolist()}
    assert found == set(map(tuple, pattern.pairs().tolist()))


@pytest.mark.parametrize("tokens", [640, 1290])
def test_a_cell_of_a_large_map_stands_for_several_blocks(tokens):
    pattern = at.sliding_window(tokens, 50, block=5)
    head, *lines = pattern_map(pattern)
    each = -(-pattern.blocks[0] // 32)
    assert f"a cell is {each} x {each} blocks of 5 tokens" in head
    assert (len(lines), {len(line) for line in lines}) == (-(-pattern.blocks[0] // each), {len(lines)})
    blocks = np.zeros(pattern.blocks)
    blocks[tuple(pattern.pairs().T[1:])] = 1
    for q, line in enumerate(lines):
        for k, cell in enumerate(line):
            tile = blocks[q * each : (q + 1) * each, k * each : (k + 1) * each]
            assert cell == "·░▒▓█"[int(np.ceil(tile.mean() * 4 - 1e-9))]


def test_the_page_of_a_model_shows_the_map_of_its_pattern_as_it_is_now():
    model = gw.open("bundled")
    pattern = at.sliding_window(64, 16, block=8)
    at.sparsify(model, "layers.*.attn", pattern)
    before = details(model.program.to_html(), "pattern")
    assert "\n".join(pattern_map(pattern)[1:]) in before
    pattern.connect(7, 0)
    after = details(model.program.to_html(), "pattern")
    assert after != before
    assert "█····███" not in before
    assert "█····███" in after
