"""Philox words into planned memory, by the same rounds as `array.random`; importing this module loads numba."""

from __future__ import annotations

from typing import Any

import numpy as np

from graphwright.native import njit

_njit: Any = njit(cache=True, nogil=True)


@_njit
def fill(out: np.ndarray, key: np.ndarray, stream: int, shift: int) -> None:
    """Words of (seed, step) = key and a stream, shifted right: four per counter, in order.

    Args:
        out: int32 or int64 [n]; 32-bit words unshifted want int64.
        key: int64 [2]: the bits of the seed, and the step.
    """
    low = np.uint64(0xFFFFFFFF)
    seed, step = np.uint64(key[0]), np.uint64(key[1]) & low
    for block in range((len(out) + 3) // 4):
        c0, c1, c2, c3 = np.uint64(block) & low, np.uint64(block) >> np.uint64(32), np.uint64(stream), step
        k0, k1 = seed & low, seed >> np.uint64(32)
        for _ in range(10):
            p0, p1 = np.uint64(0xD2511F53) * c0, np.uint64(0xCD9E8D57) * c2
            c0, c1, c2, c3 = (p1 >> np.uint64(32)) ^ c1 ^ k0, p1 & low, (p0 >> np.uint64(32)) ^ c3 ^ k1, p0 & low
            k0, k1 = (k0 + np.uint64(0x9E3779B9)) & low, (k1 + np.uint64(0xBB67AE85)) & low
        at = 4 * block
        for i in range(min(4, len(out) - at)):
            word = c0 if i == 0 else c1 if i == 1 else c2 if i == 2 else c3
            out[at + i] = word >> np.uint64(shift)
