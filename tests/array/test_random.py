"""Philox by its published vectors; the numbers made of it by their moments and distributions."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import stats

from graphwright.array import random

ONES = 0xFFFFFFFF
VECTORS = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((ONES,) * 4, (ONES,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]
"""Random123's known answers for philox4x32 with 10 rounds: counter, key, result."""

N = 200_000


@pytest.mark.parametrize(("counter", "key", "expected"), VECTORS)
def test_philox_matches_the_published_vectors(counter: tuple, key: tuple, expected: tuple) -> None:
    assert random.philox(np.array([counter], np.uint32), key).tolist() == [list(expected)]


def test_counter_and_key_have_the_documented_layout() -> None:
    seed, stream, step = 0x0123456789ABCDEF, 5, 7
    words = random.bits(9, seed=seed, stream=stream, step=step)
    for i in range(9):
        block = random.philox(np.array([[i // 4, 0, stream, step]], np.uint32), (seed & ONES, seed >> 32))
        assert words[i] == block[0, i % 4]


def test_numbers_do_not_depend_on_the_requested_length() -> None:
    for make in (random.bits, random.uniform, random.normal):
        assert np.array_equal(make(1001, seed=3)[:7], make(7, seed=3))


def test_seed_stream_and_step_each_change_the_numbers() -> None:
    base = random.bits(4000, seed=1)
    for other in ({"seed": 2}, {"seed": 1, "stream": 1}, {"seed": 1, "step": 1}, {"seed": 1 + 2**32}):
        assert np.mean(base == random.bits(4000, **other)) < 0.01


def test_uniform_numbers_are_multiples_of_the_grid_below_one() -> None:
    u = random.uniform(N, seed=11)
    assert u.dtype == np.float32
    assert u.min() >= 0
    assert u.max() < 1
    assert np.array_equal(u * 2**24, np.round(u * 2**24))
    assert stats.kstest(u, "uniform").pvalue > 1e-3
    assert abs(u.mean() - 0.5) < 0.003
    assert abs(u.var() - 1 / 12) < 0.001


def test_normal_numbers_have_the_normal_distribution() -> None:
    z = random.normal(N, seed=12).astype(np.float64)
    assert np.isfinite(z).all()
    assert stats.kstest(z, "norm").pvalue > 1e-3
    assert abs(z.mean()) < 0.01
    assert abs(z.var() - 1) < 0.01
    assert abs(stats.skew(z)) < 0.02
    assert abs(stats.kurtosis(z)) < 0.05


def test_integers_are_uniform_over_their_range() -> None:
    k = random.integers(-3, 7, N, seed=14)
    assert (k.min(), k.max()) == (-3, 6)
    assert stats.chisquare(np.bincount(k + 3)).pvalue > 1e-3


@pytest.mark.parametrize("lag", [1, 2, 3, 4, 8, 1024, 8192])
def test_consecutive_numbers_are_uncorrelated(lag: int) -> None:
    u = random.uniform(N, seed=15).astype(np.float64) - 0.5
    assert abs(np.mean(u[:-lag] * u[lag:]) * 12) < 0.01


def test_a_normal_matrix_has_the_expected_largest_singular_value() -> None:
    m = random.normal(1024 * 896, seed=16).reshape(1024, 896)
    assert abs(np.linalg.norm(m, 2) / (1024**0.5 + 896**0.5) - 1) < 0.03
