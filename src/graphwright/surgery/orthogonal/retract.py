"""A step of gradient descent among matrices with orthonormal columns: project the gradient, step, and come back.

Source: Absil, Mahony and Sepulchre 2008, "Optimization algorithms on matrix manifolds", section 4.1.
"""

from __future__ import annotations

import numpy as np

from graphwright.errors import ShapeError, UsageError
from graphwright.surgery.orthogonal.lie import cayley, skew
from graphwright.surgery.orthogonal.polar import polar
from graphwright.surgery.orthogonal.qr import qr

WAYS = ("qr", "polar", "cayley")


def retract(w: np.ndarray, gradient: np.ndarray, lr: float, by: str = "qr") -> np.ndarray:
    """One step against a gradient; the result has orthonormal columns (rows, if it is wide) as `w` has.

    ξ = W skew(WᵀG) + (I - WWᵀ) G is the part of G that does not stretch W.

    Args:
        w: [out, in], orthonormal.
        gradient: [out, in], of a loss by w.
        lr: length of the step, in units of the gradient.
        by: how to come back: `qr` (cheapest), `polar` (nearest), `cayley` (a rotation from the left).
    Raises: UsageError for no such way, ShapeError.
    """
    w, gradient = np.asarray(w, np.float64), np.asarray(gradient, np.float64)
    if w.ndim != 2 or w.shape != gradient.shape:
        raise ShapeError("a gradient has the shape of its matrix", expected=list(w.shape), got=list(gradient.shape))
    if by not in WAYS:
        raise UsageError("no such retraction", where="by", expected=", ".join(WAYS), got=by)
    if w.shape[0] < w.shape[1]:
        return retract(w.T, gradient.T, lr, by).T
    inner = w.T @ gradient
    tangent = w @ skew(inner) + gradient - w @ inner
    if by != "cayley":
        return (qr if by == "qr" else polar)(w - lr * tangent)
    half = tangent - w @ (w.T @ tangent) / 2
    return cayley(-lr * (half @ w.T - w @ half.T)) @ w
