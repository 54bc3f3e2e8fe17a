"""What a run found, in numbers and as a Program."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from graphwright.errors import UsageError
from graphwright.evolve.errors import Status
from graphwright.evolve.program import founder
from graphwright.evolve.tasks.task import Task
from graphwright.program.cost import flops

if TYPE_CHECKING:
    from graphwright.evolve.genomes import Genome
    from graphwright.evolve.lineage import Birth, Key, Lineage
    from graphwright.evolve.neurons import NeuronEvolution
    from graphwright.program import Program


def facts(run: Any, status: Status, aim: float | None) -> dict[str, Any]:
    """Where it ended, what for, and what it cost; seconds in environments are part of the seconds."""
    c = run.counters
    return {
        "task": run.task.name,
        "split": run.task.split if isinstance(run.task.split, str) else "train/valid/test",
        "target": aim,
        "seed": run.seed,
        "status": str(status),
        "generations": len(run.log),
        "evaluations": c.evaluations,
        "forward_passes": c.forward,
        "backward_passes": c.backward,
        "seconds": c.seconds,
        "environment_seconds": c.environment,
        "refused": dict(c.refused or {}),
        "failed": c.failed,
        "failures": run.failures[:3],
        "test_reads": run.task.test_reads,
    }


def ended(report: dict[str, Any]) -> str:
    """Why and when."""
    count = report["generations"]
    return f"{report['status']} after {count} generation{'' if count == 1 else 's'}"


def nothing_yet(report: dict[str, Any]) -> str:
    """The print of a run without a generation."""
    return f"{ended(report)}: nothing was scored yet"


def same_cases(report: dict[str, Any]) -> str:
    """What a report of a task without a split has to say."""
    return " (the same cases for training, validation and test)" if report["split"] == "same" else ""


def cost(report: dict[str, Any]) -> str:
    """Passes, the share of time in environments, and refused mutations, as one line of a print."""
    share, refused = report["environment_seconds"] / max(report["seconds"], 1e-9), sum(report["refused"].values())
    parts = [f"{report['forward_passes']:,} passes forward, {report['backward_passes']:,} with gradients"]
    parts += [f"{100 * share:.0f} % of the time in environments"] if share else []
    parts += [f"{refused:,} mutations refused"] if refused else []
    return "; ".join(parts)


def read_again(report: dict[str, Any]) -> list[str]:
    """A line on test cases that were read more than once: what is chosen by them is no longer tested by them."""
    return [f"  the test cases were read {report['test_reads']} times"] if report["test_reads"] > 1 else []


def without_fitness(report: dict[str, Any], what: str) -> list[str]:
    """A line on candidates that failed, if some did."""
    return [f"  {report['failed']} {what}: {'; '.join(report['failures'])}"] if report["failed"] else []


@dataclass(frozen=True, slots=True, eq=False)
class Individual:
    """A genome of a run, how it came to be, and what it scored."""

    evolution: NeuronEvolution
    birth: Birth
    genome: Genome

    @property
    def key(self) -> Key:
        """Generation and place."""
        return self.birth.key

    @property
    def fitness(self) -> float:
        """As it was scored."""
        return self.birth.fitness

    @property
    def metric(self) -> float:
        """As it was scored, on the validation cases."""
        return self.birth.metric

    @property
    def program(self) -> Program:
        """The individual as a Program; its journal is its history, one entry per generation that changed it."""
        return self.evolution.lineage.replay(self.key)

    def rescore(self) -> float:
        """Its fitness, computed again from its genes: the same bits, on the same machine."""
        run = self.evolution
        population = run.population(run.lineage.columns(self.key))
        from dataclasses import replace

        return float(run.task.score(replace(population, generation=self.key.generation)).fitness[0])

    def predict(self, x: Any, head: str | None = None) -> np.ndarray:
        """Answers to inputs [N, inputs] or [N, T, inputs]: float32 [N, outputs] or [N, T, outputs].

        Classes have probabilities, whether the network gives logits or not; `program` answers as it is.

        Args:
            x: in the units that the task was given, for which see its `scaled`.
            head: those of one head; of all by default.
        """
        from graphwright.array.population.runner import Cases

        run = self.evolution
        population = run.population(run.lineage.columns(self.key))
        seen = run.task.seen(x) if isinstance(run.task, Task) else np.asarray(x)
        answers = population.answers(Cases.of(seen))[0]
        if isinstance(run.task, Task):
            answers = run.task.told(answers, population.logits, head)
        return answers if np.ndim(x) == 3 else answers[:, 0]


class Result:
    """The outcome of `Evolution.run`.

    Attributes:
        status: why it ended; aim: the target, if there was one; evolution: the run, which can go on.
    """

    def __init__(self, evolution: NeuronEvolution, status: Status, aim: float | None) -> None:
        self.evolution, self.status, self.aim = evolution, status, aim

    @property
    def best(self) -> Individual:
        """The one that solved the task; else the fittest so far. Raises: UsageError before the first generation."""
        run = self.evolution
        key = run.solution or run.best
        if key is None:
            raise UsageError("nothing was scored yet", where=run.task.name, fix="run(max_generations=...) of 1 or more")
        return run.individual(key)

    @property
    def solved(self) -> bool:
        """Whether the target was reached."""
        return self.status is Status.TARGET_REACHED

    @property
    def lineage(self) -> Lineage:
        """Who descends from whom."""
        return self.evolution.lineage

    def test(self) -> float:
        """The metric of the best on the test cases; the task counts how often they were read."""
        run = self.evolution
        return run.task.test(run.population(run.lineage.columns(self.best.key)))

    def predict(self, x: Any, head: str | None = None) -> np.ndarray:
        """Answers of the best; see `Individual.predict`."""
        return self.best.predict(x, head)

    def to_json(self) -> dict[str, Any]:
        """The report; before the first generation without a champion."""
        run = self.evolution
        if not run.log:
            return facts(run, self.status, self.aim)
        best = self.best
        return {
            **facts(run, self.status, self.aim),
            "fitness": {"best": best.fitness, "median": run.log[-1].median},
            "metric": {"name": run.task.metric, "valid": best.metric},
            "hidden": best.genome.hidden,
            "links": best.genome.open_links,
            "parameters": best.genome.open_links,
            "flops": flops(founder(best.genome), {"B": 1}),
            "species": len(run.log[-1].species),
            "champion": {"generation": best.key.generation, "index": best.key.index},
        }

    def __str__(self) -> str:
        r = self.to_json()
        if not self.evolution.log:
            return nothing_yet(r)
        fitness = r["fitness"]["best"] + 0.0  # no -0
        lines = [
            f"{ended(r)}, {r['evaluations']:,} evaluations, {r['seconds']:.2f} s",
            f"  {r['metric']['name']} {r['metric']['valid']:.4g}, fitness {fitness:.4g}{same_cases(r)}",
            f"  champion of generation {r['champion']['generation']}: {r['hidden']} hidden, {r['links']} links",
            f"  {r['species']} species; {cost(r)}",
            *without_fitness(r, "genomes had no fitness"),
            *read_again(r),
        ]
        return "\n".join(lines)
