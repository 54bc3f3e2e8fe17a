"""Operators that resample images and read regions of them."""

from __future__ import annotations

from math import floor
from typing import Any

import numpy as np

from graphwright.autograd import Tensor, as_tensor, top
from graphwright.models.importing.onnx_operators.table import NotExpressible, bounded, fixed_sizes, ints, operator, text
from graphwright.nn import functional
from graphwright.ops import call
from graphwright.ops.axes import axis_of

_WHOLE = {
    ("nearest", "asymmetric", "floor"): ("nearest", False), ("linear", "half_pixel", ""): ("linear", False),
    ("linear", "pytorch_half_pixel", ""): ("linear", False), ("linear", "align_corners", ""): ("linear", True),
}  # fmt: skip
"""Mode, mapping of coordinates and rounding that the op `interpolate` computes -> its mode and alignment."""


# -- resize ------------------------------------------------------------------------------------------------------------
@operator("Resize", known=(1, 2, 3))
def resize(
    x: Tensor, roi: Any = None, scales: Any = None, sizes: Any = None, *, antialias: int = 0, axes: Any = None,
    coordinate_transformation_mode: Any = "half_pixel", cubic_coeff_a: float = -0.75, exclude_outside: int = 0,
    extrapolation_value: float = 0.0, keep_aspect_ratio_policy: Any = None, mode: Any = "nearest",
    nearest_mode: Any = "round_prefer_floor",
) -> Tensor:  # fmt: skip
    """Resample axes by factors or to sizes."""
    at = list(range(x.ndim)) if axes is None else [axis_of(a, x.ndim) for a in axes]
    how, grid, rule = text(mode), text(coordinate_transformation_mode), text(nearest_mode)
    old = [x.shape[a] for a in at]
    if sizes is not None and np.asarray(sizes).size:
        new, policy = ints(sizes), text(keep_aspect_ratio_policy)
        if policy in ("not_larger", "not_smaller"):
            static = fixed_sizes(x, at, "Resize with a fixed aspect ratio")
            pick = min if policy == "not_larger" else max
            factor = pick(m / n for n, m in zip(static, new, strict=True))
            new, factors = [floor(n * factor + 0.5) for n in static], [factor] * len(at)
        else:
            factors = [None] * len(at)
    else:
        factors = [float(f) for f in np.asarray(scales).reshape(-1)]
        new = [n * int(f) if f.is_integer() else floor(fixed_sizes(x, [a], "Resize")[0] * f)
               for a, n, f in zip(at, old, factors, strict=True)]  # fmt: skip
    crops = grid == "tf_crop_and_resize"
    moved = [i for i, (n, m, f) in enumerate(zip(old, new, factors, strict=True))
             if crops or f not in (None, 1.0) or (f is None and n != m)]  # fmt: skip
    if not moved:
        return x
    spatial = list(range(2, x.ndim))
    if any(type(old[i]) is not int for i in moved) and how == "nearest":
        for i in moved:
            x = _repeated(x, at[i], factors[i], grid, rule)
        return x
    one = (how, grid, rule if how == "nearest" else "")
    exact = all(f is None or f.is_integer() or m == n * f for n, m, f in zip(old, new, factors, strict=True))
    plain = exact and x.dtype.is_float and not antialias and not exclude_outside
    above = all(type(n) is int for i in moved for n in (old[i], new[i]))
    above = above and (grid != "pytorch_half_pixel" or all(new[i] > 1 for i in moved))
    if one in _WHOLE and plain and above and 3 <= x.ndim < 5 and all(at[i] in spatial for i in moved):
        result = dict(zip(at, new, strict=True))
        name, corners = _WHOLE[one]
        goal = tuple(result.get(a, x.shape[a]) for a in spatial)
        return call("interpolate", x, sizes=bounded(goal), mode=name, align_corners=corners)
    static = fixed_sizes(x, [at[i] for i in moved], f"Resize in mode {how} with {grid}")
    region = None if roi is None or not np.asarray(roi).size else np.asarray(roi, np.float64).reshape(2, -1)
    made, kind = x, x.dtype
    for i, n in zip(moved, static, strict=True):
        m, given = int(new[i]), factors[i]
        factor = m / n if given is None else given
        bounded((m, n))
        where, outside = _positions(n, m, factor, grid, None if region is None else region[:, i])
        if how == "nearest":
            index = np.clip(_nearest(where, rule), 0, n - 1).astype(np.int64)
            made = call("index", made, as_tensor(index), axis=at[i])
            if outside is not None and outside.any():
                made = top.where(_along(outside, made, at[i]), as_tensor(np.array(extrapolation_value)).to(kind), made)
            continue
        taps = _weights(where, n, factor, how, cubic_coeff_a, bool(exclude_outside), bool(antialias))
        wide = made if made.dtype.is_float else made.to("float32")
        made = top.matmul(wide.movedim(at[i], -1), as_tensor(taps.T).to(wide.dtype)).movedim(-1, at[i])
        if outside is not None and outside.any():
            made = top.where(_along(outside, made, at[i]), float(extrapolation_value), made)
    return made if made.dtype is kind else top.round(made).to(kind) if not kind.is_float else made.to(kind)


