"""Surgery: find the defects of a model, make the model smaller, and measure the loss of quality."""

from __future__ import annotations

from graphwright.errors import BudgetUnreachable
from graphwright.surgery.attribution import Attributions, attribute
from graphwright.surgery.budgets import Bytes, Energy, Error, Flops, Latency, Params, Ratio
from graphwright.surgery.calibration import Calibration, CalibrationLeak, CalibrationTooSmall, MissingCalibration
from graphwright.surgery.compare import ComparisonReport, ErrorReport, compare
from graphwright.surgery.constraints import (
    Budget,
    Constraint,
    Custom,
    EqualSizes,
    GradientFlow,
    HeadBalance,
    MaxDepth,
    MultipleOf,
    NoPath,
    Reachable,
    ResidualPath,
    constraint,
)
from graphwright.surgery.errors import CompressionWouldGrow, NotAbsorbable, NotFactorable, NotRotation
from graphwright.surgery.factorise.chain import densify
from graphwright.surgery.factorise.compress import CompressOptions, compress, curve
from graphwright.surgery.factorise.factors import LowRank, TensorRing, TensorTrain, compression_ratio
from graphwright.surgery.factorise.lora import lora, merge_lora
from graphwright.surgery.factorise.methods import asvd, svd
from graphwright.surgery.factorise.report import CompressionReport
from graphwright.surgery.findings.diagnose import diagnose, finding
from graphwright.surgery.findings.diagnosis import Diagnosis
from graphwright.surgery.findings.finding import Finding, Findings, Fix, Limits, Severity
from graphwright.surgery.matrices import DtypeUnsupported, NonFiniteWeight
from graphwright.surgery.measure import activation_memory
from graphwright.surgery.orthogonal.lie import cayley, lie_exp, lie_log, skew, so_generator
from graphwright.surgery.orthogonal.methods import is_orthogonal, newton_schulz, polar, qr
from graphwright.surgery.orthogonal.orthogonalize import OrthogonalizeOptions, OrthoReport, orthogonalize
from graphwright.surgery.orthogonal.parametrize import bake, make_dense, parametrize, unbake
from graphwright.surgery.pruning.heal import Healing, heal
from graphwright.surgery.pruning.plan import PrunePlan, PruneReport
from graphwright.surgery.pruning.prune import PruneOptions, optimise_report, prune
from graphwright.surgery.pruning.scores import scores
from graphwright.surgery.pruning.zeros import remove_zeros
from graphwright.surgery.rewriting.rewrite import (
    NotEquivalent,
    Rewrite,
    RewriteReport,
    register_rewrite,
    rewrite,
    rewrites,
)
from graphwright.surgery.solve import ConstraintSolution, Unsatisfied, solve

__all__ = [
    "Attributions", "Budget", "BudgetUnreachable", "Bytes", "Calibration", "CalibrationLeak", "CalibrationTooSmall",
    "ComparisonReport", "CompressOptions", "CompressionReport", "CompressionWouldGrow", "Constraint",
    "ConstraintSolution", "Custom", "Diagnosis", "DtypeUnsupported", "Energy", "EqualSizes", "Error", "ErrorReport",
    "Finding", "Findings", "Fix", "Flops", "GradientFlow", "HeadBalance", "Healing", "Latency", "Limits", "LowRank",
    "MaxDepth", "MissingCalibration", "MultipleOf", "NoPath", "NonFiniteWeight", "NotAbsorbable", "NotEquivalent",
    "NotFactorable", "NotRotation", "OrthoReport", "OrthogonalizeOptions", "Params", "PruneOptions", "PrunePlan",
    "PruneReport", "Ratio", "Reachable", "ResidualPath", "Rewrite", "RewriteReport", "Severity", "TensorRing",
    "TensorTrain", "Unsatisfied", "activation_memory", "asvd", "attribute", "bake", "cayley", "compare", "compress",
    "compression_ratio", "constraint", "curve", "densify", "diagnose", "finding", "heal", "is_orthogonal",
    "lie_exp", "lie_log", "lora", "make_dense", "merge_lora", "newton_schulz", "optimise_report", "orthogonalize",
    "parametrize", "polar", "prune", "qr", "register_rewrite", "remove_zeros", "rewrite", "rewrites", "scores",
    "skew", "so_generator", "solve", "svd", "unbake",
]  # fmt: skip
