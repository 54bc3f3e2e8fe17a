"""Reductions, extrema, scans and order along axes, under torch's names. Of equal extrema the first entry counts."""

from __future__ import annotations

import builtins
from collections.abc import Callable
from math import inf, prod
from typing import TYPE_CHECKING, Any

from graphwright.array import bool_, float32, float64, int64, uint8
from graphwright.autograd.apply import TensorBase, apply, as_tensor
from graphwright.autograd.functions import cast_like, where
from graphwright.autograd.names import METHOD, TOP, Extremes, named
from graphwright.errors import DTypeError, ShapeError, UsageError
from graphwright.ops import call, get
from graphwright.ops.axes import axes_of, axis_of

if TYPE_CHECKING:
    from graphwright.autograd.tensor import Tensor

Axes = Any
"""An axis, several, or None for all."""


# -- one op each -------------------------------------------------------------------------------------------------------
def _reduction(op: str, doc: str, typed: bool = True) -> None:
    row = get(op)

    def reduce(input: Tensor, dim: Axes = None, keepdim: bool = False, *, dtype: Any = None) -> Tensor:
        x = input if dtype is None else input.to(dtype)
        made = apply(row, (x,), {"axes": axes_of(dim, x.ndim), "keepdims": keepdim})
        return made if dtype is None else made.to(dtype)

    def reduce_untyped(input: Tensor, dim: Axes = None, keepdim: bool = False) -> Tensor:
        return apply(row, (input,), {"axes": axes_of(dim, input.ndim), "keepdims": keepdim})

    made = reduce if typed else reduce_untyped
    made.__name__, made.__doc__ = op, doc
    named()(made)


_reduction("sum", "Σ over axes, all by default; with `dtype`, the operand is cast first.")
_reduction("mean", "Mean over axes, all by default; with `dtype`, the operand is cast first.")
_reduction("prod", "Π over axes, all by default; with `dtype`, the operand is cast first.")
_reduction("amax", "Largest entry over axes; ties share the gradient.", typed=False)
_reduction("amin", "Smallest entry over axes; ties share the gradient.", typed=False)
_reduction("any", "True if some entry is not 0.", typed=False)
_reduction("all", "True if no entry is 0.", typed=False)


@named()
def logsumexp(input: Tensor, dim: Axes = None, keepdim: bool = False) -> Tensor:
    """ln Σ eˣ over axes."""
    x = input if input.dtype.is_float else input.to(float32)
    return call("logsumexp", x, axes=axes_of(dim, x.ndim), keepdims=keepdim)


# -- moments and norms -------------------------------------------------------------------------------------------------
def _moments(dim: Axes, unbiased: Any, correction: Any) -> tuple[Axes, Any]:
    if isinstance(dim, bool):  # torch's var(unbiased)
        dim, unbiased = None, dim
    return dim, (1 if unbiased else 0) if correction is None else correction


@named()
def var(
    input: Tensor, dim: Axes = None, unbiased: bool = True, keepdim: bool = False, *, correction: float | None = None
) -> Tensor:
    """Σ (x - mean)² / (n - correction) over axes (all by default); NaN for n ≤ correction, as in torch.

    For 16-bit floats the statistics are float32, rounded once. Raises: DTypeError for integers.

    Args:
        unbiased: correction 1 if true, else 0; `correction` has precedence.
    """
    x = input
    dim, less = _moments(dim, unbiased, correction)
    axes = axes_of(dim, x.ndim)
    if x.dtype.is_low:
        return var(x.to(float32), axes, keepdim=keepdim, correction=less).to(x.dtype)
    deviation = x - x.mean(axes, True)
    return (deviation * deviation).sum(axes, keepdim) / builtins.max(prod(x.shape[a] for a in axes) - less, 0)


@named()
def std(
    input: Tensor, dim: Axes = None, unbiased: bool = True, keepdim: bool = False, *, correction: float | None = None
) -> Tensor:
    """√ of `var`, with gradient 0 where the result is 0."""
    x = input
    dim, less = _moments(dim, unbiased, correction)
    if x.dtype.is_low:
        return std(x.to(float32), dim, keepdim=keepdim, correction=less).to(x.dtype)
    return _zero_safe(var(x, dim, keepdim=keepdim, correction=less), lambda v: v.sqrt())


