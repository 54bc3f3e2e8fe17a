"""Resampling of images, signals and volumes [N, C, spatial...] under torch's names."""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from itertools import product
from math import floor
from typing import Any

import numpy as np

from graphwright.autograd import Tensor, as_tensor, where
from graphwright.errors import DTypeError, ShapeError, UsageError
from graphwright.nn.spatial import adaptive_avg_pool1d, adaptive_avg_pool2d, adaptive_avg_pool3d, per_axis
from graphwright.ops import call

__all__ = ["affine_grid", "grid_sample", "interpolate", "upsample", "upsample_bilinear", "upsample_nearest"]
_AREA = {1: adaptive_avg_pool1d, 2: adaptive_avg_pool2d, 3: adaptive_avg_pool3d}
_RANKS = {"linear": 1, "bilinear": 2, "bicubic": 2, "trilinear": 3}


def interpolate(
    input: Tensor, size: Any = None, scale_factor: Any = None, mode: str = "nearest", align_corners: bool | None = None,
    recompute_scale_factor: bool | None = None, antialias: bool = False,
) -> Tensor:  # fmt: skip
    """Resample [N, C, spatial...] to `size`, or by `scale_factor`.

    Args:
        mode: `nearest`, `nearest-exact`, `area`; `linear`, `bilinear`, `trilinear` for one, two, three spatial axes;
            `bicubic` for two.
        align_corners: map the first and last entries of an axis to the first and last of the result.
        recompute_scale_factor: use the ratio of the sizes instead of the given factor.
    Raises: ShapeError; DTypeError for integers in another mode than nearest; UsageError for a mode of another rank,
        size and factor together, or antialias.
    """
    rank = input.ndim - 2
    known = ("nearest", "nearest-exact", "area", *(m for m, r in _RANKS.items() if r == rank))
    if mode not in known or antialias:
        got = f"{mode}, {input.spec}{', antialias' if antialias else ''}"
        raise UsageError("no such interpolation mode for this rank", where="interpolate", expected=", ".join(known),
                         got=got)  # fmt: skip
    if (size is None) == (scale_factor is None):
        raise UsageError("give either size or scale_factor", where="interpolate", got=f"{size}, {scale_factor}")
    if align_corners is not None and mode not in _RANKS:
        raise UsageError("align_corners is for linear and cubic modes", where="interpolate", got=mode)
    old = input.shape[2:]
    if size is not None:
        factors, new = (None,) * rank, per_axis(rank, size)
    else:
        factors = tuple(map(float, per_axis(rank, scale_factor)))
        new = tuple(floor(n * f) for n, f in zip(old, factors, strict=True))
    if not rank or min((*new, *old)) < 1:
        raise ShapeError("cannot resample to these sizes", where="interpolate", expected="sizes >= 1", got=new)
    if mode == "area":
        return _AREA[rank](input, new)
    exact = all(f is None or recompute_scale_factor or m == n * f for n, m, f in zip(old, new, factors, strict=True))
    if not input.dtype.is_float and not mode.startswith("nearest"):
        raise DTypeError("integers cannot be interpolated", where="interpolate", expected="floats, or mode nearest",
                         got=f"{mode}, {input.spec}", fix="input.to('float32')")  # fmt: skip
    if rank < 3 and exact and input.dtype.is_float and mode in ("nearest", "linear", "bilinear"):
        kind = "nearest" if mode == "nearest" else "linear"
        return call("interpolate", input, sizes=new, mode=kind, align_corners=bool(align_corners))
    for axis, (n, m, factor) in enumerate(zip(old, new, factors, strict=True), 2):
        ratio = n / m if factor is None or recompute_scale_factor else 1.0 / factor
        input = _resampled(input, axis, _taps(n, m, ratio, mode, bool(align_corners)))
    return input


