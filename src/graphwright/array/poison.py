"""Poison: memory that nobody has written holds NaN, so that a value read too early, or freed too early, shows."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import numpy as np

_POISON = 0x7FF8  # NaN in float16, bfloat16, float32 and float64 alike when repeated

poisoning: ContextVar[bool] = ContextVar("graphwright_poisoning", default=False)
"""Whether `empty` fills what it gives."""


@contextmanager
def poison() -> Iterator[None]:
    """Arrays that are made empty inside hold NaN (integers: 7FF8, as often as it fits; bools: True)."""
    token = poisoning.set(True)
    try:
        yield
    finally:
        poisoning.reset(token)


def fill(memory: Any) -> None:
    """Fill bytes with NaN."""
    host = np.asarray(memory)
    host[0::2], host[1::2] = _POISON & 0xFF, _POISON >> 8


def poisoned(shape: tuple[int, ...], kind: np.dtype) -> np.ndarray:
    """Elements of a dtype (floats that numpy lacks: their bits) that read NaN."""
    if kind.itemsize == 1:
        return np.full(shape, 1 if kind.kind == "b" else _POISON >> 8, kind)  # 7F is NaN in both floats of 8 bits
    made = np.empty(shape, kind)
    fill(made.reshape(-1).view(np.uint8))
    return made
