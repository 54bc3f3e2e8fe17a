"""Pictures letter by letter. `FREEZE_PICTURES=1 pytest` rewrites them; look at each before it is committed."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import graphwright as gw
from graphwright.program import Builder, Program

from . import models

GOLDEN = Path(__file__).with_name("golden")


def cell() -> Program:
    """A recurrent cell in a module, and an edge with a delay of two steps."""
    b = Builder("cell")
    x, c = b.input("x", (2, 3)), b.scope("cell")
    held = c.state("h", np.zeros((2, 4), "f4"))
    inp = c.linear(x, c.param("inp.weight", np.zeros((4, 3), "f4")), name="inp")
    rec = c.linear(held, c.param("rec.weight", np.zeros((4, 4), "f4")), name="rec")
    new = c.tanh(c.junction(inp, rec, name="sum"), name="new")
    b.assign(held, new)
    b.output(b.linear(new, b.param("out.weight", np.zeros((2, 4), "f4")), name="out"), "y")
    p = b.build()
    with p.edit("lag") as e:
        e.connect("cell.new", "cell.sum", delay=2)
    return p


def unfolded() -> Program:
    """One block of a decoder, its output projection by heads and one head cut."""
    p = models.llama(1)
    with p.edit("heads") as e:
        e.cut(p.in_edges(e.unfold("layers.0.attn.o", "in"))[1])
    return p


def tape() -> Program:
    """A residual net's loss."""
    first, last = gw.nn.Linear(3, 4), gw.nn.Linear(4, 4)
    first.weight.name, last.weight.name = "first.weight", "last.weight"
    h = (gw.tensor(np.ones((5, 3), "f4")) @ first.weight.T).relu()
    return gw.tape((h + (h @ last.weight.T).relu()).exp().mean())


def loop() -> Program:
    """Seventy steps of one cell."""
    weight = gw.Parameter(gw.tensor(np.eye(2, dtype="f4")).data, name="cell.weight")
    h = gw.tensor(np.ones((1, 2), "f4"))
    for _ in range(70):
        h = (h @ weight).tanh()
    return gw.tape(h.sum())


PICTURES: dict[str, Callable[[], str]] = {
    "cell.svg": lambda: cell().to_svg(),
    "cell.dot": lambda: cell().to_dot(level=9),
    "decoder.svg": lambda: models.llama(3).to_svg(),
    "unfolded.svg": lambda: unfolded().to_svg(level=9),
    "tape.svg": lambda: tape().to_svg(),
    "loop.svg": lambda: loop().to_svg(),
}


@pytest.mark.parametrize("name", PICTURES)
def test_pictures_match_reviewed_files(name: str) -> None:
    made, file = PICTURES[name](), GOLDEN / name
    if os.environ.get("FREEZE_PICTURES"):
        file.parent.mkdir(exist_ok=True)
        file.write_text(made, "utf-8")
    assert made == file.read_text("utf-8")
