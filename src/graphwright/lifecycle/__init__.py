"""Models that learn from their own output: on-policy prefixes, the exposure gap, and solve rates of grid tasks."""

from __future__ import annotations

from graphwright.lifecycle.exposure import ExposureGap, exposure_gap
from graphwright.lifecycle.on_policy import EAVI, OnPolicy, ramp
from graphwright.lifecycle.solve_rate import SolveRate, exact_match, vote

__all__ = ["EAVI", "ExposureGap", "OnPolicy", "SolveRate", "exact_match", "exposure_gap", "ramp", "vote"]
