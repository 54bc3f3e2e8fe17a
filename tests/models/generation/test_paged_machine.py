"""Random use of a paged cache beside plain lists: same rows, no block lost, none held twice."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, rule
from uneven import uneven

from graphwright.models import CacheFull, PagedCache

Draw = Callable[[int, int], int]
PROGRAM = uneven()
SHAPES = [(4, 16), (4, 16), (1, 8), (1, 16)]  # k and v of both attentions
BLOCKS, BLOCK, LIVE, MARKS = 12, 4, 6, 4


class Beside:
    """A cache, and per live sequence or snapshot its rows as a list: a row holds its id, plus the number of its pool.

    `draw(low, high)` chooses, both ends included.
    """

    ACTIONS = ("sequence", "append", "append", "append", "fork", "truncate", "snapshot", "restore", "reserve",
               "release", "keep", "match", "evict")  # fmt: skip

    def __init__(self) -> None:
        self.cache = PagedCache(PROGRAM, blocks=BLOCKS, block=BLOCK, poison=True)
        self.live: list[tuple] = []
        self.marks: list[tuple] = []
        self.next = 1

    def act(self, what: str, draw: Draw) -> None:
        if what in ("sequence", "evict"):
            getattr(self, what)(draw)
        elif self.live:
            getattr(self, what)(draw, *self.live[draw(0, len(self.live) - 1)])
        self.check(draw)

    def sequence(self, draw: Draw) -> None:
        if len(self.live) < LIVE:
            self.live.append((self.cache.sequence(), []))

    def append(self, draw: Draw, s, rows) -> None:
        first, count = (100, draw(0, 11)) if draw(0, 1) else (self.next, draw(0, 11))  # often rows that others have too
        ids = list(range(first, first + count))
        self.next += count * (first == self.next)
        made = [np.broadcast_to(np.array(ids, "f4")[:, None], (g, count, d)) + i for i, (g, d) in enumerate(SHAPES)]
        try:
            s.append(made[::2], made[1::2], ids)
            rows += ids
        except CacheFull:
            pass

    def keep(self, draw: Draw, s, rows) -> None:
        self.cache.prefix.insert(b"root", s.tokens[0], s.table)

    def match(self, draw: Draw, s, rows) -> None:
        ids = np.array(rows[: draw(0, len(rows))] + [7] * draw(0, 2), np.int64)
        found = self.cache.prefix.match(b"root", ids)
        assert len(found) <= max(len(ids) - 1, 0) // BLOCK
        self.holds(found, ids[: len(found) * BLOCK].tolist(), draw(0, len(SHAPES) - 1))
        self.cache.pool.drop(found)

    def fork(self, draw: Draw, s, rows) -> None:
        if len(self.live) < LIVE:
            self.live.append((s.fork(), list(rows)))

    def truncate(self, draw: Draw, s, rows) -> None:
        length = draw(0, len(rows))
        s.truncate(length)
        del rows[length:]

    def snapshot(self, draw: Draw, s, rows) -> None:
        if len(self.marks) < MARKS:
            self.marks.append((s.snapshot(), list(rows)))

    def restore(self, draw: Draw, s, rows) -> None:
        if self.marks:
            mark, then = self.marks[draw(0, len(self.marks) - 1)]
            s.restore(mark)
            rows[:] = then

    def reserve(self, draw: Draw, s, rows) -> None:
        before = list(s.table)
        try:
            s.reserve(draw(0, 9))
        except CacheFull:
            assert s.table == before

    def release(self, draw: Draw, s, rows) -> None:
        held = [*self.live, *self.marks]
        gone = draw(0, len(held) - 1)
        held[gone][0].release()
        self.live, self.marks = (
            [h for h in some if h is not held[gone]] for some in (self.live, self.marks)
        )  # fmt: skip

    def evict(self, draw: Draw) -> None:
        able, free, wanted = self.cache.prefix.evictable, self.cache.pool.free, draw(1, 3)
        assert self.cache.prefix.evict(wanted) == min(wanted, able)
        assert self.cache.pool.free == free + min(wanted, able)

    def holds(self, table: list[int], rows: list[int], i: int) -> None:
        """The blocks of a table hold these rows in pool i."""
        pool = list(self.cache.variables.values())[i].data.to_numpy()
        found = pool[table].swapaxes(1, 2).reshape(-1, *SHAPES[i])[: len(rows)]
        assert (found == np.array(rows, "f4")[:, None, None] + i).all()

    def check(self, draw: Draw) -> None:
        i = draw(0, len(SHAPES) - 1)  # a row that is lost stays so until it is looked at
        for s, rows in (*self.live, *self.marks):
            assert s.length == len(rows)
            self.holds(s.table, rows, i)
        if self.live and not draw(0, 4):
            s, rows = self.live[draw(0, len(self.live) - 1)]
            for i, values in enumerate((*s.gather(0), *s.gather(1)) if rows else ()):
                assert (values == np.array(rows, "f4")[:, None] + i).all()
        tables = [s.table for s, _ in (*self.live, *self.marks)] + [self.cache.prefix.blocks]
        counts = np.bincount([b for t in tables for b in t], minlength=BLOCKS)
        assert counts.tolist() == [self.cache.pool.refs(b) for b in range(BLOCKS)]
        assert self.cache.pool.used == int((counts > 0).sum())

    def end(self) -> None:
        for holder, _ in (*self.live, *self.marks):
            holder.release()
        self.cache.prefix.clear()
        assert self.cache.pool.free == BLOCKS
        assert self.cache.holders() == []


class Machine(RuleBasedStateMachine):
    """Short walks, which are made shorter where they fail."""

    def __init__(self) -> None:
        super().__init__()
        self.beside = Beside()

    @rule(data=st.data(), what=st.sampled_from(Beside.ACTIONS))
    def act(self, data: st.DataObject, what: str) -> None:
        self.beside.act(what, lambda low, high: data.draw(st.integers(low, high)))

    def teardown(self) -> None:
        self.beside.end()


Machine.TestCase.settings = settings(max_examples=20, stateful_step_count=40, deadline=None)
TestPagedMachine = Machine.TestCase
DEEP = settings.default is not None and settings.default.max_examples >= 10_000


@pytest.mark.parametrize("seed", range(200 if DEEP else 2))
def test_a_thousand_random_calls_match_the_model(seed: int) -> None:
    """Of 200 walks under the profile `deep`."""
    rng = np.random.default_rng(seed)
    draws = iter(rng.random(1 << 14))

    def draw(low: int, high: int) -> int:
        return low + int(next(draws) * (high - low + 1))

    beside = Beside()
    for _ in range(1000):
        beside.act(Beside.ACTIONS[draw(0, len(Beside.ACTIONS) - 1)], draw)
    assert beside.next > 100  # it was not full all the time
    beside.end()
