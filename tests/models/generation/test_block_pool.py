"""Reference counts of blocks, and blocks cached for prompts with the same prefix: bookkeeping without a tensor."""

from __future__ import annotations

import numpy as np
import pytest

from graphwright.models import BlockError, CacheFull
from graphwright.models.generation.paged import BlockPool, PrefixCache, chained

ROOT = b"model"


def test_blocks_are_taken_in_order_and_the_last_freed_first() -> None:
    freed: list[int] = []
    pool = BlockPool(4, 10, freed.append)
    assert pool.take(3) == [0, 1, 2]
    pool.drop([1])
    pool.drop([0])
    assert freed == [1, 0]
    assert pool.take(2) == [0, 1]
    assert (pool.cap, pool.free, pool.used, pool.bytes) == (4, 1, 3, 40)


def test_blocks_are_taken_completely_or_not_at_all() -> None:
    pool = BlockPool(3)
    pool.take(2)
    with pytest.raises(CacheFull, match="2 blocks"):
        pool.take(2)
    assert pool.free == 1
    assert pool.take(0) == []


def test_releasing_unheld_blocks_is_refused_and_changes_no_count() -> None:
    pool = BlockPool(3)
    a, b = pool.take(2)
    pool.hold([a])
    for wrong in ([2], [3], [-1], [a, 2], [a, a, a], ["0"]):
        with pytest.raises(BlockError):
            pool.drop(wrong)  # pyright: ignore[reportArgumentType]
        assert [pool.refs(a), pool.refs(b), pool.free] == [2, 1, 1]
    with pytest.raises(BlockError):
        pool.hold([2])
    pool.drop([a, a])
    with pytest.raises(BlockError):
        pool.drop([a])


def pool_and_cache(most: int = 9, digest=chained) -> tuple[BlockPool, PrefixCache]:
    pool = BlockPool(9)
    return pool, PrefixCache(pool, 4, most, digest)


def matched(prefix: PrefixCache, ids: list[int]) -> list[int]:
    found = prefix.match(ROOT, np.array(ids))
    prefix.pool.drop(found)
    return found


@pytest.mark.parametrize("length", [0, 3, 4, 5, 8, 9, 12, 13])
def test_prefix_matches_leave_at_least_one_token_to_run(length: int) -> None:
    pool, prefix = pool_and_cache()
    ids = list(range(12))
    prefix.insert(ROOT, np.array(ids), pool.take(3))
    assert len(matched(prefix, [*ids, 99][:length])) == max(length - 1, 0) // 4


def test_a_chain_of_blocks_is_cached_once_and_shared_by_branches() -> None:
    pool, prefix = pool_and_cache()
    table = pool.take(3)
    prefix.insert(ROOT, np.arange(12), table)
    prefix.insert(ROOT, np.arange(12), table)
    assert len(prefix) == 3
    assert [pool.refs(b) for b in table] == [2, 2, 2]
    other = [table[0], *pool.take(1)]
    prefix.insert(ROOT, np.array([0, 1, 2, 3, 9, 9, 9, 9]), other)
    assert len(prefix) == 4
    assert matched(prefix, [0, 1, 2, 3, 9, 9, 9, 9, 0]) == other
    assert matched(prefix, list(range(13))) == table
    assert prefix.match(b"another model", np.arange(13)) == []


def test_equal_hashes_of_different_tokens_do_not_match() -> None:
    pool, prefix = pool_and_cache(digest=lambda before, tokens: b"same")
    one, two = pool.take(2), pool.take(2)
    prefix.insert(ROOT, np.arange(8), one)
    prefix.insert(ROOT, np.array([4, 5, 6, 7, 4, 5, 6, 7]), two)
    assert matched(prefix, [*range(8), 0]) == one
    assert matched(prefix, [4, 5, 6, 7, 4, 5, 6, 7, 0]) == two  # [4..7] continues another block in the first chain
    assert matched(prefix, [0, 1, 2, 3, 0, 1, 2, 3, 0]) == one[:1]
    assert prefix.match(b"another model", np.arange(9)) == []


def test_the_least_recently_used_block_is_evicted_after_its_continuations() -> None:
    pool, prefix = pool_and_cache()
    a, b = pool.take(3), pool.take(2)
    prefix.insert(ROOT, np.arange(12), a)
    prefix.insert(ROOT, np.arange(50, 58), b)
    matched(prefix, list(range(13)))
    pool.drop(a)
    assert prefix.evictable == 3
    assert prefix.evict(1) == 1
    assert [pool.refs(x) for x in a] == [1, 1, 0]  # b is older, but it is held
    pool.drop(b)
    assert prefix.evict(2) == 2
    assert pool.free == 9 - 2
    assert matched(prefix, list(range(13))) == a[:2]
    prefix.clear()
    assert pool.free == 9


def test_a_block_before_a_held_one_is_not_evicted() -> None:
    """A sequence with the same prefix holds the third block, but not those that are kept before it."""
    pool, prefix = pool_and_cache()
    first, own = pool.take(2), pool.take(3)
    prefix.insert(ROOT, np.arange(8), first)
    prefix.insert(ROOT, np.arange(12), own)
    pool.drop(first)
    assert prefix.blocks == [*first, own[2]]
    assert [pool.refs(b) for b in prefix.blocks] == [1, 1, 2]
    assert prefix.evictable == prefix.evict(3) == 0
    pool.drop(own)
    assert prefix.evictable == 3
    assert prefix.evict(2) == 2
    assert pool.refs(first[0]) == 1


def test_uncaching_a_block_uncaches_its_continuations() -> None:
    pool, prefix = pool_and_cache()
    table, other = pool.take(3), pool.take(1)
    prefix.insert(ROOT, np.arange(12), table)
    prefix.insert(ROOT, np.array([0, 1, 2, 3, 9, 9, 9, 9]), [table[0], *other])
    assert not prefix.forget(8)
    assert prefix.forget(table[1])
    assert sorted(prefix.blocks) == sorted([table[0], *other])
    assert [pool.refs(b) for b in (*table, *other)] == [2, 1, 1, 2]
    assert prefix.forget(table[0])
    assert prefix.blocks == []


@pytest.mark.parametrize("most", [0, 1, 2])
def test_no_more_blocks_than_the_limit_are_cached(most: int) -> None:
    pool, prefix = pool_and_cache(most)
    table = pool.take(3)
    prefix.insert(ROOT, np.arange(12), table)
    assert len(prefix) == most
    assert len(matched(prefix, list(range(13)))) == most
    pool.drop(table)
    assert pool.used == most
    more = pool.take(1)
    prefix.insert(ROOT, np.arange(90, 94), more)  # evicts older ones
    assert len(prefix) == most
    assert sum(pool.refs(b) for b in range(9)) == most + 1
