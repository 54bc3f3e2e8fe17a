"""How far an operation moved what a model computes: one layer alone, predicted; every layer and the end, measured.

A prediction takes the inputs of a layer as they are, summed up in their Gram matrix; a measurement runs both programs.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from graphwright.errors import UsageError
from graphwright.program import Program, Value
from graphwright.surgery.calibration import Calibration
from graphwright.surgery.matrices import Matrix


@dataclass(slots=True)
class Drift:
    """Of one value [.., n] between two programs, over all calibration rows.

    Attributes:
        relative: ‖new - old‖ / ‖old‖, Frobenius.
        max_abs: largest difference of an entry.
        kl: of scores: mean KL(old ‖ new) of their softmax, nats.
        same_top: of scores: share of rows with the same largest entry, the greedy token.
        rows: counted.
    """

    relative: float
    max_abs: float
    kl: float | None
    same_top: float | None
    rows: int

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self)

    def __str__(self) -> str:
        moved = f"moved by {self.relative:.3g} relative, {self.max_abs:.3g} at most"
        if self.kl is None or self.same_top is None:
            return moved
        return f"{moved}; KL {self.kl:.3g} nats; {self.same_top:.2%} greedy tokens equal over {self.rows} rows"


@dataclass(slots=True)
class _Sum:
    scores: bool
    squared: float = 0.0
    norm: float = 0.0
    most: float = 0.0
    kl: float = 0.0
    same: int = 0
    rows: int = 0

    def add(self, old: np.ndarray, new: np.ndarray) -> None:
        a, b = (x.reshape(-1, x.shape[-1]).astype(np.float64) for x in (old, new))
        difference = b - a
        self.squared += float(np.vdot(difference, difference))
        self.norm += float(np.vdot(a, a))
        self.most = max(self.most, float(np.abs(difference).max(initial=0.0)))
        self.rows += len(a)
        if self.scores:
            self.kl += float(kl(a, b).sum())
            self.same += int((a.argmax(-1) == b.argmax(-1)).sum())

    def drift(self) -> Drift:
        relative = (self.squared / self.norm) ** 0.5 if self.norm else float("inf") if self.squared else 0.0
        kl, same = (max(self.kl / self.rows, 0.0), self.same / self.rows) if self.scores else (None, None)
        return Drift(relative, self.most, kl, same, self.rows)


def kl(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """KL(softmax a ‖ softmax b) of each row of scores, nats."""
    la, lb = (x - x.max(-1, keepdims=True) for x in (a, b))
    la, lb = (x - np.log(np.exp(x).sum(-1, keepdims=True)) for x in (la, lb))
    return (np.exp(la) * (la - lb)).sum(-1)


def measured(
    before: Program, after: Program, calibration: Calibration, layers: Sequence[str] = ()
) -> tuple[Drift, dict[str, Drift]]:
    """Drift of the first output, and of nodes by path, between two programs on calibration windows.

    Args:
        before, after: both take the calibration's inputs.
        calibration: its windows to learn from; drift is no measure of quality.
        layers: paths that both have.
    """
    name = before.output_names()[0]
    sums = {path: _Sum(scores=False) for path in layers}
    end = _Sum(scores=True)
    for feeds in calibration.feeds(before):
        runs = [p.run(feeds, keep="outputs", capture=list(layers)) for p in (before, after)]
        end.add(*(r[name].to_numpy("float64") for r in runs))
        for path, total in sums.items():
            total.add(*(r.value(path).to_numpy("float64") for r in runs))
    return end.drift(), {path: total.drift() for path, total in sums.items()}


def input_grams(program: Program, matrices: Iterable[Matrix], calibration: Calibration) -> dict[str, np.ndarray]:
    """Per matrix G = Σ x xᵀ / N of the inputs x of the linear maps that read it, float64 [in, in], by its path.

    Maps that read the same value share one run of it. A matrix that no linear map reads, a mere table, has none.
    """
    sources: dict[str, list[Value]] = {}
    for m in matrices:
        sources[m.path] = [program.operands(u.node)[0] for u in m.uses if u.op == "linear"]
    wanted = list(dict.fromkeys(v for found in sources.values() for v in found))
    sums: dict[Value, np.ndarray] = {}
    counts: dict[Value, int] = {}
    for feeds in calibration.feeds(program):
        run = program.run(feeds, keep="outputs", capture=wanted)
        for value in wanted:
            x = run.value(value).to_numpy("float64")
            x = x.reshape(-1, x.shape[-1])
            if not np.isfinite(x).all():
                raise UsageError("the inputs of a layer are not finite", where=program.path(value))
            sums[value] = sums.get(value, 0.0) + x.T @ x
            counts[value] = counts.get(value, 0) + len(x)
    return {
        path: np.sum([sums[v] for v in found], axis=0) / sum(counts[v] for v in found)
        for path, found in sources.items()
        if found
    }


def output_error(w: np.ndarray, new: np.ndarray, gram: np.ndarray) -> float:
    """Relative error of y = x · Wᵀ in the mean square over inputs of a Gram matrix: √(tr D G Dᵀ / tr W G Wᵀ)."""
    d = new - w
    lost, whole = float(np.vdot(d @ gram, d)), float(np.vdot(w @ gram, w))
    return (max(lost, 0.0) / whole) ** 0.5 if whole > 0 else 0.0 if lost <= 0 else float("inf")
