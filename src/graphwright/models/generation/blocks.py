"""Which blocks of a pool are taken, and by how many; knows no tensors.

Invariant: a block is free or has holders, never both; the sum of its holders is what `refs` says.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable

from graphwright.models.errors import BlockError, CacheFull


class BlockPool:
    """Blocks 0 to cap - 1 with a count of holders each; the block freed last is taken first.

    Args:
        cap: number of blocks.
        nbytes: of one block, over all layers.
        freed: called with a block that nobody holds any more.
    """

    def __init__(self, cap: int, nbytes: int = 0, freed: Callable[[int], object] | None = None) -> None:
        self.cap, self.block_bytes, self._freed = cap, nbytes, freed
        self._free = list(range(cap - 1, -1, -1))
        self._refs = [0] * cap

    @property
    def free(self) -> int:
        """Blocks that nobody holds."""
        return len(self._free)

    @property
    def used(self) -> int:
        """Blocks that somebody holds."""
        return self.cap - len(self._free)

    @property
    def bytes(self) -> int:
        """Of all blocks."""
        return self.cap * self.block_bytes

    def refs(self, block: int) -> int:
        """Holders of a block. Raises: BlockError for one of another pool."""
        if type(block) is not int or not 0 <= block < self.cap:
            raise BlockError("no block of this pool", expected=f"0..{self.cap - 1}", got=block)
        return self._refs[block]

    def take(self, count: int) -> list[int]:
        """Blocks with one holder each, all or none. Raises: CacheFull."""
        if count > len(self._free):
            raise CacheFull("too few free blocks", expected=f"{count} blocks", got=f"{len(self._free)} free")
        blocks = [self._free.pop() for _ in range(count)]
        for block in blocks:
            self._refs[block] = 1
        return blocks

    def hold(self, blocks: Iterable[int]) -> None:
        """One more holder for each. Raises: BlockError for a free block; then none is held."""
        blocks = list(blocks)
        self._held(blocks)
        for block in blocks:
            self._refs[block] += 1

    def drop(self, blocks: Iterable[int]) -> None:
        """One holder less for each; the last one frees it. Raises: BlockError as `hold`; then none is dropped."""
        blocks = list(blocks)
        self._held(blocks)
        if any(count > self._refs[block] for block, count in Counter(blocks).items()):
            raise BlockError("dropped more often than held", got=blocks)
        for block in blocks:
            self._refs[block] -= 1
            if not self._refs[block]:
                self._free.append(block)
                if self._freed is not None:
                    self._freed(block)

    def _held(self, blocks: list[int]) -> None:
        for block in blocks:
            if not self.refs(block):
                raise BlockError("nobody holds this block", where=f"block {block}")
