"""A matrix as a tensor: rows and columns split into modes, mode k of the tensor holds (o_k, i_k)."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from math import prod

import numpy as np

from graphwright.errors import UsageError
from graphwright.surgery.factorise.errors import NotFactorable


def split(n: int, order: int, pad: bool = True) -> tuple[int, ...]:
    """`order` factors above 1, as equal as they get, of n or of the next number that has so many.

    Raises: NotFactorable if n has not and `pad` is False; UsageError for an order below 2.
    """
    if order < 2:
        raise UsageError("a chain of cores has two or more", where="order", expected=">= 2", got=order)
    size = n
    while (found := _balanced(size, order, 2)) is None:
        if not pad:
            raise NotFactorable((n,), order)
        size += 1
    return found


@lru_cache(4096)
def _balanced(n: int, order: int, least: int) -> tuple[int, ...] | None:
    """Rising factors of n, each at least `least`, with the smallest sum."""
    if order == 1:
        return (n,) if n >= least else None
    best: tuple[int, ...] | None = None
    for factor in range(least, round(n ** (1 / order)) + 1):
        if n % factor == 0 and (rest := _balanced(n // factor, order - 1, factor)) is not None:
            found = (factor, *rest)
            best = found if best is None or sum(found) < sum(best) else best
    return best


def to_tensor(w: np.ndarray, out: Sequence[int], inner: Sequence[int]) -> np.ndarray:
    """[out, in] as [o_1 i_1, .., o_d i_d], padded with zeros where the modes hold more."""
    d = len(out)
    padded = np.zeros((prod(out), prod(inner)), w.dtype)
    padded[: w.shape[0], : w.shape[1]] = w
    axes = [axis for k in range(d) for axis in (k, d + k)]
    return padded.reshape(*out, *inner).transpose(axes).reshape([o * i for o, i in zip(out, inner, strict=True)])


def to_cores(arrays: Sequence[np.ndarray], out: Sequence[int], inner: Sequence[int]) -> tuple[np.ndarray, ...]:
    """Cores [r, p, r'] of the tensor as cores [r, o, i, r'] of the matrix."""
    return tuple(a.reshape(a.shape[0], o, i, a.shape[2]) for a, o, i in zip(arrays, out, inner, strict=True))
