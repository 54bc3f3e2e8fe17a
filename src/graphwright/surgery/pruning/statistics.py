"""What is known of an axis before it is cut: moments of what its products read, and what removing its units costs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from graphwright.surgery.calibration import MissingCalibration, Stream
from graphwright.surgery.errors import NothingToPrune
from graphwright.surgery.measure import loss_gradients, speaks
from graphwright.surgery.pruning.criteria import greedy, need_method, of_units, taylor
from graphwright.surgery.pruning.prunable import of_group
from graphwright.surgery.pruning.restore import Gram, energy

if TYPE_CHECKING:
    from graphwright.graph import NodeId
    from graphwright.program import Program
    from graphwright.program.axes.axes import AxisGroup
    from graphwright.surgery.calibration import Calibration
    from graphwright.surgery.pruning.prunable import Consumer, Prunable


@dataclass(frozen=True, slots=True)
class Removal:
    """Units of an axis in the order in which they go.

    Attributes:
        order: unit numbers.
        growth: of the error, by each removal.
        scores: [units], of the axis as it was.
    """

    order: np.ndarray
    growth: np.ndarray
    scores: np.ndarray


@dataclass(frozen=True, slots=True)
class Importance:
    """Gradients of the loss over the calibration data.

    Attributes:
        output: product -> mean square of the loss's gradient by its output, summed over entries: turns a squared error
            of the output into loss, to second order.
        effect: product -> [columns] Σ a ∂L/∂a of what it reads.
    """

    output: Mapping[NodeId, float]
    effect: Mapping[NodeId, np.ndarray]


def importance(p: Program, axes: Sequence[Prunable], feeds: Sequence[Mapping[str, np.ndarray]]) -> Importance:
    """One pass forwards and back, in slices of about 1024 tokens."""
    ends = list({c.node: c for a in axes for c in a.consumers}.values())
    outputs, inputs = {p.path(c.node): c for c in ends}, {p.path(c.x): c for c in ends if not c.x.port}
    squares, effects, count = dict.fromkeys(outputs, 0.0), {}, 0
    for found in loss_gradients(p, feeds, list(dict.fromkeys([*outputs, *inputs]))):
        for path in outputs:
            squares[path] += float((found[path][1].astype(np.float64) ** 2).sum())
        for path, c in inputs.items():
            value, gradient = found[path]
            product = (value * gradient).astype(np.float64)
            effects[c.node] = effects.get(c.node, 0.0) + product.reshape(-1, product.shape[-1]).sum(axis=0)
        count += next(iter(found.values()))[0].size // next(iter(found.values()))[0].shape[-1]
    return Importance({c.node: squares[path] / count for path, c in outputs.items()}, effects)


def grams(p: Program, ends: Sequence[Consumer], stream: Stream) -> list[Gram]:
    """The moments of what each product reads, from where a stream stands."""
    return [Gram.of(c.rows(p, values[c.x]) for values in stream.read([c.x])) for c in ends]


def removal(
    p: Program,
    axis: Prunable,
    moments: Sequence[Gram | None],
    method: str,
    *,
    scales: Sequence[float] | None = None,
    effects: Sequence[np.ndarray] = (),
    most: int | None = None,
    ridge: float | None = None,
    seed: int = 0,
) -> Removal:
    """In which order the units of an axis go.

    Args:
        moments: per product that the axis ends in.
        scales: per product, what its squared error weighs.
        effects: per product, see `Importance`; for `taylor`.
        most: how many go at most, all but one by default.
    """
    weights = [1.0] * len(axis.consumers) if scales is None else list(scales)
    parts = list(zip(axis.consumers, moments, weights, strict=True))
    if method == "greedy" and len(parts) == 1:
        c, gram, weight = parts[0]
        assert gram is not None
        h = gram.second if c.bias is None else gram.centred()
        order, growth, first = greedy(c.matrix(p), c.columns, h, most=most, ridge=ridge)
        return Removal(order, weight * growth, weight * first)
    name = [*axis.name.encode()]

    def score(i: int, c: Consumer, gram: Gram | None) -> np.ndarray:
        if method == "taylor":
            return taylor(effects[i], c.columns)
        matrix = c.stored(p) if gram is None else c.matrix(p)
        by = "obs" if method == "greedy" else method
        return of_units(matrix, c.columns, gram, by, bias=c.bias is not None, ridge=ridge, seed=(seed, *name))

    scored = np.sum([weight * score(i, c, gram) for i, (c, gram, weight) in enumerate(parts)], axis=0)
    order = np.argsort(scored, kind="stable")[: axis.size - 1 if most is None else most]
    return Removal(order, scored[order], scored)


def scales(p: Program, axis: Prunable, moments: Sequence[Gram | None], weighed: Importance | None) -> list[float]:
    """What the squared error of each product weighs: in loss, or relative to its output's mean square."""
    if weighed is not None:
        return [weighed.output[c.node] for c in axis.consumers]
    return [1 / max(energy(c.matrix(p), gram), 1e-300) if gram is not None else 1.0
            for c, gram in zip(axis.consumers, moments, strict=True)]  # fmt: skip


def scores(
    axis: AxisGroup,
    calibration: Calibration | None = None,
    method: str = "obs",
    *,
    ridge: float | None = None,
    seed: int = 0,
) -> np.ndarray:
    """What removing each unit of an axis costs: [units] float64, squared; see `prune.scores` for the formulas.

    Args:
        axis: of `program.axes()`.
        calibration: data; `magnitude` and `random` need none.
        method: `obs`, `wanda`, `magnitude`, `taylor`, `random`, or `greedy`: the error that the unit's removal adds at
            its turn when units go one by one (the last one that stays: infinite).
        ridge: λ in units of the mean diagonal; by default as little as is needed, from 1e-4 on.
        seed: of `random`.
    Raises: MissingCalibration; NothingToPrune for an axis that ends in no product with a trained matrix; UsageError for
        a method that there is not, or `taylor` of a program that scores no tokens.
    """
    need_method(method)
    p = axis.axes.program
    found = of_group(axis)
    if found is None:
        raise NothingToPrune("the axis ends in no product with a trained matrix", where=axis.name)
    moments: Sequence[Gram | None] = [None] * len(found.consumers)
    effects: list[np.ndarray] = []
    if method not in ("magnitude", "random"):
        if calibration is None:
            raise MissingCalibration("this score needs calibration data", where=axis.name, got=method)
        if method == "taylor":
            need_tokens(p, "method='taylor'")
            weighed = importance(p, [found], calibration.feeds(p))
            effects = [weighed.effect[c.node] for c in found.consumers]
        else:
            moments = calibration.kept((p.hash(), axis.name), lambda: _moments(p, found, calibration))
    made = removal(p, found, moments, method, effects=effects, ridge=ridge, seed=seed)
    if method != "greedy" or len(found.consumers) > 1:
        return made.scores
    result = np.full(found.size, np.inf)
    result[made.order] = made.growth
    return result


def need_tokens(p: Program, what: str) -> None:
    """Raises: UsageError for a program that scores no next tokens."""
    if not speaks(p):
        raise MissingCalibration(f"{what} takes the gradient of the loss of next tokens", where=p.name,
                                 expected="an input `ids` and an output `logits`")  # fmt: skip


def _moments(p: Program, axis: Prunable, calibration: Calibration) -> list[Gram]:
    stream = Stream(p, calibration.feeds(p))
    stream.advance(axis.start)
    return grams(p, axis.consumers, stream)
