"""A task on data: inputs, targets, a split, losses and metrics; and the population that tasks score.

Training reads the split `train`, fitness reads `valid`, and only `Result.test` reads the test split. The scores of a
genome do not depend on the rest of the population, not even in the last bits: each is a sum over contiguous memory.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from numbers import Integral, Real
from pathlib import Path
from traceback import extract_tb
from typing import Any, Literal

import numpy as np

from graphwright.evolve.errors import TaskError, need
from graphwright.evolve.tasks.losses import LOSSES
from graphwright.files import blake2b_128

METRICS = ("accuracy", "r2")


@dataclass(frozen=True, slots=True, eq=False)
class Head:
    """One of several targets of a task.

    Attributes:
        targets: [N] or [N, outputs] or [N, T, outputs]; integers 0, 1, ... for cross entropy.
        loss: "mse", "bce" or "cross_entropy"; weight: weight in the loss of the task.
        metric: "accuracy" or "r2"; None means "r2" for the loss "mse", else "accuracy".
    """

    targets: Any
    loss: Literal["mse", "bce", "cross_entropy"] = "bce"
    weight: float = 1.0
    metric: str | None = None


@dataclass(frozen=True, slots=True)
class HeadSpec:
    """A checked `Head`, and the range of network outputs that belongs to it.

    Attributes:
        name, loss, metric, weight: see `Head`; start, stop: the head has the outputs `start..stop - 1`.
    """

    name: str
    loss: str
    metric: str
    weight: float
    start: int
    stop: int

    @staticmethod
    def of(name: str, head: Head, start: int, width: int) -> HeadSpec:
        """Check a head and assign it `width` outputs from index `start`. Raises: TaskError if a field is invalid."""
        need(head.loss in [*LOSSES], "unknown loss", where=name, expected=", ".join(LOSSES), got=head.loss)
        metric, valid = head.metric or LOSSES[head.loss].metric, 0 < head.weight < float("inf")
        need(metric in METRICS, "unknown metric", where=name, expected=", ".join(METRICS), got=metric)
        need(valid, "the weight of a head is not a positive number", where=name, got=head.weight)
        return HeadSpec(name, head.loss, metric, float(head.weight), start, start + width)

    @property
    def outputs(self) -> slice:
        """The slice of the network outputs that belong to the head."""
        return slice(self.start, self.stop)

    def cost(self, y: np.ndarray, wanted: np.ndarray, share: np.ndarray, logits: bool) -> np.ndarray:
        """Compute the unweighted loss of this head, float64 [G], given outputs `y` and targets `wanted` of all heads.

        `y` is [G genomes, N cases, T steps, outputs]; `share` [N, T] has the weight of each step in the loss, of sum 1.
        """
        y, wanted, loss = y[..., self.outputs], wanted[..., self.outputs].astype(np.float64), LOSSES[self.loss]
        each = loss.error(loss.predictions(y) if logits else loss.bounded(y), wanted)
        return np.ascontiguousarray((each * share).reshape(len(y), -1)).sum(1)

    def measure(self, final: np.ndarray, right: np.ndarray, logits: bool) -> np.ndarray:
        """Compute this head's metric, float64 [genomes], from the last outputs [genomes, N, outputs] and targets."""
        if self.stop - self.start < final.shape[-1]:
            final, right = np.ascontiguousarray(final[..., self.outputs]), right[..., self.outputs]
        if self.metric == "r2":
            spread = ((right - right.mean(0)) ** 2).sum()
            return 1 - np.ascontiguousarray(((final - right) ** 2).reshape(len(final), -1)).sum(1) / max(spread, 1e-30)
        hit = LOSSES[self.loss].correct(final, right, 0.0 if logits else 0.5)
        return np.add.reduce(hit, -1) / hit.shape[-1]


