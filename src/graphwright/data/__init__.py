"""Datasets, windows over token files, and loaders that resume at any batch."""

from __future__ import annotations

from graphwright.data.dataset import Dataset, IterableDataset, TensorDataset, stack
from graphwright.data.loader import DataLoader
from graphwright.data.tokens import TokenWindows

__all__ = ["DataLoader", "Dataset", "IterableDataset", "TensorDataset", "TokenWindows", "stack"]
