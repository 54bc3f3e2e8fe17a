"""Lives: programs with an identity, a log and a store, trained for ever; and training on a model's own output."""

from __future__ import annotations

from graphwright.lifecycle.commit import Commit
from graphwright.lifecycle.errors import (
    CommitDamaged,
    LifeBusy,
    LifeExists,
    LogCorrupt,
    MergeConflict,
    NoLife,
    ResumeMismatch,
    StepGone,
    StoreDamaged,
    StoreGap,
    SubstrateMismatch,
)
from graphwright.lifecycle.exposure import ExposureGap, exposure_gap
from graphwright.lifecycle.identity import Identity
from graphwright.lifecycle.life import Life, birth, open
from graphwright.lifecycle.log import Event, LifeLog
from graphwright.lifecycle.on_policy import EAVI, OnPolicy, ramp
from graphwright.lifecycle.segment import Segment
from graphwright.lifecycle.solve_rate import SolveRate, exact_match, vote
from graphwright.program.editing.proposal import Proposal

__all__ = [
    "EAVI",
    "Commit",
    "CommitDamaged",
    "Event",
    "ExposureGap",
    "Identity",
    "Life",
    "LifeBusy",
    "LifeExists",
    "LifeLog",
    "LogCorrupt",
    "MergeConflict",
    "NoLife",
    "OnPolicy",
    "Proposal",
    "ResumeMismatch",
    "Segment",
    "SolveRate",
    "StepGone",
    "StoreDamaged",
    "StoreGap",
    "SubstrateMismatch",
    "birth",
    "exact_match",
    "exposure_gap",
    "open",
    "ramp",
    "vote",
]