@dataclass(frozen=True, slots=True, eq=False)
class Population:
    """The genomes of a generation, in the form that tasks score.

    Attributes:
        genes, table: the genomes as arrays, and in the form that native code runs; outputs: outputs per genome.
        logits: True if outputs are logits, not probabilities.
        seed, generation: seed of the run and current generation, from which tasks derive random numbers.
        threads: number of threads of native calls.
        program: function that builds the program of a genome from the genome's index.
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
        """Run all genomes on a `Cases` object; return their outputs, float32 [genomes, cases, steps, outputs]."""
        from graphwright.array.population.runner import outputs

        return np.ascontiguousarray(outputs(self.table, self.genes, cases, self.threads))

    def session(self, episodes: int, inputs: int) -> Any:
        """Create a session in which all genomes run step by step in `episodes` episodes each."""
        from graphwright.array.population.runner import Session

        return Session(self.table, self.genes, episodes, inputs, self.threads)


@dataclass(frozen=True, slots=True, eq=False)
class Scores:
    """The scores of a generation.

    Attributes:
        fitness: float64 [genomes]; NaN for a failed genome.
        metric: float64 [genomes]; the value that is compared with the target of a run.
        passes: number of time steps in forward passes, over all cases.
        seconds: time spent in environments, not in networks.
        failures: dict from indices of genomes to their errors.
    """

    fitness: np.ndarray
    metric: np.ndarray
    passes: int
    seconds: float = 0.0
    failures: dict[int, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Trial:
    """Result of the test whether a genome that reached the target is a solution, and its cost as in `Scores`."""

    passed: bool
    passes: int = 0
    seconds: float = 0.0


@dataclass(frozen=True, eq=False)
class DataSplit:
    """Cases `x` [N, T, inputs], targets `y` [N, T, outputs], weights of steps `counts` [N, T], last step `last` [N]."""

    x: np.ndarray
    y: np.ndarray
    counts: np.ndarray
    last: np.ndarray

    def take(self, rows: np.ndarray) -> DataSplit:
        """Select cases by index."""
        return DataSplit(self.x[rows], self.y[rows], self.counts[rows], self.last[rows])

    def final(self, answers: np.ndarray) -> np.ndarray:
        """Select the outputs at each case's last step: [genomes, N, T, outputs] -> float64 [genomes, N, outputs]."""
        one = answers.shape[2] == 1
        last = answers[:, :, 0] if one else answers[:, np.arange(len(self.x)), self.last]
        return last.astype(np.float64, order="C")

    @cached_property
    def right(self) -> np.ndarray:
        """The targets at the last step of each case, float64 [N, outputs]."""
        return self.y[np.arange(len(self.x)), self.last].astype(np.float64)


