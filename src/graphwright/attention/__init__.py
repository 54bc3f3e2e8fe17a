"""Sparse attention as a graph that can be edited: patterns, their use in models, and attention that chooses blocks."""

from __future__ import annotations

from graphwright.attention.decoding import NativeSparseDecoder
from graphwright.attention.native_sparse import Choice, Compressor, NativeSparse, SparseAttention
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
    "Choice",
    "Compressor",
    "NativeSparse",
    "NativeSparseDecoder",
    "Pattern",
    "SparseAttention",
    "block_local",
    "causal_full",
    "dilated",
    "document",
    "full",
    "patterns",
    "random_blocks",
    "sliding_window",
    "sparsify",
    "star",
    "topk",
]
