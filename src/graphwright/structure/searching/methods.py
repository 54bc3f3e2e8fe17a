"""Methods of architecture search by name; each gets the same budget of training steps, including retraining."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import inf, log
from typing import ClassVar, TypeVar
from warnings import warn

import numpy as np

from graphwright.array.formulas.activations import sigmoid
from graphwright.autograd import Tensor
from graphwright.errors import UsageError
from graphwright.program import Program
from graphwright.program.cost import parameters
from graphwright.program.editing.journal import Journal
from graphwright.progress import ProgressCallback
from graphwright.report import Report
from graphwright.settings import Range
from graphwright.structure.elements import Element
from graphwright.structure.graph import DifferentiableGraph, Task, task_of
from graphwright.structure.losses import Terms
from graphwright.structure.optimizer import JointOptimizer
from graphwright.structure.policy import gains
from graphwright.structure.searching.candidates import CandidateGates, Candidates, Ops, Skips
from graphwright.structure.searching.trials import Batch, Batches, SameBatch, SearchOutcome, Team, Trials
from graphwright.workers import Failed, WorkerError, Workers
from graphwright.workers.choice import opened

Method = Callable[[Trials], SearchOutcome]
M = TypeVar("M", bound=Method)
METHODS: dict[str, Method] = {}
_WHOLE: set[str] = set()
"""Names of the methods that one worker runs as a whole."""
_GATES, _GROW, _DRAWS, _EVOLVE, _SOFTMAX, _SOFTMAX_VALID = range(1, 7)  # purposes of random streams
_PENALTY, _WITH_WEIGHTS = 0.05, 3.0
"""Penalty of a candidate as a share of the task's loss, and its factor for candidates with weights, which overfit more.

Measured on a task that needs some of the projections between blocks of different widths, in 1200 steps: the others end
at probability 0.45 with factor 1 and at 0.16 with factor 3; the needed ones end at 0.33 and above. The share is at most
1 / number of candidates.
"""


def method(name: str, *, whole: bool = False) -> Callable[[M], M]:
    """Make a decorator that registers a search method: a function of `Trials` that returns a `SearchOutcome`.

    Args:
        whole: if a search has workers, one of them runs the method from beginning to end. This is for methods whose
            steps depend on each other, and which return `t.outcome(chosen)`. Other methods run in the process of the
            caller, and workers train the programs that they pass to `t.outcomes` and `t.losses`.
    """

    def enter(function: M) -> M:
        METHODS[name] = function
        (_WHOLE.add if whole else _WHOLE.discard)(name)
        return function

    return enter


class Collapsed(UserWarning):
    """Over 80 % of the chosen candidates add no parameters, the usual sign of a collapsed search."""


@method("gates", whole=True)
def gates(t: Trials) -> SearchOutcome:
    """Train the weights and an independent gate per candidate under a penalty; then retrain the result without gates.

    Half of the budget is for the search, and the first tenth of that half trains only weights. The penalty of a
    candidate is a share of the task's loss, so a candidate stays if the loss would increase by more without it. The
    share is larger for candidates with weights.
    """
    p, steps = t.start.fork(), t.budget // 2
    gate_of = t.candidates.gate(p)
    view = DifferentiableGraph(p, seed=t.seed)
    share, free = min(_PENALTY, 1 / max(len(gate_of), 1)), {n for n in gate_of if t.candidates.free(t.start, n)}
    shares = {element: share * (1 if name in free else _WITH_WEIGHTS) for name, element in gate_of.items()}
    penalty = _LossShares(tuple(shares.get((e.gate.handle, e.index), 0.0) for e in view.elements()))
    opt = JointOptimizer(view, t.task, [penalty], params=t.lr, gates=0.02, warmup=max(1, steps // 10))
    t.drive(opt, steps, _GATES)
    probable = _elements(view, gate_of)
    best: dict[object, float] = {}
    for e in probable.values():
        best[e.gate.handle] = max(best.get(e.gate.handle, 0.0), e.p)
    least = _threshold([e.p for e in probable.values() if e.over != "choice"])
    chosen = tuple(n for n, e in probable.items()
                   if (e.p >= least if e.over != "choice" else e.p == best[e.gate.handle]))  # fmt: skip
    gained = len(free.intersection(chosen))
    if len(free) < len(probable) and gained > 0.8 * len(chosen):
        warn(f"{gained} of {len(chosen)} chosen candidates add no parameters", Collapsed, stacklevel=3)
    return t.outcome(chosen)


@dataclass(frozen=True)
class _LossShares:
    """A penalty on open gates: L · Σ share·P over elements, with the task's loss L (detached), open probability P."""

    shares: tuple[float, ...]
    name: str = "penalty"

    def __call__(self, terms: Terms) -> Tensor:
        assert terms.task is not None
        return (terms.open * terms.constant(self.shares)).sum() * terms.task.to(terms.open.dtype)


