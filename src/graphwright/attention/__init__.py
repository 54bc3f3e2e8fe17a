"""Sparse attention as a graph that can be edited: patterns in models, and functions that read and change them."""

from __future__ import annotations

from graphwright.attention.attend import attend
from graphwright.attention.drift import Drift, drift
from graphwright.attention.mass import collect
from graphwright.attention.propose import Candidates, propose
from graphwright.attention.prune import Pruned, prune
from graphwright.attention.sparsify import patterns, sparsify

__all__ = [
    "Candidates", "Drift", "Pruned", "attend", "collect", "drift", "patterns", "propose", "prune", "sparsify",
]  # fmt: skip
