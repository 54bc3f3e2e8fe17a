"""The methods by one interface: fewest parameters for an error, or least error for a number of parameters."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import Protocol

import numpy as np

from graphwright.surgery.factorise.als import refine
from graphwright.surgery.factorise.factors import Factors, LowRank, TensorRing, parameters
from graphwright.surgery.factorise.low_rank import LowRankFit
from graphwright.surgery.factorise.modes import split, to_cores, to_tensor
from graphwright.surgery.factorise.tensor_ring import ring
from graphwright.surgery.factorise.tensor_train import Unfolding, train

BISECTIONS = 14
"""Steps by which the error of a train or a ring is fitted to a number of parameters."""


class Fit(Protocol):
    """Decompositions of one matrix by one method."""

    def within_error(self, error: float) -> Factors:
        """The fewest parameters at this relative error (asvd: of the outputs)."""
        ...

    def within_params(self, params: int) -> Factors | None:
        """The least error at up to this many parameters; None if not even the smallest rank fits."""
        ...


class LowRankMethod:
    """`svd` and `asvd`: one decomposition gives every rank."""

    def __init__(self, w: np.ndarray, gram: np.ndarray | None, min_rank: int = 1, max_rank: int | None = None) -> None:
        self.fit = LowRankFit.of(w, gram)
        most = min(len(self.fit.s), max_rank or len(self.fit.s))
        self.low, self.high, self.cost = min(min_rank, most), most, sum(w.shape)

    def within_error(self, error: float) -> LowRank:
        """At least `min_rank`, at most `max_rank`: the error may then be larger, which the caller checks."""
        return self.fit.at(min(max(self.fit.rank_for(error), self.low), self.high))

    def within_params(self, params: int) -> LowRank | None:
        """The largest rank that fits."""
        rank = min(params // self.cost, self.high)
        return self.fit.at(rank) if rank >= self.low else None


class RingMethod:
    """`tt` and `tr`: the first unfolding is decomposed once, the others anew for each accuracy."""

    def __init__(self, w: np.ndarray, order: int, closed: bool, pad: bool, sweeps: int) -> None:
        self.w, self.closed, self.sweeps = w, closed, sweeps
        self.out, self.inner = split(w.shape[0], order, pad), split(w.shape[1], order, pad)[::-1]

    @cached_property
    def tensor(self) -> np.ndarray:
        """The matrix by modes."""
        return to_tensor(self.w, self.out, self.inner)

    @cached_property
    def first(self) -> Unfolding:
        """Decomposed at first use."""
        return Unfolding.of(self.tensor)

    def within_error(self, error: float) -> TensorRing:
        """The error is a guarantee."""
        arrays = (ring if self.closed else train)(self.first, error=error)
        if self.sweeps:
            arrays = refine(self.tensor, arrays, self.sweeps)[0]
        return TensorRing(to_cores(arrays, self.out, self.inner), (self.w.shape[0], self.w.shape[1]))

    def within_params(self, params: int) -> TensorRing | None:
        """The smallest error, by bisection, whose train or ring fits."""
        low, high = 0.0, 1.0
        best = self.within_error(high)
        if parameters(best) > params:
            return None
        for _ in range(BISECTIONS):
            middle = (low + high) / 2
            found = self.within_error(middle)
            if parameters(found) <= params:
                best, high = found, middle
            else:
                low = middle
        return best


METHODS: dict[str, Callable[..., Fit]] = {
    "svd": lambda w, gram, o: LowRankMethod(w, None, o.min_rank, o.max_rank),
    "asvd": lambda w, gram, o: LowRankMethod(w, gram, o.min_rank, o.max_rank),
    "tt": lambda w, gram, o: RingMethod(w, o.order, False, o.pad, o.sweeps),
    "tr": lambda w, gram, o: RingMethod(w, o.order, True, o.pad, o.sweeps),
}
"""Name -> fit of a matrix, given the Gram matrix of its inputs or None, and the options of `compress`."""
