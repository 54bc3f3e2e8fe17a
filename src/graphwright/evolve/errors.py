"""Errors of evolution."""

from __future__ import annotations

from enum import StrEnum
from typing import Unpack

from graphwright.errors import ComputeError, Facts, UsageError


class TaskError(UsageError):
    """An invalid task: ragged or empty data, an unknown name, a missing column."""


def need(holds: object, problem: str, **facts: Unpack[Facts]) -> None:
    """Raises: TaskError unless a condition holds."""
    if not holds:
        raise TaskError(problem, **facts)


class EvaluationFailed(ComputeError):
    """More than half of a generation failed."""


class ResumeMismatch(UsageError):
    """A saved run is damaged, or of another task or schema; nothing was overwritten."""


class RegistryConflict(UsageError):
    """Innovation numbers contradict each other."""


class LimitTooSmall(UsageError):
    """The initial genome or program exceeds the limits."""


class NoisyFitness(UserWarning):
    """A fitness function gave one genome two different values."""


class NoGradientPath(UserWarning):
    """Gradients cannot reach some weights: every path to an output has a step or sign activation."""


class Status(StrEnum):
    """The reason why a run ended. A missed target is not an error."""

    TARGET_REACHED = "TargetReached"
    MAX_GENERATIONS = "MaxGenerations"
    MAX_EVALUATIONS = "MaxEvaluations"
    MAX_TIME = "MaxTime"
    CALLBACK_STOPPED = "CallbackStopped"
    NO_MUTATION = "NoApplicableMutation"
    CONVERGED = "Converged"
