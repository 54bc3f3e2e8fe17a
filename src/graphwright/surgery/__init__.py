"""Surgery: what is wrong with a model, what it can do without, and what an operation cost it."""

from graphwright.surgery.budgets import BudgetUnreachable, Bytes, Energy, Error, Flops, Latency, Params, Ratio
from graphwright.surgery.calibration import Calibration, CalibrationLeak, CalibrationTooSmall, MissingCalibration
from graphwright.surgery.pruning import Healing, PrunePlan, PruneReport, heal, prune, remove_zeros, scores
from graphwright.surgery.reports import Comparison, ErrorReport, compare, optimise_report

__all__ = [
    "BudgetUnreachable",
    "Bytes",
    "Calibration",
    "CalibrationLeak",
    "CalibrationTooSmall",
    "Comparison",
    "Energy",
    "Error",
    "ErrorReport",
    "Flops",
    "Healing",
    "Latency",
    "MissingCalibration",
    "Params",
    "PrunePlan",
    "PruneReport",
    "Ratio",
    "compare",
    "heal",
    "optimise_report",
    "prune",
    "remove_zeros",
    "scores",
]
