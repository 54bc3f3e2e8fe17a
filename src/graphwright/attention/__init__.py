"""Sparse attention as a graph that can be edited: patterns in models, and functions that read and change them."""

from __future__ import annotations

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
    "Pattern", "block_local", "causal_full", "dilated", "document", "full", "patterns", "random_blocks",
    "sliding_window", "sparsify", "star", "topk",
]  # fmt: skip
