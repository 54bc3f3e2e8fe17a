"""Greedy continuations of several prompts of any lengths in one batch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np

from graphwright.models.generation.cache import StaticCache, independent
from graphwright.models.generation.sampling import Sampling, SamplingRequest
from graphwright.models.generation.text import check_ids
from graphwright.program.exclusive import exclusive

if TYPE_CHECKING:
    from graphwright.models.model import Model

_BURST = 16  # tokens between two looks at which rows have ended
_ROUND = 64  # capacities are multiples of this
_PLANS = 16  # compiled steps of a cache: one per length of the shortest prompt of a batch


class GreedyBatch:
    """A function that continues prompts greedily with a KV cache, as `generate` does one by one.

    All sequences of a static cache have one length. So the tokens up to the end of the shortest prompt run at once.
    Each further step appends the next token of the prompts that are longer, and the sampled token of the others.

    Args:
        model: is run in its current state at each call.
        batch: number of prompts that run together, those of similar lengths.
    """

    def __init__(self, model: Model, batch: int = 16) -> None:
        self.model, self.batch = model, batch
        self._caches: dict[int, StaticCache] = {}

    def __call__(self, prompts: Sequence[np.ndarray], limits: Sequence[int]) -> list[np.ndarray]:
        """Return the new ids of each prompt, int64 [n]: up to a token that ends a text, or as many as its limit.

        Args:
            prompts: ids int64 [T_i], T_i >= 1.
            limits: largest number of new ids of each prompt.
        Raises: PromptError; NonFinite.
        """
        checked = [check_ids(ids, self.model.vocab)[0] for ids in prompts]
        lengths = np.array([len(ids) for ids in checked])
        found = [np.zeros(0, np.int64)] * len(checked)
        with exclusive(self.model.program):
            for rows in self._batches(lengths):
                made = self._run([checked[i] for i in rows], np.array([limits[i] for i in rows]))
                for i, ids in zip(rows, made, strict=True):
                    found[i] = ids
        return found

    def _batches(self, lengths: np.ndarray) -> Iterator[np.ndarray]:
        """Yield indices of rows of similar lengths; with dynamic RoPE, of equal lengths where a text is long."""
        order, start = np.argsort(lengths, kind="stable"), 0
        while start < len(order):
            rows = order[start : start + self.batch]
            if lengths[rows[-1]] > independent(self.model.program):
                rows = rows[lengths[rows] == lengths[rows[0]]]
            start += len(rows)
            yield rows

    def _run(self, prompts: list[np.ndarray], limits: np.ndarray) -> list[np.ndarray]:
        lengths, count = np.array([len(ids) for ids in prompts]), len(prompts)
        ends = lengths + limits
        at, longest, last = int(lengths.min()), int(lengths.max()), int(ends.max())
        cache = self._cache(1 << (count - 1).bit_length(), last)
        tokens = np.zeros((cache.batch, last), np.int64)  # rows beyond the prompts run, too
        for row, ids in zip(tokens, prompts, strict=False):
            row[: len(ids)] = ids
        requests = (SamplingRequest(Sampling(), 0, 0),) * cache.batch
        stop, running = np.array(sorted(self.model.eos_ids), np.int64), limits > 0
        cache.prefill(tokens[:, :at])
        while running.any():
            free = np.flatnonzero(lengths <= at)
            tokens[free, at] = cache.sampled(requests)[free]
            running[free] &= (at + 1 < ends[free]) & ~np.isin(tokens[free, at], stop)
            if not running.any():
                break
            if at < longest:
                cache.step(tokens[:, at : at + 1], requests=requests)
                at += 1
            else:
                ids = cache.advance(min(_BURST, last - at - 1), requests)
                tokens[:, at : at + ids.shape[1]] = ids
                running &= ~np.isin(ids[:count], stop).any(1)
                at += ids.shape[1]
        return [_until(row[a:b], stop) for row, a, b in zip(tokens, lengths, ends, strict=False)]

    def _cache(self, size: int, entries: int) -> StaticCache:
        """Return an empty cache of `size` sequences, an earlier one if it has room."""
        cache = self._caches.get(size)
        if cache is None or cache.capacity < entries:
            cache = self._caches[size] = self.model.new_cache(-(-entries // _ROUND) * _ROUND, size, kind="static")
        if len(cache.steps.spaces) > _PLANS:
            cache.steps.spaces.clear()
        cache.reset()
        return cache


def _until(ids: np.ndarray, stop: np.ndarray) -> np.ndarray:
    """Return a copy of the ids up to the first one that ends a text."""
    ended = np.flatnonzero(np.isin(ids, stop))
    return ids[: ended[0] + 1].copy() if len(ended) else ids.copy()
