"""Sparse attention as a graph that can be edited: patterns, their use in models, and attention that chooses blocks."""

from __future__ import annotations

from graphwright.attention.attend import attend
from graphwright.attention.decoding import NativeSparseDecoder
from graphwright.attention.drift import Drift, drift
from graphwright.attention.mass import collect
from graphwright.attention.native_sparse import Choice, Compressor, NativeSparse, SparseAttention
from graphwright.attention.propose import Candidates, propose
from graphwright.attention.prune import Pruned, prune
from graphwright.attention.selected_pattern import SelectedPattern, to_pattern
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
    "Candidates",
    "Choice",
    "Compressor",
    "Drift",
    "NativeSparse",
    "NativeSparseDecoder",
    "Pattern",
    "Pruned",
    "SelectedPattern",
    "SparseAttention",
    "attend",
    "block_local",
    "causal_full",
    "collect",
    "dilated",
    "document",
    "drift",
    "full",
    "patterns",
    "propose",
    "prune",
    "random_blocks",
    "sliding_window",
    "sparsify",
    "star",
    "to_pattern",
    "topk",
]
