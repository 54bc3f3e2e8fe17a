"""Evolution of layers: forks of one Program are mutated by edits, inherit weights, and are trained and scored.

Each child is a fork, which shares its weights with the fitter parent until training writes them. Survivors are chosen
by NSGA-II on several objectives, or by the metric.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import takewhile
from pathlib import Path
from typing import Any

import numpy as np

from graphwright.errors import GraphwrightError, UsageError
from graphwright.evolve.errors import LimitTooSmall, Status, TaskError, need
from graphwright.evolve.gradient_paths import blocked_params, warn_of_blocked
from graphwright.evolve.layers import train
from graphwright.evolve.layers.candidate import GENES, Candidate, CandidateBirth, Moments, TrainingGenes, entry
from graphwright.evolve.layers.trial import Newborn, Outcome, Trainer
from graphwright.evolve.mutations.registry import MUTATIONS, MutationKind, name_parts, parts
from graphwright.evolve.mutations.sizes import widths
from graphwright.evolve.pareto import crowding, fronts, survivors
from graphwright.evolve.run import EvolutionResult, EvolutionRun, cost, same_cases
from graphwright.evolve.saving import layer_content
from graphwright.evolve.settings import Layers
from graphwright.evolve.tasks.losses import LOSSES
from graphwright.evolve.tasks.task import Task
from graphwright.program import Program, Transaction, replay
from graphwright.program.cost import flops, parameters
from graphwright.progress import Progress
from graphwright.workers import Workers

_DRAW, _APPLY = 0, 1  # purposes of random streams; 2 is that of training, see `trial`
_MIN_GAIN = 1e-6
_NOTHING = "no possible mutation"
Parents = tuple[Candidate | None, Candidate | None]


class LayerResult(EvolutionResult):
    """The outcome of a run on layers; see `EvolutionResult` for the attributes."""

    evolution: LayerEvolution

    @property
    def best(self) -> Candidate:
        """The best candidate by metric; with several objectives, the smallest candidate at or above the target, if any.

        Raises: UsageError before the first generation.
        """
        run = self.evolution
        if not run.members:
            raise self._no_champion()
        smallest = self.smallest_meeting_target() if run.settings.pareto else None
        return smallest or run.champion()

    @property
    def pareto_front(self) -> list[Candidate]:
        """The candidates that no other candidate dominates."""
        return self.evolution.archive

    @property
    def births(self) -> list[CandidateBirth]:
        """The records of all candidates, in order of birth."""
        return self.evolution.births

    def smallest_meeting_target(self) -> Candidate | None:
        """Return the smallest candidate of the Pareto front whose metric reaches the target, or None."""
        aim = np.inf if self.aim is None else self.aim
        found = [m for m in self.pareto_front if m.metric >= aim]
        return min(found, key=lambda m: m.birth.params, default=None)

    def test(self, candidate: Candidate | None = None) -> float:
        """Return the metric of a candidate (default: the best) on the test cases; `task.test_reads` counts calls."""
        task = self.evolution.task
        task.test_reads += 1
        return train.measure(task, (candidate or self.best).program, task._test)[0]

    def predict(self, x: Any, head: str | None = None) -> np.ndarray:
        """Return the predictions of the best candidate for inputs [N, ...], float32.

        Predictions of classes are probabilities, whereas `best.program` returns logits.

        Args:
            x: inputs in the same units as those given to the task; they are standardised if the task is `scaled`.
            head: name of the head whose predictions to return; by default all heads.
        """
        task, program = self.evolution.task, self.best.program
        return task.predictions(train.answers(program, task.network_inputs(x)), True, head)

    def _champion_facts(self) -> dict[str, Any]:
        run, best, program = self.evolution, self.best.birth, self.best.program
        return {"fitness": {"best": best.metric, "median": run.log[-1].median},
                "metric": {"name": run.task.metric, "valid": best.metric},
                "hidden": sum(program.axes()[a].size for a in widths(program)),
                "parameters": best.params, "flops": best.flops, "training": best.training.to_json(),
                "front": len(run.archive),
                "champion": {"candidate": best.number, "generation": best.generation, "what": best.what}}  # fmt: skip

    def _champion_lines(self, report: dict[str, Any]) -> list[str]:
        r, best = report, self.best.birth
        return [
            f"  {r['metric']['name']} {best.metric:.4g} with {best.params:,} parameters, "
            f"{best.flops:,} operations a case{same_cases(r)}",
            f"  candidate {best.number}: {best.what}; trained by {best.training}",
            f"  {r['front']} candidates on the Pareto front; {cost(r)}",
        ]


@dataclass(frozen=True, slots=True)
class _Child:
    """A child before its trial, its parents, (mutation, site, block), and what children of it inherit untrained."""

    newborn: Newborn
    parents: Parents
    change: tuple[str, str, str]
    untrained: Program | None
    untrained_moments: Moments


@dataclass(frozen=True, slots=True)
class LayerGeneration:
    """A log entry: best and median metric, parameters of the best candidate, archive size, number of failures."""

    generation: int
    best: float
    median: float
    params: int
    archive: int
    failed: int


class LayerEvolution(EvolutionRun):
    """Evolution of the layers of a program; created by `Evolution(task, blocks(program), Layers(...))`."""

    RESULT = LayerResult

    def __init__(
        self, task: Any, start: Program, settings: Layers | None = None, *, seed: int = 0, threads: int = 1,
        workers: Workers = None,
    ) -> None:  # fmt: skip
        self.settings = s = settings or Layers()
        if not isinstance(s, Layers):
            raise UsageError("these settings are not for layers", got=type(s).__name__, expected="Layers(...)")
        if not isinstance(task, Task):
            raise TaskError("the task has no data, which the evolution of layers needs", where="task",
                            expected="an evolve.Task", got=getattr(task, "name", task),
                            fix="start from evolve.scalar()")  # fmt: skip
        if task.sequence and task.loss == "heads":
            raise TaskError("the task has sequences and several heads, which the evolution of layers cannot combine",
                            where="task", got=task.name, fix="start from evolve.scalar()")  # fmt: skip
        sizes, expected = train.fits(task, start), (task.inputs, task.outputs)
        problem = "the inputs or outputs of the program do not match the task"
        need(sizes == expected, problem, where=start.name, expected=_sizes(expected), got=_sizes(sizes))
        super().__init__(task, seed, threads, workers)
        self.start = start
        try:
            self._fits(start)
            self._affordable(start)
        except TaskError as error:
            raise LimitTooSmall(f"the start program exceeds the limits: {error.what}", where=start.name,
                                expected=error.expected, got=error.got) from None  # fmt: skip
        need(task.fitness is None and task.fitness_batch is None,
             "layers are selected by the metric, but the task has a fitness function", where=task.name,
             fix="evolve.scalar(), or a task without fitness")  # fmt: skip
        if unknown := set(s.rates) - {*MUTATIONS, *GENES}:
            raise UsageError("unknown mutations in Layers.rates", got=", ".join(sorted(unknown)),
                             expected=", ".join((*MUTATIONS, *GENES)))  # fmt: skip
        self.members: list[Candidate] = []
        self.archive: list[Candidate] = []
        self.births: list[CandidateBirth] = []
        self.numbers: dict[tuple[str, str, int], str] = {}  # (mutation, site, count) -> name of the block
        self.trainer = Trainer(task, s, seed, threads)
        self.steady = 0

    # -- a generation ------------------------------------------------------------------------------------------------
    def _advance(self, aim: float | None, generations: int | None, evaluations: int | None) -> None:
        before = self.generation, dict(self.numbers), dict(self.counters.refused)
        try:
            born = self._breed(generations, evaluations)
            outcomes = self.trainer.trials([child.newborn for child in born], self.pool)
        except BaseException:  # such as Ctrl-C: a later call breeds the same children
            self.generation, self.numbers, self.counters.refused = before
            raise
        found = [self._judge(*pair) for pair in zip(born, outcomes, strict=True)]
        alive = [m for m in found if isinstance(m, Candidate)]
        self._check_failures(len(born), self.failures[len(self.failures) - len(born) + len(alive) :], "metric")
        champion = max((m.metric for m in self.members), default=-np.inf)
        self._survive(alive)
        best = self.champion()
        if best.metric > champion + _MIN_GAIN:
            self.gained = self.generation
        values = [m.metric for m in self.members]
        self.log.append(LayerGeneration(self.generation, best.metric, float(np.median(values)), best.birth.params,
                                   len(self.archive), len(born) - len(alive)))  # fmt: skip

    def _breed(self, generations: int | None, evaluations: int | None) -> list[_Child]:
        """Return the children of the next generation, or the first candidate, before their trial."""
        number = len(self.births)
        if not self.members:
            s = self.settings
            training = TrainingGenes.of(s.lr, s.optimizer, self.task.loss)
            return [self._conceived(number, self.start.fork("start"), {}, training)]
        self.generation += 1
        count = self.settings.population
        left = count if evaluations is None else evaluations - self.counters.evaluations
        done = max(self.counters.evaluations / evaluations if evaluations else 0.0,
                   len(self.log) / generations if generations else 0.0)  # fmt: skip
        return [self._child(number + k, done) for k in range(min(count, left))]

    @property
    def _shared(self) -> Trainer:
        return self.trainer

    @property
    def _sends(self) -> bool:
        return True

    def _reached(self, aim: float) -> bool:
        return any(m.metric >= aim for m in self.members)

    def _stuck(self) -> Status | None:
        born = [
            b
            for b in takewhile(lambda b: b.generation == self.generation, reversed(self.births))
            if b.author != "human"
        ]
        if born and all(b.mutation == _NOTHING for b in born):
            return Status.NO_MUTATION
        if self.settings.pareto and self.steady >= max(20, 2 * self.settings.population):
            return Status.CONVERGED
        return None

    # -- one candidate -----------------------------------------------------------------------------------------------
    def _child(self, number: int, done: float) -> _Child:
        s, rng = self.settings, self._stream(_DRAW, number)
        fitter, other = self._parent(rng), None
        if rng.random() < s.crossover and len(self.members) > 1:
            second = self._parent(rng)
            if second is not fitter:
                fitter, other = sorted((fitter, second), key=self.members.index)
        program, moments = fitter.heritage
        program, training = program.fork(f"candidate {number}"), fitter.birth.training
        if other is not None:
            moments, _ = cross(program, moments, *other.heritage, rng)
            genes = (training, other.birth.training)
            names = ("rate", "optimizer", "loss")
            training = TrainingGenes(**{name: getattr(genes[int(rng.integers(2))], name) for name in names})
            if training.optimizer != fitter.birth.training.optimizer:
                training = replace(training, rate=other.birth.training.rate)
        opt = train.optimizer(program, fitter.birth.training, moments)
        name, site, block, training = self._mutate(number, program, training, rng, done)
        moments = train.moments(opt) if training.optimizer == fitter.birth.training.optimizer else {}
        return self._conceived(number, program, moments, training, (fitter, other), (name, site, block))

    def rates(self, done: float) -> dict[str, float]:
        """Map each mutation to the weight with which it is drawn when the fraction `done` of the run is finished."""
        s, late = self.settings, done >= self.settings.explore
        stuck = self.generation - self.gained > s.stagnation
        table = {k.name: (k.explore, k.refine) for k in MUTATIONS.values() if k.structural or not stuck}
        if not stuck:
            table |= {gene: both for gene, both in GENES.items() if gene != "loss" or len(self._losses) > 1}
        weights = {name: float(s.rates.get(name, both[late])) for name, both in table.items()}
        return {name: weight for name, weight in weights.items() if weight}

    def _mutate(
        self, number: int, program: Program, training: TrainingGenes, rng: np.random.Generator, done: float
    ) -> tuple[str, str, str, TrainingGenes]:
        """Draw mutations by weight until one is possible, and apply it; impossible ones leave the program unchanged.

        Returns: name, site and block of the mutation, and the training genes.
        """
        rates = self.rates(done)
        names = list(rates)
        for at in tried(np.array(list(rates.values())), rng)[0]:
            if names[at] in GENES:
                return names[at], "", "", training.changed(names[at], self._losses, rng)
            kind = MUTATIONS[names[at]]
            sites = kind.sites(program)
            if len(sites):
                drawn = sites[int(rng.integers(len(sites)))]
                site = drawn if isinstance(drawn, str) else program.path(drawn)
                block = self._block_name(kind.name, site, parts(program)) if kind.adds else ""
                try:
                    self.apply(program, kind, site, block, self._stream(_APPLY, number))
                    return kind.name, site, block, training
                except GraphwrightError:
                    self.counters.refuse(kind.name)
        return _NOTHING, "", "", training

    def apply(self, program: Program, kind: MutationKind, site: str, block: str, rng: np.random.Generator) -> None:
        """Apply a mutation as one edit. If this raises, the program is unchanged.

        Raises: TaskError if a limit is exceeded; errors of the edit.
        """
        with program.edit(f"{kind.name} at {site}", author="evolution", tool="graphwright.evolve") as e:
            kind.apply(e, site, rng, **({"block": block} if kind.adds else {}))
            self._fits(program)
        try:
            self._affordable(program)
        except TaskError:
            program.undo()
            raise

    def _fits(self, program: Program) -> None:
        """Raise TaskError if the program exceeds `max_params` or `max_width`."""
        limit, count = self.settings.max_params, parameters(program)
        need(count <= limit, "the program has more parameters than max_params", expected=limit, got=count)
        limit = self.settings.max_width
        widest = max((int(program.spec(n).shape[0]) for n in program.params() if program.spec(n).shape), default=0)
        need(widest <= limit, "a layer is wider than max_width", expected=limit, got=widest)

    def _affordable(self, program: Program) -> None:
        """Raise TaskError if the program exceeds `max_flops`; operations can be counted only after the edit."""
        limit, count = self.settings.max_flops, _flops(program)
        need(count <= limit, "the program has more operations than max_flops", expected=limit, got=count)

    def _block_name(self, kind: str, site: str, existing: set[str]) -> str:
        """Return the name `b<number>`, not one of `existing`, of a block that mutation `kind` adds at `site`.

        The k-th block of this kind at this site has the same name in all candidates of the run.
        """
        for k in range(len(existing) + 1):
            name = self.numbers.get((kind, site, k))
            if name is None:
                taken = parts(self.start) | set(self.numbers.values())
                first = max((int(t[1:]) for t in taken), default=0) + 1
                name = self.numbers[(kind, site, k)] = f"b{first}"
            if name not in existing:
                return name
        raise AssertionError("unreachable: one of the k + 1 names for k blocks is unused")

    def _conceived(
        self, number: int, program: Program, moments: Moments, training: TrainingGenes,
        parents: Parents = (None, None), change: tuple[str, str, str] = ("", "", ""),
    ) -> _Child:  # fmt: skip
        """Return a child before its trial. `change` is (mutation, site, block)."""
        s = self.settings
        if s.steps and not self.warned and (blocked := blocked_params(program)):
            self.warned = True
            warn_of_blocked(f"{self.task.name}, candidate {number}", blocked, stacklevel=5)
        untrained = program.fork(f"untrained {number}") if s.inherit == "baldwin" else None
        given = train.moments(train.optimizer(program, training, moments)) if untrained is not None else {}
        return _Child(Newborn(number, program, training, moments), parents, change, untrained, given)

    def _judge(self, child: _Child, outcome: Outcome) -> Candidate | CandidateBirth:
        """Count and record a trial; return the candidate, or only its birth if it failed."""
        s, one, counters, steps = self.settings, child.newborn, self.counters, self.task.steps
        counters.evaluations += 1
        counters.backward += train.batch_of(one.program, s, self.task) * s.steps * steps
        counters.forward += len(self.task.valid.x) * steps if outcome.scored else 0
        metric, loss = outcome.metric, outcome.loss
        birth = self._birth(one.program, child.parents, child.change, one.training, metric, loss, outcome.failure)
        self.births.append(birth)
        if metric is None:
            counters.failed += 1
            self.failures.append(f"candidate {one.number} ({birth.what}): {outcome.failure}")
            return birth
        return Candidate(birth, one.program, outcome.moments, child.untrained, child.untrained_moments)

    def _birth(
        self, program: Program, parents: Parents, change: tuple[str, str, str], training: TrainingGenes,
        metric: float | None, loss: float, failure: str = "", **edit: Any,
    ) -> CandidateBirth:  # fmt: skip
        fitter, other = (None if parent is None else parent.number for parent in parents)
        sizes = parameters(program), _flops(program)
        origin = (len(self.births), self.generation, fitter, other)
        return CandidateBirth(*origin, *change, training, metric, loss, *sizes, failure, **edit)

    # -- manual edits ------------------------------------------------------------------------------------------------
    @contextmanager
    def edit(self, who: int, why: str = "edited") -> Iterator[Transaction]:
        """Edit a member of the population: `with run.edit(number, "why") as e:` edits a fork of its program.

        After the `with` block the result is scored (not trained) and replaces the member, as a child of the member
        with author "human". Blocks `b<number>` that the edit added are renamed: blocks of equal structure get equal
        names in the whole run.

        Args:
            who: number of the member.
            why: the reason, which the record of the birth contains.
        Raises: UsageError if no member has this number; TaskError if the program does not fit the task or exceeds the
            limits; errors of the `with` block and of the scoring. The run is then unchanged.
        """
        member = next((m for m in self.members if m.number == who), None)
        if member is None:
            numbers = ", ".join(str(m.number) for m in self.members)
            raise UsageError("no member of the population has this number", got=who, expected=numbers or "run(1) first",
                             fix="for a candidate that died, edit a fork of its program")  # fmt: skip
        number, training = len(self.births), member.birth.training
        program = member.program.fork(f"candidate {number}")
        opt = train.optimizer(program, training, member.moments)
        before, names = set(program.nodes()), dict(self.numbers)
        try:
            with program.edit(why, author="human") as e:
                yield e
                name_parts(e, before, lambda what, existing: self._block_name("manual", what, existing))
                self._fits(program)
            sizes, expected = train.fits(self.task, program), (self.task.inputs, self.task.outputs)
            changed = "the edit changed the inputs or outputs"
            need(sizes == expected, changed, where=program.name, got=_sizes(sizes), expected=_sizes(expected))
            self._affordable(program)
            metric, loss = train.measure(self.task, program, self.task.valid)
            need(np.isfinite(loss), "the loss of the edited network is not finite", where=program.name, got=loss)
        except BaseException:
            self.numbers = names
            raise
        if not len(program.journal):
            return
        birth = self._birth(program, (member, None), ("edit", "", ""), training, metric, loss, author="human", why=why,
                            edits=program.journal[-1].edits)  # fmt: skip
        untrained, untrained_moments = member.untrained, member.untrained_moments
        if untrained is not None:
            untrained = untrained.fork(f"untrained {number}")
            start = train.optimizer(untrained, training, untrained_moments)
            replay([program.journal[-1]], onto=untrained)
            untrained_moments = train.moments(start)
        self.births.append(birth)
        self.counters.evaluations += 1
        self.counters.forward += len(self.task.valid.x) * self.task.steps
        best, steady = self.champion().metric, self.steady
        self.members.remove(member)
        self._survive([Candidate(birth, program, train.moments(opt), untrained, untrained_moments)])
        self.steady = min(self.steady, steady)  # an edit does not count as a generation
        if self.champion().metric > best + _MIN_GAIN:
            self.gained = self.generation

    # -- selection ---------------------------------------------------------------------------------------------------
    def champion(self) -> Candidate:
        """Return the member with the best metric; ties are broken by fewest parameters, then by lowest number."""
        return max(self.members, key=lambda m: (m.metric, -m.birth.params, -m.number))

    @property
    def _losses(self) -> tuple[str, ...]:
        loss = self.task.loss
        return (loss,) if self.task.sequence or loss not in LOSSES else tuple(LOSSES[loss].trained)

    def _objectives(self, members: list[Candidate]) -> np.ndarray:
        names = ("metric", "params") if self.settings.pareto is None else self.settings.pareto.objectives
        return np.array([[m.birth.value(name) for name in names] for m in members], float)

    def _parent(self, rng: np.random.Generator) -> Candidate:
        """Draw two members and return the better one; members are sorted from best to worst."""
        return self.members[int(rng.integers(len(self.members), size=2).min())]

    def _survive(self, children: list[Candidate]) -> None:
        s, both = self.settings, self.members + children
        values = self._objectives(both)
        if s.pareto is None:
            order = np.lexsort((np.arange(len(both)), -values[:, 1], -values[:, 0]))[: s.population]
        else:  # at equal rank and crowding, the candidate with the lower loss survives
            by_loss = sorted(range(len(both)), key=lambda i: both[i].birth.loss)
            both, values = [both[i] for i in by_loss], values[by_loss]
            order = survivors(values, s.population)
        self.members = [both[i] for i in order]
        seen: dict[tuple[float, ...], Candidate] = {}
        for m in self.archive + children:  # the first of equal ones
            seen.setdefault(tuple(self._objectives([m])[0]), m)
        pool = list(seen.values())
        rank = fronts(self._objectives(pool))
        front = [m for m, r in zip(pool, rank, strict=True) if r == 0]
        room = crowding(self._objectives(front), np.zeros(len(front), np.int64))
        size = 64 if s.pareto is None else s.pareto.archive
        kept = [front[i] for i in sorted(np.argsort(-room, kind="stable")[:size])]
        same = len(kept) == len(self.archive) and np.allclose(
            self._objectives(kept), self._objectives(self.archive), rtol=0, atol=_MIN_GAIN
        )
        self.steady = self.steady + 1 if same else 0
        self.archive = kept

    # -- parts -------------------------------------------------------------------------------------------------------
    def _stream(self, purpose: int, number: int) -> np.random.Generator:
        return np.random.Generator(np.random.Philox(key=[self.seed, (purpose << 40) + number]))

    def _progress(self, generations: int | None, evaluations: int | None) -> Progress:
        line, c = self.log[-1], self.counters
        facts = {self.task.metric: line.best, "parameters": float(line.params), "archive": float(line.archive),
                 "candidates": float(c.evaluations)}  # fmt: skip
        if evaluations is not None:
            return Progress("evolve", c.evaluations, evaluations, facts)
        return Progress("evolve", len(self.log), generations or len(self.log), facts)

    def _content(self, folder: Path) -> dict[str, Any]:
        return layer_content(self, folder)

    def restore_log(self, lines: list[dict[str, Any]]) -> None:
        """Restore the log from its saved lines."""
        self.log = [LayerGeneration(**{**line, "best": float(line["best"])}) for line in lines]

    def replay(self, number: int) -> Program:
        """Rebuild the structure of a candidate, not its weights, by applying its ancestors' edits to the start program.

        Raises: UsageError if no candidate has this number.
        """
        program = self.start.fork(f"candidate {number}")
        for birth in self.line(number):
            if birth.author == "human":
                made, brought = entry(birth)
                replay([made], onto=program, payloads=brought)
            elif birth.mutation in MUTATIONS:
                kind = MUTATIONS[birth.mutation]
                self.apply(program, kind, birth.site, birth.block, self._stream(_APPLY, birth.number))
        return program

    def line(self, number: int) -> list[CandidateBirth]:
        """Return the births of a candidate and its fitter-parent ancestors, oldest first. Raises: UsageError."""
        if not 0 <= number < len(self.births):
            raise UsageError("no candidate has this number", got=number, expected=f"0 to {len(self.births) - 1}")
        found = [self.births[number]]
        while found[-1].fitter_parent is not None:
            found.append(self.births[found[-1].fitter_parent])
        return found[::-1]


def tried(weights: np.ndarray, rng: np.random.Generator, count: int = 1) -> np.ndarray:
    """Draw `count` random orders of all indices: int64 [count, len(weights)]; larger weights tend to come first.

    An order is a weighted sample without replacement: the order of exponential variables with the weights as rates.
    """
    return np.argsort(rng.exponential(size=(count, len(weights))) / weights, axis=1)


def _sizes(found: tuple[int, int] | None) -> str:
    return f"{found[0]} inputs, {found[1]} outputs" if found else "no single input and output with axes as in the task"


def _flops(program: Program) -> int:
    names = {d for n in program.input_names() for d in program.spec(n).shape if isinstance(d, str)}
    return flops(program, dict.fromkeys(names, 1))


def cross(
    child: Program, moments: Moments, other: Program, others: Moments, rng: np.random.Generator
) -> tuple[Moments, list[str]]:
    """Copy weights from the other parent into a fork of the fitter parent, layer by layer with probability 1/2.

    Only layers with equal weight shapes are copied; `moments` and `others` are the parents' optimizer states.
    Returns: the optimizer state of the child, and the names of the copied layers.
    """
    mine, theirs = _layers(child), _layers(other)
    taken: list[str] = []
    found = dict(moments)
    with child.edit("cross over", author="evolution", tool="graphwright.evolve", keep_undo=False) as e:
        for name, weights in mine.items():
            if weights != theirs.get(name) or rng.random() < 0.5:
                continue
            taken.append(name)
            for key in weights:
                e.set_weight(key, other.weights.array(key))
                for moment in [m for m in found if _of(m, key)]:
                    del found[moment]
                found.update({m: value for m, value in others.items() if _of(m, key)})
    return found, taken


def _layers(p: Program) -> dict[str, dict[str, tuple[int, ...]]]:
    """Map each layer (a common prefix of keys) to a dict from keys of weights and running statistics to shapes."""
    found: dict[str, dict[str, tuple[int, ...]]] = {}
    for key in p.weights:
        found.setdefault(key.rpartition(".")[0], {})[key] = p.weights[key].shape
    return found


def _of(moment: str, key: str) -> bool:
    """Return True if an entry of the optimizer state, such as `adam.<key>.steps`, belongs to the weight `key`."""
    return moment.partition(".")[2].rpartition(".")[0] == key
