"""What runs of all kinds report."""

from __future__ import annotations

from typing import Any

from graphwright.evolve.status import Status


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
