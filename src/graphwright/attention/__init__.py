"""Sparse attention as a graph that can be edited: patterns in models, and functions that read and change them."""

from __future__ import annotations

from graphwright.attention.sparsify import patterns, sparsify

__all__ = ["patterns", "sparsify"]
