"""Automatic mixed precision: ops of class `low` run in 16 bits, those of class `f32` in float32, casts stay visible."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from graphwright.array import bfloat16
from graphwright.autograd import autocast_to
from graphwright.ops.casting import low_dtype


@contextmanager
def autocast(dtype: object = bfloat16, enabled: bool = True) -> Iterator[None]:
    """Inside, matrix products and attention run in `dtype`; losses and sums in float32; norms keep their input's dtype.

    Works eagerly and in traces. Nested `autocast(enabled=False)` switches it off; an exception restores the outer mode.
    Raises: DTypeError for a dtype that is no 16-bit float.
    """
    kind = low_dtype(dtype)
    with autocast_to(kind if enabled else None):
        yield
