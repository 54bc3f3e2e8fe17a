"""Lives of programs that attend over a pattern: its edits are committed, and it is there after a resume."""

from __future__ import annotations

import numpy as np
import pytest

import graphwright as gw
from graphwright import lifecycle as lf
from graphwright.patterns import Pattern, sliding_window

pytestmark = pytest.mark.usefixtures("warm")


def program(pattern: Pattern) -> gw.Program:
    b = gw.Builder("sparse")
    x = b.input("x", (1, 2, 16, 4))
    scaled = b.mul(x, b.param("scale", np.ones((4,), np.float32)))
    b.output(b.block_sdpa(scaled, x, x, b.pattern("window", pattern), scale=0.5)[0], "y")
    return b.build()


def test_a_life_has_its_pattern_after_each_commit_and_undo(tmp_path):
    life = lf.birth(program(sliding_window(16, 4, block=4)), tmp_path / "life", name="sparse")
    pattern = life.program.patterns["window"]
    pattern.connect(3, 0)
    life.commit(verify=True)
    pattern.cut(pattern.edges()[:1])
    life.commit()
    wanted = life.program.hash(), pattern.hash(positions=True)
    life.close()
    life = lf.open(tmp_path / "life")
    again = life.program.patterns["window"]
    assert (life.program.hash(), again.hash(positions=True)) == wanted
    life.program.undo(2)
    assert not again.has(3, 0)
    again.connect(3, 1)
    life.commit()
    life.close()
