"""Datasets, windows over token files, IDX files, and loaders that resume at any batch."""

from __future__ import annotations

from graphwright.data.files import CorruptIdx, TokenWindows, read_idx
from graphwright.data.loader import DataLoader, Dataset, IterableDataset, TensorDataset, pad, stack
from graphwright.data.replay import ReplayBuffer
from graphwright.data.subset import ConcatDataset, Subset, random_split
from graphwright.data.workers import WorkerError

__all__ = [
    "ConcatDataset", "CorruptIdx", "DataLoader",
    "Dataset", "IterableDataset", "ReplayBuffer", "Subset", "TensorDataset",
    "TokenWindows", "WorkerError", "pad", "random_split", "read_idx", "stack",
]  # fmt: skip
