"""Reports: errors by layer, two programs compared, and the figures of a pruning made again from the journal."""

from graphwright.surgery.compare import Comparison, compare
from graphwright.surgery.error_report import ErrorReport, Moments
from graphwright.surgery.pruning.report import activation_memory, optimise_report

__all__ = ["Comparison", "ErrorReport", "Moments", "activation_memory", "compare", "optimise_report"]
