"""Mixtures of experts as editable structure: usage, scores and edits of experts, routers, layers, losses, renewal."""

from __future__ import annotations

from graphwright.experts.alive import set_alive
from graphwright.experts.calibrate import Calibrated, CalibratedLayer, calibrate
from graphwright.experts.checkpoint import checkpoint
from graphwright.experts.dense import DenseMlp, dense_mlps
from graphwright.experts.edits import add, clone, freeze, level, merge, set_k, split
from graphwright.experts.integrity import integrity
from graphwright.experts.layers import DynMoE, DynONN, DynSMHA, Head, to_dense
from graphwright.experts.observed import ObservedLayer, ThresholdLayer, TopKLayer, observe
from graphwright.experts.prune import FewerExperts, merge_similar, prune
from graphwright.experts.regeneration import NoRouter, Regeneration, Signals
from graphwright.experts.routed import NotAMixture, RoutedLayer, routed_layer, routed_layers
from graphwright.experts.routers import RouterNodes, threshold_routers
from graphwright.experts.scores import ExpertScores, scores
from graphwright.experts.selection import TooFewExperts, least
from graphwright.experts.terms import InertExpert, RouterTerm, ghost, long_surprise, sdl, surprise, surprise_min
from graphwright.experts.unstack import unstack
from graphwright.experts.upcycle import assemble, to_mlp, upcycle
from graphwright.experts.usage import LayerUsage, Usage, expert_tokens, usage
from graphwright.nn.router import AllDead, Uncalibrated

__all__ = [
    "AllDead",
    "Calibrated",
    "CalibratedLayer",
    "DenseMlp",
    "DynMoE",
    "DynONN",
    "DynSMHA",
    "ExpertScores",
    "FewerExperts",
    "Head",
    "InertExpert",
    "LayerUsage",
    "NoRouter",
    "NotAMixture",
    "ObservedLayer",
    "Regeneration",
    "RoutedLayer",
    "RouterNodes",
    "RouterTerm",
    "Signals",
    "ThresholdLayer",
    "TooFewExperts",
    "TopKLayer",
    "Uncalibrated",
    "Usage",
    "add",
    "assemble",
    "calibrate",
    "checkpoint",
    "clone",
    "dense_mlps",
    "expert_tokens",
    "freeze",
    "ghost",
    "integrity",
    "least",
    "level",
    "long_surprise",
    "merge",
    "merge_similar",
    "observe",
    "prune",
    "routed_layer",
    "routed_layers",
    "scores",
    "sdl",
    "set_alive",
    "set_k",
    "split",
    "surprise",
    "surprise_min",
    "threshold_routers",
    "to_dense",
    "to_mlp",
    "unstack",
    "upcycle",
    "usage",
]
