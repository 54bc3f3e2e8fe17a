"""Mixtures of experts as editable structure: routers, layers whose heads and experts each token chooses, losses."""

from __future__ import annotations

from graphwright.experts.alive import set_alive
from graphwright.experts.calibrate import Calibrated, CalibratedLayer, calibrate
from graphwright.experts.layers import DynMoE, DynONN, DynSMHA, Head, to_dense
from graphwright.experts.routed import RoutedLayer, observe
from graphwright.experts.routers import NotAMixture, RouterNodes, threshold_routers
from graphwright.experts.terms import InertExpert, RouterTerm, ghost, long_surprise, sdl, surprise, surprise_min
from graphwright.nn.router import AllDead, Uncalibrated

__all__ = [
    "AllDead", "Calibrated", "CalibratedLayer", "DynMoE", "DynONN", "DynSMHA", "Head", "InertExpert", "NotAMixture",
    "RoutedLayer", "RouterNodes", "RouterTerm", "Uncalibrated", "calibrate", "ghost", "long_surprise", "observe", "sdl",
    "set_alive", "surprise", "surprise_min", "threshold_routers", "to_dense",
]  # fmt: skip
