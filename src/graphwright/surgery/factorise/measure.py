"""What factors cost: their error as stored, and the time of the chain beside that of the matrix product."""

from __future__ import annotations

from statistics import median
from time import perf_counter

import numpy as np

from graphwright.plan import plan_for
from graphwright.program import Builder, Program
from graphwright.surgery.calibration import Calibration
from graphwright.surgery.drift import kl
from graphwright.surgery.factorise.chain import attach
from graphwright.surgery.factorise.factors import Factors, LowRank, TensorRing
from graphwright.surgery.matrices import Matrix, find_matrices, rounded

ROWS, ROUNDS, WARM_UP = 32, 9, 2


def as_stored(factors: Factors, matrix: Matrix) -> Factors:
    """The factors after rounding to the dtype of the matrix."""
    if isinstance(factors, LowRank):
        return LowRank(rounded(factors.outer, matrix.dtype), rounded(factors.inner, matrix.dtype))
    assert isinstance(factors, TensorRing)
    return TensorRing(tuple(rounded(a, matrix.dtype) for a in factors.arrays), factors.shape)


def milliseconds(factors: Factors) -> tuple[float, float]:
    """Median time of y = x · Wᵀ for 32 rows in float32, planned: by the matrix, and by the chain of its factors."""
    out, inner = factors.shape
    b = Builder("timed")
    rng = np.random.default_rng(0)
    w = b.param("map.weight", np.zeros((out, inner), np.float32))
    b.output(b.linear(b.input("x", (ROWS, inner)), w, name="map"), "y")
    dense = b.build()
    chain = dense.fork()
    with chain.edit("factors") as e:
        attach(e, find_matrices(chain, "map")[0][0], factors)
    x = rng.standard_normal((ROWS, inner)).astype(np.float32)
    plans = [plan_for(p, {"x": p.spec(p.inputs()[0])}, ("y",), freeze=True) for p in (dense, chain)]
    taken: tuple[list[float], list[float]] = ([], [])
    for _ in range(ROUNDS + WARM_UP):
        for plan, times in zip(plans, taken, strict=True):
            started = perf_counter()
            plan({"x": x})
            times.append((perf_counter() - started) * 1e3)
    before, after = (median(times[WARM_UP:]) for times in taken)
    return before, after


class Alone:
    """The model with one matrix factored at a time, beside itself, on the first chunk of the calibration windows."""

    def __init__(self, program: Program, calibration: Calibration) -> None:
        self.program, self.feeds = program, calibration.feeds(program)[0]
        self.output = program.output_names()[0]
        self.scores = self._scores(program)

    def divergence(self, matrix: Matrix, factors: Factors) -> float:
        """Mean KL of the scores in nats."""
        copy = self.program.fork()
        with copy.edit("one matrix") as e:
            attach(e, matrix, factors)
        return max(float(kl(self.scores, self._scores(copy)).mean()), 0.0)

    def _scores(self, p: Program) -> np.ndarray:
        found = p.run(self.feeds, keep="outputs")[self.output].to_numpy("float64")
        return found.reshape(-1, found.shape[-1])
