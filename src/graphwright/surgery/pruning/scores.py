"""Scores of units: the cost of removing each unit, computed from the weight columns that read it.

A unit is read by a block J of columns of W [out, columns]; H = E[a aᵀ] for the input a of W. All scores are squared
quantities, so that the scores of a unit that several linear maps read can be added up:

    random      uniform random numbers
    magnitude   Σ |W_J|²
    wanda       tr W_J H_JJ W_Jᵀ, for one column ‖w_j‖² H_jj: mean square of the unit's contribution to the output
    obs         tr W_J [(H⁻¹)_JJ]⁻¹ W_Jᵀ, for one column ‖w_j‖² / (H⁻¹)_jj: error after the other units compensate
    taylor      (Σ a_j ∂L/∂a_j)²: squared first-order change of the loss
    greedy      obs, one unit after the other; the other weights and H⁻¹ are updated after each removal

A new criterion is a subclass of `Criterion` with an instance in `CRITERIA`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, ClassVar, Literal

import numpy as np

from graphwright.array import NDArray
from graphwright.graph import NodeId
from graphwright.program.axes.axes import AxisGroup
from graphwright.surgery.calibration import Calibration, MissingCalibration, Stream, as_float
from graphwright.surgery.errors import NothingToPrune, check_choices
from graphwright.surgery.measure import gradient_chunks, loss_gradients, scores_tokens
from graphwright.surgery.pruning.prunable import Consumer, PrunableAxis, prunable_axis, refusal
from graphwright.surgery.pruning.restore import Downdate, Gram, GramSum, energy, regularised
from graphwright.surgery.spread import spread

if TYPE_CHECKING:
    from graphwright.program.program import Program
    from graphwright.workers import Pool


ROUNDS = 512
"""`greedy` removes N // 512 of N units per refit, so one by one below 1024 units."""


def squared(matrix: np.ndarray) -> np.ndarray:
    """Return Σ w² of each column of a float matrix, float64 [columns], in blocks of rows that fit the cache."""
    total = np.zeros(matrix.shape[1])
    for start in range(0, len(matrix), 64):
        block = matrix[start : start + 64].astype(np.float64)
        total += np.einsum("oi,oi->i", block, block)
    return total


def wanda(matrix: np.ndarray, columns: np.ndarray, h: np.ndarray) -> np.ndarray:
    """tr W_J H_JJ W_Jᵀ for the columns J of each unit, [units]."""
    if columns.shape[1] == 1:
        return squared(matrix)[columns[:, 0]] * np.diag(h)[columns[:, 0]]
    return np.array([np.einsum("oi,ij,oj->", matrix[:, j], h[np.ix_(j, j)], matrix[:, j]) for j in columns])


