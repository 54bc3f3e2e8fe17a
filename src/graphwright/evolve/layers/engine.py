"""Evolution of whole layers: forks of one Program, mutated by edits, trained by a compiled step, weights inherited.

Each child is a fork: weights are shared with its mother until training writes them. Survival is NSGA-II on several
objectives, or the metric alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from graphwright.errors import GraphwrightError, UsageError
from graphwright.evolve.errors import EvaluationFailed, LimitTooSmall, Status, TaskError
from graphwright.evolve.evolution import Evolution
from graphwright.evolve.gradient_paths import blocked_params, warn_of_blocked
from graphwright.evolve.layers import train
from graphwright.evolve.layers.manual import entry, name_parts
from graphwright.evolve.layers.member import GENES, LOSSES, Birth, Member, Recipe
from graphwright.evolve.layers.result import LayerResult
from graphwright.evolve.layers.settings import Layers
from graphwright.evolve.mutations.registry import MUTATIONS, parts, where
from graphwright.evolve.pareto import crowding, fronts, survivors
from graphwright.evolve.tasks.task import Task
from graphwright.program import replay
from graphwright.program.cost import flops, parameters
from graphwright.progress import Progress

if TYPE_CHECKING:
    from graphwright.evolve.evolution import Blocks
    from graphwright.evolve.layers.member import Moments
    from graphwright.evolve.mutations.registry import Kind
    from graphwright.files import StrPath
    from graphwright.program import Program, Transaction


def cross(
    child: Program, moments: Moments, other_parent: Program, others: Moments, rng: np.random.Generator
) -> tuple[Moments, list[str]]:
    """Give a fork of the mother layers of the father, each with one half; the moments of the child, and their names."""
    mine, theirs = _layers(child), _layers(other_parent)
    taken: list[str] = []
    found = dict(moments)
    with child.edit("cross over", author="evolution", tool="graphwright.evolve", keep_undo=False) as e:
        for name, weights in mine.items():
            if {k: s for k, s in weights.items()} != theirs.get(name) or rng.random() < 0.5:
                continue
            taken.append(name)
            for key in weights:
                e.set_weight(key, other_parent.weights.array(key))
                for moment in [m for m in found if _of(m, key)]:
                    del found[moment]
                found.update({m: value for m, value in others.items() if _of(m, key)})
    return found, taken


def _layers(p: Program) -> dict[str, dict[str, tuple[int, ...]]]:
    """Layer -> its weights (running statistics among them) and their shapes."""
    found: dict[str, dict[str, tuple[int, ...]]] = {}
    for key in p.weights:
        found.setdefault(key.rpartition(".")[0], {})[key] = p.weights[key].shape
    return found


def _of(moment: str, key: str) -> bool:
    """Whether a state of an optimizer, `adam.<key>.steps`, belongs to a weight."""
    return moment.partition(".")[2].rpartition(".")[0] == key


_DRAW, _APPLY, _TRAIN = 0, 1, 2  # purposes of random streams
_GAIN = 1e-6


@dataclass(frozen=True, slots=True)
class Generation:
    """One line of the log: the best and median metric, its parameters, how many nobody dominates, how many failed."""

    generation: int
    best: float
    median: float
    params: int
    archive: int
    failed: int


class LayerEvolution(Evolution):
    """Evolution of the layers of a program; made by `Evolution(task, blocks(program), Layers(...))`."""

    def __init__(
        self, task: Any, start: Blocks, settings: Layers | None = None, *, seed: int = 0, threads: int = 1
    ) -> None:
        if not isinstance(settings or Layers(), Layers):
            raise UsageError("settings that layers don't have", got=type(settings).__name__, expected="Layers")
        if not isinstance(task, Task) or (task.sequence and task.loss == "heads"):
            raise TaskError("layers evolve on data, and over time for one head", got=getattr(task, "name", task))
        sizes = train.fits(task, start.program)
        if sizes != (task.inputs, task.outputs):
            raise TaskError("program and task do not fit", where=start.program.name,
                            expected=(task.inputs, task.outputs), got=sizes)  # fmt: skip
        self._begin(task, seed, threads)
        self.settings = s = settings or Layers()
        self.start = start.program
        try:
            self._fits(self.start)
            self._affordable(self.start)
        except TaskError as error:
            raise LimitTooSmall(f"the start is larger than the limits: {error.what}", where=self.start.name,
                                expected=error.expected, got=error.got) from None  # fmt: skip
        if task.fitness is not None or task.fitness_batch is not None:
            raise TaskError("layers are chosen by the task's metric, not by a fitness", where=task.name,
                            fix="evolve.scalar(), or a task without fitness")  # fmt: skip
        unknown = set(s.rates) - {*MUTATIONS, *GENES}
        if unknown:
            raise UsageError("rates of mutations that are not there", got=", ".join(sorted(unknown)),
                             expected=", ".join((*MUTATIONS, *GENES)))  # fmt: skip
        self.members: list[Member] = []
        self.archive: list[Member] = []
        self.births: list[Birth] = []
        self.numbers: dict[tuple[str, str, int], str] = {}  # (mutation, site, how many before) -> name of the part
        self.seats = train.Seats()
        self.gained = self.steady = 0
        self._idle = False
        self._blocked = False  # whether it was said that training can't reach some weights

    # -- a generation ------------------------------------------------------------------------------------------------
    def _advance(self, aim: float | None, generations: int | None, evaluations: int | None) -> None:
        if not self.members:
            s = self.settings
            recipe = Recipe.of(s.lr, s.optimizer, self.task.loss)
            born = [self._candidate(self.start.fork("start"), {}, recipe, None, None, "", "", "")]
        else:
            self.generation += 1
            count = self.settings.population
            left = count if evaluations is None else evaluations - self.counters.evaluations
            done = max(self.counters.evaluations / evaluations if evaluations else 0.0,
                       len(self.log) / generations if generations else 0.0)  # fmt: skip
            born = [self._child(done) for _ in range(min(count, left))]
        alive = [m for m in born if isinstance(m, Member)]
        self._check(len(born), len(alive))
        before = max((m.metric for m in self.members), default=-np.inf)
        self._survive(alive)
        best = self._best()
        if best.metric > before + _GAIN:
            self.gained = self.generation
        values = [m.metric for m in self.members]
        self.log.append(Generation(self.generation, best.metric, float(np.median(values)), best.birth.params,
                                   len(self.archive), len(born) - len(alive)))  # fmt: skip
        self._idle = len(born) > 0 and all(b.mutation == _NOTHING for b in self.births[-len(born) :])

    def _reached(self, aim: float) -> bool:
        return any(m.metric >= aim for m in self.members)

    def _stuck(self) -> Status | None:
        if self._idle:
            return Status.NO_MUTATION
        if self.settings.pareto and self.steady >= max(20, 2 * self.settings.population):
            return Status.CONVERGED
        return None

    # -- one candidate -----------------------------------------------------------------------------------------------
    def _child(self, done: float) -> Member | Birth:
        """Fork a parent, cross over, make one mutation, train."""
        s, rng = self.settings, self._stream(_DRAW)
        fitter_parent = self._parent(rng)
        program, moments = fitter_parent.heritage
        program, recipe = program.fork(f"candidate {len(self.births)}"), fitter_parent.birth.recipe
        other_parent: Member | None = None
        if rng.random() < s.crossover and len(self.members) > 1:
            other = self._parent(rng)
            if other is not fitter_parent:
                fitter_parent, other_parent = sorted((fitter_parent, other), key=self.members.index)
                program, moments = fitter_parent.heritage
                program = program.fork(f"candidate {len(self.births)}")
                moments, _ = cross(program, moments, *other_parent.heritage, rng)
                genes = (fitter_parent.birth.recipe, other_parent.birth.recipe)
                recipe = Recipe(*(getattr(genes[int(rng.integers(2))], f) for f in ("rate", "optimizer", "loss")))
                if recipe.optimizer != fitter_parent.birth.recipe.optimizer:
                    recipe = replace(recipe, rate=other_parent.birth.recipe.rate)
        opt = train.optimizer(program, fitter_parent.birth.recipe)
        train.restore(opt, moments)
        name, site, block, recipe = self._mutate(program, recipe, rng, done)
        kept = train.moments(opt) if recipe.optimizer == fitter_parent.birth.recipe.optimizer else {}
        other = None if other_parent is None else other_parent.number
        return self._candidate(program, kept, recipe, fitter_parent.number, other, name, site, block)

    def rates(self, done: float) -> dict[str, float]:
        """Weights by which mutations are drawn for the next children, with `done` of the run behind."""
        s, late = self.settings, done >= self.settings.explore
        stuck = self.generation - self.gained > s.stagnation
        table = {k.name: (k.explore, k.refine) for k in MUTATIONS.values() if k.structural or not stuck}
        if not stuck:
            table |= {gene: both for gene, both in GENES.items() if gene != "loss" or len(self._losses) > 1}
        weights = {name: float(s.rates.get(name, both[late])) for name, both in table.items()}
        return {name: weight for name, weight in weights.items() if weight}

    def _mutate(
        self, program: Program, recipe: Recipe, rng: np.random.Generator, done: float
    ) -> tuple[str, str, str, Recipe]:
        """One mutation out of those that can be made; after a refused one, which changed nothing, another is tried."""
        rates = self.rates(done)
        names = list(rates)
        for at in tried(np.array(list(rates.values())), rng)[0]:
            if names[at] in GENES:
                return names[at], "", "", recipe.changed(names[at], self._losses, rng)
            kind = MUTATIONS[names[at]]
            sites = kind.sites(program)
            if len(sites):
                site = where(program, sites[int(rng.integers(len(sites)))])
                block = self._number(kind.name, site, parts(program)) if kind.adds else ""
                try:
                    self.apply(program, kind, site, block, self._stream(_APPLY))
                    return kind.name, site, block, recipe
                except GraphwrightError:
                    refused = self.counters.refused
                    assert refused is not None
                    refused[kind.name] = refused.get(kind.name, 0) + 1
        return _NOTHING, "", "", recipe

    def apply(self, program: Program, kind: Kind, site: str, block: str, rng: np.random.Generator) -> None:
        """One mutation as one edit. Raises: what the edit raises, or TaskError beyond the limits; nothing changed."""
        with program.edit(f"{kind.name} at {site}", author="evolution", tool="graphwright.evolve") as e:
            kind.apply(e, site, rng, **({"block": block} if kind.adds else {}))
            self._fits(program)
        try:
            self._affordable(program)
        except TaskError:
            program.undo()
            raise

    def _fits(self, program: Program) -> None:
        """Raises: TaskError beyond the limits of weights."""
        s = self.settings
        if parameters(program) > s.max_params:
            raise TaskError("more parameters than max_params", expected=s.max_params, got=parameters(program))
        widest = max((int(program.spec(n).shape[0]) for n in program.params() if program.spec(n).shape), default=0)
        if widest > s.max_width:
            raise TaskError("wider than max_width", expected=s.max_width, got=widest)

    def _affordable(self, program: Program) -> None:
        """Raises: TaskError beyond the limit of operations, which are known when an edit is over."""
        if self._flops(program) > self.settings.max_flops:
            raise TaskError("more operations than max_flops", expected=self.settings.max_flops,
                            got=self._flops(program))  # fmt: skip

    def _number(self, kind: str, site: str, there: set[str]) -> str:
        """The name of a part: equal for equal mutations at an equal place, whoever makes them and whenever.

        Args:
            there: names of the parts that are there already.
        """
        for k in range(len(there) + 1):
            name = self.numbers.get((kind, site, k))
            if name is None:
                taken = parts(self.start) | set(self.numbers.values())
                first = max((int(t[1:]) for t in taken), default=0) + 1
                name = self.numbers[(kind, site, k)] = f"b{first}"
            if name not in there:
                return name
        raise AssertionError("more parts than there are")

    def _candidate(
        self, program: Program, moments: Moments, recipe: Recipe, fitter_parent: int | None, other_parent: int | None,
        mutation: str, site: str, block: str,
    ) -> Member | Birth:  # fmt: skip
        s, number, failure, metric, loss = self.settings, len(self.births), "", None, float("inf")
        seedling = program.fork(f"seedling {number}") if s.inherit == "baldwin" else None
        if s.steps and not self._blocked and (blocked := blocked_params(program)):
            self._blocked = True
            warn_of_blocked(f"{self.task.name}, candidate {number}", blocked, stacklevel=4)
        opt = train.optimizer(program, recipe)
        train.restore(opt, moments)
        seeds = train.moments(opt) if seedling is not None else {}
        try:
            self.counters.backward += train.batch_of(program, s, self.task) * s.steps * self.task.steps
            train.fit(self.task, program, opt, recipe, s, self._stream(_TRAIN), self.seats)
            self.counters.forward += len(self.task.valid.x) * self.task.steps
            metric, loss = train.measure(self.task, program, self.task.valid)
            if not np.isfinite(loss):
                metric, failure = None, f"loss is {loss}"
        except (GraphwrightError, FloatingPointError) as error:
            failure = f"{type(error).__name__}: {error}"
        self.counters.evaluations += 1
        birth = Birth(number, self.generation, fitter_parent, other_parent, mutation, site, block, recipe, metric, loss,
                      parameters(program), self._flops(program), failure)  # fmt: skip
        self.births.append(birth)
        if metric is None:
            self.counters.failed += 1
            self.failures.append(f"candidate {number} ({birth.what}): {failure}")
            return birth
        return Member(birth, program, train.moments(opt), seedling, seeds)

    # -- by hand -----------------------------------------------------------------------------------------------------
    @contextmanager
    def edit(self, who: int, why: str = "edited") -> Iterator[Transaction]:
        """Edit a member by hand: `with run.edit(member.number, "why") as e:`, an edit of a fork of its program.

        On leaving, new parts get names from the run, and the result is scored (not trained) and takes the place of the
        member: a candidate whose mother is the member, author "human".

        Args:
            who: number of a member.
        Raises: UsageError for who is no member; TaskError for what does not fit the task or the limits; what the edit
            or its score raises. Then nothing has changed.
        """
        fitter_parent = next((m for m in self.members if m.number == who), None)
        if fitter_parent is None:
            numbers = ", ".join(str(m.number) for m in self.members)
            raise UsageError("no member has this number", got=who, expected=numbers or "members, after run(1)",
                             fix="edit its program, which goes its own way")  # fmt: skip
        number, recipe = len(self.births), fitter_parent.birth.recipe
        program = fitter_parent.program.fork(f"candidate {number}")
        opt, before = train.optimizer(program, recipe), set(program.nodes())
        train.restore(opt, fitter_parent.moments)
        names = dict(self.numbers)
        try:
            with program.edit(why, author="human") as e:
                yield e
                name_parts(e, before, lambda what, there: self._number("by hand", what, there))
                self._fits(program)
            if train.fits(self.task, program) != (self.task.inputs, self.task.outputs):
                raise TaskError("program and task do not fit", where=program.name, got=train.fits(self.task, program),
                                expected=(self.task.inputs, self.task.outputs))  # fmt: skip
            self._affordable(program)
            metric, loss = train.measure(self.task, program, self.task.valid)
            if not np.isfinite(loss):
                raise TaskError("the edited network has no finite loss", where=program.name, got=loss)
        except BaseException:
            self.numbers = names
            raise
        if not len(program.journal):
            return
        birth = Birth(number, self.generation, fitter_parent.number, None, "edit", "", "", recipe, metric, loss,
                      parameters(program), self._flops(program), author="human", why=why,
                      edits=program.journal[-1].edits)  # fmt: skip
        seedling, seeds = fitter_parent.seedling, fitter_parent.seeds
        if seedling is not None:
            seedling = seedling.fork(f"seedling {number}")
            start = train.optimizer(seedling, recipe)
            train.restore(start, seeds)
            replay([program.journal[-1]], onto=seedling)
            seeds = train.moments(start)
        self._take(fitter_parent, Member(birth, program, train.moments(opt), seedling, seeds))

    def _take(self, old: Member, new: Member) -> None:
        """Put what was edited in the place of what it was."""
        self.births.append(new.birth)
        self.counters.evaluations += 1
        self.counters.forward += len(self.task.valid.x) * self.task.steps
        best, steady = self._best().metric, self.steady
        self.members.remove(old)
        self._survive([new])
        self.steady = min(self.steady, steady)  # no generation went by
        if self._best().metric > best + _GAIN:
            self.gained = self.generation

    # -- selection ---------------------------------------------------------------------------------------------------
    def _best(self) -> Member:
        """The best metric, then the fewest parameters, then the first."""
        return max(self.members, key=lambda m: (m.metric, -m.birth.params, -m.number))

    @property
    def _losses(self) -> tuple[str, ...]:
        """Losses that training may lower."""
        return (self.task.loss,) if self.task.sequence else LOSSES[self.task.loss]

    def _objectives(self, members: list[Member]) -> np.ndarray:
        names = ("metric", "params") if self.settings.pareto is None else self.settings.pareto.objectives
        return np.array([[m.birth.value(name) for name in names] for m in members], float)

    def _parent(self, rng: np.random.Generator) -> Member:
        """The better of two, by place: members stand in the order of survival."""
        return self.members[int(rng.integers(len(self.members), size=2).min())]

    def _survive(self, children: list[Member]) -> None:
        s, both = self.settings, self.members + children
        values = self._objectives(both)
        if s.pareto is None:
            order = np.lexsort((np.arange(len(both)), -values[:, 1], -values[:, 0]))[: s.population]
        else:  # of equals by rank and room the one with the lower loss
            by_loss = sorted(range(len(both)), key=lambda i: both[i].birth.loss)
            both, values = [both[i] for i in by_loss], values[by_loss]
            order = survivors(values, s.population)
        self.members = [both[i] for i in order]
        seen: dict[tuple[float, ...], Member] = {}
        for m in self.archive + children:  # of equals the first
            seen.setdefault(tuple(self._objectives([m])[0]), m)
        pool = list(seen.values())
        rank = fronts(self._objectives(pool))
        front = [m for m, r in zip(pool, rank, strict=True) if r == 0]
        room = crowding(self._objectives(front), np.zeros(len(front), np.int64))
        size = 64 if s.pareto is None else s.pareto.archive
        kept = [front[i] for i in sorted(np.argsort(-room, kind="stable")[:size])]
        same = len(kept) == len(self.archive) and np.allclose(
            self._objectives(kept), self._objectives(self.archive), rtol=0, atol=_GAIN
        )
        self.steady = self.steady + 1 if same else 0
        self.archive = kept

    def _check(self, born: int, alive: int) -> None:
        if 2 * (born - alive) > born:
            raise EvaluationFailed(
                "more than half of a generation has no metric",
                where=f"{self.task.name}, generation {self.generation}",
                expected=f"at most {born // 2} of {born}",
                got="; ".join(self.failures[-(born - alive) :][:3]),
            )

    # -- parts -------------------------------------------------------------------------------------------------------
    def _stream(self, purpose: int, number: int | None = None) -> np.random.Generator:
        """Random numbers of one candidate for one purpose."""
        key = (purpose << 40) + (len(self.births) if number is None else number)
        return np.random.Generator(np.random.Philox(key=[self.seed, key]))

    def _flops(self, program: Program) -> int:
        names = {d for n in program.input_names() for d in program.spec(n).shape if isinstance(d, str)}
        return flops(program, dict.fromkeys(names, 1))

    def _progress(self, generations: int | None, evaluations: int | None) -> Progress:
        line, c = self.log[-1], self.counters
        facts = {self.task.metric: line.best, "parameters": float(line.params), "archive": float(line.archive),
                 "candidates": float(c.evaluations)}  # fmt: skip
        if evaluations is not None:
            return Progress("evolve", c.evaluations, evaluations, facts)
        return Progress("evolve", len(self.log), generations or len(self.log), facts)

    def _result(self, status: Status, aim: float | None) -> LayerResult:
        return LayerResult(self, status, aim)

    def save(self, directory: StrPath) -> None:
        """Write all that the run needs to go on, atomically; see `evolve.resume`."""
        from graphwright.evolve.layers.saving import save

        save(self, directory)

    def replay(self, number: int) -> Program:
        """The structure of a candidate, made again from the start by the edits of its mothers; weights are not.

        Raises: UsageError for a number that nobody has.
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

    def line(self, number: int) -> list[Birth]:
        """A candidate and its mothers, the start first. Raises: UsageError for a number that nobody has."""
        if not 0 <= number < len(self.births):
            raise UsageError("no such candidate", got=number, expected=f"0 to {len(self.births) - 1}")
        found = [self.births[number]]
        while found[-1].fitter_parent is not None:
            found.append(self.births[found[-1].fitter_parent])
        return found[::-1]


def tried(weights: np.ndarray, rng: np.random.Generator, count: int = 1) -> np.ndarray:
    """Orders in which things are drawn by weight, each time among those that are left: int64 [count, len(weights)].

    Independent exponential times of these rates come in such an order.
    """
    return np.argsort(rng.exponential(size=(count, len(weights))) / weights, axis=1)


_NOTHING = "no mutation could be made"
