"""One sequence in a paged cache: a list of blocks and a length. Forks share blocks; the first write copies one.

Invariant: the length is the sequence's own, never the block's; rows behind it are nobody's and are not read.
"""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as Several
from contextlib import contextmanager
from itertools import count
from threading import RLock
from typing import TYPE_CHECKING, Any
from weakref import finalize

import numpy as np

from graphwright.array import NDArray, from_numpy
from graphwright.errors import ShapeError, UsageError
from graphwright.models.errors import BlockError, PromptError
from graphwright.models.generation.cache import CHUNK, ENDLESS, KVCache, independent, numbers
from graphwright.models.generation.sampling import need
from graphwright.models.generation.text import check_ids
from graphwright.program import Released

if TYPE_CHECKING:
    from graphwright.models.generation.block_pool import BlockPool
    from graphwright.models.generation.paged import PagedCache
    from graphwright.models.generation.sampling import SamplingRequest


class PagedSnapshot:
    """A place of a sequence to come back to; holds its blocks until it is released.

    Attributes:
        table: its blocks.
        tokens: ids at that time, [1, length].
    """

    def __init__(self, s: Sequence) -> None:
        self.cache, self.table, self.tokens = s.cache, s.blocks(), s.tokens
        self.facts = s.facts()
        self.released = False
        s.cache.pool.hold(self.table)
        s.cache.held(self)
        finalize(self, _let_go, s.cache.pool, self.table)

    @property
    def length(self) -> int:
        """Rows at that time."""
        return self.tokens.shape[1]

    def release(self) -> None:
        """Let go of the blocks; again is no harm."""
        with self.cache.lock:
            self.released = True
            _let_go(self.cache.pool, self.table)


def _let_go(pool: BlockPool, table: list[int]) -> None:
    pool.drop(table)
    table.clear()


