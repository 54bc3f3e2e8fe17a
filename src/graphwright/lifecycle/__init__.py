"""Lives: programs with an identity, a diary and a store, trained for ever, resumed bit for bit after a kill."""

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
from graphwright.lifecycle.identity import Identity
from graphwright.lifecycle.life import Life, birth, open
from graphwright.lifecycle.log import Event, LifeLog
from graphwright.lifecycle.segment import Proposal, Segment

__all__ = [
    "Commit", "CommitDamaged", "Event", "Identity", "Life", "LifeBusy", "LifeExists", "LifeLog", "LogCorrupt",
    "MergeConflict", "NoLife", "Proposal", "ResumeMismatch", "Segment", "StepGone", "StoreDamaged", "StoreGap",
    "SubstrateMismatch", "birth", "open",
]  # fmt: skip
