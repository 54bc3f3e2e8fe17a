"""Parameters of a few shapes, and one of 16 bits."""

from __future__ import annotations

import numpy as np

from graphwright.array import bfloat16, empty, from_numpy
from graphwright.autograd import Parameter

SHAPES = [(5, 3), (3,), (2, 1, 4)]


def values(seed: int) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    return [rng.normal(size=s).astype(np.float32) for s in SHAPES]


def low(value: np.ndarray) -> Parameter:
    return Parameter(empty(value.shape, bfloat16).copy_from(from_numpy(value)), name="low")
