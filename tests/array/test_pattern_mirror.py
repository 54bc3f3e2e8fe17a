"""Copies of patterns on the simulated device: cells equal the pattern's after each edit, whatever the queue holds."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import pytest

from graphwright.array import Device
from graphwright.array.pattern_mirror import CapacityGrown, PatternMirror
from graphwright.errors import UsageError
from graphwright.patterns import Pattern, sliding_window
from graphwright.patterns import table as words
from graphwright.testing.simulated_device import SimBackend

BLOCK = 16


def mirrored(pattern: Pattern, **sizes: Any) -> PatternMirror:
    return PatternMirror(pattern, SimBackend(Device("sim", 3)), **sizes)


def run(mirror: PatternMirror) -> None:
    with mirror.pattern.reading():
        mirror.send()
        mirror.apply()
        mirror.ran()
    assert mirror.backend.driver is not None
    mirror.backend.driver.synchronize()


def lists(words_of: np.ndarray, pattern: Pattern) -> list[Any]:
    """The edges of all lists with their columns and masks, read as a kernel does."""
    w = words_of.tolist()

    def at(word: int, index: int, count: int = 1, size: int = 4) -> list[int]:
        from ctypes import POINTER as pointer
        from ctypes import c_uint8, c_uint32, cast

        kind = c_uint8 if size == 1 else c_uint32
        return cast(w[word], pointer(kind))[index : index + count]

    found, each = [w[words.EDGES], w[words.GATES], w[words.TQ], w[words.TK]], BLOCK * 2
    for first, nodes, stride, count in (
        (words.IN_HEAD, words.ROWS, words.ROW_STRIDE, w[words.NQ]),
        (words.OUT_HEAD, words.COLS, words.COL_STRIDE, w[words.NK]),
    ):
        for plane in range(w[words.PLANES]):
            for i in range(count):
                node = at(nodes, plane * w[stride] + i)[0]
                left, entries = at(first + 1, node)[0], []
                bucket = at(first, node)[0] if left else 0
                while left > 0:
                    entries += at(first + 3, 16 * bucket, min(left, 16))
                    left -= 16
                    bucket = at(first + 2, bucket)[0] if left > 0 else 0
                for edge in entries:
                    ends = [at(words.INDEX, at(end, edge)[0])[0] for end in (words.SRC, words.DST)]
                    kind, bits = at(words.KIND, edge, size=1)[0], at(words.BITS, edge)[0]
                    mask = at(words.POOL, bits * each, each) if kind == words.MASKED else []
                    found.append((plane, i, edge, *ends, kind, at(words.GATE, edge)[0], mask))
    return found


def equal(mirror: PatternMirror) -> bool:
    there = mirror.table.impl.numpy()
    return lists(there, mirror.pattern) == lists(mirror.pattern.table, mirror.pattern)


def random_edit(pattern: Pattern, rng: np.random.Generator) -> None:
    rows, columns = pattern.blocks
    draw, present = rng.random(), pattern.edges()
    if draw < 0.1 and pattern.journal:
        pattern.undo()
    elif draw < 0.15 and len(present):
        with pattern.edit("gates") as e:
            e.set(present[: max(len(present) // 2, 1)], gate=int(rng.integers(3)))
    elif draw < 0.2 and len(present):
        pattern.edges["gate"] = int(rng.integers(3))  # outside of a transaction
    elif draw < 0.4 and len(present):
        pattern.cut(present[rng.random(len(present)) < 0.4])
    else:
        with pattern.edit("connect") as e:
            for _ in range(int(rng.integers(1, 6))):
                q = int(rng.integers(rows))
                k, plane = int(rng.integers(min(q + 1, columns))), int(rng.integers(pattern.planes))
                found = pattern.edge_between(q, k, plane)
                if found is None:
                    e.connect(q, k, plane)
                else:
                    e.cut(found)


@pytest.mark.parametrize(("queue", "capacity"), [(4096, None), (1, None), (7, 8)])
def test_after_each_edit_the_cells_are_those_of_the_pattern(queue: int, capacity: int | None) -> None:
    pattern = Pattern(640, BLOCK, planes=2)
    mirror = mirrored(pattern, queue=queue, capacity=capacity)
    run(mirror)
    rng = np.random.default_rng(queue)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", CapacityGrown)
        for step in range(150):
            for _ in range(int(rng.integers(1, 4))):
                random_edit(pattern, rng)
            run(mirror)
            assert equal(mirror), step
    assert (mirror.launches > 0) == (queue < 100)
    assert mirror.copies == mirror.growths + 1


def test_masks_rows_with_many_buckets_and_extension() -> None:
    pattern = sliding_window(tokens=1500, window=400, block=BLOCK)
    mirror = mirrored(pattern)
    run(mirror)
    assert equal(mirror)
    for q in range(40, 94, 6):
        pattern.connect(q, 0)  # outside of the window: key block 0 gets a long list, rows have own masks
        run(mirror)
        assert equal(mirror)
    copies = mirror.copies
    pattern.extend(1600)
    pattern.compact()
    run(mirror)
    assert equal(mirror)
    assert mirror.copies == copies + 1


def test_an_edit_sends_as_many_words_at_any_length() -> None:
    sent = []
    for tokens in (16 * 100, 16 * 1000):
        pattern = sliding_window(tokens=tokens, window=64, block=BLOCK)
        mirror = mirrored(pattern)
        run(mirror)
        pattern.connect(90, 2)
        run(mirror)
        pattern.undo()
        run(mirror)
        sent.append(mirror.sent)
    assert sent[0] == sent[1] <= 48


def test_words_of_a_run_that_was_not_launched_are_sent_again() -> None:
    pattern = Pattern(64, BLOCK)
    mirror = mirrored(pattern)
    run(mirror)
    pattern.connect(1, 0)
    with pattern.reading():
        mirror.send()  # the run fails before the kernel of edits
    pattern.connect(2, 1)
    run(mirror)
    assert equal(mirror)


def test_growth_at_the_edge_of_the_capacity_is_reported() -> None:
    pattern = Pattern(640, BLOCK)
    mirror = mirrored(pattern, capacity=8)
    for k in range(8):
        pattern.connect(30, k)
        run(mirror)
    assert (mirror.growths, mirror.capacity) == (0, 8)
    table = mirror.table
    pattern.connect(30, 8)
    with pytest.warns(CapacityGrown, match="room for 8 edges before, 13 now"):
        run(mirror)
    assert (mirror.growths, mirror.capacity) == (1, 13)
    assert mirror.table is not table
    assert equal(mirror)


def test_sizes_that_are_too_small_are_refused() -> None:
    pattern = sliding_window(tokens=160, window=64, block=BLOCK)
    for sizes in ({"capacity": 3}, {"queue": 0}):
        with pytest.raises(UsageError, match="too small"):
            mirrored(pattern, **sizes)
