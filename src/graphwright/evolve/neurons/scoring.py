"""Training and scoring of the genomes of a generation, in this process or in slices by workers.

Genomes are independent, so a slice of a generation has the same bits as in the whole. A slice whose worker dies or is
late is given out again genome by genome, so that one genome that crashes does not take others with it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise
from time import perf_counter
from typing import Any, NamedTuple

import numpy as np

from graphwright.array.population.names import LINK_COLUMNS, NODE_COLUMNS
from graphwright.evolve.neurons.genomes import genome
from graphwright.evolve.neurons.program import founder
from graphwright.evolve.settings import NEAT
from graphwright.evolve.tasks.task import Population, Scores
from graphwright.workers import Failed, Pool

MIN_SECONDS = 0.02
"""Seconds of a generation in this process from which on two workers are faster; see `benchmarks.workers`."""
_TRAINED = ("weight", "first", "second", "steps")  # columns of links that training changes


class Slice(NamedTuple):
    """Consecutive genomes of a generation as a population, and the number of the generation."""

    genes: Any
    generation: int


class SliceScores(NamedTuple):
    """What a worker returns: the scores of a slice, and its trained columns by name."""

    scores: Scores
    columns: dict[str, np.ndarray]


@dataclass(slots=True)
class Scorer:
    """Trains and scores generations; sent to workers as a whole.

    Attributes:
        task, settings, seed: those of the run; threads: number of threads of native calls.
        seconds: time of the last generation that this process trained and scored.
    """

    task: Any
    settings: NEAT
    seed: int
    threads: int
    seconds: float = field(default=0.0, init=False)

    @property
    def foreign(self) -> bool:
        """True if the task calls code of others, of which neither duration nor safety is known."""
        return getattr(self.task, "foreign", True)

    def tabulate(self, genes: Any, *past: Any) -> Any:
        """Return genomes in the form that native code runs; see `array.population.table`."""
        from graphwright.array.population.table import tabulate

        return tabulate(genes, self.task.inputs, self.task.outputs, *past)

    def population(self, genes: Any, table: Any, generation: int) -> Population:
        """Return genomes as a `Population`, which tasks score."""
        task, logits = self.task, self.settings.output == "identity"

        def program(g: int) -> Any:
            return founder(genome(genes, g, task.inputs, task.outputs), task.names)

        return Population(genes, table, task.outputs, logits, self.seed, generation, self.threads, program)

    def score(self, genes: Any, table: Any, generation: int) -> Scores:
        """Train genomes in place, if the settings say so, and score them."""
        began = perf_counter()
        if (train := self.settings.train) is not None:
            from graphwright.array.population.runner import fit

            count = len(genes.node_off) - 1
            steps, rates = np.full(count, train.steps, np.int64), np.full(count, train.lr)
            fit(table, genes, self.task.lesson(), steps, rates, train.clip, self.threads)
        scores = self.task.score(self.population(genes, table, generation))
        self.seconds = perf_counter() - began
        return scores

    def by_workers(self, genes: Any, generation: int, pool: Pool) -> Scores:
        """Do what `score` does, by workers."""
        count = len(genes.node_off) - 1
        pieces = min(count, pool.size * (4 if self.foreign else 1))
        ends = [count * k // pieces for k in range(pieces + 1)]
        bounds = list(pairwise(ends))
        found = self._sent(genes, bounds, generation, pool)
        alone = [g for (low, high), one in zip(bounds, found, strict=True) if isinstance(one, Failed)
                 for g in range(low, high)]  # fmt: skip
        again = self._sent(genes, [(g, g + 1) for g in alone], generation, pool) if alone else []
        fitness, metric = np.full(count, np.nan), np.full(count, np.nan)
        passes, seconds, failures = 0, 0.0, dict[int, str]()
        whole = [pair for pair in zip(bounds, found, strict=True) if not isinstance(pair[1], Failed)]
        for (low, high), one in [*whole, *zip(((g, g + 1) for g in alone), again, strict=True)]:
            if isinstance(one, Failed):
                failures[low] = one.reason
                continue
            fitness[low:high], metric[low:high] = one.scores.fitness, one.scores.metric
            failures |= {low + g: text for g, text in one.scores.failures.items()}
            passes, seconds = passes + one.scores.passes, seconds + one.scores.seconds
            links = slice(genes.link_off[low], genes.link_off[high])
            for name, column in one.columns.items():
                getattr(genes, name)[links] = column
        return Scores(fitness, metric, passes, seconds / min(pieces, pool.size), failures)

    def _sent(self, genes: Any, bounds: list[tuple[int, int]], generation: int, pool: Pool) -> list[Any]:
        return pool.map(_in_worker, [Slice(part(genes, *ends), generation) for ends in bounds], self, retries=0)


def part(genes: Any, low: int, high: int) -> Any:
    """Return genomes `low` to `high - 1` as a population that shares memory."""
    columns: dict[str, np.ndarray] = {}
    for offsets, names in (("node_off", NODE_COLUMNS), ("link_off", LINK_COLUMNS)):
        off = getattr(genes, offsets)[low : high + 1]
        columns |= {name: getattr(genes, name)[off[0] : off[-1]] for name in names}
        columns[offsets] = off - off[0]
    return type(genes)(**columns)


def _in_worker(scorer: Scorer, given: Slice) -> SliceScores:
    scores = scorer.score(given.genes, scorer.tabulate(given.genes), given.generation)
    names = _TRAINED if scorer.settings.train is not None else ()
    return SliceScores(scores, {name: getattr(given.genes, name) for name in names})
