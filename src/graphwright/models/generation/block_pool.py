"""Reference counts of the blocks of a pool, and the prefix cache; contains no tensors.

Invariant: a block is either free or has owners; `refs` is the number of its owners.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from collections.abc import Sequence as Several
from hashlib import blake2b
from itertools import count

import numpy as np

from graphwright.models.errors import BlockError, CacheFull


class BlockPool:
    """Blocks 0 to cap - 1 with a reference count each; the block freed last is taken first.

    Args:
        cap: number of blocks.
        nbytes: of one block, over all layers.
        freed: called with a block when its count becomes 0.
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
        """Reference count of a block. Raises: BlockError for a number outside the pool."""
        if type(block) is not int or not 0 <= block < self.cap:
            raise BlockError("this block is outside the pool", expected=f"0..{self.cap - 1}", got=block)
        return self._refs[block]

    def take(self, count: int) -> list[int]:
        """Take free blocks, all or none; each gets count 1. Raises: CacheFull."""
        if count > len(self._free):
            raise CacheFull("too few free blocks", expected=f"{count} blocks", got=f"{len(self._free)} free")
        blocks = [self._free.pop() for _ in range(count)]
        for block in blocks:
            self._refs[block] = 1
        return blocks

    def hold(self, blocks: Iterable[int]) -> None:
        """Increment the count of each. Raises: BlockError for a free block; then no count changes."""
        blocks = list(blocks)
        self._check_used(blocks)
        for block in blocks:
            self._refs[block] += 1

    def drop(self, blocks: Iterable[int]) -> None:
        """Decrement the count of each, and free it at 0. Raises: BlockError as `hold`; then no count changes."""
        blocks = list(blocks)
        self._check_used(blocks)
        if any(count > self._refs[block] for block, count in Counter(blocks).items()):
            raise BlockError("blocks are dropped more often than they are held", got=blocks)
        for block in blocks:
            self._refs[block] -= 1
            if not self._refs[block]:
                self._free.append(block)
                if self._freed is not None:
                    self._freed(block)

    def _check_used(self, blocks: list[int]) -> None:
        for block in blocks:
            if not self.refs(block):
                raise BlockError("this block is free", where=f"block {block}")


def chained(before: bytes, tokens: np.ndarray) -> bytes:
    """h_i = BLAKE2b-128(h_(i-1), ids of the block as int64)."""
    return blake2b(before + np.ascontiguousarray(tokens, "<i8").tobytes(), digest_size=16).digest()


class _PrefixEntry:
    __slots__ = ("before", "block", "followers", "key", "root", "tokens", "used")

    def __init__(self, key: bytes, root: bytes, before: _PrefixEntry | None, tokens: np.ndarray, block: int) -> None:
        self.key, self.root, self.before, self.tokens, self.block = key, root, before, tokens, block
        self.followers, self.used = 0, 0


class PrefixCache:
    """Blocks cached for prompts that start with the same tokens, found by a hash chain over their ids.

    Args:
        pool: that owns the blocks.
        block: tokens per block.
        most: largest number of cached blocks; 0 caches none.
        digest: the hash, see `chained`.
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
        """The cached blocks."""
        return [e.block for e in self._all()]

    def _all(self) -> Iterator[_PrefixEntry]:
        return (e for found in self._entries.values() for e in found)

    @property
    def evictable(self) -> int:
        """Number of blocks that eviction can free: no sequence uses them, nor any block that continues them."""
        used: set[_PrefixEntry] = set()
        for entry in self._all():
            at = entry if self.pool.refs(entry.block) > 1 else None
            while at is not None and at not in used:
                used.add(at)
                at = at.before
        return self._size - len(used)

    def match(self, root: bytes, ids: np.ndarray) -> list[int]:
        """Find the longest chain of cached blocks that `ids` [T] starts with, and hold each block for the caller.

        At most ⌊(T - 1) / block⌋ blocks, so that at least one token is left to run.
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

    def insert(self, root: bytes, ids: np.ndarray, table: Several[int]) -> None:
        """Cache the full blocks of a sequence, except those of a chain that is already cached."""
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
        """Free up to `wanted` unused blocks, the least recently used first. Returns: how many were freed."""
        gone = 0
        while gone < wanted:
            leaves = [e for e in self._all() if not e.followers and e is not keep and self.pool.refs(e.block) == 1]
            if not leaves:
                break
            self._remove(min(leaves, key=lambda e: e.used))
            gone += 1
        return gone

    def forget(self, block: int) -> bool:
        """Uncache a block and all that continue it; False if it is not cached."""
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
