"""Populations by worker processes: how many times as fast as one process, and where workers begin to pay.

Wall time, workers started and warm; every variant of a figure has the same bits, which is checked. On two cores two
workers can be at most twice as fast, and the process that drives the run needs a core too while it breeds.
"""

from __future__ import annotations

from collections.abc import Callable
from statistics import median
from time import perf_counter
from typing import Any

import numpy as np

from benchmarks.evolve_speed import ABSENT, neat, neat_time
from benchmarks.harness import Figure, interval
from graphwright import evolve as ev
from graphwright.evolve.neurons.scoring import Scorer
from graphwright.program import Builder
from graphwright.workers import Processes

PARTS = ("population", "layers", "carts", "sending")


def side_by_side(
    figure: Figure, new: Callable[[Any], Any], ways: dict[str, int], first: int, count: int, rounds: int = 7
) -> dict[str, list[float]]:
    """Seconds per generation of the same run in several ways, in interleaved rounds of `count` generations.

    Args:
        new: function from the workers to a run; ways: name -> number of worker processes, 0 for none.
        first: generations before the first round.
    """
    pools = {way: Processes(workers) if workers else None for way, workers in ways.items()}
    runs = {way: new(pool) for way, pool in pools.items()}
    taken: dict[str, list[float]] = {way: [] for way in ways}
    try:
        for run in runs.values():
            run.run(first, target=1e9)
        for r in range(rounds):
            for way in list(runs) if r % 2 == 0 else list(reversed(runs)):
                began = perf_counter()
                runs[way].run(first + (r + 1) * count, target=1e9)
                taken[way].append((perf_counter() - began) / count)
        logs = [[str(line) for line in run.log] for run in runs.values()]
        assert all(log == logs[0] for log in logs)
    finally:
        for pool in pools.values():
            if pool is not None:
                pool.close()
    base = next(iter(ways))
    for way, seconds in taken.items():
        low, high = interval([a / b for a, b in zip(taken[base], seconds, strict=True)])
        note = "" if way == base else f"{median(taken[base]) / median(seconds):.2f}x ({low:.2f} to {high:.2f})"
        figure.add(way, 1e3 * median(seconds), "ms", note, *(1e3 * end for end in interval(seconds)))
    return taken


def population() -> Figure:
    """1 000 genomes on XOR: one population, which is bred by one process, and islands, which workers breed whole."""
    figure = Figure(
        "A generation of 1 000 genomes on XOR", "wall time; evaluation, species, crossover, mutation, lineage"
    )
    settings, islands = ev.NEAT(population=500), ev.Islands(2, every=20)
    one = side_by_side(figure, lambda pool: ev.Evolution(ev.tasks.xor(), None, ev.NEAT(population=1000), seed=0,
                                                         workers=pool),
                       {"one population": 0, "one population, 2 workers": 2}, 20, 20)  # fmt: skip
    two = side_by_side(figure, lambda pool: ev.Evolution(ev.tasks.xor(), None, settings, seed=0, workers=pool,
                                                         islands=islands),
                       {"2 islands": 0, "2 islands, 1 worker": 1, "2 islands, 2 workers": 2}, 20, 20)  # fmt: skip
    if neat is None:
        figure.notes.append(ABSENT)
        return figure
    for workers in (1, 2):
        seconds = [neat_time(1, 2, seed, workers, 1000)[1] for seed in range(3)]
        ours = {"one population": one["one population"], "2 islands, 2 workers": two["2 islands, 2 workers"]}
        note = "; ".join(f"{who} is {median(seconds) / median(t):.0f} times as fast" for who, t in ours.items())
        figure.add(f"neat-python, ParallelEvaluator({workers})", 1e3 * median(seconds), "ms", note)
    return figure


def layers() -> Figure:
    """Candidates that are trained: the case that workers are for."""
    task = ev.tasks.digits()
    b = Builder("digits")
    weight = b.param("out.weight", np.zeros((10, 64), np.float32))
    b.output(b.linear(b.input("x", ("B", 64)), weight, b.param("out.bias", np.zeros(10, np.float32)), name="out"), "y")
    start, settings = b.build(), ev.Layers(population=8, steps=1000)
    figure = Figure("A generation of 8 candidates of layers on digits, 1 000 steps each", "wall time")
    side_by_side(figure, lambda pool: ev.Evolution(task, ev.blocks(start), settings, seed=0, workers=pool),
                 {"no workers": 0, "1 worker": 1, "2 workers": 2}, 3, 1, 5)  # fmt: skip
    return figure


def carts() -> Figure:
    """An environment in NumPy, which threads do not speed up."""
    figure = Figure("A generation of 150 genomes on CartPole, 5 episodes each", "wall time")
    side_by_side(figure, lambda pool: ev.Evolution(ev.tasks.cartpole(), None, ev.NEAT(), seed=0, workers=pool),
                 {"no workers": 0, "1 worker": 1, "2 workers": 2}, 3, 2, 7)  # fmt: skip
    return figure


def sending() -> Figure:
    """What it costs to send genomes, beside scoring them here: what is faster stays in this process."""
    figure = Figure("1 000 genomes by two workers", "wall time of scoring; 20 generations on")
    x = np.random.default_rng(0).normal(size=(2048, 2)).astype(np.float32)
    with Processes(2) as pool:
        for cases in (4, 64, 512, 2048):
            task = ev.Task(x[:cases], x[:cases, 0] > x[:cases, 1], split="same", name="larger")
            run = ev.Evolution(task, None, ev.NEAT(population=1000), seed=0)
            run.run(20, target=1e9)
            scorer = Scorer(task, run.settings, 0, 1)
            calls = {"here": lambda: scorer.score(run.genes, run.table, 19),
                     "by workers": lambda: scorer.by_workers(run.genes, 19, pool)}  # fmt: skip
            taken: dict[str, list[float]] = {who: [] for who in calls}
            for _ in range(9):
                for who, call in calls.items():
                    began = perf_counter()
                    call()
                    taken[who].append(perf_counter() - began)
            assert np.array_equal(calls["here"]().fitness, calls["by workers"]().fitness)
            for who, seconds in taken.items():
                note = f"{median(taken['here']) / median(seconds):.2f}x" if who == "by workers" else ""
                figure.add(f"{cases} cases, {who}", 1e3 * median(seconds[1:]), "ms", note)
    return figure
