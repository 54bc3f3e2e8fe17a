"""Surgery: what is wrong with a model, what it can do without, and what an operation cost it."""

from __future__ import annotations

from graphwright.surgery.constraints import (
    Budget,
    Constraint,
    Custom,
    GradientFlow,
    HeadBalance,
    MaxDepth,
    MultipleOf,
    NoPath,
    Reachable,
    Residual,
    Uniform,
    constraint,
)
from graphwright.surgery.diagnose import diagnose, diagnose_model
from graphwright.surgery.findings import Diagnosis, Finding, Findings, Fix, Limits, Severity, finding
from graphwright.surgery.solve import Solution, Unsatisfied, solve

__all__ = [
    "Budget",
    "Constraint",
    "Custom",
    "Diagnosis",
    "Finding",
    "Findings",
    "Fix",
    "GradientFlow",
    "HeadBalance",
    "Limits",
    "MaxDepth",
    "MultipleOf",
    "NoPath",
    "Reachable",
    "Residual",
    "Severity",
    "Solution",
    "Uniform",
    "Unsatisfied",
    "constraint",
    "diagnose",
    "diagnose_model",
    "finding",
    "solve",
]
