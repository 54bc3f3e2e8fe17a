"""Random use of a paged cache beside plain lists: same rows, no block lost, none held twice."""

from __future__ import annotations

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from uneven import uneven

from graphwright.models import CacheFull, PagedCache

PROGRAM = uneven()
SHAPES = [(4, 16), (4, 16), (1, 8), (1, 16)]  # k and v of both attentions


class Machine(RuleBasedStateMachine):
    """`dense` holds, per live sequence or snapshot, its rows as a list of one float per row."""

    def __init__(self) -> None:
        super().__init__()
        self.cache = PagedCache(PROGRAM, blocks=12, block=4, poison=True)
        self.live: list[tuple] = []
        self.marks: list[tuple] = []
        self.next = 1.0

    def pick(self, data: st.DataObject, of: list[tuple]) -> int:
        return data.draw(st.integers(0, len(of) - 1))

    @rule()
    def sequence(self) -> None:
        self.live.append((self.cache.sequence(), []))

    @precondition(lambda self: self.live)
    @rule(data=st.data(), count=st.integers(0, 11), alike=st.booleans())
    def append(self, data: st.DataObject, count: int, alike: bool) -> None:
        s, rows = self.live[self.pick(data, self.live)]
        values = [float(v) for v in (range(100, 100 + count) if alike else np.arange(count) + self.next)]
        self.next += count
        made = [np.broadcast_to(np.array(values, "f4")[:, None], (g, count, d)) + i for i, (g, d) in enumerate(SHAPES)]
        bits = [t.copy() for t in s.gather(0)]
        try:
            s.append(made[::2], made[1::2], [int(v) % 30 for v in values])
            rows += values
        except CacheFull:
            assert all(np.array_equal(a, b) for a, b in zip(bits, s.gather(0), strict=True))
        if data.draw(st.booleans()):
            self.cache.prefix.insert(b"root", s.tokens[0], s.table)

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def fork(self, data: st.DataObject) -> None:
        s, rows = self.live[self.pick(data, self.live)]
        self.live.append((s.fork(), list(rows)))

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def truncate(self, data: st.DataObject) -> None:
        s, rows = self.live[self.pick(data, self.live)]
        length = data.draw(st.integers(0, len(rows)))
        s.truncate(length)
        del rows[length:]

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def snapshot(self, data: st.DataObject) -> None:
        s, rows = self.live[self.pick(data, self.live)]
        self.marks.append((s.snapshot(), list(rows)))

    @precondition(lambda self: self.live and self.marks)
    @rule(data=st.data())
    def restore(self, data: st.DataObject) -> None:
        s, rows = self.live[self.pick(data, self.live)]
        mark, then = self.marks[self.pick(data, self.marks)]
        s.restore(mark)
        rows[:] = then

    @precondition(lambda self: self.live)
    @rule(data=st.data(), rows=st.integers(0, 9))
    def reserve(self, data: st.DataObject, rows: int) -> None:
        s, _ = self.live[self.pick(data, self.live)]
        before = (list(s.table), self.cache.pool.used - len(self.cache.prefix))
        try:
            s.reserve(rows)
        except CacheFull:
            assert before[0] == s.table

    @precondition(lambda self: self.live or self.marks)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        held = [*self.live, *self.marks]
        held[i := self.pick(data, held)][0].release()
        (self.live if i < len(self.live) else self.marks).pop(i if i < len(self.live) else i - len(self.live))

    @rule(wanted=st.integers(1, 3))
    def evict(self, wanted: int) -> None:
        able, free = self.cache.prefix.evictable, self.cache.pool.free
        assert self.cache.prefix.evict(wanted) == min(wanted, able)
        assert self.cache.pool.free == free + min(wanted, able)

    @invariant()
    def rows_are_those_of_the_lists(self) -> None:
        for s, rows in self.live:
            assert s.length == len(rows)
            for layer in (0, 1):
                for part, values in enumerate(s.gather(layer)):
                    i = 2 * layer + part
                    want = np.broadcast_to(np.array(rows, "f4")[:, None] + i, (SHAPES[i][0], len(rows), SHAPES[i][1]))
                    assert not rows or np.array_equal(values, want)

    @invariant()
    def every_holder_is_counted(self) -> None:
        tables = [s.table for s, _ in (*self.live, *self.marks)] + [self.cache.prefix.blocks]
        counts = np.bincount([b for t in tables for b in t], minlength=12)
        assert counts.tolist() == [self.cache.pool.refs(b) for b in range(12)]
        assert self.cache.pool.used == int((counts > 0).sum())

    def teardown(self) -> None:
        for holder, _ in (*self.live, *self.marks):
            holder.release()
        self.cache.prefix.clear()
        assert self.cache.pool.free == 12
        assert self.cache.holders() == []


DEEP = settings.default is not None and settings.default.max_examples >= 10_000
"""Of the profile `deep`: 200 machines of 1000 steps."""
Machine.TestCase.settings = settings(
    max_examples=200 if DEEP else 25, stateful_step_count=1000 if DEEP else 40, deadline=None
)
TestPagedMachine = Machine.TestCase