@named(TOP)
def var_mean(
    input: Tensor, dim: Axes = None, unbiased: bool = True, keepdim: bool = False, *, correction: float | None = None
) -> tuple[Tensor, Tensor]:
    """Return `var` and the mean over the same axes."""
    dim, less = _moments(dim, unbiased, correction)
    return var(input, dim, keepdim=keepdim, correction=less), input.mean(dim, keepdim)


@named(TOP)
def std_mean(
    input: Tensor, dim: Axes = None, unbiased: bool = True, keepdim: bool = False, *, correction: float | None = None
) -> tuple[Tensor, Tensor]:
    """Return `std` and the mean over the same axes."""
    dim, less = _moments(dim, unbiased, correction)
    return std(input, dim, keepdim=keepdim, correction=less), input.mean(dim, keepdim)


@named()
def norm(input: Tensor, p: Any = 2, dim: Axes = None, keepdim: bool = False, dtype: Any = None) -> Tensor:
    """(Σ |x|ᵖ)^(1/p) over axes (all by default), with gradient 0 where the norm is 0.

    Args:
        p: a number, `inf` for the largest |x|, `-inf` for the smallest, 0 for the number of nonzero entries;
            `"fro"` is 2.
    Raises: UsageError for another name.
    """
    x = input if dtype is None else input.to(dtype)
    if x.dtype.is_low:
        return norm(x.to(float32), p, dim, keepdim).to(x.dtype)
    p = 2 if p in ("fro", None) else p
    if isinstance(p, str):
        raise UsageError("unknown order of a norm", expected="a number, inf, -inf or 'fro'", got=p)
    if p == 0:
        return (x != 0.0).to(x.dtype).sum(dim, keepdim)
    if p in (inf, -inf):
        return x.abs().amax(dim, keepdim) if p > 0 else x.abs().amin(dim, keepdim)
    if p < 0:
        zero = x == 0.0
        total = where(zero, inf, where(zero, 1.0, x.abs()) ** p).sum(dim, keepdim)
        return where(total == inf, 0.0, where(total == inf, 1.0, total) ** (1.0 / p))
    if p == 1:
        return x.abs().sum(dim, keepdim)
    if p == 2:
        return _zero_safe((x * x).sum(dim, keepdim), lambda total: total.sqrt())
    powers = _zero_safe(x.abs(), lambda size: size**p)
    return _zero_safe(powers.sum(dim, keepdim), lambda total: total ** (1.0 / p))


def _zero_safe(x: Tensor, function: Callable[[Tensor], Tensor]) -> Tensor:
    """Apply a function that maps 0 to 0, with gradient 0 at 0 instead of infinity or NaN."""
    zero = x == 0.0
    return where(zero, 0.0, function(where(zero, 1.0, x)))


@named(in_place=True)
def renorm(input: Tensor, p: float, dim: int, maxnorm: float) -> Tensor:
    """Scale the slices of an axis whose p-norm exceeds `maxnorm` down to it.

    Raises: ShapeError below two axes, UsageError for a negative `maxnorm`.
    """
    if maxnorm < 0:
        raise UsageError("maxnorm is negative", where="renorm", expected=">= 0", got=maxnorm)
    if input.ndim < 2:
        raise ShapeError("the tensor has too few axes", where="renorm", expected="at least 2", got=input.spec)
    rest = tuple(a for a in range(input.ndim) if a != axis_of(dim, input.ndim))
    size = norm(input, p, rest, True)
    return input * where(size > maxnorm, maxnorm / (size + 1e-7), 1.0)


@named()
def nansum(input: Tensor, dim: Axes = None, keepdim: bool = False, *, dtype: Any = None) -> Tensor:
    """Σ over axes of the entries that are not NaN."""
    x = input if dtype is None else input.to(dtype)
    return where(x.isnan(), cast_like(0.0, x), x).sum(dim, keepdim, dtype=dtype)


