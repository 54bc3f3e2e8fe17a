"""Datasets, windows over token files, IDX files, grid tasks, and loaders that resume at any batch."""

from __future__ import annotations

from graphwright.data.arc import arc
from graphwright.data.files import CorruptIdx, TokenWindows, read_idx
from graphwright.data.grid_tasks import (
    AugmentedTasks,
    GridError,
    GridTask,
    GridTasks,
    ListedTasks,
    collate_tasks,
    read_answer,
)
from graphwright.data.grids import ProceduralTasks, grids
from graphwright.data.loader import DataLoader, Dataset, IterableDataset, TensorDataset, pad, stack
from graphwright.data.replay import ReplayBuffer
from graphwright.data.subset import ConcatDataset, Subset, random_split
from graphwright.workers import WorkerError

__all__ = [
    "AugmentedTasks", "ConcatDataset", "CorruptIdx", "DataLoader", "Dataset", "GridError", "GridTask", "GridTasks",
    "IterableDataset", "ListedTasks", "ProceduralTasks", "ReplayBuffer", "Subset", "TensorDataset", "TokenWindows",
    "WorkerError", "arc", "collate_tasks", "grids", "pad", "random_split", "read_answer", "read_idx", "stack",
]  # fmt: skip
