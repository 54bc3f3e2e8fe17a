"""One sequence: it loses nothing where there is no room, is with one thread, and keeps rows of elsewhere to itself."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from threading import Thread
from typing import Any

import numpy as np
import pytest
from checkpoints import relative, some_ids

import graphwright as gw
from graphwright.errors import ShapeError, UsageError
from graphwright.models import CacheFull, PagedCache, PromptError, SequenceReleased
from graphwright.models.generation.sequence import CachedSequence

IDS = some_ids((1, 60))[0]


def bits(s: CachedSequence) -> list[bytes]:
    return [a.tobytes() for i in range(3) for a in s.gather(i)]


# -- room --------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("length", [1, 4, 6, 7])
def test_a_single_sequence_can_use_the_whole_pool(length: int, model: gw.Model) -> None:
    """Full blocks are cached for prompts with the same prefix; such a one is written to where it cannot be copied."""
    cache = PagedCache(model.program, blocks=2, block=4, poison=True)
    s = cache.sequence()
    assert s.capacity == 8
    s.prefill(IDS[None, :8])
    s.truncate(length)
    s.step(IDS[None, 20 : 28 - length])
    ids = np.concatenate([IDS[:length], IDS[20 : 28 - length]])
    assert relative(s.last_logits()[0], model.logits(ids)[-1]) < 1e-5
    s.release()
    cache.prefix.clear()
    assert cache.pool.free == 2


@pytest.mark.parametrize("length", [3, 4, 5])
def test_recomputing_logits_without_a_free_block_appends_no_entry(length: int, model: gw.Model) -> None:
    """After another head the last row is run again, in a block of its own; a fork holds the only one there is."""
    cache = PagedCache(model.program, blocks=-(-length // 4), block=4, prefix_bytes=0)
    s = cache.sequence()
    s.prefill(IDS[None, :length])
    fork, before = s.fork(), bits(s)
    with model.program.edit("another head") as e:
        e.set_weight("lm_head.weight", lambda w: w * 1.1)
    with pytest.raises(CacheFull):
        s.last_logits()
    assert (s.length, s.tokens.tolist(), bits(s)) == (length, [IDS[:length].tolist()], before)
    fork.release()
    assert relative(s.last_logits()[0], model.logits(IDS[:length])[-1]) < 1e-5
    assert bits(s) == before


# -- rows of elsewhere -------------------------------------------------------------------------------------------------
def given(n: int) -> tuple[list[np.ndarray], list[np.ndarray]]:
    k, v = (np.random.default_rng(i).normal(size=(3, 2, n, 10)).astype("f4") for i in (0, 1))
    return list(k), list(v)


@pytest.mark.parametrize(
    ("ids", "keys", "error"),
    [([1, 2], 3, PromptError), ([1, 2, 3.5], 3, PromptError), ([1, 2, -3], 3, PromptError), ([1, 2, 3], 2, ShapeError)],
)
def test_appending_entries_without_ids_or_values_is_refused(ids: list, keys: int, error: Any, model: gw.Model) -> None:
    s = model.new_cache(64, block=4).sequence()
    s.prefill(IDS[None, :4])
    k, v = given(3)
    with pytest.raises(error):
        s.append(k[:keys], v, ids)
    assert (s.length, s.tokens.shape, len(s.table)) == (4, (1, 4), 1)


def test_appended_entries_are_not_shared_with_other_sequences(model: gw.Model) -> None:
    cache = model.new_cache(200, block=4)
    s = cache.sequence()
    s.prefill(IDS[None, :6])
    s.append(*given(3), IDS[6:9])
    fork, held = s.fork(), bits(s)
    with model.program.edit("another head") as e:
        e.set_weight("lm_head.weight", lambda w: w * 1.1)
    s.last_logits()  # runs the row again, and puts back what was given
    assert bits(s) == held
    for one in (s, fork):
        one.step(IDS[None, 9:20])
        with cache.sequence() as other:
            assert relative(other.prefill(IDS[None, :20])[0], model.logits(IDS[:20])[-1]) < 1e-5
            assert other.reused <= 16
        cache.prefix.clear()
    s.truncate(6)
    s.step(IDS[None, 6:9])  # its own again
    with cache.sequence() as other:
        other.prefill(IDS[None, :9])
        assert other.reused == 8


def test_appended_entries_without_ids_survive_a_refused_reprefill(model: gw.Model) -> None:
    s = model.new_cache(64, block=4).sequence()
    s.prefill(IDS[None, :4])
    s.append(*given(3))
    held = bits(s)
    with pytest.raises(PromptError):
        model.reprefill(s)
    assert (s.length, bits(s)) == (7, held)


# -- one thread --------------------------------------------------------------------------------------------------------
CHANGES: dict[str, Callable[[CachedSequence], Any]] = {
    "step": lambda s: s.step(IDS[None, :1]),
    "prefill": lambda s: s.prefill(IDS[None, :1]),
    "append": lambda s: s.append(*given(1)),
    "reserve": lambda s: s.reserve(1),
    "truncate": lambda s: s.truncate(0),
    "refill": lambda s: s.refill(),
    "last_logits": lambda s: s.last_logits(),
    "a step of several": lambda s: s.cache.step([s], IDS[None, :1]),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_sequence_refuses_concurrent_use(name: str, model: gw.Model) -> None:
    s = model.new_cache(64).sequence()
    s.prefill(IDS[None, :3])
    other = model.new_cache(64).sequence()
    caught: list[Exception] = []

    def run() -> None:
        try:
            CHANGES[name](s)
        except UsageError as error:
            caught.append(error)

    with s.exclusive():
        thread = Thread(target=run, daemon=True)
        thread.start()
        thread.join(20)
    assert "another thread" in str(caught[0])
    assert (s.length, len(s.table)) == (3, 1)
    CHANGES[name](s)
    with other.exclusive():
        CHANGES[name](s)  # of another cache


def test_concurrent_first_prefills_lose_no_block(model: gw.Model) -> None:
    """The second one found the sequence empty, and waited for the first."""
    cache = model.new_cache(400, prefix_bytes=0, block=4)
    for _ in range(3):
        s = cache.sequence()

        def run(s: CachedSequence = s) -> None:
            with suppress(UsageError):
                s.prefill(IDS[None, :40])

        threads = [Thread(target=run) for _ in range(3)]
        for t in threads:
            t.start()
        for t in threads:
            t.join()
        assert (s.length % 40, len(s.table)) == (0, s.length // 4)
        s.release()
        assert cache.pool.used == 0


def test_a_released_sequence_raises(model: gw.Model) -> None:
    s = model.new_cache(64).sequence()
    s.prefill(IDS[None, :3])
    s.release()
    with pytest.raises(SequenceReleased):
        s.last_logits()