class Task:
    """A supervised task: inputs, targets and a split into training, validation and test cases.

    Args:
        inputs: [N, inputs], or [N, T, inputs] for sequences.
        targets: [N] or [N, outputs] or [N, T, outputs]; integers 0, 1, ... for cross entropy. Or a dict of `Head` by
            name: the loss is then their weighted sum, and the metric is that of the worst head.
        loss: "mse", "bce" (binary cross entropy) or "cross_entropy"; training minimises it.
        metric: "accuracy" or "r2", computed at the last step of a sequence; `target` is compared with it.
        fitness: function of one genome, given as a Program, that returns its fitness; flexible but slow.
        fitness_batch: function of the outputs [G, N, outputs] of some genomes for the validation cases that returns the
            fitness [G]; each entry depends on one genome. By default the fitness is minus the loss.
        split: fractions for training, validation and test, stratified by class; "same" to use all cases for all three.
        target: value of the metric at which a run ends.
        lengths: number of steps of each sequence, [N].
        skip: number of steps at the start of a sequence that are not scored.
        runs: number of calls over which a noisy fitness is averaged; each call has its own fixed random key.
        scaled: standardise inputs by mean and standard deviation of the training cases; a mask [inputs] selects some.
            The attribute `scale`, float32 [2, inputs], holds mean and standard deviation.
        names: names of the inputs.
        meaning: description of the outputs: class names by index, or mean and standard deviation of a number.
        name: name of the task.
        seed: seed of the split.
    Raises: TaskError if an argument is invalid or the arguments do not match.
    """

    def __init__(
        self, inputs: Any, targets: Any, loss: Literal["mse", "bce", "cross_entropy"] = "bce",
        metric: str | None = None, *, fitness: Callable[[Any], float] | None = None,
        fitness_batch: Callable[[np.ndarray], np.ndarray] | None = None,
        split: tuple[float, float, float] | Literal["same"] = (0.6, 0.2, 0.2), target: float | None = None,
        lengths: Any = None, skip: int = 0, runs: int = 1, scaled: Any = False, names: tuple[str, ...] = (),
        meaning: Mapping[str, Any] | None = None, name: str = "task", seed: int = 0,
    ) -> None:  # fmt: skip
        for function in (fitness, fitness_batch):
            need(function is None or callable(function), "the fitness is not a function", where=name,
                 got=repr(function)[:80])  # fmt: skip
        need(fitness is None or fitness_batch is None, "fitness and fitness_batch are both given", where=name,
             fix="give one of them")  # fmt: skip
        number = target is None or isinstance(target, Real)
        need(number, "the target is not a number", where=name, got=repr(target)[:80])
        need(isinstance(seed, Integral) and seed >= 0, "the seed is not an integer >= 0", where=name, got=repr(seed))
        several = isinstance(targets, Mapping)
        given = dict(targets) if several else {"": Head(targets, loss, 1.0, metric)}
        need(given, "the dict of targets is empty", where=name, expected="Head objects by name")
        others = [key for key, head in given.items() if not isinstance(head, Head)]
        need(not others, "values of the dict of targets are not Head objects", where=name, got=others)
        heads, parts, width, x = [], [], 0, np.zeros((0, 1, 0), np.float32)
        for key, head in given.items():
            where = f"{name}, head {key}" if several else name
            HeadSpec.of(where, head, 0, 0)
            x, y, classes = _arrays(inputs, head.targets, head.loss, where)
            heads.append(HeadSpec.of(where if several else name, head, width, y.shape[2]))
            parts.append((y, classes, np.ndim(head.targets) < 3))
            width += y.shape[2]
        self.heads = dict(zip(given, heads, strict=True))
        y, classes = np.concatenate([part[0] for part in parts], 2), parts[0][1]
        for other in parts[1:]:  # stratified by all classes together
            classes = classes * (int(other[1].max()) + 1) + other[1]
        self.metric = "worst head" if several else heads[0].metric
        self.name, self.split, self.target, self.meaning = name, split, target, meaning
        self.loss: str = "heads" if several else loss
        self.inputs, self.outputs = x.shape[2], width
        self.names = tuple(names) or tuple(f"x{i}" for i in range(self.inputs))
        need(len(self.names) == self.inputs and np.ndim(scaled) <= 1 and np.size(scaled) in (1, self.inputs),
             "`names` or `scaled` do not match the inputs", where=name,
             expected=f"{self.inputs} names; scaled: a bool or [{self.inputs}]",
             got=f"{len(self.names)} names; scaled {np.shape(scaled)}")  # fmt: skip
        need(type(runs) is int and runs >= 1, "`runs` is not an integer >= 1", where=name, got=repr(runs))
        self.fitness, self.fitness_batch, self.runs = fitness, fitness_batch, runs
        steps = np.full(len(x), x.shape[1]) if lengths is None else np.asarray(lengths, np.int64)
        need(steps.shape == (len(x),) and steps.min(initial=1) >= 1 and steps.max(initial=1) <= x.shape[1],
             "`lengths` do not match the sequences", where=name, expected=f"[{len(x)}] of 1 to {x.shape[1]}",
             got=repr(lengths)[:80])  # fmt: skip
        least = steps.min(initial=x.shape[1])
        problem = "`skip` is negative" if skip < 0 else "`skip` leaves no step of the shortest sequence"
        need(0 <= skip < least, problem, where=name, expected=f"0 to {least - 1}", got=skip)
        counts = (np.arange(x.shape[1]) < steps[:, None]) & (np.arange(x.shape[1]) >= skip)
        if all(part[2] for part in parts):  # one target per sequence, at its end
            counts = np.arange(x.shape[1]) == steps[:, None] - 1
        whole = DataSplit(x, y, counts.astype(np.float32), steps - 1)
        if split == "same":
            self.train = self.valid = self._test = whole
        else:
            self.train, self.valid, self._test = (whole.take(rows) for rows in _split(classes, split, seed, name))
        if fitness is None and fitness_batch is None:
            for head in heads:
                _varies(head, whole, {"validation": self.valid, "test": self._test})
        self.scale = _scale(self.train.x, np.broadcast_to(np.asarray(scaled, bool), self.inputs))
        if np.any(scaled):
            parts = (self.train, self.valid, self._test)
            self.train, self.valid, self._test = (replace(p, x=self._finite(self.network_inputs(p.x))) for p in parts)
        self.test_reads = 0
        self._cases: dict[str, Any] = {}

    def __getstate__(self) -> dict[str, Any]:
        """Return what is sent to another process: everything but the data in the layout of native code."""
        return {**vars(self), "_cases": {}}

    @property
    def foreign(self) -> bool:
        """True if a fitness function of the user's is called per genome; see `Scorer.foreign`."""
        return self.fitness is not None

    @property
    def steps(self) -> int:
        """The number of steps of each case."""
        return self.train.x.shape[1]

    @property
    def sequence(self) -> bool:
        """True if cases have several steps."""
        return self.steps > 1

    def head(self, name: str) -> HeadSpec:
        """Return a head by name. Raises: TaskError listing all names if it is unknown."""
        need(name in self.heads, "the task has no such head", where=self.name, expected=", ".join(self.heads), got=name)
        return self.heads[name]

    def network_inputs(self, x: Any) -> np.ndarray:
        """Convert inputs [..., inputs] to the float32 inputs of networks, standardised if the task is `scaled`.

        Raises: TaskError if the last axis does not match the inputs of the task.
        """
        values = np.asarray(x, np.float32)
        need(values.ndim >= 2 and values.shape[-1] == self.inputs, "inputs have the wrong shape", where=self.name,
             expected=f"cases of {self.inputs} inputs", got=values.shape)  # fmt: skip
        with np.errstate(over="ignore"):
            return (values - self.scale[0]) / self.scale[1]

    def _finite(self, x: np.ndarray) -> np.ndarray:
        """Return `x`, the scaled inputs. Raises: TaskError if one is not finite."""
        odd = ~np.isfinite(x).all((0, 1))
        need(not odd.any(), "a scaled input exceeds float32, since it is far from all training cases",
             where=f"{self.name}, {self.names[int(odd.argmax())]}", fix="remove the case")  # fmt: skip
        return x

    def predictions(self, answers: np.ndarray, logits: bool, head: str | None = None) -> np.ndarray:
        """Convert outputs [..., outputs] to predictions of one head or of all: logits become probabilities."""
        if logits:
            answers = answers.copy()
            for each in self.heads.values():
                answers[..., each.outputs] = LOSSES[each.loss].predictions(answers[..., each.outputs])
        return answers if head is None else answers[..., self.head(head).outputs]

    def hash(self) -> str:
        """Return a hash of everything that determines scores, except fitness functions."""
        parts = (self.train, self.valid, self._test)
        data = b"".join(np.ascontiguousarray(a).tobytes() for p in parts for a in (p.x, p.y, p.counts, p.last))
        facts = f"{self.name} {self.heads} {self.split} {self.target} {self.inputs} {self.outputs}"
        facts += f" {self.runs} runs" if self.runs > 1 else ""
        return blake2b_128(facts.encode() + data)

    def lesson(self) -> Any:
        """Return the training cases as the `Lesson` object that native training takes."""
        from graphwright.array.population.runner import Lesson

        if "lesson" not in self._cases:
            part, heads = self.train, [(h.loss, h.start, h.stop, h.weight) for h in self.heads.values()]
            self._cases["lesson"] = Lesson.of(part.x, part.y, heads, part.counts)
        return self._cases["lesson"]

    def score(self, population: Population) -> Scores:
        """Compute fitness and metric on the validation cases."""
        return self._score(population, "valid", self.valid)

    def confirm(self, population: Population) -> Trial:
        """Confirm that a single genome that reached the target is a solution; tasks on data need no further test."""
        return Trial(True)

    def test(self, population: Population) -> float:
        """Return the metric of a single genome on the test cases; `test_reads` counts the calls."""
        self.test_reads += 1
        return float(self._score(population, "test", self._test).metric[0])

    def _score(self, population: Population, name: str, part: DataSplit) -> Scores:
        from graphwright.array.population.runner import Cases

        if name not in self._cases:
            self._cases[name] = Cases.of(part.x)
        with np.errstate(invalid="ignore", over="ignore"):
            answers = population.answers(self._cases[name])
            final = part.final(answers)
            metric = self._metric(final, part, population.logits)
            given = self.fitness is not None or self.fitness_batch is not None
            fitness = np.full(len(population), np.nan) if given else -self._loss(answers, part, population.logits)
        failures: dict[int, str] = {}
        if self.fitness is not None:
            for g in range(len(population)):
                try:
                    fitness[g] = _number(self._mean(self.fitness, population.program(g)))
                except Exception as error:  # a candidate that crashes does not end the run
                    failures[g] = _error_text(error)
        elif self.fitness_batch is not None:
            seen = self.predictions(final, population.logits)
            try:
                fitness = np.array(self._mean(self.fitness_batch, seen), np.float64)
            except Exception as error:
                failures = dict.fromkeys(range(len(population)), _error_text(error))
            need(fitness.shape == metric.shape, "fitness_batch did not return one number per genome", where=self.name,
                 expected=metric.shape, got=fitness.shape)  # fmt: skip
        return Scores(fitness, metric, len(population) * part.x.shape[0] * part.x.shape[1], failures=failures)

    def _mean(self, fitness: Callable[[Any], Any], given: Any) -> Any:
        """Return the mean of `runs` calls `fitness(given)` of a user's fitness function."""
        if self.runs == 1:
            return fitness(given)
        from graphwright.autograd import fork_rng

        total = 0.0
        for key in range(self.runs):
            with fork_rng(key):
                total = total + np.asarray(fitness(given), np.float64)
        return total / self.runs

    def _loss(self, answers: np.ndarray, part: DataSplit, logits: bool) -> np.ndarray:
        """Compute the loss, float64 [genomes], of outputs [genomes, N, T, outputs] over the steps that are scored."""
        loss, y, share = np.zeros(len(answers)), answers.astype(np.float64), part.counts / part.counts.sum()
        for head in self.heads.values():
            loss += head.weight * head.cost(y, part.y, share, logits)
        return loss

    def _metric(self, final: np.ndarray, part: DataSplit, logits: bool) -> np.ndarray:
        """Compute the metric, float64 [genomes], of the last outputs [genomes, N, outputs]: that of the worst head."""
        measured = [head.measure(final, part.right, logits) for head in self.heads.values()]
        return measured[0] if len(measured) == 1 else np.min(measured, axis=0)