def greedy(
    matrix: np.ndarray, columns: np.ndarray, h: np.ndarray, *, most: int | None = None, ridge: float | None = None
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return units in the order of cheapest removal, with the remaining weights refitted after each removal.

    Of N >= 1024 units, N // 512 are removed per round, with one refit per round. Refits are exact for quadratic error:
    W -= W_J [(H⁻¹)_JJ]⁻¹ (H⁻¹)_J: and H⁻¹ -= (H⁻¹)_:J [(H⁻¹)_JJ]⁻¹ (H⁻¹)_J:.

    Args:
        matrix, columns: weights [out, columns], and the columns [units, k] that read each unit.
        h: second moment (or covariance) [columns, columns] of the input.
        most: number of units to remove; by default all except one.
        ridge: λ that is added to the diagonal of h, relative to its mean; by default 1e-4, or up to 0.1 if needed.
    Returns: units [most] in order, the squared error [most] that each adds, and the scores [units] at the start.
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


@dataclass(frozen=True, slots=True)
class UnitColumns:
    """The input of a pruning criterion: one linear map that reads an axis, and the matrix columns that read each unit.

    Attributes:
        matrix: the weights [out, columns].
        columns: indices [units, k] of the columns that read each unit.
        gram: moments of the map's input, if the criterion needs them.
        effect: Σ a ∂L/∂a [columns] over the rows, for the input a of each column, if the criterion needs gradients.
        bias: True if the map has a bias, which absorbs the mean of a removed unit.
        weight: factor of this map's squared error in the sum over all maps that read the axis.
        ridge: λ that is added to the diagonal of the second moment, relative to its mean.
        seed: seed of random scores.
    """

    matrix: np.ndarray
    columns: np.ndarray
    gram: Gram | None = None
    effect: np.ndarray | None = None
    bias: bool = False
    weight: float = 1.0
    ridge: float | None = None
    seed: Sequence[int] = (0,)

    @property
    def second(self) -> np.ndarray:
        """Second moment of the input, or its covariance if the map has a bias; float64 [columns, columns]."""
        assert self.gram is not None
        return self.gram.centred() if self.bias else self.gram.second


@dataclass(frozen=True, slots=True)
class RemovalOrder:
    """The order in which units are removed, the error `growth` that each adds, and initial `scores` of all units."""

    order: np.ndarray
    growth: np.ndarray
    scores: np.ndarray


class Criterion:
    """Base class of scores of units. A subclass defines `score`, or `total` if costs do not add up.

    Attributes:
        needs: data that the score needs besides the weights: "moments" of the inputs, "gradients" of the loss, or
            "nothing".
    """

    needs: ClassVar[Literal["moments", "gradients", "nothing"]] = "moments"

    def score(self, u: UnitColumns) -> np.ndarray:
        """Return the cost of removing each unit from the input of one linear map, [units]."""
        raise NotImplementedError

    def total(self, products: Sequence[UnitColumns]) -> np.ndarray:
        """Return the cost [units] of removing each unit, summed over all linear maps that read the axis."""
        return np.sum([u.weight * self.score(u) for u in products], axis=0)

    def order(self, products: Sequence[UnitColumns], most: int) -> RemovalOrder:
        """Return the removal order of the `most` cheapest units, cheapest first."""
        scored = self.total(products)
        order = np.argsort(scored, kind="stable")[:most]
        return RemovalOrder(order, scored[order], scored)

    def costs(self, products: Sequence[UnitColumns]) -> np.ndarray:
        """Return the costs [units] that the function `scores` returns to its caller: by default those of `total`."""
        return self.total(products)


class OBS(Criterion):
    """The error that remains after the other units compensate a removal (Hassibi and Stork 1993)."""

    def score(self, u: UnitColumns) -> np.ndarray:
        """tr W_J [(H⁻¹)_JJ]⁻¹ W_Jᵀ for the columns J of each unit, [units]."""
        return Downdate(u.matrix, np.linalg.inv(regularised(u.second, u.ridge)[0])).scores(u.columns)


class Greedy(OBS):
    """OBS with the remaining weights refitted after each removal, or from 1024 units on after several."""

    def order(self, products: Sequence[UnitColumns], most: int) -> RemovalOrder:
        """Order units by greedy removal; an axis that several linear maps read is ordered by its OBS scores."""
        if len(products) > 1:
            return super().order(products, most)
        (u,) = products
        order, growth, first = greedy(u.matrix, u.columns, u.second, most=most, ridge=u.ridge)
        return RemovalOrder(order, u.weight * growth, u.weight * first)

    def costs(self, products: Sequence[UnitColumns]) -> np.ndarray:
        """Return the error that each unit's removal adds in greedy order; infinity for the last unit, which remains."""
        if len(products) > 1:
            return super().costs(products)
        made, found = self.order(products, len(products[0].columns) - 1), np.full(len(products[0].columns), np.inf)
        found[made.order] = made.growth
        return found


class Wanda(Criterion):
    """Mean square of a unit's contribution to the output (Sun et al. 2024)."""

    def score(self, u: UnitColumns) -> np.ndarray:
        """tr W_J H_JJ W_Jᵀ for the columns J of each unit, [units]."""
        assert u.gram is not None
        return wanda(u.matrix, u.columns, u.gram.second)


class Magnitude(Criterion):
    """Squared norm of the weights that read a unit."""

    needs = "nothing"

    def score(self, u: UnitColumns) -> np.ndarray:
        """Σ |W_J|² for the columns J of each unit, [units]."""
        return squared(u.matrix)[u.columns].sum(axis=1)


class Taylor(Criterion):
    """Squared first-order change of the loss (Molchanov et al. 2019)."""

    needs = "gradients"

    def total(self, products: Sequence[UnitColumns]) -> np.ndarray:
        """(Σ a_j ∂L/∂a_j)² of each unit, [units]; the sum runs over the columns of all linear maps that read it."""
        effect = np.zeros(len(products[0].columns))
        for u in products:
            assert u.effect is not None
            effect += u.effect[u.columns].sum(axis=1)
        return effect**2


class RandomCriterion(Criterion):
    """Random scores, as a baseline."""

    needs = "nothing"

    def score(self, u: UnitColumns) -> np.ndarray:
        """Return uniform random numbers in [0, 1), one per unit."""
        return np.random.default_rng(list(u.seed)).random(len(u.columns))


CRITERIA: dict[str, Criterion] = {
    "greedy": Greedy(), "obs": OBS(), "wanda": Wanda(), "magnitude": Magnitude(), "taylor": Taylor(),
    "random": RandomCriterion(),
}  # fmt: skip
"""The criteria by the name of `method=`."""


@dataclass(frozen=True, slots=True)
class Importance:
    """Gradients of the loss over the calibration data.

    Attributes:
        output: dict from linear map to the mean square of dL/dy for the map's output y, summed over entries; this
            factor converts a squared error of y to loss, to second order.
        effect: dict from linear map to Σ a ∂L/∂a [columns] for the map's input a, through this map alone.
    """

    output: Mapping[NodeId, float]
    effect: Mapping[NodeId, np.ndarray]


def importance(
    p: Program, axes: Sequence[PrunableAxis], feeds: Sequence[Mapping[str, np.ndarray]], criterion: Criterion,
    pool: Pool | None = None,
) -> Importance:  # fmt: skip
    """Compute the gradients of the loss by one forward and backward pass, in chunks of about 1024 tokens.

    `effect` is empty unless the criterion needs gradients.
    """
    ends = list({c.node: c for a in axes for c in a.consumers}.values())
    squares, effects, count = dict.fromkeys([c.node for c in ends], 0.0), dict[NodeId, np.ndarray](), 0
    shared = p, ends, criterion.needs == "gradients"
    for found, through, rows in spread(pool, _importance, gradient_chunks(p, feeds), shared):
        for node, square in found.items():
            squares[node] += square
        for node, effect in through.items():
            effects[node] = effects.get(node, 0.0) + effect
        count += rows
    return Importance({node: square / count for node, square in squares.items()}, effects)


def _importance(
    shared: tuple[Program, Sequence[Consumer], bool], feeds: Mapping[str, np.ndarray]
) -> tuple[dict[NodeId, float], dict[NodeId, np.ndarray], int]:
    """Return for one chunk Σ (dL/dy)² and, if wanted, Σ a ∂L/∂a [columns] by linear map; and the number of rows."""
    p, ends, with_effects = shared
    inputs = dict.fromkeys(c.x for c in ends) if with_effects else {}
    values, gradients = loss_gradients(p, feeds, [p.path(c.node) for c in ends], [*inputs])
    squares, effects = dict[NodeId, float](), dict[NodeId, np.ndarray]()
    for c in ends:
        slope = c.result_rows(gradients[p.path(c.node)])
        squares[c.node] = float((slope.astype(np.float64) ** 2).sum())
        if inputs:
            through = slope @ c.matrix(p, slope.dtype.name)
            effects[c.node] = np.einsum("nk,nk->k", c.rows(values[c.x]), through, dtype=np.float64)
    return squares, effects, next(iter(gradients.values()))[..., 0].size


def grams(ends: Sequence[Consumer], stream: Stream) -> list[Gram]:
    """Compute the moments of the input of each linear map in `ends` by running the stream up to these inputs."""
    totals = [GramSum() for _ in ends]
    for chunk in stream.each(partial(_gram_sums, ends), [c.x for c in ends]):
        totals = [total + part for total, part in zip(totals, chunk, strict=True)]
    return [total.moments() for total in totals]


def _gram_sums(ends: Sequence[Consumer], feeds: Mapping[str, np.ndarray], inputs: Sequence[NDArray]) -> list[GramSum]:
    return [GramSum.of(c.rows(as_float(a))) for c, a in zip(ends, inputs, strict=True)]


def unit_columns(
    p: Program, axis: PrunableAxis, moments: Sequence[Gram | None], *, scales: Sequence[float] | None = None,
    weighed: Importance | None = None, ridge: float | None = None, seed: int = 0,
) -> list[UnitColumns]:  # fmt: skip
    """Return the data by which a criterion scores an axis: one entry per linear map that reads the axis.

    Args:
        moments: input moments of each linear map; None if the criterion does not need moments.
        scales: factor of the squared error of each linear map; 1 by default.
        weighed: gradients of the loss, for a criterion that needs gradients.
    """
    effects: Mapping[NodeId, np.ndarray] = {} if weighed is None else weighed.effect
    products = []
    for c, gram, weight in zip(axis.consumers, moments, scales or [1.0] * len(axis.consumers), strict=True):
        wide = gram is not None or p.spec(c.weight).dtype.name == "float64"  # float32 is read mostly without a copy
        products.append(UnitColumns(
            c.matrix(p, "float64" if wide else "float32"), c.columns, gram, effects.get(c.node), c.bias is not None,
            weight, ridge, (seed, *axis.name.encode()),
        ))  # fmt: skip
    return products


def error_scales(
    p: Program, axis: PrunableAxis, moments: Sequence[Gram | None], weighed: Importance | None
) -> list[float]:
    """Return per linear map that reads the axis a factor from squared output error to loss, or to relative error.

    It converts to loss if gradients of the loss are given as `weighed`.
    """
    if weighed is not None:
        return [weighed.output[c.node] for c in axis.consumers]
    return [1 / max(energy(c.matrix(p), gram), 1e-300) if gram is not None else 1.0
            for c, gram in zip(axis.consumers, moments, strict=True)]  # fmt: skip


def scores(
    axis: AxisGroup, calibration: Calibration | None = None, method: str = "obs", *, ridge: float | None = None,
    seed: int = 0,
) -> np.ndarray:  # fmt: skip
    """Return the cost of removing each unit of an axis, as a squared quantity: float64 [units].

    Args:
        axis: axis from `program.axes()`.
        calibration: data of the score; not needed for `magnitude` and `random`.
        method: `obs`, `wanda`, `magnitude`, `taylor`, `random`, or `greedy`: the error that the unit's removal adds
            when units are removed one by one (infinite for the last unit, which remains).
        ridge: λ of `obs` and `greedy`, relative to the mean square of the inputs; by default 1e-4, or more if needed.
        seed: seed of `random`.
    Raises: MissingCalibration without needed data, or if `taylor` is used and the program scores no tokens;
        NothingToPrune if the axis cannot be pruned; UsageError for an unknown method.
    """
    check_choices({"method": method}, {"method": tuple(CRITERIA)})
    criterion = CRITERIA[method]
    p = axis.axes.program
    found = prunable_axis(axis)
    if found is None:
        raise NothingToPrune("the axis cannot be pruned, so its units have no scores", where=axis.name,
                             got=refusal(axis))  # fmt: skip
    moments: Sequence[Gram | None] = [None] * len(found.consumers)
    weighed = None
    if criterion.needs != "nothing":
        if calibration is None:
            raise MissingCalibration(f"the score {method!r} needs calibration data", where=axis.name,
                                     fix="pass calibration=Calibration(tokens)")  # fmt: skip
        if criterion.needs == "gradients":
            need_tokens(p, f"method={method!r}", "pass another method, e.g. 'obs'")
            weighed = importance(p, [found], calibration.feeds(p), criterion, calibration.pool)
        else:
            moments = calibration.cached(
                (p.hash(), axis.name), lambda: grams(found.consumers, calibration.stream(p).advance(found.start))
            )
    return criterion.costs(unit_columns(p, found, moments, weighed=weighed, ridge=ridge, seed=seed))


def need_tokens(p: Program, what: str, fix: str | None = None) -> None:
    """Raise MissingCalibration if the program does not score next tokens, which the operation `what` needs."""
    if not scores_tokens(p):
        raise MissingCalibration(f"{what} needs a program that scores next tokens", where=p.name,
                                 expected="an input `ids` and an output `logits`", fix=fix,
                                 got=f"{', '.join(p.input_names())} => {', '.join(p.output_names())}")  # fmt: skip
