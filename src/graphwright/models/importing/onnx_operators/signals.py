"""Windows and Fourier transforms."""

from __future__ import annotations

from math import pi
from typing import Any

import numpy as np

from graphwright.autograd import Tensor, as_tensor, stack, top
from graphwright.models.importing.onnx_operators.table import bounded, dtype_of, fixed_sizes, ints, operator
from graphwright.ops.axes import axis_of


def _window(name: str, *factors: float) -> None:
    @operator(name, known=(0,))
    def window(size: Any, *, output_datatype: int = 1, periodic: int = 1) -> Tensor:
        (n,) = bounded(ints(size))
        angle = 2 * pi * np.arange(n) / (n if periodic else n - 1)
        values = sum(a * np.cos(k * angle) * (-1) ** k for k, a in enumerate(factors))
        return as_tensor(np.asarray(values)).to(dtype_of(output_datatype))


_window("HannWindow", 0.5, 0.5)
_window("HammingWindow", 25 / 46, 21 / 46)
_window("BlackmanWindow", 0.42, 0.5, 0.08)


@operator("MelWeightMatrix", known=(0, 1, 2, 3, 4))
def mel_weight_matrix(bins: Any, length: Any, rate: Any, low: Any, high: Any, *, output_datatype: int = 1) -> Tensor:
    """The matrix [frequencies, bins] of triangles that turns a spectrum into mel bins."""
    count, n = ints(bins)[0], ints(length)[0]
    bounded((count, n))
    ends = [2595 * np.log10(1 + float(np.asarray(e).item()) / 700) for e in (low, high)]
    mels = ends[0] + np.arange(count + 2) * (ends[1] - ends[0]) / (count + 2)
    hertz = 700 * (10 ** (mels / 2595) - 1)
    edges = ((n + 1) * hertz // float(np.asarray(rate).item())).astype(int)
    made = np.zeros((n // 2 + 1, count))
    for i, (left, middle, right) in enumerate(zip(edges, edges[1:], edges[2:], strict=False)):
        if middle == left:
            made[middle, i] = 1
        else:
            made[left : middle + 1, i] = np.arange(middle - left + 1) / (middle - left)
        if right > middle:
            made[middle:right, i] = np.arange(right - middle, 0, -1) / (right - middle)
    return as_tensor(made).to(dtype_of(output_datatype))


# -- Fourier transforms ------------------------------------------------------------------------------------------------
@operator("DFT", known=(1, 2))
def dft(x: Tensor, length: Any = None, at: Any = None, *, axis: int | None = None, inverse: int = 0, onesided: int = 0,
        opset: int) -> Tensor:  # fmt: skip
    """The discrete Fourier transform along an axis; the last axis holds real and imaginary parts."""
    given = ints(at)[0] if at is not None else axis if axis is not None else 1 if opset < 20 else -2
    return transformed(x, axis_of(given, x.ndim), None if length is None else ints(length)[0], inverse, onesided)


def transformed(x: Tensor, axis: int, length: int | None, inverse: int = 0, onesided: int = 0) -> Tensor:
    """Return the discrete Fourier transform along an axis as products with matrices of cosines and sines."""
    (n,) = fixed_sizes(x, (axis,), "DFT")
    half = bool(inverse and onesided)  # the other half of the spectrum is the conjugate of the given one
    size = (2 * (n - 1) if half else n) if length is None else length
    bounded((size, n))
    used = min(n, size // 2 + 1 if half else size)
    moved = x.narrow(axis, 0, used).movedim(axis, -1)  # [..., parts, n] or, for the axis before the parts, the same
    real = moved.select(moved.ndim - 2, 0)
    imaginary = moved.select(moved.ndim - 2, 1) if int(x.spec.sizes[-1]) == 2 else None
    rows = size // 2 + 1 if onesided and not inverse else size
    angle = 2 * pi * np.outer(np.arange(used), np.arange(rows)) / size * (1 if inverse else -1)
    scale = np.ones((used, 1)) / (size if inverse else 1)
    if half:
        twice = np.full((used, 1), 2.0)
        twice[0] = 1.0
        if size % 2 == 0 and used == size // 2 + 1:
            twice[-1] = 1.0
        scale = scale * twice
    cos, sin = (as_tensor(m * scale).to(x.dtype) for m in (np.cos(angle), np.sin(angle)))
    re, im = top.matmul(real, cos), top.matmul(real, sin)
    if imaginary is not None:
        re, im = re - top.matmul(imaginary, sin), im + top.matmul(imaginary, cos)
    if half:
        return re.movedim(-1, axis).unsqueeze(-1)
    return stack([re.movedim(-1, axis), im.movedim(-1, axis)], -1)


@operator("STFT", known=(1, 3))
def stft(x: Tensor, step: Any, window: Tensor | None = None, length: Any = None, *, onesided: int = 1) -> Tensor:
    """Fourier transforms of windows of a signal [B, n, 1 or 2]."""
    (n,) = fixed_sizes(x, (1,), "STFT")
    hop = ints(step)[0]
    size = int(window.spec.sizes[0]) if window is not None else ints(length)[0]
    frames = 1 + (n - size) // hop
    bounded((frames, size))
    parts = stack([x.narrow(1, i * hop, size) for i in range(frames)], 1)
    parts = parts if window is None else parts * window.reshape(-1, 1)
    return transformed(parts, 2, None if length is None else ints(length)[0], 0, onesided)
