"""Evolution: what runs find over seeds. XOR and its ablations, hybrid training, data, control tasks, irregular times.

No other load on the machine changes what is counted here; how fast it goes is `benchmarks.evolve_speed`.
`python -m benchmarks evolve:xor,cart` runs some of the parts alone.
"""

from __future__ import annotations

import math
import runpy
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

import graphwright as gw
from benchmarks.harness import Figure
from graphwright import evolve as ev
from graphwright.evolve.layers import train
from graphwright.evolve.layers.candidate import TrainingGenes
from graphwright.evolve.seeds import wilson

PARTS = ("xor", "ablation", "hybrid", "gradients", "inherited", "data", "layers", "cart", "ppo", "double_pole",
         "ablation_poles", "sine", "event_xor", "event_xor_16")  # fmt: skip
EXAMPLES = Path(__file__).parents[1] / "examples"


# -- what is solved ----------------------------------------------------------------------------------------------------
def solve(task: Any, settings: ev.NEAT, seeds: int, **limits: int) -> list[ev.Result]:
    return [ev.Evolution(task(s), None, settings, seed=s).run(**limits) for s in range(seeds)]


def add_runs(figure: Figure, who: str, results: list[ev.Result], extra: str = "") -> None:
    """Share of seeds that solved; evaluations, those of unsolved seeds in full, and of solved ones alone."""
    solved = [r for r in results if r.solved]
    low, high = (100 * v for v in wilson(len(solved), len(results)))
    counts = [r.evolution.counters.evaluations for r in results]
    q1, q3 = np.quantile(counts, [0.25, 0.75])
    note = f"median {median(counts):,.0f} evaluations ({q1:,.0f} to {q3:,.0f})"
    if solved:
        mean = np.mean([r.evolution.counters.evaluations for r in solved])
        note += f", mean of solved {mean:,.0f}, {np.mean([r.best.genome.hidden for r in solved]):.1f} hidden nodes"
    each = [float(r.evolution.counters.evaluations) if r.solved else None for r in results]
    share = len(solved) / len(results)
    figure.add(f"{who}, {len(solved)} of {len(results)} seeds", 100 * share, "%", note + extra, low, high, each)


def xor() -> Figure:
    figure = Figure("XOR by NEAT, 100 seeds", "population 150, at most 300 generations; all four answers right")
    for who, settings in (("defaults", ev.NEAT()), ("NEAT.paper2002()", ev.NEAT.paper2002())):
        add_runs(figure, who, solve(lambda s: ev.tasks.xor(), settings, 100, max_generations=300))
    figure.notes.append("NEAT 2002 reports 4755 evaluations on average (standard deviation 2553), no failures.")
    return figure


RANDOM: dict[str, Any] = {"start": "random", "burst": 15}  # 1 to 10 hidden nodes, 5.8 on average, as in the paper


def ablation(seeds: int = 100) -> Figure:
    figure = Figure(
        f"XOR without parts of NEAT, {seeds} seeds", "as above, in the paper's order; unsolved seeds count in full"
    )
    rows: dict[str, dict[str, Any]] = {
        "all of it": {},
        "no crossover": {"crossover": False},
        "random start": RANDOM,
        "no species": {"species": False},
        "no species, random start": {"species": False, **RANDOM},
        "no growth": {"growth": False},
    }
    ablated(figure, rows, lambda s: ev.tasks.xor(), seeds, {"max_generations": 300})
    figure.notes.append("p: Fisher's exact test, one-sided, that all of it solves so many more seeds by chance.")
    figure.notes.append("The paper took its parts out on two poles, not on XOR: see the next table.")
    return figure


def ablation_poles(seeds: int = 20) -> Figure:
    figure = Figure(
        f"Two poles without parts of NEAT, {seeds} seeds",
        "the paper's task, starts and order; at most 30 000 evaluations, which unsolved seeds count in full",
    )
    layer = {"start": "random", "burst": 10, "grow": 1.0}  # ten hidden nodes that see all inputs
    rows: dict[str, dict[str, Any]] = {
        "all of it (paper: 3,600 evaluations, all seeds)": {},
        "no crossover (5,557, all seeds)": {"crossover": False},
        "random start (23,033, 95 % of seeds)": RANDOM,
        "no species, random start (25,600, 75 %)": {"species": False, **RANDOM},
        "no growth, ten hidden nodes (30,239, 20 %)": {"growth": False, **layer},
    }
    ablated(figure, rows, lambda s: ev.tasks.double_pole(), seeds, {"max_evaluations": 30_000})
    figure.notes.append(
        "In brackets what Stanley and Miikkulainen 2002 report in their table of ablations: evaluations on average of "
        "the runs that solved, and how many did."
    )
    return figure


