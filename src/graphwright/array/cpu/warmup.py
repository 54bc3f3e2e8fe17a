"""Compiling the loops of gates and of random words ahead of their first use; numba keeps them on disk."""

from __future__ import annotations

import numpy as np

from graphwright.array.cpu import gating, philox


def warmup() -> None:
    """Run each loop once on one gate, in each kind of number that a plan or an eager op calls it with."""
    table, run, ends = np.zeros((1, 7), np.int64), np.zeros(3, np.int64), np.ones(1, np.int64)
    for kind in (np.float32, np.float64):
        values, slope, lean, logits, temperature = (np.ones(1, kind) for _ in range(5))
        gating.fill(values, slope, lean, logits, table, temperature, run, ends)
        gating.pull_back(logits, lean, slope, lean, values, table, temperature, run, ends)
    for kind in (np.int32, np.int64):
        philox.fill(np.zeros(1, kind), np.zeros(2, np.int64), 0, 0)
