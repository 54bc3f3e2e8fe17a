"""Random numbers of one child: Philox 4x32-10 keyed by the run's seed, counted by (block, child, generation, purpose).

So a child's numbers depend on nobody else's. The rounds are those of `array.random`.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from graphwright.array.population.genes import native

LOW = np.uint64(0xFFFFFFFF)
SIZE = 11  # two words of the key, four of the counter, how many of the block are used, the block


@native
def begin(state: Any, seed: int, child: int, generation: int, purpose: int) -> None:
    """Set a state of `SIZE` uint64 to the start of a stream."""
    state[0], state[1] = np.uint64(seed) & LOW, np.uint64(seed) >> np.uint64(32)
    state[2], state[3], state[4], state[5] = 0, child, generation, purpose
    state[6] = 4


@native
def _refill(state: Any) -> None:
    k0, k1, c0, c1, c2, c3 = state[0], state[1], state[2], state[3], state[4], state[5]
    for _ in range(10):
        p0, p1 = np.uint64(0xD2511F53) * c0, np.uint64(0xCD9E8D57) * c2
        c0, c1, c2, c3 = (p1 >> np.uint64(32)) ^ c1 ^ k0, p1 & LOW, (p0 >> np.uint64(32)) ^ c3 ^ k1, p0 & LOW
        k0, k1 = (k0 + np.uint64(0x9E3779B9)) & LOW, (k1 + np.uint64(0xBB67AE85)) & LOW
    state[7], state[8], state[9], state[10] = c0, c1, c2, c3
    state[2] += np.uint64(1)
    state[6] = 0


@native
def uniform(state: Any) -> float:
    """A number in [0, 1), a multiple of 2⁻³²."""
    if state[6] == 4:
        _refill(state)
    word = state[np.int64(7 + state[6])]
    state[6] += np.uint64(1)
    return np.float64(word) * 2.3283064365386963e-10


@native
def below(state: Any, count: Any) -> Any:
    """A whole number from 0 to count - 1."""
    return np.int64(uniform(state) * count)


@native
def normal(state: Any) -> float:
    """A number from N(0, 1), by Box and Muller's transform of two uniform ones."""
    u, w = uniform(state), uniform(state)
    return np.sqrt(-2.0 * np.log(1.0 - u)) * np.cos(6.283185307179586 * w)
