"""Sparse attention as a graph that can be edited: patterns, their use in models, and attention that chooses blocks."""

from __future__ import annotations

from graphwright.attention.attend import attend
from graphwright.attention.decoding import NativeSparseDecoder
from graphwright.attention.drift import Drift, drift
from graphwright.attention.entropy import entropy
from graphwright.attention.gates import gate
from graphwright.attention.mass import collect
from graphwright.attention.native_sparse import Choice, Compressor, NativeSparse, SparseAttention
from graphwright.attention.picture import block_map, dot
from graphwright.attention.propose import Candidates, propose
from graphwright.attention.prune import Pruned, prune
from graphwright.attention.reach import Reach, reach
from graphwright.attention.selected_pattern import SelectedPattern, to_pattern
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
    "Candidates",
    "Choice",
    "Compressor",
    "Drift",
    "NativeSparse",
    "NativeSparseDecoder",
    "Pattern",
    "PatternStep",
    "Pruned",
    "Reach",
    "SelectedPattern",
    "SparseAttention",
    "attend",
    "block_local",
    "block_map",
    "causal_full",
    "collect",
    "dilated",
    "document",
    "dot",
    "drift",
    "entropy",
    "full",
    "gate",
    "patterns",
    "propose",
    "prune",
    "random_blocks",
    "reach",
    "sliding_window",
    "sparsify",
    "star",
    "step",
    "to_pattern",
    "topk",
]
