"""What a run on layers found."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from graphwright.evolve.layers.member import Birth, Member
from graphwright.evolve.layers.train import measure
from graphwright.evolve.mutations.units import widths
from graphwright.evolve.report import cost, facts, same_cases, without_fitness
from graphwright.evolve.status import Status

if TYPE_CHECKING:
    from graphwright.evolve.layers.engine import LayerEvolution


class LayerResult:
    """The outcome of a run on layers.

    Attributes:
        status: why it ended; evolution: the run, which can go on.
    """

    def __init__(self, evolution: LayerEvolution, status: Status) -> None:
        self.evolution, self.status = evolution, status

    @property
    def best(self) -> Member:
        """With several objectives the cheapest that meets the target, if one does; else the best metric."""
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
        target = self.evolution.task.target
        aim = np.inf if target is None else target
        found = [m for m in self.pareto_front if m.metric >= aim]
        return min(found, key=lambda m: m.birth.params, default=None)

    def test(self, member: Member | None = None) -> float:
        """The metric on the test cases; the task counts how often they were read."""
        task = self.evolution.task
        task.test_reads += 1
        return measure(task, (member or self.best).program, task._test)[0]

    def to_json(self) -> dict[str, Any]:
        """The report."""
        run, best, best_program = self.evolution, self.best.birth, self.best.program
        return {
            **facts(run, self.status),
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
        lines = [
            f"{r['status']} after {r['generations']} generations, {r['evaluations']:,} candidates, "
            f"{r['seconds']:.1f} s",
            f"  {r['metric']['name']} {r['metric']['valid']:.4g} with {r['parameters']:,} parameters, "
            f"{r['flops']:,} operations a case{same_cases(r)}",
            f"  candidate {r['champion']['candidate']}: {r['champion']['what']}; trained by {self.best.birth.recipe}",
            f"  {r['front']} that no other dominates; {cost(r)}",
            *without_fitness(r, "failed"),
        ]
        return "\n".join(lines)
