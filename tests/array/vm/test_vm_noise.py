"""Random numbers of the VM: the bits of the ATen form, for any length, key and stream."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from vm_forms import vm

from graphwright.array import NDArray, from_numpy
from graphwright.ops import OPS, compute

KEYS = ((0, 0), (-1, 2**32 - 1), (0x0123_4567_89AB_CDEF, 7))
SIZES = (0, 1, 3, 15, 16, 17, 63, 64, 65, 1023, 1024, 1025)


def same_bits(name: str, arrays: list[NDArray], attrs: dict[str, Any]) -> np.ndarray:
    """The first result, after all were compared by their bits."""
    attrs = OPS[name].complete(attrs)
    found = vm(name, arrays, attrs)
    assert found is not None
    for mine, other in zip(found, compute(OPS[name], arrays, attrs), strict=True):
        assert mine.to_numpy().tobytes() == other.to_numpy().tobytes(), name
    return found[0].to_numpy()


@pytest.mark.parametrize("key", KEYS)
@pytest.mark.parametrize("stream", [0, 2**32 - 1])
def test_random_numbers_have_the_bits_of_aten(key: tuple[int, int], stream: int) -> None:
    at = from_numpy(np.array(key))
    for n in SIZES:
        x = np.random.default_rng(n).normal(size=n).astype("f4")
        same_bits("uniform", [at], {"stream": stream, "shape": (n,)})
        same_bits("bernoulli", [from_numpy(np.abs(x).clip(0, 1)), at], {"stream": stream})
        for p in (0.0, 0.1, 0.5, 0.9, 1.0):
            same_bits("dropout", [from_numpy(x), at], {"p": p, "stream": stream})


def test_dropped_nan_and_infinity_become_zero() -> None:
    x = np.tile(np.array([np.inf, -np.inf, np.nan, -0.0, 3e38], np.float32), 400)
    kept = same_bits("dropout", [from_numpy(x), from_numpy(np.array([5, 6]))], {"p": 0.5, "stream": 1})
    dropped = kept == 0
    dropped[3::5] = False
    assert 600 < dropped.sum() < 1000
    assert np.isnan(kept[~dropped]).sum() == np.isnan(kept).sum() > 100


def test_long_masks_span_many_counters() -> None:
    """Offsets above 2³¹ bytes are too large to test; 100 000 numbers pass through many groups of counters."""
    u = same_bits("uniform", [from_numpy(np.array([1, 2]))], {"stream": 3, "shape": (100, 1001)})
    assert abs(u.mean() - 0.5) < 0.01
    assert len(np.unique(u)) > 90_000


def test_strided_random_results_have_no_vm_form() -> None:
    x = from_numpy(np.zeros((4, 6), np.float32)[:, ::2])
    assert vm("dropout", [x, from_numpy(np.array([1, 2]))], {"p": 0.5, "stream": 1}) is None


def test_uniform_number_equal_to_p_keeps_the_entry() -> None:
    key, x = from_numpy(np.array([3, 4])), from_numpy(np.ones(100, np.float32))
    u = same_bits("uniform", [key], {"stream": 9, "shape": (100,)})
    for index in (7, 50):
        kept = same_bits("dropout", [x, key], {"p": float(u[index]), "stream": 9})
        assert kept[index] != 0
        hits = same_bits("bernoulli", [from_numpy(np.full(100, u[index])), key], {"stream": 9})
        assert hits[index] == 0
