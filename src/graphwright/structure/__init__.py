"""Structure trained like weights: gates, relaxations, losses, policies, the joint optimizer, and search."""

from __future__ import annotations

from graphwright.errors import BudgetUnreachable
from graphwright.program import SoftGates
from graphwright.structure.costs import latency
from graphwright.structure.elements import Element, init_for
from graphwright.structure.errors import (
    ClippedStart,
    GatesCannotClose,
    GatesUnused,
    NoTaskTerm,
    NotScalar,
    WouldDisconnect,
)
from graphwright.structure.graph import DifferentiableGraph, TemperatureSchedule
from graphwright.structure.learn import Learned, LearnOptions, learn
from graphwright.structure.losses import (
    Penalty,
    Terms,
    attention_entropy,
    budget,
    cost,
    density,
    distill,
    edge_entropy,
    expected_l0,
    gate_entropy,
    reachability,
    smoothness,
    sparsity,
)
from graphwright.structure.optimizer import JointOptimizer
from graphwright.structure.policy import (
    Policy,
    Proposal,
    ProtectedElement,
    ThresholdPolicy,
    TopPolicy,
    additions,
    gains,
)
from graphwright.structure.report import Discretized, StepReport
from graphwright.structure.searching import SearchResult, ops, search, skips, widths

__all__ = [
    "BudgetUnreachable", "ClippedStart", "DifferentiableGraph", "Discretized", "Element",
    "GatesCannotClose", "GatesUnused", "JointOptimizer", "LearnOptions", "Learned", "NoTaskTerm", "NotScalar",
    "Penalty", "Policy", "Proposal", "ProtectedElement", "SearchResult", "SoftGates", "StepReport",
    "TemperatureSchedule", "Terms", "ThresholdPolicy", "TopPolicy", "WouldDisconnect", "additions",
    "attention_entropy", "budget", "cost", "density", "distill", "edge_entropy", "expected_l0", "gains",
    "gate_entropy", "init_for", "latency", "learn", "ops", "reachability", "search", "skips", "smoothness",
    "sparsity", "widths",
]  # fmt: skip
