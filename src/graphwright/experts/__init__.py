"""Mixtures of experts as editable structure: routers, layers whose heads and experts each token chooses, losses."""

from __future__ import annotations

from graphwright.experts.calibrate import Calibrated, CalibratedLayer, calibrate
from graphwright.experts.routers import NotAMixture, RouterNodes, threshold_routers
from graphwright.nn.router import AllDead, Uncalibrated

__all__ = [
    "AllDead", "Calibrated", "CalibratedLayer", "NotAMixture", "RouterNodes", "Uncalibrated", "calibrate",
    "threshold_routers",
]  # fmt: skip
