"""Sparse attention as a graph that can be edited: patterns in models, and functions that read and change them."""

from __future__ import annotations

from graphwright.attention.attend import attend
from graphwright.attention.drift import Drift, drift
from graphwright.attention.entropy import entropy
from graphwright.attention.gates import gate
from graphwright.attention.mass import collect
from graphwright.attention.picture import block_map, dot
from graphwright.attention.propose import Candidates, propose
from graphwright.attention.prune import Pruned, prune
from graphwright.attention.reach import Reach, reach
from graphwright.attention.sparsify import patterns, sparsify
from graphwright.attention.step import PatternStep, step
from graphwright.patterns import (
    Pattern,
    block_local,
    causal_full,
    dilated,
    document,
    full,
    random_blocks,
    sliding_window,
    star,
    topk,
)

__all__ = [
    "Candidates", "Drift", "Pattern", "PatternStep", "Pruned", "Reach", "attend", "block_local", "block_map",
    "causal_full", "collect", "dilated", "document", "dot", "drift", "entropy", "full", "gate", "patterns", "propose",
    "prune", "random_blocks", "reach", "sliding_window", "sparsify", "star", "step", "topk",
]  # fmt: skip
