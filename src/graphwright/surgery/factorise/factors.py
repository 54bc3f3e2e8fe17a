"""Factors of a matrix: cores with labelled axes, of which only products with vectors are ever formed.

W[o, i] is the sum over all bonds of the product of the cores; o and i are split into modes, o = (o₁ .. o_d).
Source of the ring: Zhao et al. 2016, "Tensor ring decomposition"; r₀ = 1 is the train of Oseledets 2011.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import NamedTuple, Protocol

import numpy as np


class Core(NamedTuple):
    """One factor.

    Attributes:
        name: under which its param is stored, behind the name of the linear map.
        array: float64.
        labels: of its axes: `o1`, `i1`, ... modes of the output and the input, `b0`, ... bonds; a bond is in two cores.
    """

    name: str
    array: np.ndarray
    labels: tuple[str, ...]


class Factors(Protocol):
    """What stands for a matrix [out, in]."""

    @property
    def shape(self) -> tuple[int, int]:
        """(out, in) of the matrix itself."""
        ...

    @property
    def modes(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Sizes of o₁, o₂, ... and of i₁, i₂, ...; where their products exceed the matrix, the rest is padding."""
        ...

    @property
    def ranks(self) -> tuple[int, ...]:
        """Sizes of the bonds."""
        ...

    @property
    def cores(self) -> tuple[Core, ...]:
        """All factors."""
        ...


@dataclass(frozen=True, eq=False)
class LowRank:
    """W ≈ outer · inner: [out, r] and [r, in]."""

    outer: np.ndarray
    inner: np.ndarray

    @property
    def shape(self) -> tuple[int, int]:
        """(out, in)."""
        return self.outer.shape[0], self.inner.shape[1]

    @property
    def ranks(self) -> tuple[int, ...]:
        """Columns of the outer factor."""
        return (self.outer.shape[1],)

    @property
    def modes(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """One each."""
        return (self.shape[0],), (self.shape[1],)

    @property
    def cores(self) -> tuple[Core, ...]:
        """The two."""
        return Core("outer", self.outer, ("o1", "b1")), Core("inner", self.inner, ("b1", "i1"))


@dataclass(frozen=True, eq=False)
class TensorRing:
    """W(o₁ i₁, .., o_d i_d) = trace of the product of G_k[:, o_k, i_k, :].

    Attributes:
        arrays: cores [r_{k-1}, o_k, i_k, r_k], with r_d = r_0.
        shape: (out, in) of the matrix, at most the products of the modes; what is beyond is padding.
    """

    arrays: tuple[np.ndarray, ...]
    shape: tuple[int, int]

    @property
    def ranks(self) -> tuple[int, ...]:
        """r_0 .. r_d."""
        return (*(core.shape[0] for core in self.arrays), self.arrays[-1].shape[3])

    @property
    def modes(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """(o_1 .. o_d), (i_1 .. i_d)."""
        return tuple(c.shape[1] for c in self.arrays), tuple(c.shape[2] for c in self.arrays)

    @property
    def cores(self) -> tuple[Core, ...]:
        """`core1` .. `core<d>`."""
        d = len(self.arrays)
        return tuple(
            Core(f"core{k}", core, (f"b{k - 1}", f"o{k}", f"i{k}", f"b{k % d}"))
            for k, core in enumerate(self.arrays, 1)
        )

    def reconstruct(self) -> np.ndarray:
        """The matrix float64 [out, in]."""
        return reconstruct(self)


def TensorTrain(arrays: Sequence[np.ndarray], shape: tuple[int, int]) -> TensorRing:  # the field's name
    """A ring whose first and last rank are 1. Raises: ValueError for other ranks."""
    if arrays[0].shape[0] != 1 or arrays[-1].shape[3] != 1:
        raise ValueError(f"a train begins and ends with rank 1, not {arrays[0].shape[0]} and {arrays[-1].shape[3]}")
    return TensorRing(tuple(arrays), shape)


def parameters(factors: Factors) -> int:
    """Numbers in all cores: Σ r_{k-1} o_k i_k r_k of a ring."""
    return sum(core.array.size for core in factors.cores)


def compression_ratio(factors: Factors) -> float:
    """Parameters of the matrix / parameters of its factors: above 1 is smaller; 4 is what others call "4x"."""
    return prod(factors.shape) / max(parameters(factors), 1)


def reconstruct(factors: Factors) -> np.ndarray:
    """The matrix float64 [out, in], padding cut off."""
    names = sorted({label for core in factors.cores for label in core.labels})
    number = {name: i for i, name in enumerate(names)}
    operands = [part for core in factors.cores for part in (core.array, [number[n] for n in core.labels])]
    out, inner = factors.modes
    modes = [number[f"o{k}"] for k in range(1, len(out) + 1)] + [number[f"i{k}"] for k in range(1, len(inner) + 1)]
    full = np.einsum(*operands, modes, optimize="greedy").reshape(prod(out), prod(inner))
    return full[: factors.shape[0], : factors.shape[1]]
