"""The paged KV cache: entries of many sequences in blocks of one pool per layer; shared prefixes are stored once.

All memory is allocated at the start. A sequence is a list of blocks and a length (`sequence.py`). Sequences may share
a block, which is copied when one of them writes; a full block is cached for later prompts with the same prefix.
Invariant: a block is either free or has owners; `refs` is the number of its owners.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from hashlib import blake2b
from itertools import count
from threading import RLock
from typing import TYPE_CHECKING, Any, TypedDict
from weakref import WeakSet

import numpy as np

from graphwright.arguments import checked
from graphwright.array import CPU, Device, NDArray, empty
from graphwright.array import dtype as named
from graphwright.autograd import Variable
from graphwright.errors import UsageError
from graphwright.models.errors import BlockError, CacheFull, PromptError, StaleCache
from graphwright.models.generation.cache import BATCH, FingerprintWatch, fill, filled, independent
from graphwright.models.generation.cached_program import LENGTHS, TABLE, Derived, StepPlans, StepResult, derive_paged
from graphwright.models.generation.pattern_rows import extend_patterns, pattern_variables
from graphwright.models.generation.sampling import Requests, check_one_each
from graphwright.models.generation.sequence import CachedSequence, PagedSnapshot
from graphwright.models.generation.text import check_ids, vocabulary
from graphwright.settings import Range

if TYPE_CHECKING:
    from graphwright.program.program import Program


class BlockPool:
    """A pool of `cap` blocks of `nbytes` bytes with reference counts; the block freed last is reused first.

    `freed` is called with the number of a block when its count becomes 0.
    """

    def __init__(self, cap: int, nbytes: int = 0, freed: Callable[[int], object] | None = None) -> None:
        self.cap, self.block_bytes, self._freed = cap, nbytes, freed
        self._free = list(range(cap - 1, -1, -1))
        self._refs = [0] * cap

    @property
    def free(self) -> int:
        """Number of free blocks."""
        return len(self._free)

    @property
    def used(self) -> int:
        """Number of blocks in use."""
        return self.cap - len(self._free)

    @property
    def bytes(self) -> int:
        """Bytes of all blocks."""
        return self.cap * self.block_bytes

    def refs(self, block: int) -> int:
        """Return the reference count of a block. Raises: BlockError if the block is outside the pool."""
        if type(block) is not int or not 0 <= block < self.cap:
            raise BlockError("this block number is outside the pool", expected=f"0..{self.cap - 1}", got=block)
        return self._refs[block]

    def take(self, count: int) -> list[int]:
        """Take `count` free blocks, each with a reference count of 1. Raises: CacheFull if fewer blocks are free."""
        if count > len(self._free):
            raise CacheFull("too few free blocks", expected=f"{count} blocks", got=f"{len(self._free)} free")
        blocks = [self._free.pop() for _ in range(count)]
        for block in blocks:
            self._refs[block] = 1
        return blocks

    def hold(self, blocks: Iterable[int]) -> None:
        """Increment the reference count of each block. Raises: BlockError for a free block; then no count changes."""
        for block in self._used(blocks):
            self._refs[block] += 1

    def drop(self, blocks: Iterable[int]) -> None:
        """Decrement the reference count of each block, and free the blocks whose count becomes 0.

        Raises: BlockError, with no count changed, for a free block or one that is listed more often than its count.
        """
        blocks = self._used(blocks)
        if excess := [block for block, count in Counter(blocks).items() if count > self._refs[block]]:
            raise BlockError("more references would be dropped than these blocks have", got=f"blocks {excess}")
        for block in blocks:
            self._refs[block] -= 1
            if not self._refs[block]:
                self._free.append(block)
                if self._freed is not None:
                    self._freed(block)

    def _used(self, blocks: Iterable[int]) -> list[int]:
        blocks = list(blocks)
        for block in blocks:
            if not self.refs(block):
                raise BlockError("cannot change the reference count of a free block", where=f"block {block}")
        return blocks


def chained(before: bytes, tokens: np.ndarray) -> bytes:
    """Return the hash of a block chain extended by one block: BLAKE2b-128 of `before` and the block's ids as int64."""
    return blake2b(before + np.ascontiguousarray(tokens, "<i8").tobytes(), digest_size=16).digest()