def _repeated(x: Tensor, axis: int, factor: float | None, grid: str, rule: str) -> Tensor:
    """Return x with each entry of an axis, whose size is named, repeated. Raises: NotExpressible."""
    times = int(factor or 0)
    whole = times > 0 and times == factor
    read = _nearest(_positions(8, 8 * times, float(times), grid, None)[0], rule) if whole else np.zeros(0)
    if not whole or not np.array_equal(np.clip(read, 0, 7), np.arange(8 * times) // times):
        raise NotExpressible("a named size is resized by a factor that is not whole", got=x.spec,
                             expected="entries that are repeated, or fixed sizes",
                             fix="give the sizes of the inputs as ints in sizes=")  # fmt: skip
    return call("repeat_interleave", x, repeats=times, axis=axis)


def _along(mask: np.ndarray, x: Tensor, axis: int) -> Tensor:
    return as_tensor(mask.reshape([-1 if i == axis else 1 for i in range(x.ndim)]))


def _positions(n: int, m: int, factor: float, grid: str, region: Any) -> tuple[np.ndarray, np.ndarray | None]:
    """Return the position in the source of each of m results, and where it is outside if that matters."""
    i, length = np.arange(m, dtype=np.float64), factor * n
    if grid == "align_corners":
        return (i * (n - 1) / (length - 1) if length != 1 else i * 0.0), None
    if grid == "asymmetric":
        return i / factor, None
    if grid == "pytorch_half_pixel":
        return ((i + 0.5) / factor - 0.5 if length != 1 else i * 0.0 - 0.5), None
    if grid == "half_pixel":
        return (i + 0.5) / factor - 0.5, None
    if grid == "half_pixel_symmetric":
        return n / 2 * (1 - m / length) + (i + 0.5) / factor - 0.5, None
    if grid != "tf_crop_and_resize" or region is None:
        raise NotExpressible("this mapping of coordinates is unknown", got=grid)
    low, high = float(region[0]), float(region[1])
    where = i * (high - low) * (n - 1) / (length - 1) if length != 1 else i * 0.0 + (high - low) * (n - 1) / 2
    where = where + low * (n - 1)
    return where, (where < 0) | (where > n - 1)


def _nearest(where: np.ndarray, rule: str) -> np.ndarray:
    if rule == "floor":
        return np.floor(where)
    if rule == "ceil":
        return np.ceil(where)
    return np.ceil(where - 0.5) if rule == "round_prefer_floor" else np.floor(where + 0.5)


def _weights(
    where: np.ndarray, n: int, factor: float, mode: str, a: float, exclude: bool, antialias: bool
) -> np.ndarray:  # fmt: skip
    """Return the matrix [m, n] that resamples an axis of n entries; entries at the ends are repeated.

    Source: Keys 1981, "Cubic convolution interpolation for digital image processing", for mode `cubic`.
    """
    reach = {"linear": 1, "cubic": 2}[mode]
    shrink = min(factor, 1.0) if antialias else 1.0
    left = np.ceil(where) - 1
    first = int(np.floor(-reach / shrink)) + 1
    steps = np.arange(first, 2 - first)
    distance = np.abs(steps[None] - (where - left)[:, None]) * shrink
    if mode == "linear":
        share = np.clip(1 - distance, 0, 1)
    else:
        near = ((a + 2) * distance - (a + 3)) * distance**2 + 1
        far = ((a * distance - 5 * a) * distance + 8 * a) * distance - 4 * a
        share = np.where(distance <= 1, near, np.where(distance < 2, far, 0.0))
    if antialias:
        share = share / share.sum(1, keepdims=True)
    index = left[:, None] + steps[None]
    if exclude:
        share = np.where((index < 0) | (index > n - 1), 0.0, share)
        share = share / share.sum(1, keepdims=True)
    made = np.zeros((len(where), n))
    rows = np.broadcast_to(np.arange(len(where))[:, None], index.shape)
    np.add.at(made, (rows, np.clip(index, 0, n - 1).astype(np.int64)), share)
    return made


# -- grids and regions -------------------------------------------------------------------------------------------------
@operator("GridSample")
def grid_sample(
    x: Tensor, grid: Tensor, *, align_corners: int = 0, mode: Any = "linear", padding_mode: Any = "zeros"
) -> Tensor:
    """Sample x at the positions of a grid."""
    how = {"linear": "bilinear", "cubic": "bicubic"}.get(text(mode), text(mode))
    return functional.grid_sample(x, grid, how, text(padding_mode), bool(align_corners))


@operator("AffineGrid", known=(1,))
def affine_grid(theta: Tensor, size: Any, *, align_corners: int = 0) -> Tensor:
    """The grid of affine maps."""
    return functional.affine_grid(theta, bounded(ints(size)), bool(align_corners))


@operator("RoiAlign")
def roi_align(
    x: Tensor, rois: Tensor, batch: Tensor, *, coordinate_transformation_mode: Any = "half_pixel", mode: Any = "avg",
    output_height: int = 1, output_width: int = 1, sampling_ratio: int = 0, spatial_scale: float = 1.0,
) -> Tensor:  # fmt: skip
    """Means, or maxima, of samples in a grid over each region of interest (He et al. 2017)."""
    if sampling_ratio < 1:
        raise NotExpressible(
            "RoiAlign with a number of samples that depends on the regions", expected="sampling_ratio >= 1"
        )
    height, width = fixed_sizes(x, (2, 3), "RoiAlign")
    half = 0.5 if text(coordinate_transformation_mode) == "half_pixel" else 0.0
    edges = rois * spatial_scale - half
    x1, y1, x2, y2 = (edges.select(1, i) for i in range(4))
    terms = []
    for low, high, cells, n in ((y1, y2, output_height, height), (x1, x2, output_width, width)):
        span = high - low if half else (high - low).clamp(min=1.0)
        steps = (np.arange(cells * sampling_ratio) + 0.5) / sampling_ratio
        at = low.unsqueeze(1) + (span / float(cells)).unsqueeze(1) * as_tensor(steps).to(x.dtype)
        inside = (at >= -1.0) & (at <= float(n))
        at = at.clamp(0.0, n - 1.0)
        below = at.detach().floor().clamp(0.0, max(n - 2.0, 0.0))
        terms.append((below.to("int64"), at - below, inside.to(x.dtype), n))
    (rows, down, seen_y, _), (columns, right, seen_x, _) = terms
    pictures = call("index", x, batch.to("int64"), axis=0)
    flat = pictures.reshape(pictures.shape[0], pictures.shape[1], -1)
    parts = []
    for dy in (0, 1):
        for dx in (0, 1):
            y, z = (rows + dy).clamp(0, height - 1), (columns + dx).clamp(0, width - 1)
            ids = (y.unsqueeze(2) * width + z.unsqueeze(1)).flatten(1).unsqueeze(1).expand(-1, x.shape[1], -1)
            share = ((down if dy else 1.0 - down) * seen_y).unsqueeze(2) * (
                (right if dx else 1.0 - right) * seen_x
            ).unsqueeze(1)
            parts.append(top.gather(flat, 2, ids) * share.flatten(1).unsqueeze(1))
    r = sampling_ratio
    grid = (parts[0].shape[0], x.shape[1], output_height, r, output_width, r)
    if text(mode) == "max":
        best = parts[0]
        for part in parts[1:]:
            best = top.maximum(best, part)
        return top.amax(best.reshape(*grid), (3, 5))
    return (parts[0] + parts[1] + parts[2] + parts[3]).reshape(*grid).mean((3, 5))