def _number(value: Any) -> float:
    """Convert the result of a user's fitness function to a float. Raises: TypeError if it is not a number."""
    try:
        return float(value if isinstance(value, Real) else value.item())
    except (AttributeError, TypeError, ValueError):
        raise TypeError(f"the fitness function returned {value!r:.80}, not a number") from None


def _error_text(error: Exception) -> str:
    """Describe an exception with the line in the called function and the line that raised it."""
    frames = [f"{Path(f.filename).name}:{f.lineno}" for f in extract_tb(error.__traceback__) if f.filename != __file__]
    lines = dict.fromkeys([*frames[:1], *frames[-1:]])
    return f"{type(error).__name__}: {error}" + (f", at {', '.join(lines)}" if lines else "")


def _scale(x: np.ndarray, which: np.ndarray) -> np.ndarray:
    """Compute mean and standard deviation of the inputs chosen by `which`, float32 [2, inputs].

    The standard deviation of constant inputs is set to 1. Inputs that are not chosen get mean 0 and deviation 1.
    """
    columns = x.reshape(-1, x.shape[-1])
    with np.errstate(over="ignore"):
        mean, spread = x.mean((0, 1)), x.std((0, 1))
    apart = ~np.isfinite(spread) | (spread < 1e-12)  # squares beyond float32
    mean, spread = np.where(apart, columns.mean(0, float), mean), np.where(apart, columns.std(0, dtype=float), spread)
    still = (columns == columns[0]).all(0)
    mean, spread = np.where(still, columns[0], mean), np.where(still, 1.0, spread)
    return np.where(which, [mean, spread], [[0.0], [1.0]]).astype(np.float32)


