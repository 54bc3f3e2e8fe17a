"""Sparse attention whose structure is visible, learned and edited."""

from __future__ import annotations

from graphwright.attention.decoding import NativeSparseDecoder
from graphwright.attention.native_sparse import Choice, Compressor, NativeSparse, SparseAttention
from graphwright.attention.selected_pattern import SelectedPattern, to_pattern

__all__ = [
    "Choice",
    "Compressor",
    "NativeSparse",
    "NativeSparseDecoder",
    "SelectedPattern",
    "SparseAttention",
    "to_pattern",
]
