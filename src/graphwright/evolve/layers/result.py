"""What a run on layers found."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from graphwright.evolve.layers.member import Birth, Member
from graphwright.evolve.layers.train import measure
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
        run, best, c = self.evolution, self.best.birth, self.evolution.counters
        return {
            "task": run.task.name,
            "split": run.task.split if isinstance(run.task.split, str) else "train/valid/test",
            "seed": run.seed,
            "status": str(self.status),
            "generations": len(run.log),
            "evaluations": c.evaluations,
            "forward_passes": c.forward,
            "backward_passes": c.backward,
            "seconds": c.seconds,
            "metric": {"name": run.task.metric, "valid": best.metric, "median": run.log[-1].median},
            "parameters": best.params,
            "flops": best.flops,
            "recipe": best.recipe.to_json(),
            "front": len(run.archive),
            "refused": dict(c.refused or {}),
            "failed": c.failed,
            "failures": run.failures[:3],
            "champion": {"candidate": best.number, "generation": best.generation, "what": best.what},
        }

    def __str__(self) -> str:
        r = self.to_json()
        cases = " (the same cases for training, validation and test)" if r["split"] == "same" else ""
        lines = [
            f"{r['status']} after {r['generations']} generations, {r['evaluations']:,} candidates, "
            f"{r['seconds']:.1f} s",
            f"  {r['metric']['name']} {r['metric']['valid']:.4g} with {r['parameters']:,} parameters, "
            f"{r['flops']:,} operations a case{cases}",
            f"  candidate {r['champion']['candidate']}: {r['champion']['what']}; trained by {self.best.birth.recipe}",
            f"  {r['front']} that no other dominates; {r['forward_passes']:,} passes forward, "
            f"{r['backward_passes']:,} with gradients",
        ]
        if r["failed"]:
            lines.append(f"  {r['failed']} failed: {'; '.join(r['failures'])}")
        return "\n".join(lines)
