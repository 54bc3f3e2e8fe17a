"""Why a run of evolution ended."""

from __future__ import annotations

from enum import StrEnum


class Status(StrEnum):
    """Why a run ended. Missing the target is no error."""

    TARGET_REACHED = "TargetReached"
    MAX_GENERATIONS = "MaxGenerations"
    MAX_EVALUATIONS = "MaxEvaluations"
    MAX_TIME = "MaxTime"
    CALLBACK_STOPPED = "CallbackStopped"
    NO_MUTATION = "NoApplicableMutation"
    CONVERGED = "Converged"
