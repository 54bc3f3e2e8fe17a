"""What a run on layers found."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from graphwright.errors import UsageError
from graphwright.evolve.errors import Status
from graphwright.evolve.layers.train import answers, measure
from graphwright.evolve.mutations.units import widths
from graphwright.evolve.result import cost, ended, facts, nothing_yet, read_again, same_cases, without_fitness

if TYPE_CHECKING:
    from graphwright.evolve.layers.engine import LayerEvolution
    from graphwright.evolve.layers.member import Birth, Member


class LayerResult:
    """The outcome of a run on layers.

    Attributes:
        status: why it ended; aim: the target, if there was one; evolution: the run, which can go on.
    """

    def __init__(self, evolution: LayerEvolution, status: Status, aim: float | None) -> None:
        self.evolution, self.status, self.aim = evolution, status, aim

    @property
    def best(self) -> Member:
        """With several objectives the cheapest that meets the target, if one does; else the best metric.

        Raises: UsageError before the first generation.
        """
        if not self.evolution.members:
            raise UsageError("nothing was scored yet", where=self.evolution.task.name,
                             fix="run(max_generations=...) of 1 or more")  # fmt: skip
        cheapest = self.smallest_meeting_target() if self.evolution.settings.pareto else None
        return cheapest or self.evolution._best()

    @property
    def solved(self) -> bool:
        """Whether the target was reached."""
        return self.status is Status.TARGET_REACHED

    @property
    def pareto_front(self) -> list[Member]:
        """Members that no other dominates."""
        return self.evolution.archive

    @property
    def births(self) -> list[Birth]:
        """What became of every candidate, in order of birth."""
        return self.evolution.births

    def smallest_meeting_target(self) -> Member | None:
        """The member of the front with the fewest parameters whose metric reaches the target."""
        aim = np.inf if self.aim is None else self.aim
        found = [m for m in self.pareto_front if m.metric >= aim]
        return min(found, key=lambda m: m.birth.params, default=None)

    def test(self, member: Member | None = None) -> float:
        """The metric on the test cases; the task counts how often they were read."""
        task = self.evolution.task
        task.test_reads += 1
        return measure(task, (member or self.best).program, task._test)[0]

    def predict(self, x: Any, head: str | None = None) -> np.ndarray:
        """Answers of the best to inputs [N, ...]: float32, of classes probabilities; `best.program` gives logits.

        Args:
            x: in the units that the task was given, for which see its `scaled`.
            head: those of one head; of all by default.
        """
        task, program = self.evolution.task, self.best.program
        return task.told(answers(program, task.seen(x)), True, head)

    def to_json(self) -> dict[str, Any]:
        """The report; before the first generation without a champion."""
        if not self.evolution.log:
            return facts(self.evolution, self.status, self.aim)
        run, best, best_program = self.evolution, self.best.birth, self.best.program
        return {
            **facts(run, self.status, self.aim),
            "fitness": {"best": best.metric, "median": run.log[-1].median},
            "metric": {"name": run.task.metric, "valid": best.metric},
            "hidden": sum(best_program.axes()[a].size for a in widths(best_program)),
            "parameters": best.params,
            "flops": best.flops,
            "recipe": best.recipe.to_json(),
            "front": len(run.archive),
            "champion": {"candidate": best.number, "generation": best.generation, "what": best.what},
        }

    def __str__(self) -> str:
        r = self.to_json()
        if not self.evolution.log:
            return nothing_yet(r)
        lines = [
            f"{ended(r)}, {r['evaluations']:,} candidates, {r['seconds']:.1f} s",
            f"  {r['metric']['name']} {r['metric']['valid']:.4g} with {r['parameters']:,} parameters, "
            f"{r['flops']:,} operations a case{same_cases(r)}",
            f"  candidate {r['champion']['candidate']}: {r['champion']['what']}; trained by {self.best.birth.recipe}",
            f"  {r['front']} that no other dominates; {cost(r)}",
            *without_fitness(r, "failed"),
            *read_again(r),
        ]
        return "\n".join(lines)
