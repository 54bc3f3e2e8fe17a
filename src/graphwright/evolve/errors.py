"""Errors of evolution."""

from __future__ import annotations

from enum import StrEnum

from graphwright.errors import ComputeError, UsageError


class TaskError(UsageError):
    """A task that cannot be: ragged or empty data, an unknown name, a column that is not there."""


class EvaluationFailed(ComputeError):
    """More than half of a generation has no fitness."""


class ResumeMismatch(UsageError):
    """A saved run of another task, other settings or another schema; nothing was overwritten."""


class RegistryConflict(UsageError):
    """Two innovation numbers for one structure."""


class LimitTooSmall(UsageError):
    """The start is larger than the limits of a genome."""


class NoisyFitness(UserWarning):
    """One genome got two fitnesses."""


class NoGradientPath(UserWarning):
    """Weights that gradients can't reach: every way from them leads through a step or a sign."""


class Status(StrEnum):
    """Why a run ended. Missing the target is no error."""

    TARGET_REACHED = "TargetReached"
    MAX_GENERATIONS = "MaxGenerations"
    MAX_EVALUATIONS = "MaxEvaluations"
    MAX_TIME = "MaxTime"
    CALLBACK_STOPPED = "CallbackStopped"
    NO_MUTATION = "NoApplicableMutation"
    CONVERGED = "Converged"
