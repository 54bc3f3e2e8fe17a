"""Conditions on a program, whose violations are findings with repairs."""

from __future__ import annotations

from graphwright.surgery.constraints.constraint import Constraint, Custom, constraint, from_json
from graphwright.surgery.constraints.paths import NoPath, Reachable, Residual
from graphwright.surgery.constraints.sizes import Budget, GradientFlow, HeadBalance, MaxDepth, MultipleOf, Uniform

__all__ = [
    "Budget",
    "Constraint",
    "Custom",
    "GradientFlow",
    "HeadBalance",
    "MaxDepth",
    "MultipleOf",
    "NoPath",
    "Reachable",
    "Residual",
    "Uniform",
    "constraint",
    "from_json",
]
