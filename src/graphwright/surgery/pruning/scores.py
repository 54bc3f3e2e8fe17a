"""Scores of units: the cost of removing each, by the columns of the product that reads it.

A unit is a block J of columns of W [out, columns]. All scores are squared, so that different methods rank equally and
sums of scores are meaningful:

    random      uniform, by seed
    magnitude   Σ |W_J|²
    wanda       tr W_J H_JJ W_Jᵀ, for one column ‖w_j‖² H_jj: mean square of the unit's contribution to the output
    obs         tr W_J [(H⁻¹)_JJ]⁻¹ W_Jᵀ, for one column ‖w_j‖² / (H⁻¹)_jj: error after the others compensate
    taylor      (Σ a_j ∂L/∂a_j)²: change of the loss to first order
    greedy      obs, one unit after the other; the other weights and H⁻¹ are updated each time

Sources: Sun et al. 2024 (wanda), Hassibi and Stork 1993 (obs), Molchanov et al. 2019 (taylor).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from graphwright.graph import NodeId
from graphwright.program.axes.axes import AxisGroup
from graphwright.surgery.calibration import Calibration, MissingCalibration, Stream
from graphwright.surgery.errors import NothingToPrune, check_choices
from graphwright.surgery.measure import loss_gradients, scores_tokens
from graphwright.surgery.pruning.prunable import Consumer, PrunableAxis, prunable_axis, refusal
from graphwright.surgery.pruning.restore import Downdate, Gram, energy, regularised

if TYPE_CHECKING:
    from graphwright.program.program import Program


METHODS = ("greedy", "obs", "wanda", "magnitude", "taylor", "random")
DATA_FREE = ("magnitude", "random")
ROUNDS = 512
"""Number of rounds in which `greedy` removes the units of a large axis; up to 512 units are removed one by one."""


def squared(matrix: np.ndarray) -> np.ndarray:
    """Return Σ w² of each column of a float matrix, float64 [columns], in blocks of rows that fit the cache."""
    total = np.zeros(matrix.shape[1])
    for start in range(0, len(matrix), 64):
        block = matrix[start : start + 64].astype(np.float64)
        total += np.einsum("oi,oi->i", block, block)
    return total


def wanda(matrix: np.ndarray, columns: np.ndarray, h: np.ndarray) -> np.ndarray:
    """tr W_J H_JJ W_Jᵀ of each unit, [units]."""
    if columns.shape[1] == 1:
        return squared(matrix)[columns[:, 0]] * np.diag(h)[columns[:, 0]]
    return np.array([np.einsum("oi,ij,oj->", matrix[:, j], h[np.ix_(j, j)], matrix[:, j]) for j in columns])


def greedy(
    matrix: np.ndarray, columns: np.ndarray, h: np.ndarray, *, most: int | None = None, ridge: float | None = None
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return units in the order of cheapest removal, with the remaining weights refitted after each removal.

    Exact under the quadratic model: W -= W_J [(H⁻¹)_JJ]⁻¹ (H⁻¹)_J: and H⁻¹ -= (H⁻¹)_:J [(H⁻¹)_JJ]⁻¹ (H⁻¹)_J:.

    Args:
        matrix, columns: weights of the product, and the columns of each unit.
        h: [columns, columns] second moment (or covariance).
        most: how many units to remove; by default all but one.
        ridge: see `regularised`.
    Returns: units [most] in order, the growth of the squared error by each, and the scores [units] at the start.
    """
    left = np.ones(len(columns), bool)
    most = len(columns) - 1 if most is None else most
    step = max(len(columns) // ROUNDS, 1)
    state = Downdate(matrix, np.linalg.inv(regularised(h, ridge)[0]))
    first = state.scores(columns)
    order, growth = np.zeros(0, np.int64), np.zeros(0)
    while len(order) < most:
        units = np.flatnonzero(left)
        scored = state.scores(columns[units])
        cheapest = np.argsort(scored, kind="stable")[: min(step, most - len(order))]
        removed = units[cheapest]
        state.remove(columns[removed].reshape(-1))
        left[removed] = False
        order, growth = np.append(order, removed), np.append(growth, scored[cheapest])
    return order, growth, first


def unit_scores(
    matrix: np.ndarray, columns: np.ndarray, gram: Gram | None, method: str, *, bias: bool = False,
    ridge: float | None = None, seed: Sequence[int] = (0,),
) -> np.ndarray:  # fmt: skip
    """Score units, [units], by a method without gradients; `wanda`, `obs` and `greedy` (same as `obs`) need `gram`."""
    if method == "random":
        return np.random.default_rng(list(seed)).random(len(columns))
    if method == "magnitude":
        return squared(matrix)[columns].sum(axis=1)
    assert gram is not None
    if method == "wanda":
        return wanda(matrix, columns, gram.second)
    h = gram.centred() if bias else gram.second
    return Downdate(matrix, np.linalg.inv(regularised(h, ridge)[0])).scores(columns)


@dataclass(frozen=True, slots=True)
class RemovalOrder:
    """Removed units of an axis in order, the `growth` of the error by each, and the first `scores` of all units."""

    order: np.ndarray
    growth: np.ndarray
    scores: np.ndarray


@dataclass(frozen=True, slots=True)
class Importance:
    """Gradients of the loss over the calibration data.

    Attributes:
        output: product -> mean square of the loss's gradient with respect to its output, summed over entries; it
            converts a squared error of the output to loss, to second order.
        effect: product -> [columns] Σ a ∂L/∂a of its input a.
    """

    output: Mapping[NodeId, float]
    effect: Mapping[NodeId, np.ndarray]


def importance(p: Program, axes: Sequence[PrunableAxis], feeds: Sequence[Mapping[str, np.ndarray]]) -> Importance:
    """Compute the gradients of the loss by one forward and backward pass, in slices of about 1024 tokens."""
    ends = list({c.node: c for a in axes for c in a.consumers}.values())
    outputs, inputs = {c.node: p.path(c.node) for c in ends}, {c.node: p.path(c.x) for c in ends if not c.x.port}
    squares, effects, count = dict.fromkeys(outputs, 0.0), {}, 0
    for found in loss_gradients(p, feeds, list(dict.fromkeys([*outputs.values(), *inputs.values()]))):
        for node, path in outputs.items():
            squares[node] += float((found[path][1].astype(np.float64) ** 2).sum())
        for node, path in inputs.items():
            value, gradient = found[path]
            product = (value * gradient).astype(np.float64)
            effects[node] = effects.get(node, 0.0) + product.reshape(-1, product.shape[-1]).sum(axis=0)
        first = next(iter(found.values()))[0]
        count += first.size // first.shape[-1]
    return Importance({node: square / count for node, square in squares.items()}, effects)


def grams(p: Program, ends: Sequence[Consumer], stream: Stream) -> list[Gram]:
    """Compute the input moments of each product, from the position of a stream."""
    return [Gram.of(c.rows(p, values[c.x]) for values in stream.read([c.x])) for c in ends]


def removal_order(
    p: Program, axis: PrunableAxis, moments: Sequence[Gram | None], method: str, *,
    scales: Sequence[float] | None = None, weighed: Importance | None = None, most: int | None = None,
    ridge: float | None = None, seed: int = 0,
) -> RemovalOrder:  # fmt: skip
    """Return the order in which units of an axis are removed.

    Args:
        moments: input moments of each product that reads the axis; None for `taylor`, `magnitude` and `random`.
        scales: weight of the squared error of each product.
        weighed: gradients of the loss, for `taylor`.
        most: how many units to remove; by default all but one.
    """
    weights = [1.0] * len(axis.consumers) if scales is None else list(scales)
    parts = list(zip(axis.consumers, moments, weights, strict=True))
    if method == "greedy" and len(parts) == 1:
        c, gram, weight = parts[0]
        assert gram is not None
        h = gram.second if c.bias is None else gram.centred()
        order, growth, first = greedy(c.matrix(p), c.columns, h, most=most, ridge=ridge)
        return RemovalOrder(order, weight * growth, weight * first)

    def score(c: Consumer, gram: Gram | None) -> np.ndarray:
        if method == "taylor" and weighed is not None:
            return weighed.effect[c.node][c.columns].sum(axis=1) ** 2
        wide = gram is not None or p.spec(c.weight).dtype.name == "float64"  # float32 is read mostly without a copy
        return unit_scores(c.matrix(p, "float64" if wide else "float32"), c.columns, gram, method,
                           bias=c.bias is not None, ridge=ridge, seed=(seed, *axis.name.encode()))  # fmt: skip

    scored = np.sum([weight * score(c, gram) for c, gram, weight in parts], axis=0)
    order = np.argsort(scored, kind="stable")[: axis.size - 1 if most is None else most]
    return RemovalOrder(order, scored[order], scored)


def error_scales(
    p: Program, axis: PrunableAxis, moments: Sequence[Gram | None], weighed: Importance | None
) -> list[float]:
    """Return the weight of each product's squared error: in loss units, or relative to its output's mean square."""
    if weighed is not None:
        return [weighed.output[c.node] for c in axis.consumers]
    return [1 / max(energy(c.matrix(p), gram), 1e-300) if gram is not None else 1.0
            for c, gram in zip(axis.consumers, moments, strict=True)]  # fmt: skip


def scores(
    axis: AxisGroup, calibration: Calibration | None = None, method: str = "obs", *, ridge: float | None = None,
    seed: int = 0,
) -> np.ndarray:  # fmt: skip
    """The cost of removing each unit of an axis: [units] float64, squared.

    Args:
        axis: from `program.axes()`.
        calibration: data; not needed for `magnitude` and `random`.
        method: `obs`, `wanda`, `magnitude`, `taylor`, `random`, or `greedy`: the error that the unit's removal adds
            when units are removed one by one (infinite for the last one, which stays).
        ridge: λ in units of the mean diagonal; by default the smallest sufficient one from 1e-4.
        seed: of `random`.
    Raises: MissingCalibration, also for `taylor` of a program that scores no tokens; NothingToPrune if the axis
        cannot be pruned; UsageError for an unknown method.
    """
    check_choices({"method": method}, {"method": METHODS})
    p = axis.axes.program
    found = prunable_axis(axis)
    if found is None:
        raise NothingToPrune(
            "the axis cannot be pruned, so its units have no scores", where=axis.name, got=refusal(axis)
        )
    moments: Sequence[Gram | None] = [None] * len(found.consumers)
    weighed = None
    if method not in DATA_FREE:
        if calibration is None:
            raise MissingCalibration(f"the score {method!r} needs calibration data", where=axis.name)
        if method == "taylor":
            need_tokens(p, "method='taylor'")
            weighed = importance(p, [found], calibration.feeds(p))
        else:
            moments = calibration.cached((p.hash(), axis.name), lambda: grams(
                p, found.consumers, Stream(p, calibration.feeds(p)).advance(found.start)))  # fmt: skip
    made = removal_order(p, found, moments, method, weighed=weighed, ridge=ridge, seed=seed)
    if method != "greedy" or len(found.consumers) > 1:
        return made.scores
    result = np.full(found.size, np.inf)
    result[made.order] = made.growth
    return result


def need_tokens(p: Program, what: str) -> None:
    """Check that a program scores next tokens. Raises: MissingCalibration if it does not."""
    if not scores_tokens(p):
        raise MissingCalibration(f"{what} needs a program that scores next tokens", where=p.name,
                                 expected="an input `ids` and an output `logits`")  # fmt: skip
