"""The result of a run on layers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from graphwright.errors import UsageError
from graphwright.evolve.layers.train import answers, measure
from graphwright.evolve.mutations.sizes import widths
from graphwright.evolve.result import EvolutionResult, cost, same_cases

if TYPE_CHECKING:
    from graphwright.evolve.layers.candidate import Candidate, CandidateBirth
    from graphwright.evolve.layers.engine import LayerEvolution


class LayerResult(EvolutionResult):
    """The outcome of a run on layers; see `EvolutionResult` for the attributes."""

    evolution: LayerEvolution

    @property
    def best(self) -> Candidate:
        """The candidate with the best metric; with several objectives the smallest that meets the target, if any.

        Raises: UsageError before the first generation.
        """
        run = self.evolution
        if not run.members:
            raise UsageError("the run has no champion yet", where=run.task.name, fix="run(max_generations=1) or more")
        smallest = self.smallest_meeting_target() if run.settings.pareto else None
        return smallest or run.champion()

    @property
    def pareto_front(self) -> list[Candidate]:
        """The candidates that no other dominates."""
        return self.evolution.archive

    @property
    def births(self) -> list[CandidateBirth]:
        """The records of all candidates, in order of birth."""
        return self.evolution.births

    def smallest_meeting_target(self) -> Candidate | None:
        """The candidate of the front with the fewest parameters whose metric reaches the target."""
        aim = np.inf if self.aim is None else self.aim
        found = [m for m in self.pareto_front if m.metric >= aim]
        return min(found, key=lambda m: m.birth.params, default=None)

    def test(self, candidate: Candidate | None = None) -> float:
        """The metric of a candidate (the best) on the test cases; the task counts how often they are read."""
        task = self.evolution.task
        task.test_reads += 1
        return measure(task, (candidate or self.best).program, task._test)[0]

    def predict(self, x: Any, head: str | None = None) -> np.ndarray:
        """The answers of the best to inputs [N, ...]: float32, probabilities for classes; `best.program` gives logits.

        Args:
            x: inputs in the units that the task was given; see its `scaled`.
            head: return the answers of one head; by default of all.
        """
        task, program = self.evolution.task, self.best.program
        return task.predictions(answers(program, task.network_inputs(x)), True, head)

    def _champion_facts(self) -> dict[str, Any]:
        run, best, program = self.evolution, self.best.birth, self.best.program
        return {
            "fitness": {"best": best.metric, "median": run.log[-1].median},
            "metric": {"name": run.task.metric, "valid": best.metric},
            "hidden": sum(program.axes()[a].size for a in widths(program)),
            "parameters": best.params,
            "flops": best.flops,
            "training": best.training.to_json(),
            "front": len(run.archive),
            "champion": {"candidate": best.number, "generation": best.generation, "what": best.what},
        }

    def _champion_lines(self, report: dict[str, Any]) -> list[str]:
        r = report
        return [
            f"  {r['metric']['name']} {r['metric']['valid']:.4g} with {r['parameters']:,} parameters, "
            f"{r['flops']:,} operations a case{same_cases(r)}",
            f"  candidate {r['champion']['candidate']}: {r['champion']['what']}; trained by {self.best.birth.training}",
            f"  {r['front']} candidates on the Pareto front; {cost(r)}",
        ]
