"""Datasets, windows over token files, IDX files, and loaders that resume at any batch."""

from __future__ import annotations

from graphwright.data.dataset import Dataset, IterableDataset, TensorDataset, stack
from graphwright.data.idx import CorruptIdx, read_idx
from graphwright.data.loader import DataLoader
from graphwright.data.tokens import TokenWindows

__all__ = [
    "CorruptIdx",
    "DataLoader",
    "Dataset",
    "IterableDataset",
    "TensorDataset",
    "TokenWindows",
    "read_idx",
    "stack",
]
