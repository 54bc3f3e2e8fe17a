"""Calls that run a prompt or one decoding step of a program, to be timed."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from graphwright.models.generation.cache import StaticCache

if TYPE_CHECKING:
    from graphwright.program.program import Program

CONTEXT, STEPS = 128, 16
"""Tokens of the timed prompt; decoding steps after it before the cache is truncated to the prompt again."""


def prefill_call(p: Program) -> Callable[[], object]:
    """Return a function that runs a prompt of 128 tokens. Raises: NonFinite if the program's logits are not finite."""
    cache, ids = StaticCache(p, 1, CONTEXT), np.zeros((1, CONTEXT), np.int64)

    def prefill() -> object:
        cache.truncate(0)
        return cache.step(ids)

    prefill()
    return prefill


def decode_call(p: Program) -> Callable[[], object]:
    """Return a function that decodes one token after 128 others. Raises: NonFinite as `prefill_call`."""
    cache, token = StaticCache(p, 1, CONTEXT + STEPS), np.zeros((1, 1), np.int64)

    def decode() -> object:
        if cache.length == cache.capacity:
            cache.truncate(CONTEXT)
        return cache.step(token)

    cache.step(np.zeros((1, CONTEXT), np.int64))
    decode()
    return decode
