"""A task on data: inputs, targets, a split in three, and what counts as good; and the population that tasks score.

Training reads `train`, fitness `valid`, and `test` is read by `Result.test` alone. Scores of a genome do not depend on
who else is in the population: each is a sum over one contiguous row.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from graphwright.evolve.errors import TaskError
from graphwright.files import blake2b_128

METRICS = ("accuracy", "r2")
LOSSES = ("mse", "bce", "cross_entropy")


@dataclass(frozen=True, slots=True, eq=False)
class Population:
    """What a task sees of a generation.

    Attributes:
        genes, table: of `array.population`; outputs: of each genome.
        logits: outputs are logits, not probabilities.
        seed, generation: of the run; noisy tasks draw by them.
        threads: of native calls.
        program: a genome as a program, by its place.
    """

    genes: Any
    table: Any
    outputs: int
    logits: bool
    seed: int
    generation: int
    threads: int
    program: Callable[[int], Any]

    def __len__(self) -> int:
        return len(self.genes.node_off) - 1

    def answers(self, cases: Any) -> np.ndarray:
        """Float32 [G, N, T, outputs] for `Cases`."""
        from graphwright.array.population.runner import outputs

        return np.ascontiguousarray(outputs(self.table, self.genes, cases, self.threads))

    def session(self, episodes: int, inputs: int) -> Any:
        """Genomes in environments, step by step."""
        from graphwright.array.population.runner import Session

        return Session(self.table, self.genes, episodes, inputs, self.threads)


@dataclass(frozen=True, slots=True, eq=False)
class Scores:
    """What a task says of a generation.

    Attributes:
        fitness: float64 [G]; NaN for a genome that failed. metric: float64 [G], what targets are set in.
        passes: cases (of one step each) that were run forwards.
        seconds: spent in the environment, not in networks.
        failures: place -> what went wrong.
    """

    fitness: np.ndarray
    metric: np.ndarray
    passes: int
    seconds: float = 0.0
    failures: dict[int, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, eq=False)
class Part:
    """One part of the data: inputs [N, T, inputs], targets [N, T, outputs], which steps count [N, T], the last [N]."""

    x: np.ndarray
    y: np.ndarray
    counts: np.ndarray
    last: np.ndarray

    def take(self, rows: np.ndarray) -> Part:
        """Some cases."""
        return Part(self.x[rows], self.y[rows], self.counts[rows], self.last[rows])


class Task:
    """Inputs to targets.

    Args:
        inputs: [N, inputs], or [N, T, inputs] for sequences.
        targets: [N] or [N, outputs] or [N, T, outputs]; whole numbers 0, 1, ... for cross entropy.
        loss: "mse", "bce" (binary cross entropy) or "cross_entropy"; training lowers it.
        metric: "accuracy" or "r2"; targets are set in it, and it is read at the last step of a sequence.
        fitness: of one genome as a Program: fn(program) -> float. Slow, and free.
        fitness_batch: of a generation: fn(answers [G, N, outputs]) -> [G], on the validation cases. By default minus
            the loss on them.
        split: shares of train, valid and test, stratified by class; or "same": all cases are all three.
        target: of the metric; lengths: [N], steps of each sequence; seed: of the split.
    Raises: TaskError.
    """

    def __init__(
        self,
        inputs: Any,
        targets: Any,
        loss: Literal["mse", "bce", "cross_entropy"] = "bce",
        metric: str | None = None,
        *,
        fitness: Callable[[Any], float] | None = None,
        fitness_batch: Callable[[np.ndarray], np.ndarray] | None = None,
        split: tuple[float, float, float] | Literal["same"] = (0.6, 0.2, 0.2),
        target: float | None = None,
        lengths: Any = None,
        names: tuple[str, ...] = (),
        name: str = "task",
        seed: int = 0,
    ) -> None:
        if loss not in LOSSES:
            raise TaskError("no such loss", where=name, expected=", ".join(LOSSES), got=loss)
        self.metric = metric or ("r2" if loss == "mse" else "accuracy")
        if self.metric not in METRICS:
            raise TaskError("no such metric", where=name, expected=", ".join(METRICS), got=metric)
        x, y, classes = _arrays(inputs, targets, loss, name)
        self.name, self.loss, self.split, self.target = name, loss, split, target
        self.inputs, self.outputs = x.shape[2], y.shape[2]
        self.names = names or tuple(f"x{i}" for i in range(self.inputs))
        self.fitness, self.fitness_batch = fitness, fitness_batch
        steps = np.full(len(x), x.shape[1]) if lengths is None else np.asarray(lengths, np.int64)
        if steps.shape != (len(x),) or (len(x) and (steps.min() < 1 or steps.max() > x.shape[1])):
            raise TaskError(
                "lengths do not fit", where=name, expected=f"[{len(x)}] of 1 to {x.shape[1]}", got=steps.shape
            )
        counts = np.arange(x.shape[1]) < steps[:, None]
        if np.ndim(targets) < 3:  # one target for a sequence: at its end
            counts = np.arange(x.shape[1]) == steps[:, None] - 1
        whole = Part(x, y, counts.astype(np.float32), steps - 1)
        if split == "same":
            self.train = self.valid = self._test = whole
        else:
            self.train, self.valid, self._test = (whole.take(rows) for rows in _split(classes, split, seed, name))
        self.test_reads = 0
        self._cases: dict[str, Any] = {}

    @property
    def sequence(self) -> bool:
        """Whether cases have several steps."""
        return self.train.x.shape[1] > 1

    def hash(self) -> str:
        """Of everything that decides a score, but functions."""
        parts = (self.train, self.valid, self._test)
        data = b"".join(np.ascontiguousarray(a).tobytes() for p in parts for a in (p.x, p.y, p.counts, p.last))
        facts = f"{self.name} {self.loss} {self.metric} {self.split} {self.target} {self.inputs} {self.outputs}"
        return blake2b_128(facts.encode() + data)

    def lesson(self) -> Any:
        """The training cases as native training takes them."""
        from graphwright.array.population.runner import Lesson

        if "lesson" not in self._cases:
            part = self.train
            self._cases["lesson"] = Lesson.of(part.x, part.y, self.loss, part.counts)
        return self._cases["lesson"]

    def score(self, population: Population) -> Scores:
        """Fitness and metric on the validation cases."""
        return self._score(population, "valid", self.valid)

    def confirm(self, population: Population) -> bool:
        """Whether a population of one that reached the target is taken for a solution."""
        return True

    def test(self, population: Population) -> float:
        """The metric of a population of one on the test cases; counts its calls."""
        self.test_reads += 1
        return float(self._score(population, "test", self._test).metric[0])

    def _score(self, population: Population, name: str, part: Part) -> Scores:
        from graphwright.array.population.runner import Cases

        if name not in self._cases:
            self._cases[name] = Cases.of(part.x)
        with np.errstate(invalid="ignore", over="ignore"):
            answers = population.answers(self._cases[name])
            whole = self.fitness is None and self.fitness_batch is None
            loss, metric = self._measures(answers, part, population.logits, whole)
        failures: dict[int, str] = {}
        if self.fitness is not None:
            fitness = np.full(len(population), np.nan)
            for g in range(len(population)):
                try:
                    fitness[g] = float(self.fitness(population.program(g)))
                except Exception as error:  # a candidate that crashes is a result, not the end of the run
                    failures[g] = f"{type(error).__name__}: {error}"
        elif self.fitness_batch is not None:
            shown = answers[:, np.arange(len(part.x)), part.last].astype(np.float64)
            if population.logits and self.loss != "mse":
                shown = probabilities(shown, self.loss)
            try:
                fitness = np.asarray(self.fitness_batch(shown), np.float64).copy()
            except Exception as error:
                fitness = np.full(len(population), np.nan)
                failures = dict.fromkeys(range(len(population)), f"{type(error).__name__}: {error}")
            if fitness.shape != (len(population),):
                raise TaskError("fitness_batch gives one number per genome", where=self.name,
                                expected=(len(population),), got=fitness.shape)  # fmt: skip
        else:
            fitness = -loss
        return Scores(fitness, metric, len(population) * part.x.shape[0] * part.x.shape[1], failures=failures)

    def _measures(
        self, answers: np.ndarray, part: Part, logits: bool, with_loss: bool = True
    ) -> tuple[np.ndarray, np.ndarray]:
        """Loss over the steps that count (0 if nobody needs it), and the metric at the last step; each float64 [G]."""
        y = answers.astype(np.float64)
        return self._loss(y, part, logits) if with_loss else np.zeros(len(y)), self._metric(y, part, logits)

    def _loss(self, y: np.ndarray, part: Part, logits: bool) -> np.ndarray:
        wanted, weight = part.y.astype(np.float64), part.counts / part.counts.sum()
        if self.loss == "mse":
            each = ((y - wanted) ** 2).mean(-1)
        else:
            p = probabilities(y, self.loss) if logits else np.clip(y, 1e-7, 1 - 1e-7)
            if self.loss == "cross_entropy":
                p = p if logits else p / p.sum(-1, keepdims=True)
                each = -(wanted * np.log(np.maximum(p, 1e-30))).sum(-1)
            else:
                p = np.clip(p, 1e-30, None), np.clip(1 - p, 1e-30, None)
                each = -(wanted * np.log(p[0]) + (1 - wanted) * np.log(p[1])).mean(-1)
        return np.ascontiguousarray((each * weight).reshape(len(y), -1)).sum(1)

    def _metric(self, y: np.ndarray, part: Part, logits: bool) -> np.ndarray:
        rows = np.arange(len(part.x))
        final, right = np.ascontiguousarray(y[:, rows, part.last]), part.y[rows, part.last].astype(np.float64)
        if self.metric == "r2":
            spread = ((right - right.mean(0)) ** 2).sum()
            return 1 - np.ascontiguousarray(((final - right) ** 2).reshape(len(y), -1)).sum(1) / max(spread, 1e-30)
        if self.loss == "cross_entropy":
            hit = final.argmax(-1) == right.argmax(-1)
        else:
            hit = ((final > (0.0 if logits else 0.5)) == (right > 0.5)).all(-1)
        return hit.mean(-1)


def probabilities(logits: np.ndarray, loss: str) -> np.ndarray:
    """Softmax over the last axis for cross entropy, else σ of each."""
    if loss == "cross_entropy":
        grown = np.exp(logits - logits.max(-1, keepdims=True))
        return grown / grown.sum(-1, keepdims=True)
    return 0.5 * (1 + np.tanh(0.5 * logits))


def _arrays(inputs: Any, targets: Any, loss: str, name: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Inputs [N, T, inputs], targets [N, T, outputs], and a class per case. Raises: TaskError."""
    try:
        x, y = np.asarray(inputs, np.float32), np.asarray(targets)
    except (TypeError, ValueError) as error:
        raise TaskError("inputs and targets are arrays", where=name, got=str(error)) from None
    if y.dtype == object or not (np.issubdtype(y.dtype, np.number) or y.dtype == bool):
        raise TaskError("targets are numbers", where=name, got=y.dtype)
    if x.ndim not in (2, 3) or len(x) == 0 or x.shape[-1] == 0:
        raise TaskError("inputs are [N, inputs] or [N, T, inputs], and not empty", where=name, got=x.shape)
    if len(y) != len(x):
        raise TaskError("one target per case", where=name, expected=len(x), got=len(y))
    if not (np.isfinite(x).all() and np.isfinite(y).all()):
        raise TaskError("inputs and targets are finite", where=name, got="NaN or infinity")
    x = x[:, None] if x.ndim == 2 else x
    classes = np.zeros(len(x), np.int64)
    if loss == "cross_entropy":
        if y.ndim != 1 or y.min() < 0 or not np.equal(y, y.astype(np.int64)).all():
            raise TaskError("cross entropy takes one class 0, 1, ... per case", where=name, got=f"{y.dtype} {y.shape}")
        classes = y.astype(np.int64)
        y = np.eye(int(classes.max()) + 1, dtype=np.float32)[classes]
    elif loss == "bce" and y.ndim == 1:
        classes = (y > 0.5).astype(np.int64)
    y = y.astype(np.float32)
    y = y[:, None] if y.ndim == 1 else y
    y = np.repeat(y[:, None], x.shape[1], 1) if y.ndim == 2 else y
    if y.shape[1] != x.shape[1]:
        raise TaskError("targets have the steps of the inputs", where=name, expected=x.shape[1], got=y.shape[1])
    return x, y, classes


def _split(classes: np.ndarray, shares: tuple[float, float, float], seed: int, name: str) -> list[np.ndarray]:
    """Rows of train, valid and test: of each class the shares asked for."""
    if len(shares) != 3 or min(shares) <= 0 or abs(sum(shares) - 1) > 1e-9:
        raise TaskError("a split is three positive shares that sum to 1", where=name, got=shares)
    rng = np.random.default_rng(seed)
    parts: list[list[np.ndarray]] = [[], [], []]
    for kind in np.unique(classes):
        rows = rng.permutation(np.flatnonzero(classes == kind))
        a, b = round(shares[0] * len(rows)), round((shares[0] + shares[1]) * len(rows))
        for part, piece in zip(parts, (rows[:a], rows[a:b], rows[b:]), strict=True):
            part.append(piece)
    joined = [np.sort(np.concatenate(part)) for part in parts]
    if any(len(part) == 0 for part in joined):
        raise TaskError("a part of the split is empty", where=name, got=[len(p) for p in joined],
                        fix='more cases, or split="same"')  # fmt: skip
    return joined