def ablated(figure: Figure, rows: dict[str, dict[str, Any]], task: Any, seeds: int, limits: dict[str, int]) -> None:
    solved: list[int] = []
    for who, changes in rows.items():
        found = solve(task, ev.NEAT(**changes), seeds, **limits)
        solved.append(sum(r.solved for r in found))
        add_runs(figure, who, found, f"; p = {fisher(solved[0], solved[-1], seeds):.2g}" if changes else "")


def fisher(more: int, fewer: int, seeds: int) -> float:
    """Probability that the first of two samples has at least `more` of all hits, if both have the same distribution."""
    hits, ways = more + fewer, math.comb(2 * seeds, more + fewer)
    return sum(math.comb(seeds, k) * math.comb(seeds, hits - k) for k in range(more, min(seeds, hits) + 1)) / ways


def hybrid() -> Figure:
    figure = Figure("Growing and training: XOR and parity", "population 16, Adam 0.05, function-preserving growth")
    found = solve(lambda s: ev.tasks.xor(), ev.Hybrid(), 20, max_evaluations=1600)
    add_runs(figure, "XOR, 60 steps a candidate", found, f", {passes(found)}")
    found = solve(lambda s: ev.tasks.xor(), ev.NEAT(), 20, max_generations=300)
    add_runs(figure, "XOR by NEAT() without gradients", found, f", {passes(found)}")
    settings = ev.Hybrid(delays=0.5, train=ev.Train(steps=100))
    found = solve(lambda s: ev.tasks.parity(8, seed=s), settings, 10, max_generations=30)
    add_runs(figure, "parity of 8 bits by delays", found)
    last_only = solve(lambda s: at_the_end(8, s), settings, 10, max_generations=30)
    for who, runs in (("parity", found), ("parity, fitness of the last step alone", last_only)):
        tests = [100 * r.test() for r in runs]
        note = f"95 % or more in {sum(t >= 95 for t in tests)} of 10 seeds"
        figure.add(f"{who}: median test accuracy", median(tests), "%", note, seeds=tests)
    return figure


def passes(found: list[ev.Result]) -> str:
    forward, backward = (median(getattr(r.evolution.counters, n) for r in found) for n in ("forward", "backward"))
    return f"median {forward:,.0f} cases forward and {backward:,.0f} with gradients"


def at_the_end(bits: int, seed: int) -> ev.Task:
    """Parity with one label per string: no step says on the way what to keep."""
    x = (np.arange(2**bits)[:, None] >> np.arange(bits)) & 1
    return ev.Task(x[..., None], x.sum(1) % 2, "bce", split=(0.5, 0.25, 0.25), target=1.0, seed=seed)


def gradients() -> Figure:
    """What training costs and saves: cases to a target, with gradients and by perturbation alone."""
    figure = Figure(
        "Cases to a target with gradients and by perturbation alone, 20 seeds",
        "Hybrid() and NEAT(); a case with gradients counts as three; unsolved seeds count in full",
    )
    memory = {"delays": 0.5}
    rows: dict[str, tuple[Any, dict[str, Any]]] = {
        "XOR": (lambda s: ev.tasks.xor(), {}),
        "parity of 4 bits by delays": (lambda s: ev.tasks.parity(4, seed=s), memory),
        "two moons": (lambda s: ev.tasks.two_moons(200, seed=s), {}),
    }
    for name, (task, changes) in rows.items():
        for who, settings, limit in (
            ("gradients", ev.Hybrid(**changes), 30),
            ("perturbation", ev.NEAT(**changes), 100),
        ):
            found = solve(task, settings, 20, max_generations=limit)
            counters = [r.evolution.counters for r in found]
            cost = [float(c.forward + 3 * c.backward) for c in counters]
            low, high = np.quantile(cost, [0.25, 0.75])
            note = f"{sum(r.solved for r in found)} of 20 seeds; interval: quartiles"
            figure.add(f"{name}: {who}", median(cost) / 1e3, "thousand cases", note, low / 1e3, high / 1e3, cost)
    return figure