def _threshold(probabilities: list[float]) -> float:
    """Return the probability above which candidates are kept: the middle of the widest gap between sorted logits.

    Only gaps between probabilities 0.1 and 0.5 count: a useful gate may be below 0.5, because the weights after it
    carry a part of the scale.
    """
    low, high = log(0.1 / 0.9), 0.0
    with np.errstate(divide="ignore"):
        z = np.log(probabilities) - np.log1p(-np.array(probabilities))
    ends = np.clip(np.sort([low, *z, high]), low, high)
    widest = int(np.argmax(np.diff(ends)))
    return float(sigmoid((ends[widest] + ends[widest + 1]) / 2))


def _elements(view: DifferentiableGraph, gate_of: CandidateGates) -> dict[str, Element]:
    by_element = {(e.gate.handle, e.index): e for e in view.elements()}
    return {name: by_element[element] for name, element in gate_of.items()}


@method("softmax", whole=True)
def softmax(t: Trials) -> SearchOutcome:
    """Train a softmax over competing candidates, as in DARTS (Liu et al. 2019, first order); then retrain the result.

    Weights are trained on one batch and logits on a second one, which counts as two steps. Skips compete with the
    option "none", and skips that are more probable are kept; of alternative ops the most probable one is kept.
    """
    c = t.candidates
    if not isinstance(c, Skips | Ops):
        raise UsageError("the method softmax does not support candidates of this kind",
                         got=type(c).__name__, expected="skips(...) or ops(...)")  # fmt: skip
    p = t.start.fork()
    gate_of = c.compete(p)
    view = DifferentiableGraph(p, seed=t.seed)
    opt = JointOptimizer(view, t.task, params=t.lr, gates=0.02, mode="bilevel", noise=False)
    t.drive(opt, t.budget // 4, _SOFTMAX, _SOFTMAX_VALID)
    least: dict[object, float] = {}
    for e in view.elements():
        there = [x.p for x in view.elements() if x.gate.handle == e.gate.handle]
        least[e.gate.handle] = there[-1] if isinstance(c, Skips) else sorted(there)[-2]
    chosen = tuple(n for n, e in _elements(view, gate_of).items() if e.p > least[e.gate.handle])
    return t.outcome(chosen)


@method("random")
def random(t: Trials) -> SearchOutcome:
    """Train random structures, each for a quarter of the budget; return the one with the lowest validation loss."""
    names, rng = t.candidates.names(t.start), t.rng(_DRAWS)
    steps = max(1, t.budget // 4)
    found = t.outcomes([drawn(t, names, rng) for _ in range(max(1, t.left // steps))], steps)
    return min(found, key=lambda outcome: outcome.loss)


def drawn(t: Trials, names: list[str], rng: np.random.Generator) -> tuple[str, ...]:
    """Draw a random structure: one op per path, and every other candidate with a probability that is drawn first."""
    groups: dict[str, list[str]] = {}
    for name in names:
        groups.setdefault(name.partition(": ")[0] if ": " in name else name, []).append(name)
    share = rng.random()
    return tuple(options[int(rng.integers(len(options)))] if len(options) > 1 else options[0]
                 for options in groups.values() if len(options) > 1 or rng.random() < share)  # fmt: skip


@method("grow")
def grow(t: Trials, trial: int | None = None, most: int = 3, first: int = 3) -> SearchOutcome:
    """Start without skips and add them one by one; then retrain the result on a quarter of the budget.

    Each round ranks the missing skips by the estimated decrease of the loss, trains one program per top-ranked skip
    and one without a new skip for equally many steps, and continues from the one with the lowest validation loss.

    Args:
        trial: number of steps for each of these programs; by default `most` rounds fit the budget.
        most: largest number of added skips.
        first: number of skips tried per round.
    """
    c = t.candidates
    if not isinstance(c, Skips):
        raise UsageError("the method grow does not support candidates of this kind",
                         got=type(c).__name__, expected="skips(...)")  # fmt: skip
    base = t.start.fork()
    c.open(base)
    retrain = t.budget // 4
    trial = trial or (t.budget - retrain) // (1 + most * (first + 1))
    chosen: tuple[str, ...] = ()
    here = t.fit(base, trial, _GROW)
    while len(chosen) < most and t.left >= retrain + (first + 1) * trial:
        rng = t.rng(_GROW + 10 + len(chosen))
        ranked = _ranked(t, here, c, chosen, t.train(rng))[:first]
        extras = [(), *((name,) for name in ranked)]
        tries = [here.fork() for _ in extras]
        for made, extra in zip(tries, extras, strict=True):
            c.build(made, extra)
        losses = t.losses(tries, trial, _GROW + 20 + len(chosen))
        _, extra, better = min(zip(losses, extras, tries, strict=True), key=lambda row: row[0])
        if not extra:
            break
        chosen, here = (*chosen, *extra), better
    return t.outcome(chosen)


def _ranked(t: Trials, p: Program, c: Skips, chosen: tuple[str, ...], batch: Batch) -> list[str]:
    """Return the missing skips that would lower the loss on `batch` to first order, the largest decrease first."""
    ends = {}
    for name in c.names(p):
        source, junction = c.ends(p, name)
        if name not in chosen and junction is not None:
            ends[f"{p.path(source)} -> {p.path(junction)}"] = name
    view = DifferentiableGraph(p, seed=t.seed)
    found = gains(view, t.task, batch)
    return [ends[edge] for edge, gain in found if edge in ends and gain > 0]


@method("evolve", whole=True)
def evolve(t: Trials) -> SearchOutcome:
    """Evolve a population of four structures on half of the budget; then retrain the best on the rest.

    A child differs from its parent by one candidate, inherits its weights and is trained for 1/40 of the budget. The
    four with the lowest validation loss survive.
    """
    names, rng = t.candidates.names(t.start), t.rng(_EVOLVE)
    size, steps = 4, max(1, t.budget // 40)
    alive = t.outcomes([drawn(t, names, rng) for _ in range(size)], steps)
    while t.left >= t.budget // 2 + steps:
        parent = alive[int(rng.integers(len(alive), size=2).min())]
        chosen = toggled(names, parent.chosen, rng)
        made = t.structure(chosen)
        theirs = parent.program.variables()
        for key, variable in made.variables().items():
            if key in theirs and theirs[key].shape == variable.shape:
                variable.assign(theirs[key])
        (loss,) = t.losses([made], min(steps, t.left))
        alive = sorted([*alive, SearchOutcome(chosen, made, loss)], key=lambda f: f.loss)[:size]
    return t.outcome(min(alive, key=lambda f: f.loss).chosen)


def toggled(names: list[str], chosen: tuple[str, ...], rng: np.random.Generator) -> tuple[str, ...]:
    """Return `chosen` with one random candidate added or removed; an op replaces the op chosen for its path."""
    name = names[int(rng.integers(len(names)))]
    if ": " in name:
        path = name.partition(": ")[0]
        return tuple(n if n.partition(": ")[0] != path else name for n in chosen)
    others = [n for n in chosen if n != name]
    return tuple(others if len(others) < len(chosen) else [*others, name])


@dataclass(frozen=True, slots=True)
class SearchRow:
    """One method's result: validation loss, training steps, chosen candidates, parameters."""

    method: str
    loss: float
    steps: int
    chosen: tuple[str, ...]
    params: int


@dataclass(frozen=True, slots=True, repr=False)
class SearchResult(Report):
    """The result of a search.

    Attributes:
        program: the program with the chosen candidates, trained from the initial weights of the start program.
        chosen: names of the chosen candidates.
        loss: the task's loss on the validation batch.
        curve: a pair (steps, validation loss) for each scored structure.
        table: results of all methods, the requested one first.
        failures: a text for each trial or method whose worker died or was late twice; its loss counts as infinite.
    """

    program: Program
    chosen: tuple[str, ...]
    loss: float
    curve: list[tuple[int, float]]
    table: list[SearchRow]
    failures: list[str]
    HIDDEN: ClassVar = ("program",)

    @property
    def journal(self) -> Journal:
        """The journal of the found program, with the edits that add the chosen candidates."""
        return self.program.journal

    def _text(self) -> str:
        lines = [f"{'method':<10}{'loss':>12}{'steps':>8}{'params':>9}  chosen"]
        lines += [f"{r.method:<10}{r.loss:>12.5g}{r.steps:>8}{r.params:>9}  {', '.join(r.chosen) or 'none'}"
                  for r in self.table]  # fmt: skip
        lines += [f"failed: {each}" for each in self.failures]
        return "\n".join(lines)


def search(
    program: Program, candidates: Candidates, train: Batches | Batch, valid: Batch, method: str = "gates",
    budget: int = 4000, seed: int = 0, *, task: Task | None = None, lr: float = 0.01,
    beside: Sequence[str] = ("random", "evolve"), workers: Workers = None, progress: ProgressCallback | None = None,
) -> SearchResult:  # fmt: skip
    """Search for the candidates that lower a program's validation loss most within a budget of training steps.

    Args:
        program: the start program; not changed.
        candidates: `skips(...)`, `ops(...)`, `widths(...)`, ...
        train: a function of a random generator that returns a batch (arrays by name), or one batch for all steps.
        valid: a batch for validation only; structures are compared by the task's loss on it.
        method: `gates`, `softmax`, `random`, `grow`, `evolve`, or a name registered by `method`.
        budget: number of training steps of each method, including retraining.
        seed: seed of batches and random structures.
        task: name of a scalar output, or a function of (outputs, batch); by default the first scalar output.
        lr: learning rate of Adam on the weights.
        beside: other methods to run for comparison; `random` is always one of them.
        workers: workers that train structures and run methods: a number of processes, "ray" or "ray://host:port", or a
            pool of `graphwright.workers`, which stays open. Results do not depend on it. None for no workers.
    Raises: UsageError for invalid arguments, and for functions that cannot be sent to workers; NotScalar if the task is
        not a scalar; WorkerError if the worker of `method`, or of all its structures, died or was late twice.
    """
    if unknown := [m for m in (method, *beside) if m not in METHODS]:
        raise UsageError("unknown search method", expected=", ".join(METHODS), got=", ".join(unknown))
    Range(40, whole=True).check("budget", budget)
    Range(0, whole=True).check("seed", seed)
    if not hasattr(candidates, "names"):
        raise UsageError("`candidates` has the wrong type", got=candidates, expected="skips(...), ops(...), ...")
    if not isinstance(valid, Mapping):
        raise UsageError("the validation batch is not a mapping", got=type(valid).__name__, expected="arrays by name")
    task = task_of(program, task, "search")
    batches: Batches = train if callable(train) else SameBatch(train)
    candidates.names(program)
    names = list(dict.fromkeys((method, "random", *beside)))
    rows: list[SearchRow] = []
    failures: list[str] = []
    results: list[SearchResult] = []
    given = Trials(program, candidates, batches, valid, task, budget, seed, lr, progress)
    with opened(workers) as pool:
        given.team = None if pool is None else Team(pool, given)
        sent = [name for name in names if name in _WHOLE and given.team is not None]
        done = {} if given.team is None else dict(zip(sent, given.team.run([METHODS[n] for n in sent]), strict=True))
        for name in names:
            t, one = given.fresh(), done.get(name)
            if isinstance(one, Failed):
                if name == method:
                    raise WorkerError("the method has no result", where=name, got=one.reason)
                rows.append(SearchRow(name, inf, 0, (), 0))
                failures.append(f"{name}: {one.reason}")
                continue
            found = METHODS[name](t) if one is None else one.outcome(t, name)
            rows.append(SearchRow(name, found.loss, t.spent, found.chosen, parameters(found.program)))
            failures += [f"{name}, {each}" for each in t.failures]
            results.append(SearchResult(found.program, found.chosen, found.loss, t.curve, rows, failures))
    return results[0]
