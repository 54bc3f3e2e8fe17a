"""Errors of evolution."""

from __future__ import annotations

from enum import StrEnum
from typing import Unpack

from graphwright.errors import ComputeError, Facts, UsageError


class TaskError(UsageError):
    """A task is invalid (such as empty data or a missing column), or a program or genome does not fit its task."""


def need(holds: object, problem: str, **facts: Unpack[Facts]) -> None:
    """Raise TaskError(problem, **facts) unless `holds` is true; `facts` are where, expected, got and fix."""
    if not holds:
        raise TaskError(problem, **facts)


class EvaluationFailed(ComputeError):
    """More than half of the candidates of a generation could not be scored."""


class ResumeMismatch(UsageError):
    """A saved run is damaged, or its task or schema does not match. No file was overwritten."""


class RegistryConflict(UsageError):
    """Two registries of innovation numbers cannot be merged, or a saved registry has two numbers for one gene."""


class LimitTooSmall(UsageError):
    """The initial genome or program exceeds the limits in the settings."""


class NoisyFitness(UserWarning):
    """A fitness function returned two different values for the same genome."""


class NoGradientPath(UserWarning):
    """Gradients cannot reach some weights: every path to an output has a step or sign activation."""


class Status(StrEnum):
    """The reason why a run ended. A run that misses its target raises no error."""

    TARGET_REACHED = "TargetReached"
    MAX_GENERATIONS = "MaxGenerations"
    MAX_EVALUATIONS = "MaxEvaluations"
    MAX_TIME = "MaxTime"
    CALLBACK_STOPPED = "CallbackStopped"
    NO_MUTATION = "NoApplicableMutation"
    CONVERGED = "Converged"
