"""The facts that the results of all runs report."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any

from graphwright.evolve.errors import Status

if TYPE_CHECKING:
    import numpy as np

    from graphwright.evolve.run import EvolutionRun


class EvolutionResult(ABC):
    """The outcome of `Evolution.run`.

    Attributes:
        evolution: the run, which can continue.
        status: why it ended.
        aim: the target, if there was one.
    """

    evolution: Any

    def __init__(self, evolution: EvolutionRun, status: Status, aim: float | None) -> None:
        self.evolution, self.status, self.aim = evolution, status, aim

    @property
    def solved(self) -> bool:
        """Whether the target was reached."""
        return self.status is Status.TARGET_REACHED

    @abstractmethod
    def test(self) -> float:
        """The metric of the champion on the test cases; the task counts how often they were read."""

    @abstractmethod
    def predict(self, x: Any, head: str | None = None) -> np.ndarray:
        """The answers of the champion to inputs."""

    @abstractmethod
    def _champion_facts(self) -> dict[str, Any]:
        """The part of the report about the champion."""

    @abstractmethod
    def _champion_lines(self, report: dict[str, Any]) -> list[str]:
        """The part of the text about the champion."""

    def to_json(self) -> dict[str, Any]:
        """The report; without a champion before the first generation."""
        run, c = self.evolution, self.evolution.counters
        facts = {
            "task": run.task.name,
            "split": run.task.split if isinstance(run.task.split, str) else "train/valid/test",
            "target": self.aim,
            "seed": run.seed,
            "status": str(self.status),
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
        return facts | (self._champion_facts() if run.log else {})

    def __str__(self) -> str:
        r = self.to_json()
        count = r["generations"]
        ended = f"{r['status']} after {count} generation{'' if count == 1 else 's'}"
        if not self.evolution.log:
            return f"{ended}: nothing was scored yet"
        lines = [f"{ended}, {r['evaluations']:,} evaluations, {r['seconds']:.2f} s", *self._champion_lines(r)]
        if r["failed"]:
            lines.append(f"  {r['failed']} candidates failed: {'; '.join(r['failures'])}")
        if r["test_reads"] > 1:  # a choice made by the test cases is no longer tested by them
            lines.append(f"  the test cases were read {r['test_reads']} times")
        return "\n".join(lines)


def same_cases(report: dict[str, Any]) -> str:
    """A remark on tasks without a split."""
    return " (the same cases for training, validation and test)" if report["split"] == "same" else ""


def cost(report: dict[str, Any]) -> str:
    """Passes, the share of time in environments, and refused mutations."""
    share, refused = report["environment_seconds"] / max(report["seconds"], 1e-9), sum(report["refused"].values())
    parts = [f"{report['forward_passes']:,} passes forward, {report['backward_passes']:,} with gradients"]
    parts += [f"{100 * share:.0f} % of the time in environments"] if share else []
    parts += [f"{refused:,} mutations refused"] if refused else []
    return "; ".join(parts)