class Sequence(KVCache):
    """Rows of one sequence; `PagedCache.sequence()` makes one.

    Attributes:
        cache: whose blocks it holds.
        table: its blocks, in order.
        reused: rows that the last prefill found in the cache.
        stream: number of the random stream that `Model.decode` draws from: 0, and a number of its own for each fork.
    """

    def __init__(self, cache: PagedCache) -> None:
        super().__init__(cache.program, 1, cache.watch)
        self.cache = cache
        self.table: list[int] = []
        self.reused = self.stream = 0
        self._forks = count(1)  # numbers of streams, of all that come from one prompt
        self._length = 0
        self._given = ENDLESS  # the first row that was not computed here
        self._released = False
        self._busy = RLock()
        finalize(self, _let_go, cache.pool, self.table)

    @property
    def capacity(self) -> int:
        """Rows that it could have, were it alone."""
        return self.cache.pool.cap * self.cache.block

    @property
    def length(self) -> int:
        """Rows filled. Raises: Released."""
        if self._released:
            raise Released("this sequence was released", fix="cache.sequence()")
        return self._length

    @contextmanager
    def alone(self) -> Iterator[None]:
        """This thread changes the sequence, and no other. Raises: UsageError if another one does already."""
        if not self._busy.acquire(blocking=False):
            raise UsageError("a sequence is used by one thread at a time", fix="sequence.fork() per thread")
        try:
            with self.cache.lock:
                yield
        finally:
            self._busy.release()

    # -- filling -----------------------------------------------------------------------------------------------------
    def step(
        self,
        ids: np.ndarray,
        *,
        all_logits: bool = False,
        allow_stale: bool = False,
        draws: Several[SamplingRequest] = (),
    ) -> NDArray:
        """As `KVCache.step`. Raises also: UsageError if another thread is in a step of this sequence."""
        with self.alone():
            return super().step(ids, all_logits=all_logits, allow_stale=allow_stale, draws=draws)

    def prefill(self, ids: np.ndarray, *, chunk: int = CHUNK, allow_stale: bool = False) -> np.ndarray:
        """As `KVCache.prefill`; the first rows may be found in the cache, `reused` says how many."""
        with self.alone():
            self.reused = 0
            if self.length:
                return super().prefill(ids, chunk=chunk, allow_stale=allow_stale)
            ids = self._fitting(ids)
            self.admit(allow_stale)
            if ids.shape[1] <= independent(self.program):
                self.table[:] = self.cache.prefix.match(self.cache.root(self.fingerprints), ids[0])
            self._length = self.reused = len(self.table) * self.cache.block
            self.tokens = ids[:, : self._length]
            try:
                return super().prefill(ids[:, self._length :], chunk=chunk, allow_stale=allow_stale)
            except BaseException:
                self.cut(0)
                raise

    def append(self, k: Several[Any], v: Several[Any], ids: Any = None) -> None:
        """Rows computed elsewhere: per attention, k and v [kv heads, n, head dim]. The length rises once, at the end.

        They are this sequence's and its forks' alone, and not kept for prompts that begin alike.

        Args:
            k, v: rows.
            ids: of these rows, [n]; without them they cannot be computed again.
        Raises: ShapeError, DTypeError, PromptError for ids that are none or not n, CacheFull: with nothing changed.
        """
        with self.alone():
            pools, length = self.cache.pools(), self.length
            if 2 * len(k) != len(pools) or len(v) != len(k):
                expected, got = len(pools) // 2, (len(k), len(v))
                raise ShapeError("a key and a value for every attention", expected=expected, got=got)
            rows = [a if isinstance(a, NDArray) else from_numpy(a) for pair in zip(k, v, strict=True) for a in pair]
            n = rows[0].shape[1] if rows and len(rows[0].shape) == 3 else 0
            shapes = [(p.shape[1], n, p.shape[3]) for p in pools]
            if [r.shape for r in rows] != shapes:
                raise ShapeError("a key and a value for every attention", expected=shapes, got=[r.shape for r in rows])
            tokens = np.full((1, n), -1) if ids is None or not n else check_ids(list(ids), ENDLESS)
            if tokens.shape != (1, n):
                raise PromptError("an id for every row", expected=n, got=list(tokens.shape))
            if not length:
                self.admit(False)
            self.reserve(n)
            try:
                self._write(pools, rows, length, n)
            except BaseException:
                self._trim(length)
                raise
            self._length += n
            self.tokens, self._logits, self._drawn = np.concatenate([self.tokens, tokens], axis=1), None, None
            self._given = min(self._given, length) if n else self._given

    def _write(self, pools: list[NDArray], rows: list[NDArray], at: int, n: int) -> None:
        block = self.cache.block
        for pool, new in zip(pools, rows, strict=True):
            done = 0
            while done < n:
                page, inside = self._place(at + done)
                some = min(block - inside, n - done)
                pool[page, :, inside : inside + some].copy_from(new[:, done : done + some])
                done += some

    def reserve(self, rows: int) -> None:
        """Make room for so many rows more, the block they begin in its own. All or nothing. Raises: CacheFull."""
        need("rows", rows)
        with self.alone():
            at, inside = divmod(self.length, self.cache.block)
            more = max(-(-(self.length + rows) // self.cache.block) - len(self.table), 0)
            self._room(more, at, inside if rows > 0 else 0)

    def _room(self, more: int, at: int, rows: int) -> None:
        """So many blocks more, and the one at a place of the table as its own, with the first `rows` > 0 it has."""
        cache, pool = self.cache, self.cache.pool
        shared = rows > 0 and pool.refs(self.table[at]) > 1
        if shared and pool.refs(self.table[at]) == 2 and pool.free + cache.prefix.evictable == more:
            shared = not cache.prefix.forget(self.table[at])  # where nothing else makes room, it is kept no more
        new = cache.claim(more + shared)
        if shared:
            cache.copy_block(self.table[at], new[-1], rows)
            pool.drop([self.table[at]])
            self.table[at] = new.pop()
        self.table += new

    # -- as a kind of cache --------------------------------------------------------------------------------------------
    def grew(self, rows: int) -> None:
        """So many rows were written behind the length."""
        self._length += rows

    def took(
        self, ids: np.ndarray, last: np.ndarray, draws: Several[SamplingRequest] = (), chosen: np.ndarray | None = None
    ) -> None:
        """As `KVCache.took`; a block that was filled is kept for prompts that begin alike."""
        super().took(ids, last, draws, chosen)
        block = self.cache.block
        filled = self._length // block > (self._length - ids.shape[1]) // block
        if filled and not self.stale_runs:
            own = self.tokens[0, : min(self._given, self._stretched)]
            self.cache.prefix.insert(self.cache.root(self.fingerprints), own, self.table)

    def last_logits(self, *, allow_stale: bool = False) -> np.ndarray:
        """As `KVCache.last_logits`. Raises also: CacheFull if a shared block would have to be copied for it."""
        with self.alone():
            self.length  # noqa: B018  # raises for a released sequence
            given = self._given
            try:
                return super().last_logits(allow_stale=allow_stale)
            finally:
                self._given = given  # its last row was run again, and put back

    def truncate(self, length: int) -> None:
        """As `KVCache.truncate`."""
        with self.alone():
            super().truncate(length)

    def refill(self) -> None:
        """As `KVCache.refill`."""
        with self.alone():
            super().refill()

    def _run(
        self, ids: np.ndarray, all_logits: bool, draws: Several[SamplingRequest]
    ) -> tuple[NDArray, np.ndarray | None]:
        return self.cache.run([self], ids, all_logits, draws)

    def _fits(self) -> bool:
        return self.cache.fits()

    def _start(self) -> None:
        self.cache.start()

    def cut(self, length: int) -> None:
        """As `KVCache.cut`."""
        with self.cache.lock:
            self._trim(length)
            self._length = length
            self._forget(length)
            if length <= self._given:
                self._given = ENDLESS

    def _trim(self, length: int) -> None:
        """Let go of the blocks behind `length`."""
        keep = -(-length // self.cache.block)
        dropped = self.table[keep:]
        del self.table[keep:]
        self.cache.pool.drop(dropped)

    def _own(self, at: int) -> None:
        page, inside = divmod(at, self.cache.block)
        self._room(0, page, inside + 1)

    def _regrow(self, length: int) -> None:
        self.reserve(max(length - self._length, 0))
        self._length = length

    def _row(self, at: int) -> Iterator[NDArray]:
        block, inside = self._place(at)
        for pool in self.cache.pools():
            yield pool[block, :, inside]

    def _place(self, position: int) -> tuple[int, int]:
        at, inside = divmod(position, self.cache.block)
        return self.table[at], inside

    # -- looking -----------------------------------------------------------------------------------------------------
    def lookup(self, position: int) -> tuple[int, int]:
        """Block and row of a position. Raises: BlockError outside the length."""
        need("position", position)
        if not 0 <= position < self.length:
            raise BlockError("no row at this position", expected=f"0..{self.length - 1}", got=position)
        return self._place(position)

    def blocks(self) -> list[int]:
        """The blocks that hold its rows, a copy."""
        return self.table[: -(-self.length // self.cache.block)]

    def gather(self, layer: int | str) -> tuple[np.ndarray, np.ndarray]:
        """Keys and values of an attention (its path or number) as copies, [kv heads, length, head dim].

        Floats that numpy does not have are widened to float32.
        """
        k, v = (views for views in self.kv(layer))
        return tuple(np.concatenate(t, axis=1) if t else np.zeros((0, 0, 0), np.float32) for t in (k, v))  # pyright: ignore[reportReturnType]

    def kv(self, layer: int | str) -> tuple[list[np.ndarray], list[np.ndarray]]:
        """Keys and values of an attention by block, read-only [kv heads, rows, head dim].

        Views of the pool; copies where it lies on a device, and of floats that numpy does not have (as float32).
        """
        keys = list(self.cache.variables)
        paths = [key.removeprefix("cache.").removesuffix(".k") for key in keys[::2]]
        if layer not in paths and not (isinstance(layer, int) and 0 <= layer < len(paths)):
            raise UsageError("no such attention", expected=f"{', '.join(paths)}, or their number", got=layer)
        at = layer if isinstance(layer, int) else paths.index(layer)
        pools, rows, size = self.cache.pools(), self.length, self.cache.block
        found: tuple[list[np.ndarray], list[np.ndarray]] = ([], [])
        for pool, views in zip(pools[2 * at : 2 * at + 2], found, strict=True):
            for i, block in enumerate(self.blocks()):
                view = numbers(pool[block, :, : min(size, rows - i * size)])
                view.flags.writeable = False
                views.append(view)
        return found

    # -- branching ---------------------------------------------------------------------------------------------------
    def facts(self) -> tuple[Any, ...]:
        """What a fork or snapshot takes along beside blocks and ids."""
        of_rows = self._length, dict(self.fingerprints), self.stale_runs, self._stretched, self._given
        return *of_rows, self._logits, self._logits_of

    def _take(self, table: list[int], tokens: np.ndarray, facts: tuple[Any, ...]) -> None:
        self.table[:], self.tokens = table, tokens
        self._length, prints, self.stale_runs, self._stretched, self._given, self._logits, self._logits_of = facts
        self.fingerprints, self._drawn = dict(prints), None
        self._seen.clear()

    def fork(self) -> Sequence:
        """A sequence of its own with the same rows: shares all blocks, the last one until either writes to it."""
        with self.cache.lock:
            child, table = self.cache.sequence(), self.blocks()
            self.cache.pool.hold(table)
            child._take(table, self.tokens, self.facts())
            child._forks, child.stream = self._forks, next(self._forks)
            return child

    def snapshot(self) -> PagedSnapshot:
        """A place to come back to, which holds the blocks until it is released."""
        with self.cache.lock:
            return PagedSnapshot(self)

    def restore(self, mark: PagedSnapshot) -> None:
        """Go back, any number of times. Raises: UsageError for no snapshot of this cache; Released."""
        if not isinstance(mark, PagedSnapshot) or mark.cache is not self.cache:
            raise UsageError("no snapshot of this cache", got=type(mark).__name__, expected="what snapshot() gave")
        if mark.released:
            raise Released("this snapshot was released")
        self.length  # noqa: B018  # raises for a released sequence
        with self.alone():
            old = list(self.table)
            self.cache.pool.hold(mark.table)
            self._take(list(mark.table), mark.tokens, mark.facts)
            self.cache.pool.drop(old)

    def release(self) -> None:
        """Give the blocks back; the ids stay. Again is no harm; any other use raises `Released`."""
        with self.cache.lock:
            _let_go(self.cache.pool, self.table)
            self._released = True

    def __enter__(self) -> Sequence:
        return self

    def __exit__(self, *error: object) -> None:
        self.release()

    def __repr__(self) -> str:
        state = "released" if self._released else f"{self._length} rows in {len(self.table)} blocks"
        return f"Sequence({state})"
