"""What learned pruning is worth: held-out bits per byte at equal parameters, beside recipes that score units.

Each pruned model is measured as it is, and after the same distillation. Targets run beside one another, in processes:
nothing here is a time.
"""

from __future__ import annotations

from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import Any

import graphwright as gw
from benchmarks.harness import Figure
from graphwright import structure as st
from graphwright import surgery as sg
from graphwright.models.bundled import pydoc_split

TARGETS = (0.8, 0.7, 0.5)
STEPS, HEALING, RATE = 300, 100, 3e-4
BATCH, WINDOW = 8, 128
RECIPES: dict[str, dict[str, Any]] = {
    "activation-aware": {},
    "magnitude": {"recipe": "units", "scope": "layer", "method": "magnitude", "restore": False},
    "random": {"recipe": "units", "scope": "layer", "method": "random", "restore": False},
}


def run() -> list[Figure]:
    return [learned()]


def learned() -> Figure:
    """Gates against the recipes of `model.prune`, at equal parameters."""
    figure = Figure(
        "Learned pruning beside recipes, bundled model",
        f"share of the parameters of heads and neurons that stays; gates: {STEPS} steps of {BATCH} x {WINDOW} bytes, "
        "weights as they are; recipes: 8 192 tokens of calibration, the activation-aware one (`graphwright prune`) "
        f"restores what reads the units; healed: the same {HEALING} steps of {BATCH} x {WINDOW} bytes of distillation "
        f"for all, AdamW at {RATE:g}; bits per byte on 8 000 held-out bytes",
    )
    figure.add("dense", bits(gw.open("bundled")), "bits")
    with ProcessPoolExecutor(len(TARGETS), mp_context=get_context("spawn")) as pool:
        found = list(pool.map(at, TARGETS))
    for target, rows in zip(TARGETS, found, strict=True):
        for who, before, after, gone in rows:
            figure.add(f"{target:.0%}  {who}", before, "bits", f"healed {after:.4f}; {gone:,} parameters gone")
        ours, theirs = rows[0], rows[1]
        figure.notes.append(
            f"{target:.0%}: gates are {abs(ours[1] - theirs[1]):.4f} bits {side(ours[1], theirs[1])} the "
            f"activation-aware recipe, {abs(ours[2] - theirs[2]):.4f} {side(ours[2], theirs[2])} it after healing"
        )
    return figure


def side(ours: float, theirs: float) -> str:
    return "better than" if ours < theirs else "worse than"


def at(target: float) -> list[tuple[str, float, float, int]]:
    """Of each method: name, bits per byte as cut, after healing, and parameters that went."""
    model = gw.open("bundled")
    whole = parameters(model.program)
    st.learn(model, target=target, held_out=held(), steps=STEPS, batch=BATCH, window=WINDOW, round_to=1)
    gone = whole - parameters(model.program)
    rows = [("gates", *measured(model), gone)]
    for name, options in RECIPES.items():
        other = gw.open("bundled")
        calibration = sg.Calibration.of(other, max_tokens=8192, context=512)
        share = gone / sum(other.program.spec(n).size for n in in_layers(other.program))
        sg.prune(other.program, sg.Ratio(share), calibration, timed=False, **options)
        rows.append((name, *measured(other), whole - parameters(other.program)))
    return rows


def measured(model: Any) -> tuple[float, float]:
    """Bits per byte as it is, and healed."""
    before = bits(model)
    tokens = HEALING * BATCH * WINDOW
    windows = sg.Calibration.of(model, max_tokens=tokens, context=WINDOW, held_out=held()[:2000])
    sg.heal(model.program, gw.open("bundled").program, windows, HEALING, lr=RATE, batch=BATCH)
    return before, bits(model)


def held() -> str:
    return pydoc_split()[1][:8000]


def bits(model: Any) -> float:
    return float(model.perplexity(held()).bits_per_byte)


def parameters(p: gw.Program) -> int:
    return sum(p.spec(n).size for n in p.params())


def in_layers(p: gw.Program) -> list[Any]:
    return [n for n in p.params() if p.path(n).startswith("layers.")]
