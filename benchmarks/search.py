"""Architecture search: planted skips found again, growth beside chance, and all methods at one budget.

Settings of the planted problems: `graphwright.testing.planted`. Losses are on a validation batch that no weight sees.
"""

from __future__ import annotations

import warnings

import numpy as np

from benchmarks.harness import Figure
from graphwright import structure as st
from graphwright.structure import searching as ss
from graphwright.structure.searching.methods import Trials
from graphwright.testing.planted import BLOCK_NAMES, SkipTeacher, chain

CANDIDATES = st.skips(BLOCK_NAMES)
PARTS = ("found_again", "grown", "compared")
warnings.simplefilter("ignore", ss.Collapsed)


def trials(teacher: SkipTeacher, seed: int, budget: int) -> Trials:
    valid = teacher.batch(np.random.default_rng(7), 512)
    return Trials(chain(2000 + seed), CANDIDATES, teacher.batch, valid, teacher.task, budget, seed, 0.01)


def given(teacher: SkipTeacher, seed: int, steps: int, chosen: tuple[str, ...] | set[str]) -> float:
    """Validation loss of a student whose skips are given."""
    t = trials(teacher, seed, steps)
    return t.score(t.fit(t.structure(chosen), steps))


def found_again(seeds: int = 10, steps: int = 2000) -> Figure:
    """Every block's output is shown: the planted set is the only one that fits."""
    figure = Figure(
        "Planted skips found by gates",
        f"3 of 15 skips, {steps} steps of search and {steps} of retraining, batch 128; {seeds} seeds",
    )
    right = 0
    for seed in range(seeds):
        teacher = SkipTeacher(seed, CANDIDATES)
        found = ss.METHODS["gates"](trials(teacher, seed, 2 * steps))
        ratio = found.loss / given(teacher, seed, steps, teacher.planted)
        exact = set(found.chosen) == teacher.planted
        right += exact and ratio <= 1.1
        figure.add(f"seed {seed}", ratio, "of the loss with the structure given", "exact" if exact else "other skips")
    figure.notes.append(f"exact, and within 1.1 of a student that was given the structure: {right} of {seeds} seeds")
    return figure


def grown(seeds: int = 10, trial: int = 700, retrain: int = 2000) -> Figure:
    """Only the last block's output is shown: several sets fit, and what counts is the loss."""
    figure = Figure(
        "Growing skips beside skips by chance, the last block shown alone",
        f"at most 3 additions, trials of {trial} steps, {retrain} of retraining; 8 structures by chance as large",
    )
    ratios = []
    for seed in range(seeds):
        teacher = SkipTeacher(seed, CANDIDATES, last=True)
        t = trials(teacher, seed, trial * 13 + retrain)
        found = ss.METHODS["grow"](t)
        names, rng = CANDIDATES.names(t.start), np.random.default_rng(seed)
        count = max(1, len(found.chosen))
        loss = given(teacher, seed, retrain, found.chosen)
        drawn = [tuple(rng.choice(names, count, replace=False)) for _ in range(8)]
        others = [given(teacher, seed, retrain, chosen) for chosen in drawn]
        plain = given(teacher, seed, retrain, ())
        ratios.append((loss / np.median(others), loss / plain))
        figure.add(f"seed {seed}", ratios[-1][0], "of the median by chance",
                   f"{loss / min(others):.2f} of the best of 8, {ratios[-1][1]:.2f} of none")  # fmt: skip
    chance, none = np.median([r for r, _ in ratios]), max(r for _, r in ratios)
    figure.notes.append(f"median {chance:.2f} of the median by chance; at most {none:.2f} of the chain without skips")
    return figure


def compared(seeds: int = 10, budget: int = 4000) -> Figure:
    """Each method at the same number of training steps, retraining included."""
    figure = Figure(
        "Methods of a search at equal budget",
        f"{budget} training steps each, retraining included; every block shown; {seeds} seeds, median loss",
    )
    for name in ("gates", "grow", "softmax", "evolve", "random"):
        losses, right, spent = [], 0, []
        for seed in range(seeds):
            teacher = SkipTeacher(seed, CANDIDATES)
            t = trials(teacher, seed, budget)
            found = ss.METHODS[name](t)
            losses.append(found.loss)
            right += set(found.chosen) == teacher.planted
            spent.append(t.spent)
        note = f"{right} of {seeds} exact, {max(spent)} steps"
        figure.add(name, float(np.median(losses)), "mean squared error", note, min(losses), max(losses))
    return figure