@named()
def nanmean(input: Tensor, dim: Axes = None, keepdim: bool = False, *, dtype: Any = None) -> Tensor:
    """Mean over axes of the entries that are not NaN."""
    x = input if dtype is None else input.to(dtype)
    return nansum(x, dim, keepdim) / (~x.isnan()).to(x.dtype).sum(dim, keepdim)


@named()
def count_nonzero(input: Tensor, dim: Axes = None) -> Tensor:
    """Return the number of entries over axes that are not 0, int64."""
    return (input != 0).sum(dim)


# -- extrema -----------------------------------------------------------------------------------------------------------
def _extremum(input: Any, dim: Any, keepdim: bool, op: str, whole: str, pairwise: str) -> Any:
    input = as_tensor(input)
    if dim is None:
        return call(whole, input, axes=axes_of(None, input.ndim))
    if isinstance(dim, TensorBase):  # torch's max(input, other)
        return call(pairwise, input, dim)
    at = axis_of(dim, input.ndim)
    x = input.to(uint8) if input.dtype.kind == "bool" else input
    return _taken(input, call(op, x, axis=at), at, keepdim)


def _taken(x: Tensor, index: Tensor, at: int, keepdim: bool) -> Extremes:
    """Return the entries at one index [shape without the axis] per row, with the indices."""
    shape = index.shape
    column = call("reshape", index, shape=(*shape[:at], 1, *shape[at:]))
    value = call("gather", x, column, axis=at)
    return Extremes(value, column) if keepdim else Extremes(call("reshape", value, shape=shape), index)


@named(scalars=True)
def max_(input: Tensor, dim: Any = None, keepdim: bool = False) -> Any:
    """Return the largest entry; with an axis (values, indices) of the first maxima, which get the gradient.

    With a tensor instead of an axis: `maximum`.
    """
    return _extremum(input, dim, keepdim, "argmax", "amax", "maximum")


@named(scalars=True)
def min_(input: Tensor, dim: Any = None, keepdim: bool = False) -> Any:
    """Return the smallest entry; with an axis (values, indices) of the first minima, which get the gradient.

    With a tensor instead of an axis: `minimum`.
    """
    return _extremum(input, dim, keepdim, "argmin", "amin", "minimum")


@named()
def aminmax(input: Tensor, *, dim: int | None = None, keepdim: bool = False) -> tuple[Tensor, Tensor]:
    """Return the smallest and the largest entry, of all or along an axis."""
    return input.amin(dim, keepdim), input.amax(dim, keepdim)


def _position(op: str, doc: str) -> None:
    def position(input: Tensor, dim: int | None = None, keepdim: bool = False) -> Tensor:
        if dim is None:
            found = call(op, input.reshape(-1), axis=0)
            return found.reshape(*(1,) * input.ndim) if keepdim else found
        found = call(op, input, axis=dim)
        return found.unsqueeze(axis_of(dim, input.ndim)) if keepdim else found

    position.__name__, position.__doc__ = op, doc
    named(scalars=True)(position)


_position("argmax", "Index of the largest entry along an axis, or in the flattened array, int64; the first on ties.")
_position("argmin", "Index of the smallest entry along an axis, or in the flattened array, int64; the first on ties.")


# -- order -------------------------------------------------------------------------------------------------------------
@named(scalars=True)
def sort(input: Any, dim: int = -1, descending: bool = False, *, stable: bool = True) -> Extremes:
    """Return the sorted values and their indices; stable, NaN is the largest."""
    return Extremes(*call("sort", as_tensor(input), axis=dim, descending=descending))


@named(scalars=True)
def argsort(input: Any, dim: int = -1, descending: bool = False, *, stable: bool = True) -> Tensor:
    """Return the indices that sort an axis, int64; stable, NaN is the largest."""
    return sort(input, dim, descending)[1]


@named()
def msort(input: Any) -> Tensor:
    """Return the values sorted along the first axis."""
    return sort(input, 0)[0]


