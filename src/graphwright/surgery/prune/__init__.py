"""Pruning of real checkpoints: scores, restoring, allocation, modules, plans, and healing afterwards."""

from graphwright.surgery.prune.plan import PrunePlan, Step
from graphwright.surgery.prune.prune import prune
from graphwright.surgery.prune.report import PruneReport
from graphwright.surgery.prune.statistics import scores

__all__ = ["PrunePlan", "PruneReport", "Step", "prune", "scores"]
