"""Pruning of real checkpoints: scores, restoring, allocation, modules, plans, and healing afterwards."""

from graphwright.surgery.pruning.heal import Healing, heal
from graphwright.surgery.pruning.plan import PrunePlan, Step
from graphwright.surgery.pruning.prune import prune
from graphwright.surgery.pruning.report import PruneReport
from graphwright.surgery.pruning.statistics import scores
from graphwright.surgery.pruning.zeros import remove_zeros

__all__ = ["Healing", "PrunePlan", "PruneReport", "Step", "heal", "prune", "remove_zeros", "scores"]
