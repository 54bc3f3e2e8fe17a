"""Sparse attention whose structure is visible, learned and edited."""

from __future__ import annotations

from graphwright.attention.decoding import NativeSparseDecoder
from graphwright.attention.native_sparse import Choice, Compressor, NativeSparse, SparseAttention

__all__ = ["Choice", "Compressor", "NativeSparse", "NativeSparseDecoder", "SparseAttention"]