@named(scalars=True)
def topk(input: Any, k: int, dim: int = -1, largest: bool = True, sorted: bool = True) -> Extremes:
    """Return the k largest (or smallest) values in order, and their indices; equal values by ascending index.

    Raises: ShapeError if k exceeds the size of the axis.
    """
    return Extremes(*call("topk", as_tensor(input), k=k, axis=dim, largest=largest))


@named(scalars=True)
def kthvalue(input: Tensor, k: int, dim: int = -1, keepdim: bool = False) -> Extremes:
    """Return the k-th smallest value along an axis, counted from 1, and its index. Raises: ShapeError."""
    at = axis_of(dim, input.ndim)
    if not 1 <= k <= input.shape[at]:
        raise ShapeError("k is out of range", where="kthvalue", expected=f"1 to {input.shape[at]}", got=k)
    values, order = (t.narrow(at, k - 1, 1) for t in sort(input, at))
    return Extremes(values, order) if keepdim else Extremes(values.squeeze(at), order.squeeze(at))


def _middle(input: Tensor, dim: int | None, keepdim: bool, skip: bool) -> Any:
    """Return the median, the lower of two: NaN if an entry is, or with `skip` of the others."""
    x, at = (input.reshape(-1), 0) if dim is None else (input, axis_of(dim, input.ndim))
    n = x.shape[at]
    if not n and dim is None and x.dtype.is_float:
        return input.mean(keepdim=keepdim)  # NaN
    if not n:
        raise ShapeError("there is no median of no entries", where="median", expected="1 or more", got=input.spec)
    values, order = sort(x, at)
    if x.dtype.is_float:
        numbers = (~x.isnan()).sum(at, True)
        middle = ((numbers - 1) // 2).clamp(min=0)
        middle = middle if skip else where(numbers < n, n - 1, (n - 1) // 2)
    else:
        middle = call("full_like", values.narrow(at, 0, 1), value=(n - 1) // 2).to(int64)
    value, index = call("gather", values, middle, axis=at), call("gather", order, middle, axis=at)
    if dim is None:
        return value.reshape(*(1,) * input.ndim) if keepdim else value.squeeze(0)
    return Extremes(value, index) if keepdim else Extremes(value.squeeze(at), index.squeeze(at))


@named(scalars=True)
def median(input: Tensor, dim: int | None = None, keepdim: bool = False) -> Any:
    """Return the median, of two middle entries the lower; with an axis (values, indices). NaN if an entry is NaN."""
    return _middle(input, dim, keepdim, skip=False)


@named(scalars=True)
def nanmedian(input: Tensor, dim: int | None = None, keepdim: bool = False) -> Any:
    """Return the median of the entries that are not NaN; with an axis (values, indices)."""
    return _middle(input, dim, keepdim, skip=True)


@named(METHOD, differs="`gw.mode` is the context manager of training and inference", scalars=True)
def mode(input: Tensor, dim: int = -1, keepdim: bool = False) -> Extremes:
    """Return the most frequent value along an axis, of several the smallest, and an index of it."""
    at = axis_of(dim, input.ndim)
    values, order = sort(input, at)
    position = call("iota", values, axis=at).reshape(*(-1 if a == at else 1 for a in range(values.ndim)))
    starts = where(changes(values, at), position, 0)
    (start,) = scan(lambda a, b: (call("maximum", a[0], b[0]),), (starts,), at)
    end = (position - start).argmax(at, True)  # of the first of the longest runs of equal values
    value, index = call("gather", values, end, axis=at), call("gather", order, end, axis=at)
    return Extremes(value, index) if keepdim else Extremes(value.squeeze(at), index.squeeze(at))


def changes(x: Tensor, at: int) -> Tensor:
    """True where an entry differs from the one before it along an axis, and at the first entry."""
    n = x.shape[at]
    first = builtins.min(n, 1)
    begin = call("full_like", x.narrow(at, 0, first), value=1.0).to(bool_)
    return call("concat", begin, x.narrow(at, first, n - first) != x.narrow(at, 0, n - first), axis=at)


@named()
def nanquantile(
    input: Tensor, q: Any, dim: int | None = None, keepdim: bool = False, *, interpolation: str = "linear"
) -> Tensor:
    """`quantile` of the entries that are not NaN; NaN if there are none."""
    return _quantile(input, q, dim, keepdim, interpolation, skip=True)


@named()
def quantile(
    input: Tensor, q: Any, dim: int | None = None, keepdim: bool = False, *, interpolation: str = "linear"
) -> Tensor:
    """The q-quantile, 0 ≤ q ≤ 1, interpolated linearly between entries; several q give a new first axis.

    Computed in float32 or float64. NaN where an entry is NaN.

    Args:
        q: a number or a tensor [] or [n]; outside traces it is checked.
        interpolation: `linear`, `lower`, `higher`, `nearest` or `midpoint`.
    Raises: UsageError for a q outside [0, 1] or another interpolation; ShapeError for q of more axes, or no entries.
    """
    return _quantile(input, q, dim, keepdim, interpolation, skip=False)


def _quantile(input: Tensor, q: Any, dim: int | None, keepdim: bool, interpolation: str, skip: bool) -> Tensor:
    if not input.ndim:
        axes_of(dim, 0)
        dim, keepdim = None, False
    if input.dtype is not float64 and input.dtype is not float32:
        made = _quantile(input.to(float32), q, dim, keepdim, interpolation, skip)
        return made.to(input.dtype) if input.dtype.is_float else made
    rounding = {"linear": "floor", "lower": "floor", "higher": "ceil", "nearest": "round", "midpoint": "floor"}
    if interpolation not in rounding:
        raise UsageError("unknown interpolation", expected=", ".join(rounding), got=interpolation)
    share = cast_like(q, input)
    if share.ndim > 1:
        raise ShapeError("the quantiles are not a vector", where="quantile", expected="[] or [n]", got=share.spec)
    if not share.symbolic and not bool(((share >= 0.0) & (share <= 1.0)).all().item()):
        raise UsageError("a quantile is out of range", expected="0 <= q <= 1", got=q)
    x, at = (input.reshape(-1), 0) if dim is None else (input, axis_of(dim, input.ndim))
    values, n = sort(x, at)[0], x.shape[at]
    if not n:
        raise ShapeError("there is no quantile of no entries", where="quantile", expected="1 or more", got=input.spec)
    if skip:  # NaN is sorted to the end of each row, whose numbers differ in count
        values = values.movedim(at, -1)
        last = ((~values.isnan()).sum(-1, True).to(x.dtype) - 1.0).clamp(min=0.0)
        position = share.reshape(-1) * last
    else:
        position = share.reshape(-1) * float(n - 1)

    def taken(index: Tensor) -> Tensor:
        if skip:
            return call("gather", values, index.to(int64), axis=values.ndim - 1)
        return call("index", values, index.to(int64), axis=at)

    low = call(rounding[interpolation], position.detach())
    made = taken(low)
    if interpolation in ("linear", "midpoint"):
        part = position - low if interpolation == "linear" else (position > low) * 0.5
        part = part if skip else part.reshape(-1, *(1,) * (x.ndim - 1 - at))
        above = taken(call("ceil", position.detach()))
        made = where(part == 0.0, made, made + (above - made) * part)
    made = made.movedim(-1, 0) if skip else where(x.isnan().any(at, True), float("nan"), made).movedim(at, 0)
    if keepdim:
        kept = (1,) * input.ndim if dim is None else tuple(1 if a == at else s for a, s in enumerate(x.shape))
        made = made.reshape(made.shape[0], *kept)
    return made if share.ndim else made.squeeze(0)


# -- scans -------------------------------------------------------------------------------------------------------------
@named(in_place=True, scalars=True)
def cumsum(input: Tensor, dim: int, *, dtype: Any = None) -> Tensor:
    """Sum cumulatively along an axis; each sum includes its own entry."""
    if dtype is None:
        return call("cumsum", input, axis=dim)
    return call("cumsum", input.to(dtype), axis=dim).to(dtype)


def scan(combine: Callable[..., Any], parts: tuple[Tensor, ...], at: int) -> tuple[Tensor, ...]:
    """Combine all entries up to each entry along an axis, by ⌈log₂ n⌉ steps over ever longer distances."""
    n, step = parts[0].shape[at], 1
    while step < n:
        earlier = [p.narrow(at, 0, n - step) for p in parts]
        later = [p.narrow(at, step, n - step) for p in parts]
        merged = combine(earlier, later)
        parts = tuple(call("concat", p.narrow(at, 0, step), m, axis=at) for p, m in zip(parts, merged, strict=True))
        step *= 2
    return parts


@named(in_place=True, scalars=True)
def cumprod(input: Tensor, dim: int, *, dtype: Any = None) -> Tensor:
    """Multiply cumulatively along an axis; each product includes its own entry. Entries of 0 get the exact gradient."""
    x = input if dtype is None else input.to(dtype)
    x = x if x.dtype.is_float else x.to(int64)
    made = scan(lambda a, b: (a[0] * b[0],), (x,), axis_of(dim, x.ndim))[0]
    return made if dtype is None else made.to(dtype)


@named(scalars=True)
def logcumsumexp(input: Tensor, dim: int) -> Tensor:
    """ln Σ eˣ over the entries up to each entry along an axis, without overflow. Raises: DTypeError for bool."""
    from graphwright.autograd.pointwise import logaddexp  # here: stubs list functions in the order of imports

    if input.dtype is bool_:
        raise DTypeError("logcumsumexp needs numbers", where="logcumsumexp", expected="a number dtype", got=input.spec)
    return scan(lambda a, b: (logaddexp(a[0], b[0]),), (input,), axis_of(dim, input.ndim))[0]


def _running(input: Tensor, dim: int, op: str) -> Extremes:
    at = axis_of(dim, input.ndim)
    ids = call("iota", input, axis=at).reshape(*(-1 if a == at else 1 for a in range(input.ndim))).expand(*input.shape)
    values = call("stop_gradient", input)

    def combine(earlier: list[Tensor], later: list[Tensor]) -> tuple[Tensor, Tensor]:
        nan = later[0].isnan() | earlier[0].isnan()
        takes = call(op, later[0], earlier[0]) & ~nan | later[0].isnan()
        return where(takes, later[0], earlier[0]), where(takes, later[1], earlier[1])

    index = scan(combine, (values, ids), at)[1]
    return Extremes(call("gather", input, index, axis=at), index)


@named(scalars=True)
def cummax(input: Tensor, dim: int) -> Extremes:
    """Return the largest entry up to each entry along an axis, and its index; of equal entries the last."""
    return _running(input, dim, "ge")


@named(scalars=True)
def cummin(input: Tensor, dim: int) -> Extremes:
    """Return the smallest entry up to each entry along an axis, and its index; of equal entries the last."""
    return _running(input, dim, "le")


@named()
def diff(input: Tensor, n: int = 1, dim: int = -1, prepend: Any = None, append: Any = None) -> Tensor:
    """Differences of neighbours along an axis, n times; values may be joined before and after the entries first.

    Raises: ShapeError for a 0-d tensor, UsageError for n below 0.
    """
    if n < 0:
        raise UsageError("the order of differences is negative", where="diff", expected=">= 0", got=n)
    at = axis_of(dim, input.ndim)
    if n == 0:
        return input
    whole = [t for t in (prepend, input, append) if t is not None]
    x = input if len(whole) == 1 else call("concat", *whole, axis=at)
    for _ in range(n):
        size = builtins.max(x.shape[at] - 1, 0)
        after, before = x.narrow(at, x.shape[at] - size, size), x.narrow(at, 0, size)
        x = call("logical_xor", after, before) if x.dtype.kind == "bool" else after - before
    return x


@named(TOP, also="trapz")
def trapezoid(y: Tensor, x: Any = None, *, dx: Any = 1, dim: int = -1) -> Tensor:
    """Integrate y along an axis by the trapezoidal rule, at the positions x or dx apart."""
    return _trapezoids(y, x, dx, dim).sum(dim)


def _trapezoids(y: Tensor, x: Any, dx: Any, dim: int) -> Tensor:
    at = axis_of(dim, y.ndim)
    size = builtins.max(y.shape[at] - 1, 0)
    means = (y.narrow(at, 0, size) + y.narrow(at, y.shape[at] - size, size)) * 0.5
    if x is None:
        return means * dx
    positions = as_tensor(x)
    if positions.ndim == 1:
        positions = positions.reshape(*(-1 if a == at else 1 for a in range(y.ndim)))
    return means * diff(positions, 1, at - y.ndim)


@named(TOP)
def cumulative_trapezoid(y: Tensor, x: Any = None, *, dx: Any = 1, dim: int = -1) -> Tensor:
    """Integrate y cumulatively along an axis by the trapezoidal rule, at the positions x or dx apart."""
    return _trapezoids(y, x, dx, dim).cumsum(dim)


@named()
def cov(input: Tensor, *, correction: int = 1, fweights: Any = None, aweights: Any = None) -> Tensor:
    """Covariance of the rows of [variables, observations].

    Args:
        fweights: int [observations], how often each observation counts.
        aweights: [observations], its weight.
    Raises: ShapeError, DTypeError.
    """
    if input.ndim > 2:
        raise ShapeError("the tensor has too many axes", where="cov", expected="at most 2", got=input.spec)
    x = input.reshape(1, -1) if input.ndim < 2 else input
    x = x if x.dtype.is_float else x.to(float32)
    weights, total, loss = None, x.shape[1], correction
    for name, given, integral in (("fweights", fweights, True), ("aweights", aweights, False)):
        if given is None:
            continue
        if given.ndim > 1 or given.numel() != x.shape[1] or bool((given < 0).any().item()):
            expected = f"{x.shape[1]} numbers >= 0"
            raise ShapeError("invalid weights of observations", where=name, expected=expected, got=given.spec)
        if given.dtype.is_float is integral:
            raise DTypeError("weights of observations have the wrong dtype", where=name, got=given.spec)
        weights = given.to(x.dtype) if weights is None else weights * given.to(x.dtype)
    if weights is None:
        centred = x - x.mean(1, True)
        made = centred @ centred.T / builtins.max(total - loss, 0)
    else:
        whole = weights.sum()
        centred = x - (x * weights).sum(1, True) / whole
        less = loss if aweights is None else (weights * aweights.to(x.dtype)).sum() / whole * loss
        made = (centred * weights) @ centred.T / (whole - less).clamp(min=0.0)
    return made if x.shape[0] > 1 else made.reshape()


@named()
def corrcoef(input: Tensor) -> Tensor:
    """Correlation coefficients of the rows of [variables, observations]."""
    c = cov(input)
    if not c.ndim:
        return c / c
    scale = call("diagonal", c, offset=0, axes=(0, 1)).sqrt()
    return (c / scale.reshape(-1, 1) / scale).clamp(-1.0, 1.0)


# -- softmax -----------------------------------------------------------------------------------------------------------
@named(scalars=True)
def softmax(input: Tensor, dim: int = -1, mask: Any = None, *, dtype: Any = None) -> Tensor:
    """e^(x - max x) / Σ e^(x - max x) along an axis.

    Args:
        mask: bool, broadcast to x; entries where it is false are 0 and get no gradient, even if a whole row is false.
            Without a mask, a row of only -inf gives NaN.
        dtype: a dtype to cast to first.
    """
    x = input if dtype is None else input.to(dtype)
    return call("softmax", x, *(() if mask is None else (mask,)), axis=dim)


@named(scalars=True)
def log_softmax(input: Tensor, dim: int = -1, *, dtype: Any = None) -> Tensor:
    """ln softmax along an axis; with `dtype`, the operand is cast first."""
    return call("log_softmax", input if dtype is None else input.to(dtype), axis=dim)
