"""Random numbers by Philox 4x32-10, keyed by (seed, stream, step): equal on all machines, in any order of calls."""

from __future__ import annotations

from hashlib import blake2b

import numpy as np

from graphwright.array.formulas.philox import LOW
from graphwright.array.formulas.philox import philox as _rounds

_SHIFT = np.uint64(32)


def philox(counter: np.ndarray, key: tuple[int, int]) -> np.ndarray:
    """Apply the ten Philox rounds to counters uint32 [n, 4] with a key of two 32-bit words; return uint32 [n, 4]."""
    words = _rounds(*(counter[:, i].astype(np.uint64) for i in range(4)), *map(np.uint64, key))
    return np.stack(words, axis=1).astype(np.uint32)


def stream_of(name: str) -> int:
    """Return 32 bits of a name's BLAKE2b as its random stream, so that a new layer changes no other layer's numbers."""
    return int.from_bytes(blake2b(name.encode(), digest_size=4).digest(), "little")


def bits(n: int, *, seed: int, stream: int = 0, step: int = 0) -> np.ndarray:
    """Return n random uint32. The key is the seed; the counter is (low, high word of index // 4, stream, step)."""
    blocks = np.arange((n + 3) // 4, dtype=np.uint64)
    counter = np.empty((len(blocks), 4), np.uint32)
    counter[:, 0], counter[:, 1] = blocks & LOW, blocks >> _SHIFT
    counter[:, 2], counter[:, 3] = stream & 0xFFFFFFFF, step & 0xFFFFFFFF
    return philox(counter, (seed & 0xFFFFFFFF, (seed >> 32) & 0xFFFFFFFF)).reshape(-1)[:n]


def uniform(n: int, *, seed: int, stream: int = 0, step: int = 0) -> np.ndarray:
    """Return n uniform float32 in [0, 1), multiples of 2⁻²⁴."""
    return (bits(n, seed=seed, stream=stream, step=step) >> np.uint32(8)).astype(np.float32) * np.float32(2.0**-24)


def normal(n: int, *, seed: int, stream: int = 0, step: int = 0) -> np.ndarray:
    """Return n samples of N(0, 1), float32, by the Box-Muller transform of pairs, computed in float64."""
    words = bits(n + n % 2, seed=seed, stream=stream, step=step) >> np.uint32(8)
    u1, u2 = (words[0::2].astype(np.float64) + 1) * 2.0**-24, words[1::2].astype(np.float64) * 2.0**-24
    radius, angle = np.sqrt(-2 * np.log(u1)), 2 * np.pi * u2
    return np.stack([radius * np.cos(angle), radius * np.sin(angle)], axis=1).reshape(-1)[:n].astype(np.float32)


def gumbel(n: int, *, seed: int, stream: int = 0, step: int = 0) -> np.ndarray:
    """Return n samples -ln(-ln u) of the Gumbel distribution, float32; u is a midpoint of 2²⁴ intervals of [0, 1]."""
    u = ((bits(n, seed=seed, stream=stream, step=step) >> np.uint32(8)).astype(np.float64) + 0.5) * 2.0**-24
    return -np.log(-np.log(u)).astype(np.float32)


def integers(low: int, high: int, n: int, *, seed: int, stream: int = 0, step: int = 0) -> np.ndarray:
    """Return n uniform int64 in [low, high), from the high half of a 64-bit product (bias below 2⁻³²·(high - low))."""
    words = bits(n, seed=seed, stream=stream, step=step).astype(np.uint64)
    return low + ((words * np.uint64(high - low)) >> _SHIFT).astype(np.int64)
