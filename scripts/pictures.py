"""Draw the pictures of the docs: `python scripts/pictures.py [NAME ...]` writes docs/pictures/."""

from __future__ import annotations

import sys
from pathlib import Path
from runpy import run_path
from typing import Any

import numpy as np

import graphwright as gw
from graphwright import structure as st
from graphwright import surgery as sg
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


def attention() -> str:
    """The probability of each of twelve edges in `examples/attention_pruning.py`."""
    values, names, kept = example("attention_pruning")["toy"]()
    return probabilities(values, names, kept, len(values))


def orthogonal() -> str:
    """How far each method of `examples/orthogonalisation.py` moves the logits of the bundled model."""
    moved = example("orthogonalisation")["compared"]("bundled", "layers.*.attn.{q,k,v,o}", 1024)
    return bars({name: max(value, 1e-16) for name, value in moved.items()}, "logits moved, relative to the largest")


def skips() -> str:
    """The structure that `examples/architecture_search.py` finds for seed 0, beside the chain that it began with."""
    found, student, _ = example("architecture_search")["one"](0, "gates", 4000, ())
    return found.program.to_svg(diff=student)


def example(name: str) -> dict[str, Any]:
    """What a file of examples/ defines."""
    return run_path(str(PLACE.parents[1] / "examples" / f"{name}.py"))


def bars(values: dict[str, float], what: str) -> str:
    """Positive numbers on a logarithmic scale as SVG."""
    wide, left, high = 420, 210, 20
    logs = np.log10(list(values.values()))
    low, span = np.floor(logs.min()), max(np.ceil(logs.max()) - np.floor(logs.min()), 1.0)
    height = high * len(values) + 40
    parts = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {left + wide + 80} {height}" role="img">'
             "<style>text{font:12px system-ui,sans-serif;fill:#57606a}</style>"]  # fmt: skip
    for k, (name, at) in enumerate(zip(values, (logs - low) / span, strict=True)):
        y, length = 10 + high * k, max(wide * at, 2.0)
        parts.append(f'<text x="6" y="{y + 11}">{name}</text>'
                     f'<rect x="{left}" y="{y}" width="{length:.0f}" height="13" fill="#0969da"/>'
                     f'<text x="{left + length + 6:.0f}" y="{y + 11}">{values[name]:.1e}</text>')  # fmt: skip
    parts.append(f'<text x="{left}" y="{height - 12}">{what}; logarithmic</text></svg>')
    return "\n".join(parts) + "\n"


def prune() -> str:
    """Half of a block's neurons gone, in every matrix that has them, beside what it was."""
    model = gw.open("bundled")
    model.select("layers.1.mlp").neurons[:256].prune()
    return _change(model.program, "layers.1.mlp")


def orthogonalize() -> str:
    """The queries' matrix as an orthonormal one and, before it, its stretch."""
    p = gw.open("bundled").program
    sg.orthogonalize(p, "layers.1.attn.q", fold="insert")
    return _change(p, "layers.1.attn", "layers.1.attn.q")


def compress() -> str:
    """A matrix of an MLP as two thin ones."""
    p = gw.open("bundled").program
    sg.compress(p, "layers.1.mlp.up", "svd", sg.Ratio(0.3))
    return _change(p, "layers.1.mlp", "layers.1.mlp.up")


def _change(p: gw.Program, *opened: str) -> str:
    """Block 1 against what it was before the last edit, with some of its modules opened."""
    return p.to_svg(diff=p.at(-1), expanded={"layers", "layers.1", *opened})


PICTURES = {
    "edit.svg": edit,
    "gates.svg": gates,
    "findings.svg": findings,
    "attention.svg": attention,
    "orthogonal.svg": orthogonal,
    "skips.svg": skips,
    "prune.svg": prune,
    "orthogonalize.svg": orthogonalize,
    "compress.svg": compress,
}
TRAINED = {"gates.svg", "attention.svg", "orthogonal.svg", "skips.svg"}
"""Those that take seconds."""

if __name__ == "__main__":
    PLACE.mkdir(exist_ok=True)
    for name in sys.argv[1:] or PICTURES:
        (PLACE / name).write_text(PICTURES[name](), encoding="utf-8")
