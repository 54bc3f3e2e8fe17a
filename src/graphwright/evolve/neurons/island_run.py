"""Islands: populations of neurons that evolve apart and now and then send their best genomes to the next island.

Each island is a `NeuronEvolution` with a seed of its own, so its random streams depend on no other island. Between two
migrations an island needs nothing from the others: a worker gets the whole island, and returns it some generations on.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from graphwright.errors import UsageError
from graphwright.evolve.errors import Status
from graphwright.evolve.neurons.engine import Individual, NeuronEvolution, Result
from graphwright.evolve.neurons.lineage import Lineage
from graphwright.evolve.run import Counters, EvolutionResult, EvolutionRun
from graphwright.evolve.saving import island_content
from graphwright.evolve.settings import NEAT, Islands
from graphwright.progress import Progress
from graphwright.workers import Failed, Workers

_ISLAND = 7  # purpose of the stream that gives islands their seeds


class IslandResult(EvolutionResult):
    """The outcome of a run on islands; see `EvolutionResult` for the attributes."""

    evolution: IslandEvolution

    @property
    def island(self) -> int:
        """The index of the island with the individual that solved the task, else with the fittest."""
        return self.evolution.best_island()

    @property
    def best(self) -> Individual:
        """The individual that solved the task, else the fittest so far. Raises: UsageError if nothing was scored."""
        return self._of_island().best

    @property
    def lineage(self) -> Lineage:
        """The lineage of the island of the best individual; an immigrant has the reason of its edit as origin."""
        return self._of_island().lineage

    def test(self) -> float:
        """Return the metric of the best individual on the test cases; `task.test_reads` counts the calls."""
        return self._of_island().test()

    def predict(self, x: Any, head: str | None = None) -> np.ndarray:
        """Return the predictions of the best individual; see `Individual.predict`."""
        return self._of_island().predict(x, head)

    def _of_island(self) -> Result:
        return Result(self.evolution.runs[self.island], self.status, self.aim)

    def _champion_facts(self) -> dict[str, Any]:
        facts = self._of_island()._champion_facts()
        champion = facts["champion"] | {"island": self.island}
        return facts | {"champion": champion, "islands": len(self.evolution.runs)}

    def _champion_lines(self, report: dict[str, Any]) -> list[str]:
        first, second, *rest = self._of_island()._champion_lines(report)
        return [first, f"{second}, island {self.island} of {report['islands']}", *rest]


@dataclass(frozen=True, slots=True)
class IslandGeneration:
    """A log entry: best fitness and metric of all islands so far, median of their medians, best fitness per island."""

    generation: int
    best: float
    median: float
    metric: float
    islands: tuple[float, ...]


class _Epoch(NamedTuple):
    """What a worker does with an island: its index and state, and the number of generations and target to reach."""

    island: int
    state: dict[str, Any]
    until: int
    aim: float | None


class _Archipelago(NamedTuple):
    """What workers get once: the task, the settings of each island, seeds by island, and the number of threads."""

    task: Any
    settings: NEAT
    seeds: list[int]
    threads: int

    def run(self, island: int) -> NeuronEvolution:
        """Return the run of an island before its first generation."""
        run = NeuronEvolution(self.task, self.settings, seed=self.seeds[island], threads=self.threads)
        run.lineage.sweeping = False
        return run


class IslandEvolution(EvolutionRun):
    """Evolution of neurons on islands; created by `Evolution(task, settings=NEAT(...), islands=Islands(...))`.

    Attributes:
        runs: the islands; islands: the settings of migration.
    """

    RESULT = IslandResult

    def __init__(
        self, task: Any, settings: NEAT | None, islands: Islands, *, seed: int = 0, threads: int = 1,
        workers: Workers = None,
    ) -> None:  # fmt: skip
        super().__init__(task, seed, threads, workers)
        self.settings, self.islands = settings or NEAT(), islands
        if 2 * islands.migrants > self.settings.population:
            raise UsageError("more than half of an island migrates", where="Islands, migrants", got=islands.migrants,
                             expected=f"at most {self.settings.population // 2}")  # fmt: skip
        streams = np.random.Generator(np.random.Philox(key=[seed, _ISLAND << 40]))
        seeds = streams.integers(0, 1 << 63, islands.count, np.int64).tolist()
        self._archipelago = _Archipelago(task, self.settings, seeds, threads)
        self.runs = [self._archipelago.run(island) for island in range(islands.count)]

    @property
    def _shared(self) -> _Archipelago:
        return self._archipelago

    @property
    def _sends(self) -> bool:
        return True

    def _advance(self, aim: float | None, generations: int | None, evaluations: int | None) -> None:
        """Let all islands evolve to the next migration or limit, then migrate."""
        done, every = len(self.log), self.islands.every
        until = done - done % every + every
        if generations is not None:
            until = min(until, generations)
        if evaluations is not None:
            left = evaluations - self.counters.evaluations
            until = min(until, done + max(1, ceil(left / (len(self.runs) * self.settings.population))))
        before = [run.scored_generations for run in self.runs]
        self._evolve(until, aim)
        for g in range(done, max(len(run.log) for run in self.runs)):
            lines = [run.log[min(g, len(run.log) - 1)] for run in self.runs]
            best = max(lines, key=lambda line: line.best)
            self.log.append(IslandGeneration(g, best.best, float(np.median([line.median for line in lines])),
                                             best.metric, tuple(line.best for line in lines)))  # fmt: skip
        if until % every == 0 and all(run.scored_generations == until for run in self.runs):
            leaving = [run.emigrants(self.islands.migrants) for run in self.runs]
            for island, run in enumerate(self.runs):
                source = (island - 1) % len(self.runs)
                run.immigrate(leaving[source], f"island {source}")
        for run, count in zip(self.runs, before, strict=True):
            run.lineage.sweep_if_due(run.scored_generations - count)
        self.generation = len(self.log) - 1
        self._sum_up()

    def _evolve(self, until: int, aim: float | None) -> None:
        if self.pool is None:
            for run in self.runs:
                _evolved(run, until, aim)
            return
        epochs = [_Epoch(i, run.state(), until, aim) for i, run in enumerate(self.runs)]
        for run, state in zip(self.runs, self.pool.map(_in_worker, epochs, self._shared), strict=True):
            if not isinstance(state, Failed):
                run.adopt(state)
                continue
            run.pool = self.pool  # which genome ends its workers shows when slices of a generation are sent
            try:
                _evolved(run, until, aim, careful=True)
            finally:
                run.pool = None

    def _sum_up(self) -> None:
        """Add up what the islands cost and recorded."""
        total = Counters(seconds=self.counters.seconds)
        for c in (run.counters for run in self.runs):
            total.evaluations, total.forward = total.evaluations + c.evaluations, total.forward + c.forward
            total.backward, total.failed = total.backward + c.backward, total.failed + c.failed
            total.environment += c.environment
            for name, count in c.refused.items():
                total.refuse(name, count)
        self.counters = total
        self.failures = [f"island {i}, {text}" for i, run in enumerate(self.runs) for text in run.failures][:100]

    def _reached(self, aim: float) -> bool:
        return any(run._reached(aim) for run in self.runs)

    def _stuck(self) -> Status | None:
        found = {run._stuck() for run in self.runs}
        return found.pop() if len(found) == 1 else None

    def _progress(self, generations: int | None, evaluations: int | None) -> Progress:
        line, c = self.log[-1], self.counters
        facts = {"best": line.best, self.task.metric: line.metric, "islands": float(len(self.runs)),
                 "evaluations/s": c.evaluations / max(c.seconds, 1e-9)}  # fmt: skip
        return Progress("evolve", len(self.log), generations or len(self.log), facts)

    def best_island(self) -> int:
        """Return the index of the island that solved the task, else of that with the fittest individual.

        Raises: UsageError if nothing was scored yet.
        """
        ranks = [(run.solution is None, -run.lineage.birth(run.best).fitness, i)
                 for i, run in enumerate(self.runs) if run.best is not None]  # fmt: skip
        if not ranks:
            raise UsageError("the run has no champion yet", where=self.task.name, fix="run(max_generations=1) or more")
        return min(ranks)[2]

    def champion(self) -> Individual:
        """Return the individual that solved the task, else the fittest so far. Raises: UsageError before the first."""
        return Result(self.runs[self.best_island()], Status.MAX_GENERATIONS, None).best

    def _content(self, folder: Path) -> dict[str, Any]:
        return island_content(self, folder)

    def restore_log(self, lines: list[dict[str, Any]]) -> None:
        """Restore the log from its saved lines."""
        self.log = [
            IslandGeneration(line["generation"], float(line["best"]), float(line["median"]), float(line["metric"]),
                             tuple(map(float, line["islands"])))
            for line in lines
        ]  # fmt: skip


def _evolved(run: NeuronEvolution, until: int, aim: float | None, careful: bool = False) -> None:
    """Let an island evolve until it has so many generations, reaches the target, or is stuck.

    With `careful`, its workers score all genomes, however fast that is.
    """
    if careful:
        run._check_workers()
    before = run.scored_generations
    while run.scored_generations < until and not (aim is not None and run._reached(aim)) and run._stuck() is None:
        run._advance(aim, None, None)
    run.lineage.sweep(before)  # what is dropped here need not be sent


def _in_worker(archipelago: _Archipelago, epoch: _Epoch) -> dict[str, Any]:
    run = archipelago.run(epoch.island)
    run.adopt(epoch.state)
    before = run.scored_generations
    _evolved(run, epoch.until, epoch.aim)
    return run.state(before)
