"""What runs of all kinds report."""

from __future__ import annotations

from typing import Any

from graphwright.evolve.status import Status


def facts(run: Any, status: Status) -> dict[str, Any]:
    """Where it ended, and what it cost."""
    c = run.counters
    return {
        "task": run.task.name,
        "split": run.task.split if isinstance(run.task.split, str) else "train/valid/test",
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
    }


def same_cases(report: dict[str, Any]) -> str:
    """What a report of a task without a split has to say."""
    return " (the same cases for training, validation and test)" if report["split"] == "same" else ""


def without_fitness(report: dict[str, Any], what: str) -> list[str]:
    """A line on candidates that failed, if some did."""
    return [f"  {report['failed']} {what}: {'; '.join(report['failures'])}"] if report["failed"] else []
