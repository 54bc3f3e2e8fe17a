"""Bytes of a buffer in the arena, and the layout that the reuse of dead memory is measured against."""

from __future__ import annotations

import numpy as np

from graphwright.plan.planning.passes import ALIGN


def aligned(nbytes: int) -> int:
    """Bytes a buffer takes: a multiple of 64; scalars 8, so that graphs of scalars stay small."""
    return 8 if nbytes <= 8 else -(-nbytes // ALIGN) * ALIGN


def place_naive(sizes: np.ndarray, last: np.ndarray) -> tuple[np.ndarray, int]:
    """Give every living buffer (last >= 0) a place of its own, in order; returns offsets and the bytes."""
    offsets, top = np.full(len(sizes), -1, np.int64), 0
    for b in np.flatnonzero(last >= 0):
        offsets[b] = -(-top // ALIGN) * ALIGN
        top = int(offsets[b] + sizes[b])
    return offsets, top