def _taps(n: int, m: int, ratio: float, mode: str, align: bool) -> list[tuple[np.ndarray, np.ndarray | None]]:
    """Return (index of the source, weight) of each term of the m results; `ratio` is old size / new size."""
    i = np.arange(m)
    if mode.startswith("nearest"):
        at = ((i + (0.5 if mode == "nearest-exact" else 0.0)) * np.float32(ratio)).astype(np.float32)  # as torch rounds
        return [(np.minimum(np.floor(at).astype(np.int64), n - 1), None)]
    at = i * ((n - 1) / (m - 1) if m > 1 else 0.0) if align else (i + 0.5) * ratio - 0.5
    if n == m and mode != "bicubic":  # torch copies such an axis, whatever the factor
        at = i * 1.0
    if mode == "bicubic":  # Keys 1981, with a = -0.75
        low = np.floor(at)
        distances = [np.abs(at - low - k) for k in (-1, 0, 1, 2)]
        weights = [_cubic(d) for d in distances]
        return [(np.clip(low + k, 0, n - 1).astype(np.int64), w) for k, w in zip((-1, 0, 1, 2), weights, strict=True)]
    at = np.maximum(at, 0.0)
    low = np.minimum(at.astype(np.int64), n - 1)
    return [(low, 1.0 - (at - low)), (np.minimum(low + 1, n - 1), at - low)]


def _cubic(d: np.ndarray, a: float = -0.75) -> np.ndarray:
    near, far = ((a + 2) * d - (a + 3)) * d * d + 1, ((a * d - 5 * a) * d + 8 * a) * d - 4 * a
    return np.where(d <= 1, near, np.where(d < 2, far, 0.0))


def _resampled(x: Tensor, axis: int, taps: list[tuple[np.ndarray, np.ndarray | None]]) -> Tensor:
    parts = []
    for ids, weight in taps:
        part = call("index", x, as_tensor(ids), axis=axis)
        if weight is not None:
            part = part * as_tensor(weight.reshape(-1, *(1,) * (x.ndim - axis - 1))).to(x.dtype)
        parts.append(part)
    return reduce(lambda a, b: a + b, parts)


def upsample(
    input: Tensor, size: Any = None, scale_factor: Any = None, mode: str = "nearest", align_corners: bool | None = None
) -> Tensor:
    """Call `interpolate`."""
    return interpolate(input, size, scale_factor, mode, align_corners)


def upsample_nearest(input: Tensor, size: Any = None, scale_factor: Any = None) -> Tensor:
    """Call `interpolate` with mode `nearest`."""
    return interpolate(input, size, scale_factor)


def upsample_bilinear(input: Tensor, size: Any = None, scale_factor: Any = None) -> Tensor:
    """Call `interpolate` with mode `bilinear` and aligned corners."""
    return interpolate(input, size, scale_factor, "bilinear", align_corners=True)


def affine_grid(theta: Tensor, size: Sequence[int], align_corners: bool | None = None) -> Tensor:
    """Return the grid [N, spatial..., rank] of `grid_sample` for affine maps theta [N, rank, rank + 1].

    Args:
        size: the shape [N, C, spatial...] of the sampled result.
    Raises: ShapeError.
    """
    sizes = tuple(size)[2:]
    if len(sizes) not in (2, 3) or min(sizes) < 1 or theta.shape != (size[0], len(sizes), len(sizes) + 1):
        expected = "theta [N, 2, 3] and size [N, C, H, W], or [N, 3, 4] and [N, C, D, H, W], of sizes >= 1"
        raise ShapeError("invalid arguments", where="affine_grid", expected=expected, got=f"{theta.spec}, {size}")
    ends = [1.0 if align_corners else (n - 1) / n for n in sizes]
    lines = [np.linspace(-e, e, n) if n > 1 else np.zeros(1) for n, e in zip(sizes, ends, strict=True)]
    points = np.stack([*np.meshgrid(*lines, indexing="ij")[::-1], np.ones(sizes)], -1).reshape(-1, len(sizes) + 1)
    made = as_tensor(points).to(theta.dtype) @ theta.transpose(1, 2)
    return made.reshape(theta.shape[0], *sizes, len(sizes))


