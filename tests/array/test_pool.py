"""The pool on the simulated driver: waste, no overlap, order of streams, true sums, errors that leave it whole."""

from __future__ import annotations

from itertools import pairwise
from typing import Any, cast

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from graphwright.array.memory_pool import (
    DIRECT,
    SLAB,
    SMALL,
    SMALLEST,
    Block,
    MemoryPool,
    OutOfDeviceMemory,
    size_class,
)
from graphwright.errors import UsageError
from graphwright.testing.simulated_device import InjectedFault, RuleBroken, SimDriver

MIB = 2**20


def test_size_classes_lose_less_than_an_eighth() -> None:
    sizes = [*range(1, 5000), *(2**k + d for k in range(12, 33) for d in (-1, 0, 1, 2**k // 8, 2**k // 8 + 1))]
    classes = [size_class(n) for n in sizes]
    for n, c in zip(sizes, classes, strict=True):
        assert c >= n
        assert c == SMALLEST or c - n < n / 8
        assert size_class(c) == c
    for k in range(9, 30):
        assert len({size_class(n) for n in np.linspace(2**k + 1, 2 ** (k + 1), 4096).astype(int).tolist()}) == 8


REQUEST = st.one_of(st.integers(1, 5000), st.integers(1, 3 * MIB), st.sampled_from([SMALL, SMALL + 1, SLAB, 25 * MIB]))
TRACES = st.lists(st.tuples(st.booleans(), REQUEST, st.integers(0, 1000)), max_size=60)


def run(pool: MemoryPool, trace: list[tuple[bool, int, int]]) -> tuple[list[Block], list[int]]:
    live: list[Block] = []
    addresses = []
    for give_back, nbytes, pick in trace:
        if give_back and live:
            pool.free(live.pop(pick % len(live)))
        else:
            live.append(pool.alloc(nbytes))
            addresses.append(live[-1].address)
        check(pool, live)
    return live, addresses


def check(pool: MemoryPool, live: list[Block]) -> None:
    """Pieces tile the segments without overlap, free neighbours are one, and the sums are those of the blocks."""
    pieces = list(pool.pieces())
    for (a, size, free), (b, _, next_free) in pairwise(pieces):
        assert a + size <= b
        assert not (free and next_free and a + size == b)
    stats = pool.stats()
    assert stats.live == sum(b.nbytes for b in live)
    assert stats.waste == sum(s for _, s, free in pieces if not free) - stats.live
    assert stats.cached == sum(s for _, s, free in pieces if free)
    assert (
        stats.reserved
        == stats.live + stats.waste + stats.cached
        == pool.driver.mem_info()[1] - pool.driver.mem_info()[0]
    )


@given(TRACES)
def test_any_trace_keeps_the_pool_consistent_and_is_deterministic(trace: list[tuple[bool, int, int]]) -> None:
    pool = MemoryPool(SimDriver())
    live, addresses = run(pool, trace)
    spans = sorted((b.address, b.address + b.nbytes) for b in live)
    assert all(a[1] <= b[0] for a, b in pairwise(spans))
    assert run(MemoryPool(SimDriver()), trace)[1] == addresses
    for block in live:
        pool.free(block)
    check(pool, [])
    assert all(free and size % SLAB == 0 for _, size, free in pool.pieces())  # one piece a segment
    pool.empty_cache()
    assert (pool.stats().reserved, list(pool.pieces())) == (0, [])
    assert pool.driver.mem_info()[0] == pool.driver.mem_info()[1]


def test_a_repeated_step_requests_nothing_from_the_driver() -> None:
    driver = SimDriver()
    pool = MemoryPool(driver)
    sizes = np.random.default_rng(0).integers(1, 3 * MIB, 40).tolist()
    counts = []
    for _ in range(5):
        for block in [pool.alloc(n) for n in sizes]:
            pool.free(block)
        counts.append(driver.allocs)
    assert counts == counts[:1] * 5


def test_mixed_sizes_are_served_from_freed_blocks() -> None:
    """Twelve sizes from 1 KiB to 4 MiB, eight alive at a time; without a pool each request would go to the driver."""
    driver = SimDriver()
    pool = MemoryPool(driver)
    sizes = np.random.default_rng(0).permutation(np.tile(np.logspace(10, 22, 12, base=2).astype(int), 100)).tolist()
    held: list[Block] = []
    for n in sizes:
        if len(held) == 8:
            pool.free(held.pop(0))
        held.append(pool.alloc(n))
    assert pool.stats().allocs == len(sizes) == 1200
    assert driver.allocs < 0.2 * len(sizes)


def test_statistics_of_a_small_trace_are_exact() -> None:
    pool = MemoryPool(SimDriver())
    a = pool.alloc(1000, owner="a")  # class 1024
    b = pool.alloc(3 * MIB, owner="b")  # class 3 MiB, a segment of 4
    s = pool.stats()
    assert (s.live, s.waste, s.reserved, s.cached) == (1000 + 3 * MIB, 24, 6 * MIB, 3 * MIB - 1024)
    pool.free(a)
    s = pool.stats()
    assert (s.live, s.peak, s.waste, s.cached, s.allocs, s.frees) == (3 * MIB, 1000 + 3 * MIB, 0, 3 * MIB, 2, 1)
    pool.reset_peak()
    assert pool.stats().peak == 3 * MIB
    assert pool.empty_cache() == 2 * MIB
    assert "reserved" in pool.summary()
    assert f"{4 * MIB:,}" in pool.summary()
    pool.free(b)


def test_blocks_above_a_gibibyte_have_their_own_segment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(np, "full", lambda n, *rest: np.empty(n, np.uint8))  # untouched pages take no memory
    pool = MemoryPool(SimDriver())
    big = pool.alloc(DIRECT + 1)
    address = big.address
    pool.free(big)
    small = pool.alloc(5 * MIB)
    assert small.address != address  # not cut out of it
    assert pool.alloc(DIRECT + 1).address == address


class LastStreamOnly(MemoryPool):
    """The mistake: waits for the stream that used a block last, and for no other."""

    def free(self, block: Block) -> None:
        block.streams = {max(block.streams)}
        super().free(block)


def shuffle(pool: MemoryPool, driver: SimDriver, seed: int) -> None:
    rng = np.random.default_rng(seed)
    streams = [0, driver.stream(), driver.stream()]
    live: list[tuple[Block, int]] = []
    for _ in range(200):
        if live and rng.random() < 0.5:
            pool.free(live.pop(int(rng.integers(len(live))))[0])
            continue
        stream = streams[int(rng.integers(3))]
        block = pool.alloc(int(rng.integers(1, 4000)), stream)
        driver.fill(block.address, 1, block.nbytes, stream)
        event = driver.record(stream)
        for other in streams:
            if other != stream and rng.random() < 0.5:
                driver.wait(other, event)
                block.streams.add(other)
                driver.copy(np.zeros(block.nbytes, np.uint8), block.address, block.nbytes, other)
        live.append((block, stream))
        if rng.random() < 0.2:
            driver.advance(streams[int(rng.integers(3))], 3)
    driver.synchronize()


@pytest.mark.parametrize("seed", range(5))
def test_a_block_of_several_streams_waits_for_each_of_them(seed: int) -> None:
    driver = SimDriver()
    shuffle(MemoryPool(driver), driver, seed)
    driver = SimDriver()
    with pytest.raises(RuleBroken, match="without a wait"):
        shuffle(LastStreamOnly(driver), driver, seed)


def test_out_of_memory_reports_usage_and_changes_nothing() -> None:
    driver = SimDriver(capacity=64 * MIB)
    pool = MemoryPool(driver)
    kept = [pool.alloc(20 * MIB, owner=name) for name in ("weights", "activations")]
    cached = pool.alloc(10 * MIB)
    driver.fill(cached.address, 0, 10 * MIB)
    pool.free(cached)
    block = pool.alloc(22 * MIB)  # fits once the cached segment, whose work is still queued, was given back
    pool.free(block)
    before = pool.stats()
    with pytest.raises(OutOfDeviceMemory) as caught:
        pool.alloc(30 * MIB)
    e = caught.value
    assert (e.asked, e.live, e.reserved, e.largest_free) == (30 * MIB, 40 * MIB, 40 * MIB, 0)
    assert e.owners == ((20 * MIB, "weights"), (20 * MIB, "activations"))
    assert "weights" in str(e)
    after = pool.stats()
    assert (after.live, after.allocs) == (before.live, before.allocs)
    pool.free(pool.alloc(24 * MIB))
    pool.empty_cache()
    pool.set_limit(41 * MIB)
    with pytest.raises(OutOfDeviceMemory):
        pool.alloc(2 * MIB)
    pool.set_limit(1.0)
    pool.free(pool.alloc(2 * MIB))
    for wrong in (-1, float("inf"), float("nan"), "2 GiB"):
        with pytest.raises(UsageError, match="invalid memory limit"):
            pool.set_limit(cast(Any, wrong))
    for b in kept:
        pool.free(b)


def test_late_finalizer_frees_only_its_own_memory() -> None:
    pool = MemoryPool(SimDriver())
    old = pool.alloc(1000)
    pool.free(old)
    new = pool.alloc(1000)
    assert new.address == old.address
    pool.free(old)
    assert (pool.stats().stale, pool.stats().live) == (1, 1000)
    pool.reset()
    pool.free(new)
    assert pool.stats().stale == 2


def test_a_failing_driver_leaves_the_pool_consistent() -> None:
    trace = [(False, 1000, 0), (False, 3 * MIB, 0), (True, 0, 0), (False, 500, 0), (True, 0, 1), (True, 0, 0)]
    counted = SimDriver()
    run(MemoryPool(counted), trace)
    for k in range(1, counted.calls + 1):
        pool = MemoryPool(SimDriver(fail_at=k))
        with pytest.raises(InjectedFault):
            run(pool, trace)
        check(pool, list(pool._blocks.values()))


@pytest.mark.parametrize(("text", "limit"), [("1048576", MIB), ("0.25", 2 * MIB), ("1.0", 8 * MIB), ("", None)])
def test_the_environment_sets_the_limit_of_a_pool(
    monkeypatch: pytest.MonkeyPatch, text: str, limit: int | None
) -> None:
    monkeypatch.setenv("GRAPHWRIGHT_CUDA_LIMIT", text)
    assert MemoryPool(SimDriver(capacity=8 * MIB)).limit == limit
    assert MemoryPool(SimDriver(capacity=8 * MIB), 3 * MIB).limit == 3 * MIB
    monkeypatch.setenv("GRAPHWRIGHT_CUDA_LIMIT", str(2 * MIB))
    pool = MemoryPool(SimDriver(capacity=8 * MIB))
    block = pool.alloc(1000)
    with pytest.raises(OutOfDeviceMemory):
        pool.alloc(2 * MIB)
    pool.free(block)


@pytest.mark.parametrize("text", ["half", "-1", "nan", "2 GiB"])
def test_an_invalid_limit_in_the_environment_is_refused(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setenv("GRAPHWRIGHT_CUDA_LIMIT", text)
    with pytest.raises(UsageError, match="invalid memory limit"):
        MemoryPool(SimDriver())