def _arrays(inputs: Any, targets: Any, loss: str, name: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Convert data to inputs [N, T, inputs], targets [N, T, outputs], and a class per case [N].

    Raises: TaskError if the data are invalid for the loss.
    """
    try:
        with np.errstate(over="ignore"):  # overflow gives infinity, which is refused below
            x, y = np.asarray(inputs).astype(np.float32, casting="same_kind"), np.asarray(targets)
    except (TypeError, ValueError) as error:
        raise TaskError("inputs or targets are not arrays of real numbers", where=name, got=str(error)) from None
    need(y.dtype.kind in "biuf", "targets are not real numbers", where=name, got=y.dtype)
    need(x.ndim in (2, 3) and x.size, "inputs have the wrong shape or are empty", where=name,
         expected="[N, inputs] or [N, T, inputs]", got=x.shape)  # fmt: skip
    cases = "inputs and targets have different numbers of cases"
    need(y.ndim and len(y) == len(x), cases, where=name, expected=len(x), got=len(y) if y.ndim else repr(targets))
    finite = np.isfinite(x).all() and np.isfinite(y).all()
    need(finite, "inputs or targets are not finite", where=name, got="NaN or infinity")
    x = x[:, None] if x.ndim == 2 else x
    y, classes = LOSSES[loss].targets(y, name)
    y = y.astype(np.float32)
    y = y[:, None] if y.ndim == 1 else y
    y = np.repeat(y[:, None], x.shape[1], 1) if y.ndim == 2 else y
    need(y.shape[1] == x.shape[1], "inputs and targets have different numbers of steps", where=name,
         expected=x.shape[1], got=y.shape[1])  # fmt: skip
    return x, y, np.zeros(len(x), np.int64) if classes is None else classes


def _varies(head: HeadSpec, whole: DataSplit, parts: Mapping[str, DataSplit]) -> None:
    """Raise TaskError if all targets are equal or, for the metric r2, all targets of one part of the split."""
    wanted = whole.y[whole.counts > 0][:, head.outputs]
    need((wanted != wanted[0]).any(), "the target is the same in all cases", where=head.name, got=wanted[0].tolist(),
         expected="at least two different targets")  # fmt: skip
    for name, part in parts.items() if head.metric == "r2" else ():
        right = part.right[:, head.outputs]
        need((right != right[0]).any(), f"r2 is undefined: all {name} targets are the same", where=head.name,
             got=f"{len(right)} of {right[0].tolist()}",
             fix='more cases, another seed of the split, or split="same"')  # fmt: skip


def _split(classes: np.ndarray, shares: tuple[float, float, float], seed: int, name: str) -> list[np.ndarray]:
    """Draw the indices of training, validation and test cases, with the given fractions of each class."""
    three = isinstance(shares, tuple | list) and len(shares) == 3
    need(three and min(shares) > 0 and abs(sum(shares) - 1) <= 1e-9,
         "the split is not three positive fractions that sum to 1", where=name, got=shares,
         fix='(0.6, 0.2, 0.2), or "same"')  # fmt: skip
    rng, pieces = np.random.default_rng(seed), []
    for kind in np.unique(classes):
        rows = rng.permutation(np.flatnonzero(classes == kind))
        pieces.append(np.split(rows, [round(shares[0] * len(rows)), round((shares[0] + shares[1]) * len(rows))]))
    joined = [np.sort(np.concatenate(part)) for part in zip(*pieces, strict=True)]
    need(all(map(len, joined)), "a part of the split is empty", where=name, got=[*map(len, joined)],
         expected="cases for training, validation and test", fix='more cases, or split="same"')  # fmt: skip
    return joined
