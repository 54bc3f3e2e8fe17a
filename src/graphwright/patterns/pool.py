"""The masks of edges of kind MASKED: rows of one array, which are reused when edges are cut."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from . import masks

Array = npt.NDArray[Any]


class MaskPool:
    """Packed masks, uint64 [rows, block, words]; `data` is another array after the pool has grown."""

    def __init__(self, block: int) -> None:
        self._block = block
        self.data = masks.empty(block).bits
        self._used = 0
        self._free: list[int] = []

    def store(self, bits: Array) -> npt.NDArray[np.int32]:
        """Copy packed masks into the pool; return their rows."""
        count = len(bits)
        reused = [self._free.pop() for _ in range(min(count, len(self._free)))]
        start, self._used = self._used, self._used + count - len(reused)
        if self._used > len(self.data):
            grown = np.zeros((max(self._used, len(self.data) * 3 // 2), *self.data.shape[1:]), np.uint64)
            grown[:start] = self.data[:start]
            self.data = grown
        rows = np.array([*reused, *range(start, self._used)], np.int32)
        self.data[rows] = bits
        return rows

    def release(self, rows: Array) -> None:
        """Free rows; those that are -1 are ignored."""
        self._free.extend(rows[rows >= 0].tolist())

    def copy(self) -> MaskPool:
        """Return an independent copy."""
        twin = MaskPool(self._block)
        twin.data, twin._used, twin._free = self.data.copy(), self._used, self._free.copy()
        return twin

    @property
    def nbytes(self) -> int:
        """Bytes of the masks, unused rows included."""
        return self.data.nbytes
