"""Draw the pictures of the docs: `python scripts/pictures.py` writes docs/pictures/."""

from __future__ import annotations

from pathlib import Path

import numpy as np

import graphwright as gw
from graphwright import structure as st
from graphwright.structure.pictures import probabilities
from graphwright.surgery import diagnose
from graphwright.testing.planted import Edges

PLACE = Path(__file__).parents[1] / "docs" / "pictures"


def edit() -> str:
    """A branch cut and a skip added in the bundled model, beside what it was."""
    p = gw.open("bundled").program
    with p.edit("cut the MLP of block 1, skip the block") as e:
        e.cut("layers.1.mlp.down -> layers.1.out")
        e.link("layers.0.out", "layers.2.out", np.zeros((192, 192), np.float32))
    return p.to_svg(diff=p.at(-1), expanded={"layers", "layers.1"})


def gates(steps: int = 300) -> str:
    """The probability of each of 56 edges over 300 steps, 12 of which carry signal."""
    problem = Edges(0)
    problem.gate("sigmoid", init=st.init_for(0.9, "sigmoid"))
    view = st.DifferentiableGraph(problem.program, schedule=st.Schedule(1.0, 0.1, steps))
    opt = st.JointOptimizer(view, "loss", [st.sparsity(0.1)], params=0.01, gates=0.1)
    rows = []
    for step in range(steps):
        if step % 4 == 0:
            rows.append(list(view.probabilities("T").values()))
        opt.step(problem.batch())
    names = list(view.probabilities())
    return probabilities(np.array(rows), names, [name in problem.planted for name in names], steps)


def findings() -> str:
    """What a diagnosis finds in the bundled model after five defects were planted, coloured by severity."""
    p = gw.open("bundled").program
    with p.edit("five defects", check=False) as e:
        e.cut("layers.0.mid -> layers.0.out")
        e.insert("layers.1.mlp.mul -> layers.1.mlp.down", "stop_gradient", name="layers.1.mlp.stopped")
        e.add("tanh", "layers.1.attn.o", name="layers.1.attn.idle")
        e.cut("layers.1.attn.v -> layers.1.attn.v_split")
        e.set_weight("layers.1.mlp.up.weight", lambda w: np.where(w > w.max() / 2, np.nan, w))
    found = diagnose(p)
    shown = {"layers", "layers.0", "layers.1", "layers.1.attn", "layers.1.mlp"}
    return p.to_svg(overlay=found.overlay(), expanded=shown)


PICTURES = {"edit.svg": edit, "gates.svg": gates, "findings.svg": findings}

if __name__ == "__main__":
    PLACE.mkdir(exist_ok=True)
    for name, draw in PICTURES.items():
        (PLACE / name).write_text(draw(), encoding="utf-8")
