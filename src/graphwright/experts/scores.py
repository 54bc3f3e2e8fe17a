"""Scores of experts: what cutting each of them would cost, and the experts that cost least.

    share         share of the assignments
    mass          share of the sum of the weights
    output        mean norm of an expert's results (expert activation norm)
    reap          mean of weight · norm over an expert's tokens (router-weighted activation; Lasby et al. 2025)
    weights       product of the norms of an expert's matrices; needs no data
    router        norm of an expert's row of the router; needs no data
    random        uniform random numbers, as a baseline
    effect        measured increase of the loss if this expert alone is cut

A new score is a function in `SCORES`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from graphwright.array import NDArray
from graphwright.experts.routed import RoutedLayer, routed_layers
from graphwright.experts.selection import COMPARABLE, least
from graphwright.experts.usage import Usage, feeds_for, measured
from graphwright.program.axes.units import Units
from graphwright.program.weights import as_array
from graphwright.progress import Progress, ProgressCallback
from graphwright.report import Report, table
from graphwright.surgery.calibration import CalibrationSource, Stream
from graphwright.surgery.errors import check_choices
from graphwright.surgery.matrices import program_of
from graphwright.surgery.measure import loss, scores_tokens

if TYPE_CHECKING:
    from graphwright.models.model import Model
    from graphwright.program.op_graph import Value
    from graphwright.program.program import Program

Found = dict[str, np.ndarray]


@dataclass(frozen=True, slots=True)
class ScoreData:
    """The input of a score: the program, its routed layers, and data if there are any.

    Attributes:
        program: the program.
        layers: its routed layers by name.
        feeds: chunks of inputs to measure on.
        usage: the use of the experts on these; made at the first access.
        seed: seed of random scores.
        progress: called with the share of the work that is done.
    """

    program: Program
    layers: Mapping[str, RoutedLayer]
    feeds: Sequence[Mapping[str, np.ndarray]]
    known: list[Usage]
    seed: int
    progress: ProgressCallback

    @property
    def usage(self) -> Usage:
        """The use of the experts on the data."""
        if not self.known:
            self.known.append(measured(self.program, self.feeds))
        return self.known[0]


def _used(figure: str) -> Callable[[ScoreData], Found]:
    return lambda data: data.usage.scores(figure)


def _weights(data: ScoreData) -> Found:
    """Product of the Frobenius norms of an expert's matrices."""
    p = data.program

    def norm(node: Any) -> float:
        return float(np.linalg.norm(p.weights.array(p.key(node)).to_numpy("float64")))

    def one(layer: RoutedLayer, expert: int) -> float:
        matrices = [n for n in layer.params(expert) if len(p.spec(n).shape) == 2]
        return float(np.prod([norm(n) for n in matrices]))

    return {name: np.array([one(layer, e) for e in range(layer.size)]) for name, layer in data.layers.items()}


def _router(data: ScoreData) -> Found:
    """Norm of an expert's row of the router; equal scores where a router has no matrix."""
    p = data.program

    def norms(layer: RoutedLayer) -> np.ndarray:
        if layer.router is None:
            return np.ones(layer.size)
        matrix = p.weights.array(p.key(layer.router)).to_numpy("float64")
        return np.linalg.norm(matrix.reshape(layer.size, -1), axis=1)

    return {name: norms(layer) for name, layer in data.layers.items()}


def _random(data: ScoreData) -> Found:
    return {name: np.random.default_rng([data.seed, *name.encode()]).random(layer.size)
            for name, layer in data.layers.items()}  # fmt: skip


def _effect(data: ScoreData) -> Found:
    """Increase of the loss if an expert alone gets the logit -∞, which equals cutting it.

    Only what follows the router is computed again for each expert.
    """
    p, found = data.program, Found()
    stream = Stream(p, data.feeds)
    reference = None if scores_tokens(p) else list(stream.outputs())
    base, total = loss(stream, reference), sum(layer.size for layer in data.layers.values())
    done = 0
    for name, layer in data.layers.items():
        stream.advance(_after(p, layer.logits))
        row = np.zeros(layer.size)
        for e in range(layer.size):
            row[e] = loss(_without(stream, layer.logits, e), reference) - base
            done += 1
            data.progress(Progress("score", done, total, {"effect": float(row[e])}))
        found[name] = row
    return found


def _after(p: Program, value: Value) -> Any:
    """Return the first reader of a value in topological order."""
    return min(p.consumers(value), key=p.order_labels.key)


def _without(stream: Stream, logits: Value, expert: int) -> Stream:
    """Return a copy of an advanced stream whose `logits` are -∞ for one expert."""

    def cut(array: NDArray) -> NDArray:
        host = array.to_numpy("float32" if array.dtype.is_low else None).copy()
        host[:, expert] = -np.inf
        return as_array(host, array.dtype)

    made = Stream(stream.p, stream.feeds)
    made.live = [{**values, logits: cut(values[logits])} for values in stream.live]
    return made


SCORES: dict[str, Callable[[ScoreData], Found]] = {
    **{name: _used(name) for name in ("share", "mass", "output", "reap")},
    "weights": _weights, "router": _router, "random": _random, "effect": _effect,
}  # fmt: skip
"""Score by name."""
NEEDS_NO_DATA = frozenset({"weights", "router", "random"})


@dataclass(frozen=True, slots=True, repr=False)
class ExpertScores(Report):
    """Scores of the experts of a program; the least is the first to cut.

    Attributes:
        program: the program.
        by: name of the score.
        layers: {layer: scores, float64 [E]}.
    """

    program: Program
    by: str
    layers: Mapping[str, np.ndarray]
    HIDDEN: ClassVar = ("program",)

    def to_json(self) -> dict[str, Any]:
        """Return a JSON-serialisable dict."""
        return {"by": self.by, "layers": {name: row.tolist() for name, row in self.layers.items()}}

    def least(self, n: int | float, *, per_layer: bool = True) -> Units:
        """Select the experts with the least scores; see `least`."""
        return least(self.program, self.layers, n, per_layer=per_layer, comparable=self.by in COMPARABLE)

    def _text(self) -> str:
        rows = [{"layer": name, "expert": e, self.by: float(v)} for name, row in self.layers.items()
                for e, v in enumerate(row)]  # fmt: skip
        return table(rows, ("layer", "expert", self.by))


def scores(
    model: Model | Program, by: str = "effect", data: CalibrationSource | None = None, *, seed: int = 0,
    progress: ProgressCallback | None = None,
) -> ExpertScores:  # fmt: skip
    """Score all experts of a model.

    Args:
        model: a model or program with routed layers; it is not changed.
        by: effect (measured increase of the loss), reap, output, mass, share, weights, router or random.
        data: text, ids, windows, arrays by input name, or a `Calibration`, whose learning windows are used; by default
            the bundled text, for a model. `weights`, `router` and `random` need none.
        seed: seed of `random`.
        progress: called as experts are measured.
    Raises: NotAMixture; MissingCalibration; UsageError for an unknown score.
    """
    check_choices({"by": by}, {"by": tuple(SCORES)})
    p = program_of(model)
    feeds = [] if by in NEEDS_NO_DATA else feeds_for(model, data)
    return ExpertScores(p, by, scored(p, by, feeds, seed=seed, progress=progress))


def scored(
    p: Program, by: str, feeds: Sequence[Mapping[str, np.ndarray]], *, seed: int = 0,
    progress: ProgressCallback | None = None,
) -> Found:  # fmt: skip
    """Return {layer: scores [E]} on chunks of inputs."""
    return SCORES[by](ScoreData(p, routed_layers(p), feeds, [], seed, progress or (lambda _: None)))
