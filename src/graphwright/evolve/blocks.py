"""Evolution of whole layers: forks of one Program, mutated by edits, trained by a compiled step, weights inherited.

Each child is a fork: weights are shared with its mother until training writes them. Survival is NSGA-II on the metric
and the number of parameters, or the metric alone.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from math import prod
from time import perf_counter
from typing import TYPE_CHECKING, Any

import numpy as np

from graphwright.errors import GraphwrightError
from graphwright.evolve.errors import EvaluationFailed, TaskError
from graphwright.evolve.mutations import MUTATIONS
from graphwright.evolve.pareto import crowding, fronts, survivors
from graphwright.evolve.result import Status
from graphwright.evolve.tasks.task import Task
from graphwright.progress import Progress, Report

if TYPE_CHECKING:
    from graphwright.program import Program

LADDER = tuple(10.0 ** (-5 + i / 3) for i in range(13))
"""Learning rates, 1e-5 to 1e-1."""
_EXPLORE = 0.4  # share of a run that explores; then it refines


@dataclass(frozen=True, slots=True)
class BlockSettings:
    """How layers evolve.

    Attributes:
        population: members that survive; as many children are made in each generation.
        steps, batch: of training per candidate; lr: of Adam at the start, on the ladder 1e-5 to 1e-1.
        pareto: survive by metric and parameters (NSGA-II); else by the metric, ties by fewer parameters.
        rate_change: probability that a child's learning rate moves on the ladder.
        max_params: limit of a candidate.
    """

    population: int = 6
    steps: int = 200
    batch: int = 64
    lr: float = 1e-2
    pareto: bool = False
    rate_change: float = 0.1
    max_params: int = 1_000_000


@dataclass(frozen=True, slots=True, eq=False)
class Member:
    """A candidate that was trained and scored.

    Attributes:
        number: in order of birth; mother: her number, or None.
        program: its journal says what evolution did; rate: place on the ladder.
        metric: on the validation cases, None if it failed; loss: likewise; params: numbers in its weights.
        what: the mutation and where; failure: why it has no metric.
    """

    number: int
    mother: int | None
    program: Program
    rate: int
    metric: float | None
    loss: float
    params: int
    what: str
    failure: str = ""

    @property
    def objectives(self) -> tuple[float, float]:
        """Metric up, parameters down."""
        return (-np.inf if self.metric is None else self.metric, -float(self.params))


@dataclass(slots=True)
class BlockResult:
    """What a run found.

    Attributes:
        status: why it ended; members: the last generation, best first; archive: members that no other dominates.
        born: what became of every candidate, in order of birth.
    """

    status: Status
    task: Task
    members: list[Member]
    archive: list[Member]
    born: list[Member] = field(default_factory=list)
    seconds: float = 0.0
    backward: int = 0

    @property
    def best(self) -> Member:
        """The best metric, then the fewest parameters, then the first."""
        return max(self.members, key=lambda m: (*m.objectives, -m.number))

    def smallest_meeting_target(self) -> Member | None:
        """The member of the archive with the fewest parameters whose metric reaches the target."""
        aim = self.task.target if self.task.target is not None else np.inf
        found = [m for m in self.archive if m.metric is not None and m.metric >= aim]
        return min(found, key=lambda m: m.params, default=None)

    def test(self, member: Member | None = None) -> float:
        """The metric on the test cases; the task counts how often they were read."""
        self.task.test_reads += 1
        return measure(self.task, (member or self.best).program, self.task._test)[0]

    def __str__(self) -> str:
        best = self.best
        return (
            f"{self.status} after {len(self.born)} candidates, {self.seconds:.1f} s, {self.backward:,} passes with "
            f"gradients\n  {self.task.metric} {best.metric:.4g} with {best.params:,} parameters "
            f"(candidate {best.number}: {best.what})\n  {len(self.archive)} members that no other dominates; "
            f"{sum(m.metric is None for m in self.born)} failed"
        )


class BlockEvolution:
    """Layers that evolve on a task.

    Args:
        task: on data, one step a case.
        program: where it begins: input [batch, inputs], one output [batch, outputs] of logits.
        settings, seed: of the run.
    Raises: TaskError if program and task do not fit.
    """

    def __init__(self, task: Task, program: Program, settings: BlockSettings | None = None, *, seed: int = 0) -> None:
        if not isinstance(task, Task) or task.sequence:
            raise TaskError("layers evolve on data of one step a case", got=getattr(task, "name", task))
        (inputs, outputs) = (program.input_names(), program.outputs())
        widths = (program.spec(inputs[0]).shape[-1], program.spec(outputs[0]).shape[-1]) if inputs and outputs else None
        if len(inputs) != 1 or len(outputs) != 1 or widths != (task.inputs, task.outputs):
            raise TaskError("program and task do not fit", where=program.name, expected=(task.inputs, task.outputs),
                            got=widths)  # fmt: skip
        self.task, self.settings, self.seed = task, settings or BlockSettings(), seed
        self.born: list[Member] = []
        self.members: list[Member] = []
        self.archive: list[Member] = []
        self.backward = 0
        self.seconds = 0.0
        self._start = program

    def run(
        self,
        max_evaluations: int,
        *,
        target: float | None = None,
        callback: Callable[[BlockEvolution], object] | None = None,
        report: Report | None = None,
    ) -> BlockResult:
        """Go on until the target (of the metric; by default the task's) or so many candidates.

        Raises: EvaluationFailed if all of a generation failed.
        """
        aim = self.task.target if target is None else target
        began = perf_counter() - self.seconds
        status: Status | None = None
        if not self.members:
            rate = int(np.argmin([abs(np.log(v / self.settings.lr)) for v in LADDER]))
            self._survive([self._candidate(None, self._start.fork("start"), rate, "start")])
        while status is None:
            best = max(m.objectives[0] for m in self.members)
            if aim is not None and best >= aim:
                status = Status.TARGET_REACHED
            elif len(self.born) >= max_evaluations:
                status = Status.MAX_EVALUATIONS
            elif callback is not None and callback(self):
                status = Status.CALLBACK_STOPPED
            else:
                count = min(self.settings.population, max_evaluations - len(self.born))
                self._survive([self._child(len(self.born) / max_evaluations) for _ in range(count)])
                self.seconds = perf_counter() - began
                if report is not None:
                    report(Progress("evolve", len(self.born), max_evaluations, {self.task.metric: float(best)}))
        return BlockResult(status, self.task, self.members, self.archive, self.born, self.seconds, self.backward)

    # -- one candidate -----------------------------------------------------------------------------------------------
    def _child(self, done: float) -> Member:
        """Fork a parent, make one mutation, train."""
        rng = np.random.Generator(np.random.Philox(key=[self.seed, len(self.born)]))
        mother = self._parent(rng)
        program, rate, what = mother.program.fork(f"candidate {len(self.born)}"), mother.rate, ""
        if rng.random() < self.settings.rate_change:
            step = int(rng.choice([-2, -1, 1, 2], p=[0.1, 0.4, 0.4, 0.1]))
            rate = min(max(rate + step, 0), len(LADDER) - 1)
            what = f"learning rate {LADDER[rate]:.2g}"
        else:
            what = self._mutate(program, rng, done) or "no mutation could be made"
        return self._candidate(mother, program, rate, what)

    def _mutate(self, program: Program, rng: np.random.Generator, done: float) -> str:
        """One mutation out of those that can be made; after a refused one, which changed nothing, another is tried."""
        kinds = list(MUTATIONS.values())
        while kinds:
            weights = np.array([k.explore if done < _EXPLORE else k.refine for k in kinds])
            kind = kinds[int(rng.choice(len(kinds), p=weights / weights.sum()))]
            sites = kind.sites(program)
            if sites:
                site = sites[int(rng.integers(len(sites)))]
                path = program.path(site)
                try:
                    with program.edit(f"{kind.name} at {path}", author="evolution", tool="graphwright.evolve") as e:
                        kind.apply(e, site, rng)
                        if _params(program) > self.settings.max_params:
                            raise TaskError("more parameters than max_params")
                    return f"{kind.name} at {path}"
                except GraphwrightError:
                    pass
            kinds.remove(kind)
        return ""

    def _candidate(self, mother: Member | None, program: Program, rate: int, what: str) -> Member:
        number, failure, metric, loss = len(self.born), "", None, float("inf")
        try:
            self._train(program, LADDER[rate], number)
            metric, loss = measure(self.task, program, self.task.valid)
            if not np.isfinite(loss):
                metric, failure = None, f"loss is {loss}"
        except (GraphwrightError, FloatingPointError) as error:
            failure = f"{type(error).__name__}: {error}"
        member = Member(number, None if mother is None else mother.number, program, rate, metric, loss,
                        _params(program), what, failure)  # fmt: skip
        self.born.append(member)
        return member

    def _train(self, program: Program, lr: float, number: int) -> None:
        """Adam on batches that the seed and the candidate's number decide, as one plan."""
        from graphwright.autograd import Tensor
        from graphwright.nn import functional
        from graphwright.optim import Adam, clip_grad_norm_
        from graphwright.plan import compile

        part, s = self.task.train, self.settings
        x, y = part.x[:, 0], part.y[:, 0]
        wanted: Any = y.argmax(1) if self.task.loss == "cross_entropy" else y
        lost = {
            "mse": functional.mse_loss,
            "bce": functional.binary_cross_entropy_with_logits,
            "cross_entropy": functional.cross_entropy,
        }[self.task.loss]
        opt, name = Adam(program.parameters(), lr=lr), program.input_names()[0]

        def step(x: Tensor, y: Tensor) -> Tensor:
            opt.zero_grad()
            loss = lost(program(**{name: x}), y)
            loss.backward()
            clip_grad_norm_([p for p in program.parameters() if p.grad is not None], 1.0)
            opt.step()
            return loss

        planned = compile(step)
        rng = np.random.Generator(np.random.Philox(key=[self.seed, (1 << 40) + number]))
        batch = min(s.batch, len(x))
        with program.edit(f"train {s.steps} steps", author="evolution", tool="graphwright.evolve", keep_undo=False):
            for _ in range(s.steps):
                rows = rng.choice(len(x), batch, replace=False)
                planned(x[rows], wanted[rows])
        self.backward += s.steps * batch

    # -- selection ---------------------------------------------------------------------------------------------------
    def _objectives(self, members: list[Member]) -> np.ndarray:
        return np.array([m.objectives for m in members], float)

    def _parent(self, rng: np.random.Generator) -> Member:
        """The better of two: by front and room, or by place."""
        a, b = rng.integers(len(self.members), size=2)
        return self.members[min(a, b)]

    def _survive(self, children: list[Member]) -> None:
        alive = [m for m in children if m.metric is not None]
        if not alive:
            first = "; ".join(f"candidate {m.number} ({m.what}): {m.failure}" for m in children[:3])
            raise EvaluationFailed("a whole generation has no metric", where=self.task.name, got=first)
        both = self.members + alive
        values = self._objectives(both)
        if self.settings.pareto:
            order = survivors(values, self.settings.population)
        else:
            order = np.lexsort((np.arange(len(both)), -values[:, 1], -values[:, 0]))[: self.settings.population]
        self.members = [both[i] for i in order]
        pool = self.archive + alive
        rank = fronts(self._objectives(pool))
        front = [m for m, r in zip(pool, rank, strict=True) if r == 0]
        room = crowding(self._objectives(front), np.zeros(len(front), np.int64))
        self.archive = [front[i] for i in sorted(np.argsort(-room, kind="stable")[:64])]


def measure(task: Task, program: Program, part: Any) -> tuple[float, float]:
    """Metric and loss of a program on a part of a task's data."""
    answers = program.run({program.input_names()[0]: part.x[:, 0]}, keep="outputs")[program.output_names()[0]]
    loss, metric = task._measures(np.ascontiguousarray(answers.to_numpy())[None, :, None], part, True)
    return float(metric[0]), float(loss[0])


def _params(program: Program) -> int:
    return sum(prod(int(d) for d in program.spec(n).shape) for n in program.params())
