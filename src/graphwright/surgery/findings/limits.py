"""The numbers from which on something is a finding."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Limits:
    """From where on something is a finding.

    Attributes:
        siblings: share of alike blocks that have a residual path, from which on one without it stands out.
        head_ratio: a head's norm above this times the median of its layer, or below its inverse, is unbalanced.
        dead_head: share of the median below which a head is dead.
        rank: effective rank as a share of the smaller side of a matrix, below which it is degenerate.
        gradient: share of the median gradient norm of its kind below which a param hardly learns.
        rows: of the probe that must leave a unit inactive before it counts as such.
        width: a dominator narrower than this share of both neighbours is a bottleneck.
        declared: path patterns of bottlenecks that are meant.
        redundant: largest change of an output, as a share of its largest entry, that an edge may make and be redundant.
        gain: largest ratio of gradients along the trunk, and of the gain of a chain without norms.
        stable_rank: of the representations of tokens, below which they have collapsed.
    """

    siblings: float = 0.5
    head_ratio: float = 8.0
    dead_head: float = 1e-3
    rank: float = 0.05
    gradient: float = 1e-6
    rows: int = 32
    width: float = 0.25
    declared: tuple[str, ...] = ()
    redundant: float = 1e-6
    gain: float = 1e4
    stable_rank: float = 1.5