def grid_sample(
    input: Tensor, grid: Tensor, mode: str = "bilinear", padding_mode: str = "zeros", align_corners: bool | None = None
) -> Tensor:
    """Sample [N, C, spatial...] at the positions of a grid [N, result..., rank]; -1 and 1 are the ends of an axis.

    Args:
        grid: coordinates along the last axis first, as in torch.
        mode: `bilinear` (also of three axes), `nearest`, or `bicubic` for two.
        padding_mode: values outside: `zeros`, `border` or `reflection`. Positions that are NaN count as outside.
    Raises: ShapeError, UsageError.
    """
    rank, sizes = input.ndim - 2, input.shape[2:]
    if rank not in (2, 3) or grid.ndim != input.ndim or grid.shape[-1] != rank or grid.shape[0] != input.shape[0]:
        expected = f"[N, C, spatial...] and a grid [N, ..., {rank}]"
        raise ShapeError("invalid operands of grid_sample", expected=expected, got=f"{input.spec}, {grid.spec}")
    if mode not in ("bilinear", "nearest", *(("bicubic",) if rank == 2 else ())):
        raise UsageError("unknown mode", where="grid_sample", expected="bilinear, nearest or bicubic", got=mode)
    if padding_mode not in ("zeros", "border", "reflection"):
        expected = "zeros, border or reflection"
        raise UsageError("unknown padding mode", where="grid_sample", expected=expected, got=padding_mode)
    align, terms = bool(align_corners), []
    for axis, n in enumerate(sizes):
        unit = grid.select(-1, rank - 1 - axis)
        at = (unit + 1.0) * ((n - 1) / 2) if align else ((unit + 1.0) * n - 1.0) / 2
        terms.append(_sampled(at if mode == "bicubic" else _inside(at, n, padding_mode, align), mode))
    flat = input.reshape(*input.shape[:2], -1)
    total: Any = None
    for corner in product(*terms):
        index, weight, seen = as_tensor(0), None, None
        for (at, share), n in zip(corner, sizes, strict=True):
            at = _inside(at, n, padding_mode, align) if mode == "bicubic" else at
            inside = (at >= 0) & (at <= n - 1)
            index = index * n + where(inside, at, 0.0).to("int64")
            weight = share if weight is None or share is None else weight * share
            seen = inside if seen is None else seen & inside
        assert seen is not None
        ids = index.reshape(index.shape[0], 1, -1).expand(-1, input.shape[1], -1)
        values = flat.gather(2, ids).reshape(*input.shape[:2], *grid.shape[1:-1])
        values = where(seen.unsqueeze(1), values, 0.0)
        values = values if weight is None else values * weight.unsqueeze(1)
        total = values if total is None else total + values
    return total


def _sampled(at: Tensor, mode: str) -> list[tuple[Tensor, Tensor | None]]:
    """Return the (position, weight) of each entry of an axis that takes part in a sample at a position."""
    if mode == "nearest":
        return [(at.detach().round(), None)]
    low = at.detach().floor()
    part = at - low
    if mode == "bilinear":
        return [(low, 1.0 - part), (low + 1.0, part)]
    a, made = -0.75, []
    for k in (-1, 0, 1, 2):
        d = (part - float(k)) * (1.0 if k < 1 else -1.0)
        near, far = ((a + 2) * d - (a + 3)) * d * d + 1.0, ((a * d - 5 * a) * d + 8 * a) * d - 4 * a
        made.append((low + float(k), near if k in (0, 1) else far))
    return made


def _inside(at: Tensor, n: int, padding_mode: str, align: bool) -> Tensor:
    """Return positions moved into the axis, as the padding mode says."""
    if padding_mode == "zeros":
        return at
    if padding_mode == "reflection":
        low, span = (0.0, n - 1.0) if align else (-0.5, float(n))
        if span == 0:
            return at * 0.0
        away = (at - low).abs()
        turns = (away.detach() / span).floor()
        rest = away - turns * span
        at = where(turns.remainder(2.0) == 0.0, rest, span - rest) + low
    return at.clamp(0.0, n - 1.0)
