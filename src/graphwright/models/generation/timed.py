"""Calls that run a prompt or decode tokens with a program, to be timed."""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter
from typing import TYPE_CHECKING

import numpy as np

from graphwright.models.generation.cache import StaticCache
from graphwright.models.generation.generate import BURST
from graphwright.models.generation.sampling import Sampling, SamplingRequest
from graphwright.timing import Repeated

if TYPE_CHECKING:
    from graphwright.program.program import Program

CONTEXT, MOST = 128, 32
"""Tokens of the timed prompt; most tokens that are decoded after it."""


def prefill_call(p: Program) -> Callable[[], object]:
    """Return a function that runs a prompt of 128 tokens. Raises: NonFinite if the program's logits are not finite."""
    cache, ids = StaticCache(p, 1, CONTEXT), np.zeros((1, CONTEXT), np.int64)

    def prefill() -> object:
        cache.truncate(0)
        return cache.step(ids)

    prefill()
    return prefill


def decode_call(p: Program) -> Repeated:
    """Return a function that decodes up to 32 tokens after 128 others, greedily and in one burst, as `generate` does.

    Raises: NonFinite as `prefill_call`.
    """
    cache, token = StaticCache(p, 1, CONTEXT + MOST), np.zeros((1, 1), np.int64)
    greedy = (SamplingRequest(Sampling(), 0, CONTEXT),)

    def decode(tokens: int) -> float:
        started = perf_counter()
        cache.truncate(CONTEXT)
        cache.step(token, requests=greedy)
        while (left := CONTEXT + tokens - cache.length) > 0:  # one by one where the VM is not built
            cache.advance(left, greedy)
        return perf_counter() - started

    cache.step(np.zeros((1, CONTEXT), np.int64))
    decode(1)  # which compiles the step
    tokens = min(max(int(BURST / min(decode(1) for _ in range(3))), 1), MOST)
    return Repeated(lambda: decode(tokens), tokens)