@dataclass(eq=False, slots=True)
class _PrefixEntry:
    key: bytes
    root: bytes
    before: _PrefixEntry | None
    tokens: np.ndarray
    block: int
    followers: int = 0
    used: int = 0


class PrefixCache:
    """Blocks cached for prompts that start with the same tokens, found by a chain of hashes of their ids.

    At most `most` blocks of the pool, of `block` tokens each, are cached. `digest` maps (hash of the chain before a
    block, ids of the block) to the hash of the chain with it.
    """

    def __init__(
        self, pool: BlockPool, block: int, most: int, digest: Callable[[bytes, np.ndarray], bytes] = chained
    ) -> None:
        self.pool, self.block, self.most, self._digest = pool, block, most, digest
        self._entries: dict[bytes, list[_PrefixEntry]] = {}
        self._clock = count(1)
        self._size = 0

    def __len__(self) -> int:
        return self._size

    @property
    def blocks(self) -> list[int]:
        """Numbers of the cached blocks."""
        return [e.block for e in self._all()]

    def _all(self) -> Iterator[_PrefixEntry]:
        return (e for found in self._entries.values() for e in found)

    @property
    def evictable(self) -> int:
        """Number of cached blocks that can be evicted: no sequence uses the block or a cached continuation of it."""
        used: set[_PrefixEntry] = set()
        for entry in self._all():
            at = entry if self.pool.refs(entry.block) > 1 else None
            while at is not None and at not in used:
                used.add(at)
                at = at.before
        return self._size - len(used)

    def match(self, root: bytes, ids: np.ndarray) -> list[int]:
        """Return the longest chain of cached blocks that `ids` [T] starts with, and increment their reference counts.

        `root`, from `PagedCache.root`, starts the chain of hashes. At most ⌊(T - 1) / block⌋ blocks are returned, so
        that at least one token is left to run.
        """
        found: list[int] = []
        entry, key = None, root
        for i in range(max(len(ids) - 1, 0) // self.block):
            tokens = ids[i * self.block : (i + 1) * self.block]
            key = self._digest(key, tokens)
            entry = self._find(key, root, entry, tokens)
            if entry is None:
                break
            entry.used = next(self._clock)
            found.append(entry.block)
        self.pool.hold(found)
        return found

    def _find(self, key: bytes, root: bytes, before: _PrefixEntry | None, tokens: np.ndarray) -> _PrefixEntry | None:
        for entry in self._entries.get(key, ()):
            if entry.root == root and entry.before is before and np.array_equal(entry.tokens, tokens):
                return entry
        return None

    def insert(self, root: bytes, ids: np.ndarray, table: Sequence[int]) -> None:
        """Cache the full blocks of a sequence with these ids and blocks `table`; `root` starts the chain of hashes."""
        entry, key = None, root
        for i in range(min(len(ids) // self.block, len(table))):
            tokens = np.array(ids[i * self.block : (i + 1) * self.block], np.int64)
            key = self._digest(key, tokens)
            known = self._find(key, root, entry, tokens)
            if known is None:
                if self._size >= self.most and not self.evict(1, keep=entry):
                    return
                known = _PrefixEntry(key, root, entry, tokens, table[i])
                self.pool.hold([table[i]])
                self._entries.setdefault(key, []).append(known)
                self._size += 1
                if entry is not None:
                    entry.followers += 1
            known.used = next(self._clock)
            entry = known

    def evict(self, wanted: int, keep: _PrefixEntry | None = None) -> int:
        """Evict up to `wanted` unused blocks except `keep`, least recently used first; return how many were evicted."""
        gone = 0
        while gone < wanted:
            leaves = [e for e in self._all() if not e.followers and e is not keep and self.pool.refs(e.block) == 1]
            if not leaves:
                break
            self._remove(min(leaves, key=lambda e: e.used))
            gone += 1
        return gone

    def forget(self, block: int) -> bool:
        """Uncache a block and all its cached continuations; return False if the block is not cached."""
        gone = {e for e in self._all() if e.block == block}
        while following := {e for e in self._all() if e.before in gone} - gone:
            gone |= following
        for entry in gone:
            self._remove(entry)
        return bool(gone)

    def clear(self) -> None:
        """Uncache all blocks."""
        self.pool.drop(self.blocks)
        self._entries, self._size = {}, 0

    def _remove(self, entry: _PrefixEntry) -> None:
        found = self._entries[entry.key]
        found.remove(entry)
        if not found:
            del self._entries[entry.key]
        if entry.before is not None:
            entry.before.followers -= 1
        self._size -= 1
        self.pool.drop([entry.block])


KINDS = ("float32", "bfloat16", "float16")


class PagedKeywords(TypedDict, total=False):
    """The keyword arguments of `PagedCache` that a cache of other kinds does not have."""

    blocks: int | None
    nbytes: int | None
    block: int
    prefix_bytes: int | None
    dtype: str | None
    poison: bool


@checked
class PagedCache:
    """Blocks of keys and values for sequences of any lengths.

    Args:
        program: the model's program.
        tokens: capacity in tokens; ⌈tokens / block⌉ + `batch` blocks are allocated.
        blocks, nbytes: the capacity in blocks or bytes instead.
        block: entries per block.
        batch: expected number of sequences, see `tokens`.
        prefix_bytes: largest size of all blocks cached for later prompts; 0 caches none. By default the whole pool:
            cached blocks are evicted when a sequence needs them.
        dtype: dtype of the entries, "float32", "bfloat16" or "float16"; by default that of the activations.
        device: the device that holds the entries and runs the steps.
        deterministic: as in `CompileOptions`, for the steps.
        poison: fill free blocks with NaN, so that a read of a free block shows up as NaN.

    Attributes:
        pool: reference counts of the blocks.
        prefix: blocks cached for later prompts.
        variables: dict from key to the pool [blocks, kv heads, block, head dim] of an attention's keys or values.
        watch: current fingerprints of the model.
        steps: compiled steps.
    Raises: UsageError for sizes below 1, or more memory than available.
    """

    def __init__(
        self, program: Program, *, tokens: int | None = None, blocks: int | None = None, nbytes: int | None = None,
        block: int = 16, batch: int = 1, prefix_bytes: int | None = None, dtype: str | None = None,
        device: Device = CPU, deterministic: bool = False, poison: bool = False,
    ) -> None:  # fmt: skip
        given = {"tokens": tokens, "blocks": blocks, "nbytes": nbytes}
        if sum(v is not None for v in given.values()) != 1:
            passed = {k: v for k, v in given.items() if v is not None}
            what = f"the capacity of the cache is {'given more than once' if passed else 'missing'}"
            raise UsageError(what, expected="exactly one of tokens, blocks and nbytes", got=passed or None)
        for name, value in {**given, "block": block, "prefix_bytes": prefix_bytes}.items():
            if value is not None or name == "block":
                Range(0 if name == "prefix_bytes" else 1, whole=True).check(name, value)
        BATCH.check("batch", batch)
        if dtype not in (None, *KINDS):
            raise UsageError("a cache cannot have this dtype", where="dtype", expected=" or ".join(KINDS), got=dtype)
        self.program, self.block, self.watch, self.lock = program, block, FingerprintWatch(program), RLock()
        self.kind, self.device, self._poison = None if dtype is None else named(dtype), device, poison
        per_block = sum(s.nbytes for s in derive_paged(program, 1, block, True, self.kind).states.values())
        if blocks is None:
            blocks = -(-tokens // block) + batch if tokens is not None else (nbytes or 0) // max(per_block, 1)
            if blocks < 1:
                what, expected = "nbytes is smaller than one block", f">= {per_block} bytes"
                raise UsageError(what, where="nbytes", expected=expected, got=nbytes)
        self.variables: dict[str, Variable] = {}
        self.steps = StepPlans(program, self._derive, device, deterministic)
        self._alive: WeakSet[CachedSequence] = WeakSet()
        self._marks: WeakSet[PagedSnapshot] = WeakSet()
        try:
            if blocks * per_block > sys.maxsize:
                raise MemoryError(f"{blocks * per_block} bytes")
            if device == CPU:
                np.empty(blocks * per_block, np.uint8)  # raises at once; lists of that many blocks would not
            self.pool = BlockPool(blocks, per_block, self._freed if poison else None)
            most = blocks if prefix_bytes is None else prefix_bytes // max(per_block, 1)
            self.prefix = PrefixCache(self.pool, block, most)
            self.start()
        except MemoryError as error:
            raise UsageError("not enough memory for this cache", got=str(error)) from error

    @property
    def nbytes(self) -> int:
        """Bytes of keys and values."""
        return self.pool.bytes

    def sequence(self) -> CachedSequence:
        """Return a new empty sequence. Release it after use, or use it in a `with` statement."""
        made = CachedSequence(self)
        self._alive.add(made)
        return made

    def holders(self) -> list[Any]:
        """Return the sequences and snapshots that own blocks."""
        with self.lock:
            return [h for h in (*self._alive, *self._marks) if h.table]

    # -- running -----------------------------------------------------------------------------------------------------
    def step(
        self, sequences: Sequence[CachedSequence], ids: Any, *, all_logits: bool = False, allow_stale: bool = False,
        requests: Requests = (),
    ) -> NDArray:  # fmt: skip
        """Append ids int64 [B, T] to B sequences, each at its own length; return logits [B, 1 or T, vocab].

        With one request per sequence the run also samples the next ids; `sequence.sampled([request])` returns them. The
        sequences may differ from step to step. Raises: StaleCache, CacheFull, PromptError, BlockError, NonFinite or
        UsageError, with no sequence changed.
        """
        batch = check_ids(ids, vocabulary(self.program))
        if len(batch) != len(sequences):
            what = "the number of rows of ids is not the number of sequences"
            raise PromptError(what, expected=len(sequences), got=len(batch))
        if len({id(s) for s in sequences}) != len(sequences):
            raise PromptError("a sequence occurs twice in one step", where="sequences")
        if any(s.cache is not self for s in sequences):
            raise BlockError("a sequence of the batch belongs to a different cache", where="sequences")
        check_one_each(requests, len(sequences))
        with ExitStack() as locks:
            for s in sequences:
                locks.enter_context(s.exclusive())  # also takes the cache's lock
            before = [s.length for s in sequences]
            try:
                for s in sequences:
                    s.admit(allow_stale)
                logits, sampled = self.run(sequences, batch, all_logits, requests)
                last = logits.to_numpy("float32")[:, -1]
                for i, s in enumerate(sequences):
                    one = slice(i, i + 1)
                    s.record(batch[one], last[one], requests[one], None if sampled is None else sampled[one])
            except BaseException:
                for s, length in zip(sequences, before, strict=True):
                    s.rollback(length)
                raise
            return logits

    def run(
        self, sequences: Sequence[CachedSequence], ids: np.ndarray, all_logits: bool, requests: Requests
    ) -> StepResult:
        """Reserve entries, run a step on checked ids and update the lengths; return the logits and the sampled ids."""
        count = ids.shape[1]
        if len(sequences) > 1 and max(s.length for s in sequences) + count > independent(self.program):
            return self._run_separately(sequences, ids, all_logits, requests)
        extend_patterns(self.program, max(s.length for s in sequences) + count)
        with self.lock:
            for s in sequences:
                s.reserve(count)
            batch = 1 << (len(sequences) - 1).bit_length()  # padded: few plans for many batch sizes
            step = self.steps.bound(not all_logits, batch, count, self.variables)
            whole, table, lengths = step.hosts["ids"], step.hosts[TABLE], step.hosts[LENGTHS]
            whole[...], table[...], lengths[...] = 0, -1, -1
            for i, s in enumerate(sequences):
                table[i, : len(s.table)], lengths[i], whole[i] = s.table, s.length, ids[i]
            if "positions" in step.hosts:
                step.hosts["positions"][...] = np.maximum(lengths, 0)[:, None] + np.arange(count)
            step.clear_requests()
            for i, request in enumerate(() if all_logits else requests):
                sequences[i].request(step, i, ids[i], request)
            logits, sampled = step.run()
            for s in sequences:
                s.grow(count)
            return logits if batch == len(sequences) else logits[: len(sequences)], sampled

    def _run_separately(
        self, sequences: Sequence[CachedSequence], ids: np.ndarray, all_logits: bool, requests: Requests
    ) -> StepResult:
        """Run sequences one by one, because with dynamic RoPE the longest text of a batch would set all frequencies."""
        made = [self.run([s], ids[i : i + 1], all_logits, requests[i : i + 1]) for i, s in enumerate(sequences)]
        first = made[0][0]
        logits = empty((len(made), *first.shape[1:]), first.dtype, first.device)
        for i, (one, _) in enumerate(made):
            logits[i : i + 1].copy_from(one)
        sampled = [ids for _, ids in made if ids is not None]
        return logits, np.concatenate(sampled) if sampled else None

    # -- memory ------------------------------------------------------------------------------------------------------
    def start(self) -> None:
        """Allocate pools for the model's current state. Raises: StaleCache if blocks of different shapes are in use."""
        if self.fits():
            return
        self.prefix.clear()
        if self.pool.used:
            raise StaleCache("an edit changed the shape of keys or values, but blocks of the old shape are in use",
                             got=f"{self.pool.used} blocks in use",
                             fix="release the sequences that cache.holders() lists, or make a new cache")  # fmt: skip
        states = self.steps.derived().states
        self.steps.spaces.clear()
        start = np.nan if self._poison else 0.0
        self.variables = {k: Variable(filled(s, start, self.device), name=k) for k, s in states.items()}

    def _derive(self, last_only: bool) -> Derived:
        return derive_paged(self.program, self.pool.cap, self.block, last_only, self.kind)

    def fits(self) -> bool:
        """Return True if the pools have the shapes that the model's current state needs."""
        return {k: v.spec for k, v in self.variables.items()} == self.steps.derived().states

    def pools(self) -> list[NDArray]:
        """Return the writable pools [blocks, kv heads, block, head dim]: keys, then values, of each attention op."""
        return [variable.own() for variable in self.variables.values()]

    def claim(self, count: int) -> list[int]:
        """Take `count` blocks, evicting cached ones if too few are free. Raises: CacheFull, with nothing changed."""
        missing = count - self.pool.free
        if missing > 0 and missing > self.prefix.evictable:
            raise CacheFull("the cache has no room for these tokens", expected=f"{count} blocks of {self.block} tokens",
                            got=f"{self.pool.free} free, {self.prefix.evictable} evictable",
                            fix="release sequences that cache.holders() lists, or make a larger cache")  # fmt: skip
        self.prefix.evict(missing)
        return self.pool.take(count)

    def copy_block(self, source: int, target: int, count: int) -> None:
        """Copy the first `count` entries of a block to another block, in all layers."""
        for pool in self.pools():
            pool[target, :, :count].copy_from(pool[source, :, :count])

    def root(self, fingerprints: dict[str, str]) -> bytes:
        """Return the digest that starts the hash chains of blocks from the model state with these `fingerprints`."""
        digests = [v.digest for v in pattern_variables(self.program).values()]
        text = repr((sorted(fingerprints.items()), [v.spec for v in self.variables.values()], digests))
        return blake2b(text.encode(), digest_size=16).digest()

    def register(self, mark: PagedSnapshot) -> None:
        """Register a snapshot as an owner of blocks, so that `holders` returns it."""
        self._marks.add(mark)

    def _freed(self, block: int) -> None:
        for pool in self.pools():
            fill(pool[block], np.nan)

    def __repr__(self) -> str:
        return f"PagedCache({self.pool.used} of {self.pool.cap} blocks of {self.block} tokens used)"
