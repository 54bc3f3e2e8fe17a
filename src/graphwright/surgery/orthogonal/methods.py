"""The ways to an orthonormal factor, by name."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from graphwright.errors import ShapeError, UsageError
from graphwright.surgery.orthogonal.newton_schulz import newton_schulz
from graphwright.surgery.orthogonal.polar import polar
from graphwright.surgery.orthogonal.qr import qr

METHODS: dict[str, Callable[[np.ndarray], np.ndarray]] = {"polar": polar, "qr": qr, "newton_schulz": newton_schulz}
"""Name -> float64 [out, in] to its orthonormal factor."""


def orthonormal(w: np.ndarray, method: str = "polar", special: bool = False) -> np.ndarray:
    """The orthonormal factor of a matrix. Raises: UsageError, ShapeError for `special` of one that is not square."""
    if method not in METHODS:
        raise UsageError("no such method", where="method", expected=", ".join(METHODS), got=method)
    if not special:
        return METHODS[method](w)
    if method != "polar" or w.shape[0] != w.shape[1]:
        raise ShapeError(
            "the nearest rotation is a polar factor of a square matrix", where="special",
            expected="method='polar', [n, n]", got=f"{method!r}, {list(w.shape)}",
        )  # fmt: skip
    return polar(w, special=True)
