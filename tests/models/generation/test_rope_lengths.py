"""Where the rotation follows the longest position, a row is of the length of its text: what may be taken over of it."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from checkpoints import Made, relative, some_ids

import graphwright as gw
from graphwright.models import SamplingRequest
from graphwright.models.generation.cache import ENDLESS, independent

IDS = some_ids((1, 60))[0]
STRETCHING = pytest.mark.parametrize("name", ["rope-dynamic", "rope-longrope-long"])


def test_entries_are_independent_up_to_the_original_length(made: Callable[[str], Made]) -> None:
    found = {n: independent(gw.open(made(n).path).program) for n in ("llama", "rope-dynamic", "rope-longrope-long")}
    assert found == {"llama": ENDLESS, "rope-dynamic": 20, "rope-longrope-long": 16}


@STRETCHING
def test_blocks_of_a_longer_text_are_not_reused_by_a_shorter_one(name: str, made: Callable[[str], Made]) -> None:
    m = gw.open(made(name).path)
    cache = m.new_cache(400, block=4)
    with cache.sequence() as s:
        s.prefill(IDS[None, :40])
        fork = s.fork()
        fork.truncate(6)  # its rows stay those of a longer text
        fork.step(IDS[None, 6:9])
        for n in (10, 14, 40):
            with cache.sequence() as t:
                assert relative(t.prefill(IDS[None, :n])[0], m.logits(IDS[:n])[-1]) < 1e-5
    with cache.sequence() as t:
        t.prefill(IDS[None, :14])
        assert t.reused == 12  # of the texts of 10 and 14
    with cache.sequence() as t:
        assert relative(t.prefill(IDS[None, :30])[0], m.logits(IDS[:30])[-1]) < 1e-5
        assert t.reused == 0


@STRETCHING
@pytest.mark.parametrize("kind", ["paged", "static"])
def test_a_prompt_reuses_only_entries_equal_to_its_own(name: str, kind: str, made: Callable[[str], Made]) -> None:
    m = gw.open(made(name).path)
    cache = m.new_cache(64).sequence() if kind == "paged" else m.new_cache(64, kind="static")
    for n, held in ((10, 0), (12, 10), (40, 0), (12, 0), (14, 12)):
        found = m.generate(IDS[:n], 2, cache=cache)
        assert found.reused_tokens == held
        assert found.ids == m.generate(IDS[:n], 2).ids
        assert relative(cache.last_logits()[0], last(m, IDS[:n])) < 1e-5


def last(m: gw.Model, ids: np.ndarray) -> np.ndarray:
    """Logits after one generated id, with a cache of its own."""
    cache = m.new_cache(64, kind="static")
    m.generate(ids, 2, cache=cache)
    return cache.last_logits()[0]


@STRETCHING
def test_a_longer_text_in_the_batch_does_not_change_other_rotations(name: str, made: Callable[[str], Made]) -> None:
    m = gw.open(made(name).path)
    cache = m.new_cache(400, prefix_bytes=0)
    lengths, draw = (3, 40, 11), SamplingRequest()
    batch = [cache.sequence() for _ in lengths]
    for s, n in zip(batch, lengths, strict=True):
        s.prefill(IDS[None, :n])
    for _ in range(4):
        logits = cache.step(batch, [s.sampled([draw]) for s in batch], requests=[draw] * 3).to_numpy()
        assert all(np.array_equal(row[-1], s.last_logits()[0]) for s, row in zip(batch, logits, strict=True))
    for s, n in zip(batch, lengths, strict=True):
        assert s.tokens[0, n:].tolist() == m.generate(IDS[:n], 4).ids
