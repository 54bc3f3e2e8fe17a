"""Initial values by torch's functions, which fill a tensor in place, without a gradient, and return it."""

from __future__ import annotations

from math import ceil, erf, prod, sqrt

import numpy as np

from graphwright.autograd import Generator, Tensor, no_grad, rand, rand_like, randn, randn_like, tensor, where
from graphwright.errors import ShapeError, UsageError
from graphwright.nn.initial import fans
from graphwright.settings import Range

__all__ = [
    "calculate_gain", "constant_", "dirac_", "eye_", "kaiming_normal_", "kaiming_uniform_", "normal_", "ones_",
    "orthogonal_", "sparse_", "trunc_normal_", "uniform_", "xavier_normal_", "xavier_uniform_", "zeros_",
]  # fmt: skip
_LINEAR = (
    "linear",
    "conv1d",
    "conv2d",
    "conv3d",
    "conv_transpose1d",
    "conv_transpose2d",
    "conv_transpose3d",
    "sigmoid",
)
_GAINS = {
    **dict.fromkeys(_LINEAR, lambda slope: 1.0),
    "tanh": lambda slope: 5 / 3,
    "relu": lambda slope: sqrt(2.0),
    "selu": lambda slope: 0.75,
    "leaky_relu": lambda slope: sqrt(2 / (1 + slope**2)),
}


def calculate_gain(nonlinearity: str, param: float | None = None) -> float:
    """Return the factor that keeps the variance through a nonlinearity, by its name in `nn.functional`.

    1 for linear, conv{1,2,3}d, conv_transpose{1,2,3}d and sigmoid, 5/3 for tanh, √2 for relu, 3/4 for selu, and
    √(2 / (1 + param²)) for leaky_relu, whose `param` is the negative slope, by default 0.01.
    Raises: UsageError for another name.
    """
    if nonlinearity not in _GAINS:
        raise UsageError("unknown nonlinearity", expected=", ".join(_GAINS), got=nonlinearity)
    return _GAINS[nonlinearity](0.01 if param is None else param)


@no_grad()
def uniform_(tensor: Tensor, a: float = 0.0, b: float = 1.0, generator: Generator | None = None) -> Tensor:
    """Fill with samples of the uniform distribution over [a, b). Raises: UsageError if b < a."""
    return tensor.uniform_(a, b, generator=generator)


@no_grad()
def normal_(tensor: Tensor, mean: float = 0.0, std: float = 1.0, generator: Generator | None = None) -> Tensor:
    """Fill with samples of N(mean, std²). Raises: UsageError if std < 0."""
    return tensor.normal_(mean, std, generator=generator)


@no_grad()
def trunc_normal_(
    tensor: Tensor, mean: float = 0.0, std: float = 1.0, a: float = -2.0, b: float = 2.0,
    generator: Generator | None = None,
) -> Tensor:  # fmt: skip
    """Fill with samples of N(mean, std²) in [a, b]; values outside are drawn again.

    As torch: normal values if [a, b] has more than 0.3 of the probability, else uniform ones, accepted in proportion
    to the density. Raises: UsageError if std <= 0 or b < a.
    """
    if not (std > 0 and a <= b):
        raise UsageError("invalid truncated normal distribution", expected="std > 0 and a <= b", got=(std, a, b))
    inside = 0.5 * (erf((b - mean) / (std * sqrt(2))) - erf((a - mean) / (std * sqrt(2))))
    mode = max(a, min(mean, b))

    def drawn() -> tuple[Tensor, Tensor]:
        if inside > 0.3:
            values = randn_like(tensor, generator=generator) * std + mean
            return values, (values >= a) & (values <= b)
        values = rand_like(tensor, generator=generator) * (b - a) + a
        density = (((mode - mean) / std) ** 2 - ((values - mean) / std) ** 2) / 2
        return values, rand_like(tensor, generator=generator).log() <= density

    values, fits = drawn()
    while not fits.all().item():
        others, good = drawn()
        values, fits = where(fits, values, others), fits | good
    return tensor.copy_(values)


@no_grad()
def constant_(tensor: Tensor, val: float) -> Tensor:
    """Fill with one value."""
    return tensor.fill_(val)


def ones_(tensor: Tensor) -> Tensor:
    """Fill with ones."""
    return constant_(tensor, 1.0)


def zeros_(tensor: Tensor) -> Tensor:
    """Fill with zeros."""
    return constant_(tensor, 0.0)


def eye_(tensor: Tensor) -> Tensor:
    """Fill a matrix with ones on the diagonal and zeros elsewhere. Raises: ShapeError for another number of axes."""
    rows, columns = _matrix(tensor)
    return _filled(tensor, np.eye(rows, columns))


