"""Rows of prompts, prefixes and targets beside a loop over tokens, and what is read as a batch."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from small import transformer

from graphwright.data import Subset, grids
from graphwright.errors import UsageError
from graphwright.lifecycle.prefixes import TrainingRows, pairs_of

MODEL = transformer()
IDS = st.lists(st.integers(1, 13), min_size=1, max_size=6)
ROWS = st.lists(
    st.tuples(IDS, st.lists(st.integers(1, 13), max_size=8), IDS, st.floats(0.1, 1)), min_size=1, max_size=4
)


def predicted(prompt: list[int], prefix: list[int], answer: list[int]) -> dict[int, tuple[list[int], int]]:
    """Position -> (what the model has read there, target), for each target that the formula of CE' has."""
    found = {}
    last = min(len(answer), len(prefix) + 1)
    for t in range(1, last + 1):
        read = prompt + prefix[: t - 1]
        found[len(read) - 1] = read, answer[t - 1]
    return found


@given(rows=ROWS, round_to=st.sampled_from([1, 4]), length=st.integers(0, 20))
def test_rows_are_those_of_a_loop_over_targets(rows: list, round_to: int, length: int) -> None:
    arrays = [(np.array(x, np.int64), np.array(made, np.int64), np.array(y, np.int64), w) for x, made, y, w in rows]
    made = TrainingRows.of(arrays, length, round_to)
    assert made.ids.shape == made.targets.shape == made.weights.shape
    assert made.ids.shape[1] % round_to == 0
    assert made.ids.shape[1] >= length
    for i, (prompt, prefix, answer, weight) in enumerate(rows):
        expected = predicted(prompt, prefix, answer)
        assert np.flatnonzero(made.weights[i]).tolist() == sorted(expected)
        for at, (read, target) in expected.items():
            assert made.ids[i, : at + 1].tolist() == read
            assert made.targets[i, at] == target
            assert made.weights[i, at] == np.float32(weight / len(expected))
        assert not made.ids[i, max(expected) + 1 :].any()  # nothing after the last prediction is an input


def test_batches_and_datasets_are_read_as_the_same_pairs() -> None:
    source = grids("crop", side=3, pairs=1, count=5)
    expected = [tuple(ids.tolist() for ids in source[i].encode()) for i in range(5)]
    batch = source.batch(np.arange(5))
    prompts, answers = ([source[i].encode()[k] for i in range(5)] for k in (0, 1))
    for given_ in (
        batch, {name: ids.numpy() for name, ids in batch.items()}, {"prompt": prompts, "answer": answers}, source,
        Subset(source, range(5)), [source[i] for i in range(5)], list(zip(prompts, answers, strict=True)),
    ):  # fmt: skip
        found = pairs_of(given_, MODEL)
        assert [tuple(ids.tolist() for ids in pair) for pair in found] == expected
    assert len(pairs_of(source, MODEL, count=2)) == 2
    assert pairs_of([([1, 14, 0], [14, 2])], MODEL, 0)[0][0].tolist() == [1, 14]


@pytest.mark.parametrize(
    "batch",
    [
        {"prompt": [[1]]},
        {"prompt": [[1]], "answer": [[1], [2]]},
        {"prompt": [[1]], "answer": [[1]], "mask": [[1]]},
        [],
        [([1], [])],
        [([14], [1])],
        [([1.5], [1])],
        [([[1], [2]], [1])],
        [([15], [1])],
    ],
)
def test_other_batches_are_refused(batch: object) -> None:
    with pytest.raises(UsageError):
        pairs_of(batch, MODEL)
