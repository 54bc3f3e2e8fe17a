"""What compressing found: a row per method and matrix, the losing ones too, each beside SVDs of as many parameters."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from statistics import median
from time import perf_counter
from typing import TYPE_CHECKING, Any

import numpy as np

from graphwright.plan import CompileOptions, plan_for
from graphwright.program import Builder
from graphwright.surgery.factorise.chain import attach
from graphwright.surgery.factorise.factors import LowRank, TensorRing
from graphwright.surgery.matrices import find_matrices, rounded
from graphwright.surgery.measure import kl
from graphwright.surgery.table import table

if TYPE_CHECKING:
    from graphwright.program import Program
    from graphwright.surgery.calibration import Calibration
    from graphwright.surgery.factorise.factors import Factors
    from graphwright.surgery.matrices import Matrix, Skipped
    from graphwright.surgery.measure import Drift


@dataclass(slots=True)
class FitRow:
    """One matrix by one method.

    Attributes:
        path, shape, method: which.
        ranks: of a low rank one number; of a ring r_0 .. r_d.
        parameters: of all factors.
        ratio: parameters of the matrix / of its factors: above 1 is smaller.
        weight_error: ‖W - W'‖ / ‖W‖ as stored.
        output_error: of y on the calibration inputs, relative; None without them.
        svd_error, asvd_error: weight error of a truncated SVD, output error of an activation-aware one, of at most as
            many parameters; None where not even rank 1 fits, or without calibration.
        kl: mean KL of the model's scores with this matrix alone factored, nats; None without calibration.
        dense_ms, ms: measured for 32 rows: of the matrix product, of the chain.
        flops_share: operations of the chain / of the matrix product.
        chosen: the best within the budget.
        applied: it stands in the program; False for a ratio of at most 1.
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
    dense_ms: float
    ms: float
    flops_share: float
    chosen: bool = False
    applied: bool = False

    @property
    def error(self) -> float:
        """Of the outputs if it is known, else of the weights."""
        return self.weight_error if self.output_error is None else self.output_error

    @property
    def slower(self) -> bool:
        """The chain took longer than the matrix product."""
        return self.ms > self.dense_ms


@dataclass(slots=True)
class CompressionReport:
    """All matrices of one call.

    Attributes:
        method, budget: as asked for.
        rows: per matrix and method.
        skipped: what was left alone, and what is kept dense, with the reason.
        before, after: parameters of the selected matrices.
        drift: of the model's first output on calibration data; None without them.
        dry_run: the program is unchanged.
        interrupted: Ctrl-C or lack of memory ended it early, and what was done was kept.
    """

    method: str
    budget: str
    dry_run: bool
    rows: list[FitRow] = field(default_factory=list)
    skipped: list[Skipped] = field(default_factory=list)
    before: int = 0
    after: int = 0
    drift: Drift | None = None
    interrupted: bool = False

    @property
    def ratio(self) -> float:
        """Parameters before / after, of what was selected."""
        return self.before / max(self.after, 1)

    @property
    def applied(self) -> list[FitRow]:
        """Rows that stand in the program."""
        return [row for row in self.rows if row.applied]

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        facts = asdict(self)
        facts["skipped"] = [s._asdict() for s in self.skipped]
        for row, found in zip(facts["rows"], self.rows, strict=True):
            row["slower"] = found.slower
        return {**facts, "ratio": self.ratio, "applied": len(self.applied)}

    def __str__(self) -> str:
        columns = ["path", "method", "ranks", "ratio", "weight_error", "output_error", "svd_error", "asvd_error", "kl"]
        columns += ["flops_share", "dense_ms", "ms", ""]
        rows = [{**asdict(r), "": _mark(r)} for r in self.rows]
        lines = [
            f"compress: {self.method} within {self.budget}" + (", dry run" if self.dry_run else ""),
            table(rows, columns),
            f"{len(self.applied)} matrices factored; {self.before:,} parameters before, {self.after:,} after, "
            f"ratio {self.ratio:.3g}",
            *(f"left alone {s.path}: {s.reason}" for s in self.skipped),
        ]
        if self.drift is not None:
            lines.append(f"logits {self.drift}")
        if any(row.slower for row in self.applied):
            lines.append("slower: " + ", ".join(f"{r.path} ({r.method})" for r in self.applied if r.slower))
        if self.interrupted:
            lines.append("interrupted: what was done so far is kept")
        return "\n".join(lines)


def _mark(row: FitRow) -> str:
    words = ["applied" if row.applied else "chosen, kept dense" if row.chosen else "", "slower" if row.slower else ""]
    return ", ".join(word for word in words if word)


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
    plans = [plan_for(p, {"x": p.spec(p.inputs()[0])}, ("y",), CompileOptions(freeze=True)) for p in (dense, chain)]
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
