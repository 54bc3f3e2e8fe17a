"""Draw the pictures of the docs: `python scripts/pictures.py` writes docs/pictures/."""

from __future__ import annotations

from pathlib import Path

import numpy as np

import graphwright as gw

PLACE = Path(__file__).parents[1] / "docs" / "pictures"


def edit() -> str:
    """A branch cut and a skip added in the bundled model, beside what it was."""
    p = gw.open("bundled").program
    with p.edit("cut the MLP of block 1, skip the block") as e:
        e.cut("layers.1.mlp.down -> layers.1.out")
        e.link("layers.0.out", "layers.2.out", np.zeros((192, 192), np.float32))
    return p.to_svg(diff=p.at(-1), expanded={"layers", "layers.1"})


PICTURES = {"edit.svg": edit}

if __name__ == "__main__":
    PLACE.mkdir(exist_ok=True)
    for name, draw in PICTURES.items():
        (PLACE / name).write_text(draw(), encoding="utf-8")
