"""One sequence in a paged cache: a list of blocks and a length. Forks share blocks, which are copied before a write.

Invariant: a sequence reads only the entries below its own length, even if its last block holds more.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import count
from threading import RLock
from typing import TYPE_CHECKING, Any
from weakref import finalize

import numpy as np

from graphwright.arguments import checked
from graphwright.array import NDArray, from_numpy
from graphwright.errors import ShapeError, UsageError
from graphwright.models.errors import BlockError, PromptError, SequenceReleased
from graphwright.models.generation.cache import CHUNK, ENDLESS, KVCache, independent
from graphwright.models.generation.cached_program import StepResult
from graphwright.models.generation.sampling import Requests
from graphwright.models.generation.text import check_ids
from graphwright.settings import Range

if TYPE_CHECKING:
    from graphwright.models.generation.paged import BlockPool, PagedCache


class PagedSnapshot:
    """A saved state of a sequence: ids [1, length], and blocks (`table`) that stay allocated until it is released."""

    def __init__(self, s: CachedSequence) -> None:
        self.cache, self.table, self.tokens = s.cache, s.blocks(), s.tokens
        self.facts = s.facts()
        self.released = False
        s.cache.pool.hold(self.table)
        s.cache.register(self)
        finalize(self, _free, s.cache.pool, self.table)

    @property
    def length(self) -> int:
        """Number of entries when the snapshot was made."""
        return self.tokens.shape[1]

    def release(self) -> None:
        """Release the blocks; a second call does nothing."""
        with self.cache.lock:
            self.released = True
            _free(self.cache.pool, self.table)


def _free(pool: BlockPool, table: list[int]) -> None:
    pool.drop(table)
    table.clear()


@checked
class CachedSequence(KVCache):
    """The KV cache of one sequence, made by `PagedCache.sequence()`.

    Attributes:
        cache: the cache that provides the blocks.
        table: numbers of its blocks, in order.
        reused: number of entries that the last prefill found in the cache.
        stream: number of the random stream that `Model.decode` draws from: 0, and another number for each fork.
    """

    def __init__(self, cache: PagedCache) -> None:
        super().__init__(cache.program, 1, cache.watch)
        self.cache, self.steps = cache, cache.steps
        self.table: list[int] = []
        self.reused = self.stream = 0
        self._forks = count(1)  # stream numbers, shared by all forks of one prompt
        self._length = 0
        self._given = ENDLESS  # index of the first entry that was added by `append`
        self._released = False
        self._busy = RLock()
        finalize(self, _free, cache.pool, self.table)

    @property
    def capacity(self) -> int:
        """Largest length that the sequence could reach if it were the only one in the cache."""
        return self.cache.pool.cap * self.cache.block

    @property
    def length(self) -> int:
        """Number of entries. Raises: SequenceReleased."""
        if self._released:
            raise SequenceReleased("this sequence was released", fix="make a new one with cache.sequence()")
        return self._length

    @contextmanager
    def exclusive(self) -> Iterator[None]:
        """Lock the sequence for this thread. Raises: UsageError if another thread is using it."""
        if not self._busy.acquire(blocking=False):
            raise UsageError("another thread is using this sequence", fix="give each thread a sequence.fork()")
        try:
            with self.cache.lock:
                yield
        finally:
            self._busy.release()

    # -- filling -----------------------------------------------------------------------------------------------------
    def prefill(self, ids: np.ndarray, *, chunk: int = CHUNK, allow_stale: bool = False) -> np.ndarray:
        """Append ids in chunks, the first `reused` from blocks cached for them; return the last logits [1, vocab]."""
        with self.exclusive():
            self.reused = 0
            if self.length:
                return super().prefill(ids, chunk=chunk, allow_stale=allow_stale)
            ids = self._checked(ids)
            self.admit(allow_stale)
            if ids.shape[1] <= independent(self.program):
                self.table[:] = self.cache.prefix.match(self.cache.root(self.fingerprints), ids[0])
            self._length = self.reused = len(self.table) * self.cache.block
            self.tokens = ids[:, : self._length]
            self._rows.record(self.program, 0, self._length)
            try:
                return super().prefill(ids[:, self._length :], chunk=chunk, allow_stale=allow_stale)
            except BaseException:
                self.rollback(0)
                raise

    def append(self, k: Sequence[Any], v: Sequence[Any], ids: Any = None) -> None:
        """Append entries that were computed elsewhere.

        These entries belong to this sequence and its forks, and are not cached for other prompts.

        Args:
            k, v: for each attention an array of keys and one of values, [kv heads, n, head dim].
            ids: token ids of these entries, [n]; without ids the entries cannot be recomputed.
        Raises: ShapeError, DTypeError, PromptError or CacheFull, with nothing changed.
        """
        with self.exclusive():
            pools, length = self.cache.pools(), self.length
            if 2 * len(k) != len(pools) or len(v) != len(k):
                what = "the number of key or value arrays differs from the number of attention ops"
                raise ShapeError(what, expected=f"{len(pools) // 2} of each", got=f"{len(k)} keys, {len(v)} values")
            entries = [a if isinstance(a, NDArray) else from_numpy(a) for pair in zip(k, v, strict=True) for a in pair]
            n = entries[0].shape[1] if entries and len(entries[0].shape) == 3 else 0
            shapes = [(p.shape[1], n, p.shape[3]) for p in pools]
            if (got := [e.shape for e in entries]) != shapes:
                raise ShapeError("keys or values have the wrong shape", expected=shapes, got=got)
            tokens = np.full((1, n), -1) if ids is None or not n else check_ids(list(ids), ENDLESS)
            if tokens.shape != (1, n):
                what = "the shape of ids does not match the number of appended entries"
                raise PromptError(what, where="ids", expected=[1, n], got=list(tokens.shape))
            if not length:
                self.admit(False)
            self.reserve(n)
            try:
                self._write(pools, entries, length, n)
            except BaseException:
                self._trim(length)
                raise
            self._length += n
            self.tokens, self._logits, self._sampled = np.concatenate([self.tokens, tokens], axis=1), None, None
            self._given = min(self._given, length) if n else self._given

    def _write(self, pools: list[NDArray], entries: list[NDArray], at: int, n: int) -> None:
        block = self.cache.block
        for start in range(at - at % block, at + n, block) if n else ():
            low, high = max(start, at), min(start + block, at + n)
            page = self.table[start // block]
            for pool, new in zip(pools, entries, strict=True):
                pool[page, :, low - start : high - start].copy_from(new[:, low - at : high - at])

    def reserve(self, count: int) -> None:
        """Allocate room for `count` more entries; copy the last block if it is shared. On CacheFull nothing changes."""
        Range(whole=True).check("count", count)
        with self.exclusive():
            at, inside = divmod(self.length, self.cache.block)
            more = max(-(-(self.length + count) // self.cache.block) - len(self.table), 0)
            self._claim(more, at, inside if count > 0 else 0)

    def _claim(self, more: int, at: int, used: int) -> None:
        """Add `more` blocks to the table; replace block `at` by a copy if it is shared and has `used` > 0 entries."""
        cache, pool = self.cache, self.cache.pool
        shared = used > 0 and pool.refs(self.table[at]) > 1
        if shared and pool.refs(self.table[at]) == 2 and pool.free + cache.prefix.evictable == more:
            shared = not cache.prefix.forget(self.table[at])  # no block is left for a copy: uncache the block instead
        new = cache.claim(more + shared)
        if shared:
            cache.copy_block(self.table[at], new[-1], used)
            pool.drop([self.table[at]])
            self.table[at] = new.pop()
        self.table += new

    # -- storage, as `KVCache` asks for it -----------------------------------------------------------------------------
    def grow(self, count: int) -> None:
        """Add `count` to the length after entries were written."""
        self._length += count

    def record(
        self, ids: np.ndarray, last: np.ndarray, requests: Requests = (), sampled: np.ndarray | None = None
    ) -> None:
        """Store ids, last logits and sampled ids of a step; cache filled blocks for prompts with the same prefix."""
        super().record(ids, last, requests, sampled)
        block = self.cache.block
        filled = self._length // block > (self._length - ids.shape[1]) // block
        if filled and not self.stale_runs:
            own = self.tokens[0, : min(self._given, self._long_from)]
            self.cache.prefix.insert(self.cache.root(self.fingerprints), own, self.table)

    def last_logits(self, *, allow_stale: bool = False) -> np.ndarray:
        """Return the last token's logits [1, vocab]. Raises: PromptError if empty; StaleCache; CacheFull."""
        with self.exclusive():
            self.length  # noqa: B018  # raises for a released sequence
            given = self._given
            try:
                return super().last_logits(allow_stale=allow_stale)
            finally:
                self._given = given  # the last entry was recomputed and restored

    def _run(self, ids: np.ndarray, all_logits: bool, requests: Requests) -> StepResult:
        return self.cache.run([self], ids, all_logits, requests)

    def _fits(self) -> bool:
        return self.cache.fits()

    def _start(self) -> None:
        self.cache.start()

    def rollback(self, length: int) -> None:
        """Release the blocks that hold only entries from index `length` on, and set the length."""
        with self.cache.lock:
            self._trim(length)
            self._length = length
            self._forget(length)
            if length <= self._given:
                self._given = ENDLESS

    def _trim(self, length: int) -> None:
        """Release the blocks that hold only entries from index `length` on."""
        keep = -(-length // self.cache.block)
        dropped = self.table[keep:]
        del self.table[keep:]
        self.cache.pool.drop(dropped)

    def _make_writable(self, at: int) -> None:
        page, inside = divmod(at, self.cache.block)
        self._claim(0, page, inside + 1)

    def _set_length(self, length: int) -> None:
        self.reserve(max(length - self._length, 0))
        self._length = length

    def _entry(self, at: int) -> Iterator[NDArray]:
        block, inside = self._locate(at)
        return (pool[block, :, inside] for pool in self.cache.pools())

    # -- inspection --------------------------------------------------------------------------------------------------
    def lookup(self, position: int) -> tuple[int, int]:
        """Return (block, index in the block) of a position. Raises: BlockError if it is outside the sequence."""
        Range(whole=True).check("position", position)
        if not 0 <= position < self.length:
            raise BlockError("this position is outside the sequence", where="position",
                             expected=f"0..{self.length - 1}", got=position)  # fmt: skip
        return self._locate(position)

    def _locate(self, position: int) -> tuple[int, int]:
        at, inside = divmod(position, self.cache.block)
        return self.table[at], inside

    def blocks(self) -> list[int]:
        """Return a copy of the list of blocks that hold entries."""
        return self.table[: -(-self.length // self.cache.block)]

    def gather(self, layer: int | str) -> tuple[np.ndarray, np.ndarray]:
        """Return copies of keys and values of an attention (path or index), [kv heads, length, head dim].

        Dtypes that numpy lacks are widened to float32.
        """
        k, v = (np.concatenate(t, axis=1) if t else np.zeros((0, 0, 0), np.float32) for t in self.kv(layer))
        return k, v

    def kv(self, layer: int | str) -> tuple[list[np.ndarray], list[np.ndarray]]:
        """Return two lists, of keys and of values of an attention: per block a read-only [kv heads, entries, head dim].

        The arrays are views of the pool, but copies if it is on a device, and float32 copies if numpy lacks its dtype.
        """
        paths = [key.removeprefix("cache.").removesuffix(".k") for key in list(self.cache.variables)[::2]]
        if layer not in paths and not (isinstance(layer, int) and 0 <= layer < len(paths)):
            raise UsageError("unknown attention", where="layer", expected=f"{', '.join(paths)}, or an index", got=layer)
        at = layer if isinstance(layer, int) else paths.index(layer)
        length, size = self.length, self.cache.block
        found: tuple[list[np.ndarray], list[np.ndarray]] = ([], [])
        for pool, views in zip(self.cache.pools()[2 * at : 2 * at + 2], found, strict=True):
            for i, block in enumerate(self.blocks()):
                view = pool[block, :, : min(size, length - i * size)].to_numpy()
                view.flags.writeable = False
                views.append(view)
        return found

    # -- branching ---------------------------------------------------------------------------------------------------
    def facts(self) -> tuple[Any, ...]:
        """Return the state that a fork or snapshot copies besides blocks and ids, such as length and logits."""
        entries = self._length, dict(self.fingerprints), self.stale_runs, self._long_from, self._given
        return *entries, self._logits, self._logits_of, self._rows.copy()

    def _adopt(self, table: list[int], tokens: np.ndarray, facts: tuple[Any, ...]) -> None:
        self.table[:], self.tokens = table, tokens
        self._length, prints, self.stale_runs, self._long_from, self._given, *rest = facts
        self._logits, self._logits_of, rows = rest
        self._rows = rows.copy()
        self.fingerprints, self._sampled = dict(prints), None
        self._counts.clear()

    def fork(self) -> CachedSequence:
        """Return a new sequence with the same entries; the two share blocks until one of them writes."""
        with self.cache.lock:
            child, table = self.cache.sequence(), self.blocks()
            self.cache.pool.hold(table)
            child._adopt(table, self.tokens, self.facts())
            child._forks, child.stream = self._forks, next(self._forks)
            return child

    def snapshot(self) -> PagedSnapshot:
        """Return a snapshot of the current state; it keeps its blocks allocated until it is released."""
        with self.cache.lock:
            return PagedSnapshot(self)

    def restore(self, mark: PagedSnapshot) -> None:
        """Restore a snapshot, which stays usable. Raises: UsageError if it is of another cache; SequenceReleased."""
        if not isinstance(mark, PagedSnapshot) or mark.cache is not self.cache:
            got = type(mark).__name__ + (" of another cache" if isinstance(mark, PagedSnapshot) else "")
            raise UsageError("this is not a snapshot of this cache", got=got, expected="a result of snapshot()")
        if mark.released:
            raise SequenceReleased("this snapshot was released", fix="make a new one with sequence.snapshot()")
        self.length  # noqa: B018  # raises for a released sequence
        with self.exclusive():
            old = list(self.table)
            self.cache.pool.hold(mark.table)
            self._adopt(list(mark.table), mark.tokens, mark.facts)
            self.cache.pool.drop(old)

    def release(self) -> None:
        """Free the blocks but keep `tokens`. A second call does nothing; any other use raises `SequenceReleased`."""
        with self.cache.lock:
            _free(self.cache.pool, self.table)
            self._released = True

    def __enter__(self) -> CachedSequence:
        return self

    def __exit__(self, *error: object) -> None:
        self.release()

    def __repr__(self) -> str:
        state = "released" if self._released else f"{self._length} tokens in {len(self.table)} blocks"
        return f"CachedSequence({state})"
