"""Calls that run a prompt, decode tokens or run other inputs with a program, to be timed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from time import perf_counter
from typing import TYPE_CHECKING

import numpy as np

from graphwright.models.generation.cache import StaticCache
from graphwright.models.generation.generate import BURST
from graphwright.models.generation.sampling import Sampling, SamplingRequest
from graphwright.models.generation.text import longest_text
from graphwright.plan.compile import plan_for
from graphwright.plan.options import CompileOptions
from graphwright.program.run import check_feeds
from graphwright.timing import Repeated

if TYPE_CHECKING:
    from graphwright.program.program import Program

CONTEXT, MOST = 128, 32
"""Most tokens of the timed prompt, and most that are decoded after it."""


def lengths(*programs: Program) -> tuple[int, int]:
    """Return the tokens of the prompt, and most tokens after it, for which all programs have positions."""
    room = min(map(longest_text, programs))
    after = min(MOST, room // 2)
    return min(CONTEXT, room - after), after


def prefill_calls(*programs: Program) -> list[Callable[[], object]]:
    """Return for each program a function that runs a prompt of 128 tokens, or fewer if a program has fewer positions.

    Raises: NonFinite if the program's logits are not finite.
    """
    prompt, _ = lengths(*programs)
    return [_prefill(p, prompt) for p in programs]


def decode_calls(*programs: Program) -> list[Repeated]:
    """Return for each program a function that decodes greedily after the prompt of `prefill_calls`, in one burst.

    This is what `generate` does. All decode equally many tokens, at most 32, since the first one costs more than those
    that follow.

    Raises: NonFinite as `prefill_calls`.
    """
    prompt, most = lengths(*programs)
    decoders = [_decode(p, prompt, most) for p in programs]
    slowest = max(min(decode(1) for _ in range(3)) for decode in decoders)
    tokens = min(max(int(BURST / slowest), 1), most)
    return [Repeated(partial(decode, tokens), tokens) for decode in decoders]


def run_call(p: Program, feeds: Mapping[str, np.ndarray]) -> Callable[[], object]:
    """Return a function that runs a program on inputs by name."""
    given, _ = check_feeds(p, feeds)
    plan = plan_for(p, {n: t.spec for n, t in given.items()}, p.output_names(), CompileOptions(freeze=True))
    plan(given)
    return partial(plan, given)


def _prefill(p: Program, prompt: int) -> Callable[[], object]:
    cache, ids = StaticCache(p, 1, prompt), np.zeros((1, prompt), np.int64)

    def prefill() -> object:
        cache.truncate(0)
        return cache.step(ids)

    prefill()
    return prefill


def _decode(p: Program, prompt: int, most: int) -> Callable[[int], float]:
    """Return a function that decodes a number of tokens and returns the seconds that it took."""
    cache, token = StaticCache(p, 1, prompt + most), np.zeros((1, 1), np.int64)
    greedy = (SamplingRequest(Sampling(), 0, prompt),)

    def decode(tokens: int) -> float:
        started = perf_counter()
        cache.truncate(prompt)
        cache.step(token, requests=greedy)
        while (left := prompt + tokens - cache.length) > 0:  # one by one where the VM is not built
            cache.advance(left, greedy)
        return perf_counter() - started

    cache.step(np.zeros((1, prompt), np.int64))
    decode(1)  # which compiles the step
    return decode
