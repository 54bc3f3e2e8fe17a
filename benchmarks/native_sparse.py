"""Associative recall by native sparse attention: accuracy and blocks read, with a window, a threshold, top n, dense.

The task and the model are those of `examples/associative_recall.py`: 128 tokens, 64 keys outside the window of 16,
blocks of 8, one layer of two heads of 32, Adam 3e-3, 1500 steps of 32 sequences. `gain` repeats the threshold with
other initial weights of q and k.
"""

from __future__ import annotations

import sys

import numpy as np
from examples.associative_recall import MODES, trained

from benchmarks.harness import Figure

SEEDS, STEPS = 5, 1500
PARTS = ("recall", "gain")


def _row(figure: Figure, label: str, runs: list[tuple[float, float]]) -> None:
    accuracy, share = [a for a, _ in runs], float(np.mean([s for _, s in runs]))
    figure.add(label, float(np.mean(accuracy)), "accuracy", f"{share:.0%} of the candidates read", seeds=accuracy)
    print(label, f"{np.mean(accuracy):.3f}", f"lowest {min(accuracy):.3f}", f"{share:.0%}", file=sys.stderr, flush=True)


def recall() -> Figure:
    """One row per mode; a row of a window or of dense attention has no candidates."""
    figure = Figure("Associative recall, native sparse attention", f"chance 0.0625, {STEPS} steps, {SEEDS} seeds")
    for mode in MODES:
        _row(figure, mode, [trained(mode, STEPS, seed) for seed in range(SEEDS)])
    return figure


def gain() -> Figure:
    """One row per factor of the initial weights of q and k."""
    figure = Figure("Threshold, by initial weights of q and k", f"chance 0.0625, {STEPS} steps, {SEEDS} seeds")
    for factor in (1.0, 2.0, 4.0):
        _row(figure, f"qk_gain {factor:g}", [trained("tau", STEPS, seed, factor) for seed in range(SEEDS)])
    return figure
