"""Subset and random_split against torch's."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import graphwright as gw
from graphwright import data
from graphwright.errors import IndexOutOfRange, UsageError

X = np.arange(20.0).reshape(10, 2)


def test_a_subset_has_the_items_at_its_indices() -> None:
    for dataset in (data.TensorDataset(X, np.arange(10)), [(row, i) for i, row in enumerate(X)]):
        part = data.Subset(dataset, [3, 0, -1])
        assert [int(part[i][1]) for i in range(len(part))] == [3, 0, 9]
        rows, numbers = next(iter(data.DataLoader(part, 3)))
        assert np.array_equal(rows, X[[3, 0, 9]])
        assert numbers.tolist() == [3, 0, 9]
        assert [int(i) for i in data.Subset(part, [2])[0][1:]] == [9]


@pytest.mark.parametrize("lengths", [[7, 3], [0.5, 0.5], [0.33, 0.33, 0.34], [0, 10], [0.45, 0.55]])
def test_random_splits_have_torchs_sizes_and_each_item_once(lengths: list[float]) -> None:
    items: Any = range(10)
    parts = data.random_split(items, lengths, gw.Generator(1))
    assert [len(p) for p in parts] == [len(p) for p in torch.utils.data.random_split(items, lengths)]
    assert sorted(p[i] for p in parts for i in range(len(p))) == list(range(10))
    again = data.random_split(range(10), lengths, gw.Generator(1))
    assert [p.indices.tolist() for p in parts] == [p.indices.tolist() for p in again]


def test_invalid_arguments_are_refused() -> None:
    for lengths in ([3, 3], [0.5, 0.6], [-1, 11], ["a", 3]):
        with pytest.raises(UsageError):
            data.random_split(range(10), lengths)
    with pytest.raises(IndexOutOfRange, match="out of range"):
        data.Subset(X, [10])
    with pytest.raises(UsageError, match="integers"):
        data.Subset(X, [0.5])  # pyright: ignore[reportArgumentType]
    with pytest.raises(UsageError, match="batch_size"):
        data.DataLoader(X, "4")  # pyright: ignore[reportArgumentType]
