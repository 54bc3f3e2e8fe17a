"""Reports: errors by layer, two programs compared, and the figures of a pruning made again from the journal."""

from graphwright.surgery.reports.comparison import Comparison, compare
from graphwright.surgery.reports.errors import ErrorReport, Moments
from graphwright.surgery.reports.memory import activation_memory
from graphwright.surgery.reports.optimise import optimise_report

__all__ = ["Comparison", "ErrorReport", "Moments", "activation_memory", "compare", "optimise_report"]
