"""Factors of a matrix: cores with labelled axes. Runs multiply vectors by cores, but never two cores.

The indices of W[o, i] are split into modes, o = (o₁ .. o_d). Axes that two cores share are called bonds; W is the sum
over all bonds of the product of the cores. Sources: Zhao et al. 2016, "Tensor ring decomposition"; Oseledets 2011 for
the tensor train, a ring with r₀ = 1.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import NamedTuple

import numpy as np

from graphwright.array import DType
from graphwright.errors import UsageError
from graphwright.surgery.errors import NotFactorable
from graphwright.surgery.matrices import rounded


class Core(NamedTuple):
    """One factor of a matrix.

    Attributes:
        name: suffix of its param's path `<linear map>.<name>.weight`, for example `core1`.
        array: entries in float64.
        labels: one label per axis: `o1`, `i1`, ... for modes of output and input; `b0`, ... for bonds.
    """

    name: str
    array: np.ndarray
    labels: tuple[str, ...]


@dataclass(frozen=True, eq=False)
class LowRank:
    """The factors [out, r] and [r, in] of W ≈ outer · inner."""

    outer: np.ndarray
    inner: np.ndarray

    @property
    def shape(self) -> tuple[int, int]:
        """Shape (out, in) of the matrix."""
        return self.outer.shape[0], self.inner.shape[1]

    @property
    def ranks(self) -> tuple[int, ...]:
        """The rank r, as a tuple of one number."""
        return (self.outer.shape[1],)

    @property
    def modes(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Sizes of the modes of output and input: (out,) and (in,), because neither side is split."""
        return (self.shape[0],), (self.shape[1],)

    @property
    def cores(self) -> tuple[Core, ...]:
        """The cores `outer` and `inner`."""
        return Core("outer", self.outer, ("o1", "b1")), Core("inner", self.inner, ("b1", "i1"))


