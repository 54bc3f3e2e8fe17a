"""Draw the pictures of the docs: `python scripts/pictures.py` writes docs/pictures/."""

from __future__ import annotations

from pathlib import Path

import numpy as np

import graphwright as gw
from graphwright import structure as st
from graphwright import surgery as sg
from graphwright.surgery import diagnose

PLACE = Path(__file__).parents[1] / "docs" / "pictures"


def edit() -> str:
    """A branch cut and a skip added in the bundled model, beside what it was."""
    p = gw.open("bundled").program
    with p.edit("cut the MLP of block 1, skip the block") as e:
        e.cut("layers.1.mlp.down -> layers.1.out")
        e.link("layers.0.out", "layers.2.out", np.zeros((192, 192), np.float32))
    return p.to_svg(diff=p.at(-1), expanded={"layers", "layers.1"})


def gates(tokens: int = 8, width: int = 16, planted: int = 12, steps: int = 300) -> str:
    """The probability of each of 56 edges over 300 steps: y_i is a sum of M x_j over the planted edges, and noise."""
    rng = np.random.default_rng(0)
    pairs = [(i, j) for i in range(tokens) for j in range(tokens) if i != j]
    chosen = {pairs[k] for k in rng.choice(len(pairs), planted, replace=False)}
    m = rng.normal(size=(width, width)) / 4
    b = gw.Builder("edges")
    x, y = (b.input(n, ("B", tokens, width)) for n in "xy")
    w = b.param("w", (rng.normal(size=(width, width)) / 4).astype("f4"))
    token = [b.slice(x, axis=1, start=j, size=1, step=1, name=f"x{j}") for j in range(tokens)]
    sums = [b.junction(*(token[j] for j in range(tokens) if j != i), name=f"y{i}") for i in range(tokens)]
    gap = b.sub(b.linear(b.concat(*sums, axis=1), w), y)
    b.output(b.mean(b.mul(gap, gap), axes=(0, 1, 2)), name="loss")
    p = b.build()
    with p.edit("a gate on every edge") as e:
        e.gate(
            [edge for i in range(tokens) for edge in p.in_edges(f"y{i}")], "sigmoid", init=st.init_for(0.9, "sigmoid")
        )
    view = st.DifferentiableGraph(p, schedule=st.Schedule(1.0, 0.1, steps))
    opt = st.JointOptimizer(view, "loss", [st.sparsity(0.1)], params=0.01, gates=0.1)
    series: dict[str, list[float]] = {name: [] for name in view.probabilities()}
    for _ in range(steps):
        for name, value in view.probabilities("T").items():
            series[name].append(value)
        given = rng.normal(size=(64, tokens, width))
        wanted = 0.05 * rng.normal(size=given.shape)
        for i, j in chosen:
            wanted[:, i] += given[:, j] @ m.T
        opt.step({"x": given.astype("f4"), "y": wanted.astype("f4")})
    return _lines(series, {f"x{j} -> y{i}" for i, j in chosen}, steps)


def _lines(series: dict[str, list[float]], bold: set[str], steps: int) -> str:
    """Numbers in [0, 1] over steps as SVG."""
    wide, high, left = 640, 240, 44
    parts = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {wide + left + 20} {high + 50}" role="img">'
             "<style>text{font:12px system-ui,sans-serif;fill:#57606a}</style>"]  # fmt: skip
    for value in (0.0, 0.5, 1.0):
        at = 10 + high * (1 - value)
        parts.append(f'<path d="M{left} {at:g}h{wide}" stroke="#d0d7de"/><text x="8" y="{at + 4:g}">{value:g}</text>')
    for name in sorted(series, key=lambda n: n in bold):
        points = " ".join(f"{left + wide * t / (steps - 1):.0f},{10 + high * (1 - v):.1f}"
                          for t, v in enumerate(series[name]) if t % 4 == 0)  # fmt: skip
        style = 'stroke="#0969da" stroke-width="1.6"' if name in bold else 'stroke="#cf222e" opacity=".5"'
        parts.append(f'<polyline fill="none" {style} points="{points}"/>')
    parts.append(f'<text x="{left}" y="{high + 34}">probability of each edge over {steps} steps: '
                 "blue carries signal, red does not</text></svg>")  # fmt: skip
    return "\n".join(parts) + "\n"


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
    "prune.svg": prune,
    "orthogonalize.svg": orthogonalize,
    "compress.svg": compress,
}

if __name__ == "__main__":
    PLACE.mkdir(exist_ok=True)
    for name, draw in PICTURES.items():
        (PLACE / name).write_text(draw(), encoding="utf-8")
