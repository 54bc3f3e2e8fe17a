"""The report of compression: one row per method and matrix, compared with SVDs of at most as many parameters."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from graphwright import timing
from graphwright.plan.compile import plan_for
from graphwright.plan.options import CompileOptions
from graphwright.program.builder import Builder
from graphwright.report import Report, table
from graphwright.surgery.calibration import Calibration
from graphwright.surgery.factorise.chain import attach
from graphwright.surgery.factorise.factors import Factors
from graphwright.surgery.matrices import Matrix, MatrixReport, find_matrices, matrix_count
from graphwright.surgery.measure import Drift, scores_classes, scores_tokens
from graphwright.timing import TimeComparison, compare_times

if TYPE_CHECKING:
    from graphwright.program.program import Program


ROWS = 32
COLUMNS = ("path", "method", "ranks", "ratio", "weight_error", "output_error", "svd_error", "asvd_error", "kl",
           "flops_share", "dense_ms", "ms", "")  # fmt: skip


@dataclass(slots=True, repr=False)
class FitRow(Report):
    """Figures of one matrix factored by one method.

    Attributes:
        path, shape, method: path and shape of the matrix, and the method that factored it.
        ranks: one number for low rank; r_0 .. r_d for a tensor train or ring.
        parameters: number of parameters of all factors.
        ratio: parameters of the matrix / of its factors; above 1, the factors are smaller.
        weight_error: ‖W - W'‖ / ‖W‖, with the factors of W' rounded to the stored dtype.
        output_error: relative error of y = x · Wᵀ on the calibration inputs; None without calibration.
        svd_error, asvd_error: weight error of a truncated SVD, and output error of an activation-aware SVD, with at
            most as many parameters; None if even rank 1 has more (asvd_error: or without calibration).
        kl: mean KL divergence of the model's logits in nats if only this matrix is factored; None without calibration.
        speed: ms for 32 rows: by the matrix product (before), and by the chain of factors (after).
        flops_share: operations of the chain / of the matrix product.
        chosen: whether this method is the best one within the budget.
        applied: whether the factors replaced the matrix; False for a ratio of at most 1.
    """

    path: str
    shape: tuple[int, int]
    method: str
    ranks: tuple[int, ...]
    parameters: int
    ratio: float
    weight_error: float
    output_error: float | None
    svd_error: float | None
    asvd_error: float | None
    kl: float | None
    speed: TimeComparison
    flops_share: float
    chosen: bool = False
    applied: bool = False
    FIGURES: ClassVar = ("slower",)

    @property
    def error(self) -> float:
        """Relative error of the outputs if it is known, else of the weights."""
        return self.weight_error if self.output_error is None else self.output_error

    @property
    def slower(self) -> bool:
        """Whether the chain takes longer than the matrix product, beyond the spread of the measurement."""
        return self.speed.verdict == "slower"

    @property
    def mark(self) -> str:
        """Text of the last column: whether the factors were chosen and applied, and whether the chain is slower."""
        state = "applied" if self.applied else "chosen, kept dense" if self.chosen else ""
        return ", ".join(word for word in (state, "slower" if self.slower else "") if word)


@dataclass(slots=True, kw_only=True, repr=False)
class CompressionReport(MatrixReport):
    """Report on one call of `compress`: one row per method and matrix; other fields as in `MatrixReport`.

    Attributes:
        method, budget: arguments of the call.
        before, after: number of parameters of the selected matrices.
    """

    method: str
    budget: str
    rows: list[FitRow] = field(default_factory=list)
    before: int = 0
    after: int = 0
    FIGURES: ClassVar = ("ratio",)

    @property
    def ratio(self) -> float:
        """Number of parameters of the selected matrices before / after."""
        return self.before / max(self.after, 1)

    @property
    def applied(self) -> list[FitRow]:
        """Rows whose factors replaced the matrix in the program."""
        return [row for row in self.rows if row.applied]

    def to_json(self) -> dict[str, Any]:
        """Return a JSON-serialisable dict; `applied` is the number of factored matrices."""
        return {**MatrixReport.to_json(self), "applied": len(self.applied)}

    def _text(self) -> str:
        slower = ", ".join(f"{r.path} ({r.method})" for r in self.applied if r.slower)
        rows = [{**r.to_json(), "dense_ms": r.speed.before, "ms": r.speed.after, "": r.mark} for r in self.rows]
        return self.text(
            f"compress: {self.method} within {self.budget}",
            table(rows, COLUMNS),
            f"{matrix_count(self.applied)} factored; {self.before:,} parameters before, {self.after:,} after, "
            f"ratio {self.ratio:.3g}",
            *([f"slower: {slower}"] if slower else []),
        )


def chain_speed(factors: Factors) -> TimeComparison:
    """Compare the times of y = x · Wᵀ for 32 float32 rows: by the dense matrix, and by the chain of factors."""
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
    plans = [plan_for(p, {"x": p.spec(p.inputs()[0])}, ("y",), CompileOptions(freeze=True)) for p in (dense, chain)]
    dense_call, chain_call = (lambda plan=plan: plan({"x": x}) for plan in plans)
    return compare_times(dense_call, chain_call, timing.SECONDS / 10)  # one of many matrices


Divergence = Callable[[Matrix, Factors], float]
"""Mean KL in nats of a model's scores with one matrix replaced by factors."""


def divergence_of(program: Program, calibration: Calibration) -> Divergence:
    """Return a function of a matrix and its factors: KL(program ‖ program with these factors), in nats.

    Outputs other than logits are compared by their squared relative difference.
    The function compares the first outputs on the first chunk of windows; later edits of the program do not affect it.
    """
    before, feeds, name = program.fork(), calibration.feeds(program)[0], program.output_names()[0]

    def scores(p: Program) -> np.ndarray:
        return p.run(feeds, keep="outputs")[name].to_numpy("float64")

    dense, scored = scores(before), scores_tokens(before) or scores_classes(before)

    def divergence(matrix: Matrix, factors: Factors) -> float:
        copy, drift = before.fork(), Drift(scores=scored)
        with copy.edit("one matrix") as e:
            attach(e, matrix, factors)
        drift.add(dense, scores(copy))
        return drift.relative**2 if drift.kl is None else drift.kl

    return divergence