@dataclass(frozen=True, eq=False)
class TensorRing:
    """A tensor ring: W(o₁ i₁, .., o_d i_d) = trace of the product of G_k[:, o_k, i_k, :] for k = 1 .. d.

    Attributes:
        arrays: the cores G_k [r_{k-1}, o_k, i_k, r_k], with r_d = r_0.
        shape: shape (out, in) of the matrix; entries beyond it, up to the products of the modes, are padding.
    """

    arrays: tuple[np.ndarray, ...]
    shape: tuple[int, int]

    @property
    def ranks(self) -> tuple[int, ...]:
        """Ranks r_0 .. r_d: the sizes of the bonds."""
        return (*(core.shape[0] for core in self.arrays), self.arrays[-1].shape[3])

    @property
    def modes(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Sizes of the modes of output, (o_1 .. o_d), and of input, (i_1 .. i_d)."""
        return tuple(c.shape[1] for c in self.arrays), tuple(c.shape[2] for c in self.arrays)

    @property
    def cores(self) -> tuple[Core, ...]:
        """The cores, named `core1` .. `core<d>`."""
        d = len(self.arrays)
        return tuple(Core(f"core{k}", core, (f"b{k - 1}", f"o{k}", f"i{k}", f"b{k % d}"))
                     for k, core in enumerate(self.arrays, 1))  # fmt: skip

    def reconstruct(self) -> np.ndarray:
        """Return the dense matrix, float64 [out, in]."""
        return reconstruct(self)


Factors = LowRank | TensorRing
"""A factored matrix with `shape` (out, in), `modes` (sizes of o₁, o₂, .. and i₁, i₂, ..), `ranks` of bonds, `cores`."""


def TensorTrain(arrays: Sequence[np.ndarray], shape: tuple[int, int]) -> TensorRing:  # the name in the literature
    """Return a tensor train: a ring whose first and last rank are 1. Raises: ValueError if they are not 1."""
    if arrays[0].shape[0] != 1 or arrays[-1].shape[3] != 1:
        ranks = arrays[0].shape[0], arrays[-1].shape[3]
        raise ValueError(f"first and last rank of a tensor train must be 1, got {ranks[0]} and {ranks[1]}")
    return TensorRing(tuple(arrays), shape)


def as_stored(factors: Factors, dtype: DType) -> Factors:
    """Round the factors to the dtype in which they are stored."""
    if isinstance(factors, LowRank):
        return LowRank(rounded(factors.outer, dtype), rounded(factors.inner, dtype))
    return TensorRing(tuple(rounded(a, dtype) for a in factors.arrays), factors.shape)


def parameters(factors: Factors) -> int:
    """Return the number of entries of all cores: Σ r_{k-1} o_k i_k r_k for a ring."""
    return sum(core.array.size for core in factors.cores)


def compression_ratio(factors: Factors) -> float:
    """Return parameters of the dense matrix / parameters of its factors; above 1 if the factors are smaller."""
    return prod(factors.shape) / max(parameters(factors), 1)


def reconstruct(factors: Factors) -> np.ndarray:
    """Multiply the factors out; return the dense matrix, float64 [out, in], without padding."""
    names = sorted({label for core in factors.cores for label in core.labels})
    number = {name: i for i, name in enumerate(names)}
    operands = [part for core in factors.cores for part in (core.array, [number[n] for n in core.labels])]
    out, inner = factors.modes
    modes = [number[f"o{k}"] for k in range(1, len(out) + 1)] + [number[f"i{k}"] for k in range(1, len(inner) + 1)]
    full = np.einsum(*operands, modes, optimize="greedy").reshape(prod(out), prod(inner))
    return full[: factors.shape[0], : factors.shape[1]]


class ContractionStep(NamedTuple):
    """Contract a value with core number `core` over axes `summed`; its axes `remaining` and the core's `free` stay."""

    core: int
    remaining: tuple[str, ...]
    summed: tuple[str, ...]
    free: tuple[str, ...]


def contraction_order(
    start: Sequence[str], cores: Sequence[Sequence[str]], sizes: Mapping[str, int]
) -> tuple[list[ContractionStep], int]:
    """Return the cheapest order in which a vector is contracted with all cores, and its operations per vector.

    Args:
        start: labels of the vector's modes.
        cores: labels of each core's axes; a label that occurs twice in vector and cores is summed over.
        sizes: dict from label to axis size.
    """
    whole = (1 << len(cores)) - 1
    best: dict[int, tuple[int, int, int]] = {0: (0, -1, -1)}  # contracted cores -> cost, last core, set before it
    for done in range(whole + 1):  # a set comes after its subsets
        if done not in best:
            continue
        names = Counter([*start, *(name for k, labels in enumerate(cores) if done >> k & 1 for name in labels)])
        value = {name for name, count in names.items() if count == 1}  # labels of the running value
        for k, labels in enumerate(cores):
            if done >> k & 1:
                continue
            kept = prod(sizes[name] for name in value - set(labels))
            cost = best[done][0] + 2 * kept * prod(sizes[name] for name in labels)
            after = done | 1 << k
            if after not in best or cost < best[after][0]:
                best[after] = cost, k, done
    order: list[int] = []
    done = whole
    while done:
        _, k, done = best[done]
        order.append(k)
    steps: list[ContractionStep] = []
    running = list(start)
    for k in reversed(order):
        shared = tuple(name for name in cores[k] if name in running)
        kept = tuple(name for name in running if name not in shared)
        free = tuple(name for name in cores[k] if name not in shared)
        steps.append(ContractionStep(k, kept, shared, free))
        running = [*kept, *free]
    return steps, best[whole][0]


def split(n: int, order: int, pad: bool = True) -> tuple[int, ...]:
    """Split n, or the next larger number that can be split, into `order` factors above 1 of similar size.

    Raises: NotFactorable if n cannot be split and `pad` is False; UsageError for an order below 2.
    """
    if order < 2:
        raise UsageError("the order of a tensor train or ring is too small", where="order", expected=">= 2", got=order)
    size = n
    while (found := _balanced(size, order, 2)) is None:
        if not pad:
            raise NotFactorable((n,), order)
        size += 1
    return found


@lru_cache(4096)
def _balanced(n: int, order: int, least: int) -> tuple[int, ...] | None:
    """Return `order` ascending factors of n, each at least `least`, with the smallest sum; None if there are none."""
    if order == 1:
        return (n,) if n >= least else None
    best: tuple[int, ...] | None = None
    for factor in range(least, round(n ** (1 / order)) + 1):
        if n % factor == 0 and (rest := _balanced(n // factor, order - 1, factor)) is not None:
            found = (factor, *rest)
            best = found if best is None or sum(found) < sum(best) else best
    return best


def to_tensor(w: np.ndarray, out: Sequence[int], inner: Sequence[int]) -> np.ndarray:
    """Reshape a matrix [out, in] to [o_1 i_1, .., o_d i_d], padded with zeros up to the products of the modes."""
    d = len(out)
    padded = np.zeros((prod(out), prod(inner)), w.dtype)
    padded[: w.shape[0], : w.shape[1]] = w
    axes = [axis for k in range(d) for axis in (k, d + k)]
    return padded.reshape(*out, *inner).transpose(axes).reshape([o * i for o, i in zip(out, inner, strict=True)])


def to_cores(arrays: Sequence[np.ndarray], out: Sequence[int], inner: Sequence[int]) -> tuple[np.ndarray, ...]:
    """Reshape cores [r, p, r'] of a tensor to cores [r, o, i, r'] of a matrix, where p = o · i."""
    return tuple(a.reshape(a.shape[0], o, i, a.shape[2]) for a, o, i in zip(arrays, out, inner, strict=True))
