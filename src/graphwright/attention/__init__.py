"""Sparse attention as a graph that can be edited: patterns in models, and functions that read and change them."""

from __future__ import annotations

from graphwright.attention.attend import attend
from graphwright.attention.drift import Drift, drift
from graphwright.attention.mass import collect
from graphwright.attention.propose import Candidates, propose
from graphwright.attention.prune import Pruned, prune
from graphwright.attention.sparsify import patterns, sparsify
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
    "Candidates", "Drift", "Pattern", "Pruned", "attend", "block_local", "causal_full", "collect", "dilated",
    "document", "drift", "full", "patterns", "propose", "prune", "random_blocks", "sliding_window", "sparsify", "star",
    "topk",
]  # fmt: skip
