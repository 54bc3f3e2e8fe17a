"""Philox 4x32-10: ten rounds of multiplications and exclusive ors that turn a counter and a key into four random words.

Source: Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3", section 3.3.
"""

from __future__ import annotations

from typing import Any

import numpy as np

LOW = np.uint64(0xFFFFFFFF)
_SHIFT = np.uint64(32)
MULTIPLIERS = np.uint64(0xD2511F53), np.uint64(0xCD9E8D57)
WEYL = np.uint64(0x9E3779B9), np.uint64(0xBB67AE85)


def product(x: Any, factor: Any) -> Any:
    """(upper 32 bits of x·factor, lower 32 bits); arguments and results are stored as uint64."""
    wide = x * factor
    return wide >> _SHIFT, wide & LOW


def wrapped(x: Any) -> Any:
    """x modulo 2³²."""
    return x & LOW


def philox(c0: Any, c1: Any, c2: Any, c3: Any, k0: Any, k1: Any) -> Any:
    """The four random words of a counter (c0, c1, c2, c3) under a key (k0, k1): 32-bit words stored in uint64."""
    for _ in range(10):
        high0, low0 = product(c0, MULTIPLIERS[0])
        high1, low1 = product(c2, MULTIPLIERS[1])
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = wrapped(k0 + WEYL[0]), wrapped(k1 + WEYL[1])
    return c0, c1, c2, c3
