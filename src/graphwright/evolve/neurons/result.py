"""The result of a run on neurons, and one individual of it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from graphwright.errors import UsageError
from graphwright.evolve.neurons.program import founder
from graphwright.evolve.result import EvolutionResult, cost, same_cases
from graphwright.evolve.tasks.task import Task
from graphwright.program.cost import flops

if TYPE_CHECKING:
    from graphwright.evolve.neurons.engine import NeuronEvolution
    from graphwright.evolve.neurons.genomes import Genome
    from graphwright.evolve.neurons.lineage import Birth, IndividualKey, Lineage
    from graphwright.evolve.tasks.task import Population
    from graphwright.program import Program


@dataclass(frozen=True, slots=True, eq=False)
class Individual:
    """A genome of a run, with its birth and its scores."""

    evolution: NeuronEvolution
    birth: Birth
    genome: Genome

    @property
    def key(self) -> IndividualKey:
        """Generation and index of the individual."""
        return self.birth.key

    @property
    def fitness(self) -> float:
        """The fitness at its scoring."""
        return self.birth.fitness

    @property
    def metric(self) -> float:
        """The metric on the validation cases at its scoring."""
        return self.birth.metric

    @property
    def program(self) -> Program:
        """The individual as a Program; the journal is its history, one entry per generation that changed it."""
        return self.evolution.lineage.replay(self.key)

    def population(self) -> Population:
        """The individual as a population of one."""
        return self.evolution.population(self.evolution.lineage.columns(self.key))

    def rescore(self) -> float:
        """Compute the fitness again from the genes: the same bits on the same machine."""
        population = replace(self.population(), generation=self.key.generation)
        return float(self.evolution.task.score(population).fitness[0])

    def predict(self, x: Any, head: str | None = None) -> np.ndarray:
        """Compute the answers to inputs [N, inputs] or [N, T, inputs]: float32 [N, outputs] or [N, T, outputs].

        Answers for classes are probabilities, also where the network computes logits; `program` returns logits.

        Args:
            x: inputs in the units that the task was given; see its `scaled`.
            head: return the answers of one head; by default of all.
        """
        from graphwright.array.population.runner import Cases  # loads numba

        task, population = self.evolution.task, self.population()
        seen = task.network_inputs(x) if isinstance(task, Task) else np.asarray(x)
        answers = population.answers(Cases.of(seen))[0]
        if isinstance(task, Task):
            answers = task.predictions(answers, population.logits, head)
        return answers if np.ndim(x) == 3 else answers[:, 0]


class Result(EvolutionResult):
    """The outcome of a run on neurons; see `EvolutionResult` for the attributes."""

    evolution: NeuronEvolution

    @property
    def best(self) -> Individual:
        """The individual that solved the task, else the fittest so far. Raises: UsageError before a generation."""
        run = self.evolution
        key = run.solution or run.best
        if key is None:
            raise UsageError("the run has no champion yet", where=run.task.name, fix="run(max_generations=1) or more")
        return run.individual(key)

    @property
    def lineage(self) -> Lineage:
        """The ancestors of all living individuals and champions."""
        return self.evolution.lineage

    def test(self) -> float:
        """The metric of the best on the test cases; the task counts how often they were read."""
        return self.evolution.task.test(self.best.population())

    def predict(self, x: Any, head: str | None = None) -> np.ndarray:
        """The answers of the best; see `Individual.predict`."""
        return self.best.predict(x, head)

    def _champion_facts(self) -> dict[str, Any]:
        run, best = self.evolution, self.best
        return {
            "fitness": {"best": best.fitness, "median": run.log[-1].median},
            "metric": {"name": run.task.metric, "valid": best.metric},
            "hidden": best.genome.hidden,
            "links": best.genome.open_links,
            "parameters": best.genome.open_links,
            "flops": flops(founder(best.genome), {"B": 1}),
            "species": len(run.log[-1].species),
            "champion": {"generation": best.key.generation, "index": best.key.index},
        }

    def _champion_lines(self, report: dict[str, Any]) -> list[str]:
        r = report
        fitness = r["fitness"]["best"] + 0.0  # no -0
        return [
            f"  {r['metric']['name']} {r['metric']['valid']:.4g}, fitness {fitness:.4g}{same_cases(r)}",
            f"  champion of generation {r['champion']['generation']}: {r['hidden']} hidden, {r['links']} links",
            f"  {r['species']} species; {cost(r)}",
        ]
