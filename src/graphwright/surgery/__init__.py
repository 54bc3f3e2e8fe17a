"""Surgery: what is wrong with a model, what it can do without, and what an operation cost it."""

from graphwright.surgery.budgets import BudgetUnreachable, Bytes, Energy, Error, Flops, Latency, Params, Ratio
from graphwright.surgery.calibration import Calibration, CalibrationLeak, CalibrationTooSmall, MissingCalibration
from graphwright.surgery.pruning import PrunePlan, PruneReport, prune, scores

__all__ = [
    "BudgetUnreachable",
    "Bytes",
    "Calibration",
    "CalibrationLeak",
    "CalibrationTooSmall",
    "Energy",
    "Error",
    "Flops",
    "Latency",
    "MissingCalibration",
    "Params",
    "PrunePlan",
    "PruneReport",
    "Ratio",
    "prune",
    "scores",
]