def dirac_(tensor: Tensor, groups: int = 1) -> Tensor:
    """Fill a weight [out, in, kernel...] of a convolution so that it keeps as many channels as possible as they are.

    Each of the `groups` of out channels does so; the entry is in the middle of the kernel, n // 2.
    Raises: ShapeError for other than 3 to 5 axes; UsageError if the groups do not divide the out channels.
    """
    if tensor.ndim not in (3, 4, 5):
        raise ShapeError("not the weight of a convolution", expected="3, 4 or 5 axes", got=tensor.spec)
    Range(1, whole=True).check("groups", groups)
    if tensor.shape[0] % groups:
        raise UsageError("the groups do not divide the out channels", expected=tensor.shape[0], got=groups)
    made, each = np.zeros(tensor.shape), tensor.shape[0] // groups
    kept = np.arange(min(each, tensor.shape[1]))
    for start in range(0, tensor.shape[0], each or 1):
        made[(start + kept, kept, *(n // 2 for n in tensor.shape[2:]))] = 1.0
    return _filled(tensor, made)


def xavier_uniform_(tensor: Tensor, gain: float = 1.0, generator: Generator | None = None) -> Tensor:
    """Fill uniformly within ±gain·√(6 / (fan_in + fan_out)) (Glorot and Bengio 2010, equation 16).

    Raises: UsageError for fewer than two axes.
    """
    bound = gain * sqrt(6 / max(sum(fans(tensor.shape)), 1))
    return uniform_(tensor, -bound, bound, generator)


def xavier_normal_(tensor: Tensor, gain: float = 1.0, generator: Generator | None = None) -> Tensor:
    """Fill with samples of N(0, gain²·2 / (fan_in + fan_out)). Raises: UsageError for fewer than two axes."""
    return normal_(tensor, 0.0, gain * sqrt(2 / max(sum(fans(tensor.shape)), 1)), generator)


def kaiming_uniform_(
    tensor: Tensor, a: float = 0.0, mode: str = "fan_in", nonlinearity: str = "leaky_relu",
    generator: Generator | None = None,
) -> Tensor:  # fmt: skip
    """Fill uniformly within ±gain·√(3 / fan) (He et al. 2015); a tensor without entries is returned as it is.

    Args:
        a: negative slope, for `leaky_relu`; the gain is `calculate_gain(nonlinearity, a)`.
        mode: `fan_in`, which keeps the variance of values, or `fan_out`, which keeps that of gradients.
    Raises: UsageError for another mode or nonlinearity, or fewer than two axes.
    """
    bound = sqrt(3.0) * _deviation(tensor, a, mode, nonlinearity)
    return uniform_(tensor, -bound, bound, generator)


def kaiming_normal_(
    tensor: Tensor, a: float = 0.0, mode: str = "fan_in", nonlinearity: str = "leaky_relu",
    generator: Generator | None = None,
) -> Tensor:  # fmt: skip
    """Fill with samples of N(0, gain² / fan); arguments and errors as of `kaiming_uniform_`."""
    return normal_(tensor, 0.0, _deviation(tensor, a, mode, nonlinearity), generator)


def orthogonal_(tensor: Tensor, gain: float = 1.0, generator: Generator | None = None) -> Tensor:
    """Fill with a matrix of orthonormal rows (columns, if those are fewer), times gain.

    Axes after the first are flattened. Computed in float64 by QR of a normal matrix, with the signs of R's diagonal
    (Saxe, McClelland and Ganguli 2014; Mezzadri 2007). Raises: ShapeError for fewer than two axes.
    """
    if tensor.ndim < 2:
        raise ShapeError("cannot make this shape orthogonal", expected="two axes or more", got=tensor.spec)
    rows, columns = tensor.shape[0], prod(tensor.shape[1:])
    flat = randn(max(rows, columns), min(rows, columns), dtype="float64", generator=generator).numpy()
    q, r = np.linalg.qr(flat)
    q = q * np.sign(np.diagonal(r))
    return _filled(tensor, gain * (q if rows >= columns else q.T).reshape(tensor.shape))


@no_grad()
def sparse_(tensor: Tensor, sparsity: float, std: float = 0.01, generator: Generator | None = None) -> Tensor:
    """Fill a matrix with samples of N(0, std²), of which ⌈sparsity·rows⌉ entries of each column, at random, are 0.

    Source: Martens 2010. Raises: ShapeError if it is no matrix; UsageError for a sparsity outside [0, 1].
    """
    rows, _ = _matrix(tensor)
    Range(0.0, 1.0).check("sparsity", sparsity)
    order = rand(*tensor.shape, dtype="float64", generator=generator, device=tensor.device).argsort(0).argsort(0)
    tensor.normal_(0.0, std, generator=generator)
    return tensor.copy_(tensor * (order >= ceil(sparsity * rows)).to(tensor.dtype))


def _matrix(given: Tensor) -> tuple[int, int]:
    if given.ndim != 2:
        raise ShapeError("the tensor is not a matrix", expected="two axes", got=given.spec)
    return given.shape[0], given.shape[1]


@no_grad()
def _filled(given: Tensor, values: np.ndarray) -> Tensor:
    return given.copy_(tensor(values, dtype=given.dtype, device=given.device))


def _deviation(given: Tensor, a: float, mode: str, nonlinearity: str) -> float:
    """gain / √fan, or 0 if there are no entries."""
    if mode not in ("fan_in", "fan_out"):
        raise UsageError("unknown mode", expected="fan_in or fan_out", got=mode)
    fan = fans(given.shape)[mode == "fan_out"]
    return calculate_gain(nonlinearity, a) / sqrt(fan) if fan else 0.0