def cart() -> Figure:
    figure = Figure(
        "CartPole by NEAT, 20 seeds", "our own physics, greedy, at most 30 generations of 150; 100 unseen starts"
    )
    found = solve(lambda s: ev.tasks.cartpole(), ev.NEAT(), 20, max_generations=30)
    tests = [r.test() for r in found]
    steps = sum(r.evolution.counters.forward for r in found)
    share = sum(r.evolution.counters.environment for r in found) / sum(r.evolution.counters.seconds for r in found)
    add_runs(figure, "solved", found)
    well = sum(t >= 475 for t in tests)
    low, high = (100 * v for v in wilson(well, 20))
    figure.add(f"475 on average over unseen starts, {well} of 20 seeds", 5 * well, "%", "", low, high, tests)
    figure.add("mean return of the champion, worst seed", min(tests), "steps", f"median {median(tests):.0f} of 500")
    figure.notes.append(f"{steps:,} steps of environments, which took {100 * share:.0f} % of the time.")
    return figure


def ppo() -> Figure:
    figure = Figure("CartPole by PPO, 3 seeds", "greedy, 100 unseen starts, at most 400 000 steps of the environment")
    example = runpy.run_path(str(EXAMPLES / "ppo_cartpole.py"))
    returns, steps = [], []
    for seed in range(3):
        agent, taken = example["learn"](seed, 400_000)
        returns.append(example["play"](agent, 100, 10_000 + seed))
        steps.append(float(taken))
    well = sum(r >= 475 for r in returns)
    low, high = (100 * v for v in wilson(well, 3))
    figure.add(f"475 on average over unseen starts, {well} of 3 seeds", 100 * well / 3, "%", "", low, high)
    figure.add("mean return, worst seed", min(returns), "steps", f"median {median(returns):.0f} of 500", seeds=returns)
    figure.add("steps to learn from, median", median(steps), "steps", f"at most {max(steps):,.0f}", seeds=steps)
    return figure


def double_pole() -> Figure:
    figure = Figure(
        "Two poles by NEAT, 20 seeds",
        "velocities in sight, at most 30 000 evaluations; solved: the champion balances for 100 000 steps",
    )
    add_runs(figure, "solved", solve(lambda s: ev.tasks.double_pole(), ev.NEAT(), 20, max_evaluations=30_000))
    figure.notes.append("Published for NEAT: 3600 evaluations.")
    return figure


def inherited() -> Figure:
    """What a child gains by inheriting weights: steps to a target, beside the same child with fresh weights."""
    figure = Figure("Steps to a target with inherited and with fresh weights, 20 seeds",
                    "the same child; p: Wilcoxon's signed-rank test, one-sided, over pairs")  # fmt: skip
    pairs = np.array([widened(seed) for seed in range(20)], float)
    add_pairs(figure, "digits, 16 units trained 200 steps, then 24: to 95 % of validation", "steps", pairs)
    runs = [
        [ev.Evolution(ev.tasks.two_moons(seed=seed), None, ev.Hybrid(inherit=how), seed=seed)  # pyright: ignore[reportArgumentType]
         .run(max_generations=30).evolution.counters.backward for how in ("lamarck", "none")]
        for seed in range(20)
    ]  # fmt: skip
    add_pairs(figure, "two moons, whole runs of neurons, to 97 %", "cases", np.array(runs, float))
    return figure


def add_pairs(figure: Figure, who: str, unit: str, pairs: np.ndarray) -> None:
    """Two rows of a pair per seed, what inherits first."""
    from scipy.stats import wilcoxon

    p = wilcoxon(pairs[:, 0], pairs[:, 1], alternative="less").pvalue
    for how, values, note in (("inherited", pairs[:, 0], f"p = {p:.2g}"), ("fresh", pairs[:, 1], "")):
        low, high = np.quantile(values, [0.25, 0.75])
        figure.add(f"{who}: {how}", median(values), unit, f"interval: quartiles; {note}".rstrip("; "), low, high,
                   values.tolist())  # fmt: skip


def widened(seed: int, most: int = 1000, every: int = 5) -> tuple[int, int]:
    """Steps of a widened net until 95 % of the validation digits are right: its weights inherited, and fresh."""
    task, s, rng = ev.tasks.digits(seed=seed), ev.Layers(), np.random.default_rng(seed)
    training = TrainingGenes.of(s.lr, s.optimizer, task.loss)
    b = gw.Builder("digits")
    x = b.input("x", ("B", 64))
    for name, (i, o) in (("hidden", (64, 16)), ("out", (16, 10))):
        weight = b.param(f"{name}.weight", drawn(rng, o, i))
        x = b.linear(x, weight, b.param(f"{name}.bias", np.zeros(o, np.float32)), name=name)
        x = b.relu(x) if name == "hidden" else x
    b.output(x, "y")
    fitter_parent = b.build()
    opt = train.optimizer(fitter_parent, training)
    train.fit(task, fitter_parent, opt, training, s, rng, train.StepCache())
    counts = []
    for fresh in (False, True):
        child, moments = fitter_parent.fork("child"), train.moments(opt)
        own = train.optimizer(child, training)
        train.restore(own, moments)
        with child.edit("widen") as e:
            ev.mutations.widen(e, ev.mutations.widths(child)[0], np.random.default_rng(seed), 8)
        if fresh:
            with child.edit("initialise weights") as e:
                for key in list(child.weights):
                    shape = child.weights[key].shape
                    e.set_weight(key, drawn(rng, *shape) if len(shape) == 2 else np.zeros(shape, np.float32))
            own = train.optimizer(child, training)
        seats, stream, done = train.StepCache(), np.random.default_rng(1000 + seed), 0
        while done < most and train.measure(task, child, task.valid)[0] < 0.95:
            train.fit(task, child, own, training, replace(s, steps=every), stream, seats)
            done += every
        counts.append(done)
    return counts[0], counts[1]


