"""A replay buffer beside a deque: the last rows, each as likely as the others, and the same samples after a restart."""

from __future__ import annotations

from collections import deque

import numpy as np
import pytest
import scipy.stats
from hypothesis import given
from hypothesis import strategies as st

from graphwright.data import ReplayBuffer
from graphwright.errors import DTypeError, ShapeError, UsageError


def rows(first: int, count: int) -> dict[str, np.ndarray]:
    at = np.arange(first, first + count)
    return {"id": at, "pair": np.stack([at, -at], -1).astype("f4")}


@given(capacity=st.integers(1, 9), counts=st.lists(st.integers(0, 12), max_size=6))
def test_the_last_rows_are_kept_in_order(capacity: int, counts: list[int]) -> None:
    buffer, last, added = ReplayBuffer(capacity), deque[int](maxlen=capacity), 0
    for count in counts:
        buffer.add(**rows(added, count))
        last.extend(range(added, added + count))
        added += count
    assert (len(buffer), buffer.added) == (len(last), added)
    if last:
        assert buffer.state_dict()["columns"]["id"].tolist() == list(last)
        batch = buffer.sample(50)
        assert set(batch["id"].tolist()) <= set(last)
        np.testing.assert_array_equal(batch["pair"].numpy()[:, 0], batch["id"].numpy())
        np.testing.assert_array_equal(batch["pair"].numpy()[:, 1], -batch["id"].numpy())
        assert batch["pair"].dtype.name == "float32"


def test_rows_are_drawn_with_equal_probability() -> None:
    buffer = ReplayBuffer(10, seed=3)
    buffer.add(**rows(0, 15))
    counts = np.bincount(np.concatenate([buffer.sample(100)["id"].numpy() for _ in range(50)]))[5:]
    assert len(counts) == 10
    assert scipy.stats.chisquare(counts).pvalue > 1e-3


def test_samples_depend_on_the_seed_and_continue_after_a_restart() -> None:
    first, second, other = (ReplayBuffer(8, seed=seed) for seed in (1, 1, 2))
    for buffer in (first, second, other):
        buffer.add(**rows(0, 11))
    assert first.sample(20)["id"].tolist() == second.sample(20)["id"].tolist() != other.sample(20)["id"].tolist()
    again = ReplayBuffer(8)
    again.load_state_dict(first.state_dict())
    for buffer in (first, again):
        buffer.add(**rows(11, 3))
    a, b = first.sample(20)["id"].tolist(), again.sample(20)["id"].tolist()
    assert a == b
    assert a != second.sample(20)["id"].tolist()


def test_invalid_rows_are_refused_and_not_added() -> None:
    buffer = ReplayBuffer(4)
    with pytest.raises(UsageError, match="empty"):
        buffer.sample(1)
    buffer.add(**rows(0, 2))
    with pytest.raises(UsageError, match="columns"):
        buffer.add(id=np.zeros(1, int))
    for pair in (np.zeros((3, 2)), np.zeros((1, 3)), np.zeros(())):
        with pytest.raises(ShapeError, match="fit"):
            buffer.add(id=np.zeros(1, int), pair=pair)
    with pytest.raises(ShapeError, match="fit"):
        buffer.add(id=np.zeros((), int), pair=np.zeros((1, 2)))
    assert buffer.state_dict()["columns"]["id"].tolist() == [0, 1]
    with pytest.raises(UsageError, match="capacity"):
        ReplayBuffer(0)


def test_invalid_rows_states_and_counts_are_refused_and_change_nothing() -> None:
    buffer = ReplayBuffer(4)
    buffer.add(reward=[1, 0])
    for error, call in (
        (DTypeError, lambda: buffer.add(reward=[0.5])),  # would become 0
        (DTypeError, lambda: ReplayBuffer(4).add(name=["a"])),
        (UsageError, lambda: buffer.sample(-1)),
        (UsageError, lambda: buffer.load_state_dict({})),
        (UsageError, lambda: ReplayBuffer(2.5)),  # pyright: ignore[reportArgumentType]
    ):
        with pytest.raises(error):
            call()
    assert (len(buffer), buffer.added, buffer.sampled) == (2, 2, 0)
    wide = ReplayBuffer(4)
    wide.add(reward=[0.5])
    wide.add(reward=[2])
    assert sorted(wide.state_dict()["columns"]["reward"]) == [0.5, 2.0]