def drawn(rng: np.random.Generator, outputs: int, inputs: int) -> np.ndarray:
    return (rng.normal(size=(outputs, inputs)) * math.sqrt(2 / inputs)).astype(np.float32)


def sine() -> Figure:
    figure = Figure(
        "Readings of a sine at irregular times, 3 seeds",
        "predict the next; 400 Adam steps of 64 sequences; mean squared error on 500 unseen ones",
    )
    example = runpy.run_path(str(EXAMPLES / "irregular_time.py"))["sine"]
    for kind, who, pick in (("cfc", "CfC, worst seed", max), ("rnn", "RNN that does not see the time, best seed", min)):
        found = [example(kind, seed) for seed in range(3)]
        errors = [error for error, _ in found]
        figure.add(who, pick(errors), "", f"{found[0][1]:,} parameters", seeds=errors)
    return figure


def event_xor() -> Figure:
    figure = Figure(
        "Parity of 8 bits that come as runs, 3 seeds", f"at most 1000 steps of training a length; {STRINGS}"
    )
    add_kinds(figure, {"cfc": "CfC", "rnn": "RNN that does not see how long a run lasts"})
    return figure


def event_xor_16() -> Figure:
    figure = Figure(
        "Parity of 16 bits that come as runs, 3 seeds", f"at most 600 steps of training a length; {STRINGS}"
    )
    kinds = {"cfc": "CfC", "gru, timed": "GRU, how long a run lasts is an input", "rnn, timed": "RNN, the same"}
    add_kinds(figure, kinds, most=600, bits=(4, 6, 8, 12, 16))
    return figure


STRINGS = "10 000 strings, longer ones when the shorter are known; accuracy on 2000 other strings"


def add_kinds(figure: Figure, kinds: dict[str, str], **options: Any) -> None:
    example = runpy.run_path(str(EXAMPLES / "irregular_time.py"))["parity"]
    for kind, who in kinds.items():
        found = [example(kind, seed, **options) for seed in range(3)]
        right = [100 * share for share, _ in found]
        note = f"best {max(right):.1f} %, {found[0][1]:,} parameters"
        figure.add(f"{who}, worst seed", min(right), "%", note, seeds=right)


def data() -> Figure:
    figure = Figure("Growing and training on data", "population 16, 15 generations, 100 steps a candidate, 20 seeds")
    for name, task in (("two moons", ev.tasks.two_moons), ("iris", ev.tasks.iris)):
        found = solve(lambda s, t=task: t(seed=s), ev.Hybrid(train=ev.Train(steps=100)), 20, max_generations=15)
        tests = [100 * r.test() for r in found]
        low, high = np.quantile(tests, [0.25, 0.75])
        figure.add(f"{name}, median test accuracy", median(tests), "%", "interval: quartiles", low, high, tests)
    return figure


def layers() -> Figure:
    figure = Figure("Digits, layers evolved from one linear layer", "60 candidates, 200 steps each, 3 seeds")
    for seed in range(3):
        b = gw.Builder("digits")
        w, bias = (b.param(f"out.{n}", np.zeros(s, np.float32)) for n, s in (("weight", (10, 64)), ("bias", 10)))
        b.output(b.linear(b.input("x", ("B", 64)), w, bias, name="out"), "y")
        run = ev.Evolution(ev.tasks.digits(seed=seed), ev.blocks(b.build()), seed=seed)
        found = run.run(max_evaluations=60, target=0.985)
        note = (
            f"{found.best.birth.params:,} parameters, {len(found.births)} candidates, {run.counters.seconds:.0f} s, "
            f"{run.counters.backward:,} cases with gradients"
        )
        figure.add(f"seed {seed}, test accuracy", 100 * found.test(), "%", note)
    return figure
