"""Neurons that evolve: generations of genomes in columns, scored, sorted into species, and bred."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from graphwright.array.population.names import MUTATIONS, founders
from graphwright.errors import UsageError
from graphwright.evolve.errors import EvaluationFailed, LimitTooSmall, NoisyFitness, Status, TaskError
from graphwright.evolve.evolution import Evolution
from graphwright.evolve.genomes import columns_of, minimal, replaced, take
from graphwright.evolve.gradient_paths import blocked_links, warn_of_blocked
from graphwright.evolve.lineage import Edited, Key, Lineage, said
from graphwright.evolve.manual import inherited, numbered, reading, untrained
from graphwright.evolve.result import Individual, Result
from graphwright.evolve.settings import NEAT
from graphwright.evolve.species import Nursery, Species, founding
from graphwright.evolve.tasks.task import Population
from graphwright.progress import Progress

if TYPE_CHECKING:
    from graphwright.array.population.names import Births
    from graphwright.evolve.evolution import Scalar
    from graphwright.evolve.genomes import Genome
    from graphwright.evolve.tasks.task import Scores
    from graphwright.files import StrPath
    from graphwright.program import Transaction

_REDRAW = 6  # purpose of the stream of weights that are not inherited


@dataclass(frozen=True, slots=True)
class Generation:
    """One line of the log: best and median fitness, the best metric so far, species by number with their sizes."""

    generation: int
    best: float
    median: float
    metric: float
    hidden: int
    links: int
    species: dict[int, int]
    failed: int
    threshold: float


class NeuronEvolution(Evolution):
    """Evolution of neurons and links; made by `Evolution(task, scalar(), NEAT(...))`."""

    def __init__(
        self, task: Any, start: Scalar | None = None, settings: NEAT | None = None, *, seed: int = 0, threads: int = 1
    ) -> None:
        if not isinstance(settings or NEAT(), NEAT):
            raise UsageError("settings that neurons don't have", got=type(settings).__name__, expected="NEAT or Hybrid")
        self._begin(task, seed, threads)
        self.settings = settings or NEAT()
        s = self.settings
        if s.train is not None and task.lesson is None:
            raise TaskError("this task has nothing to train on", where=task.name, fix="NEAT(), without train")
        links = (task.inputs + 1) * task.outputs
        if task.outputs > s.max_nodes or links > s.max_links:
            raise LimitTooSmall("the start is larger than the limits", expected=f"{task.outputs} nodes, {links} links",
                                got=f"max_nodes {s.max_nodes}, max_links {s.max_links}")  # fmt: skip
        self.genes, self.registry = minimal(task.inputs, task.outputs, s.population, s, seed)
        self.births = founders(s.population)
        self._table: Any = None
        self._nursery = Nursery(s, task.inputs, task.outputs, seed)
        if s.start == "random":
            self._burst(Nursery(founding(s), task.inputs, task.outputs, seed))
        self.species = Species.founders(self.genes, s)
        self.fitness: np.ndarray | None = None  # of the generation as it is; None until it is scored
        self.metric = np.zeros(0)
        self.lineage = Lineage(task.inputs, task.outputs, task.names)
        self.best: Key | None = None
        self.gained = 0
        self.solution: Key | None = None
        self._shown: tuple[Key, float, int, int] | None = None
        self._blocked = False  # whether it was said that training can't reach some weights

    # -- running -----------------------------------------------------------------------------------------------------
    def _advance(self, aim: float | None, generations: int | None, evaluations: int | None) -> None:
        if self.fitness is not None:
            self._reproduce()
        self._evaluate(aim)

    def _reached(self, aim: float) -> bool:
        if not self._solved(aim) and self.fitness is not None and self.lineage.past[-1].edits:
            self._confirm(aim, self.fitness, self.metric)
        return self._solved(aim)

    def _solved(self, aim: float) -> bool:
        return self.solution is not None and self.lineage.birth(self.solution).metric >= aim

    def _stuck(self) -> Status | None:
        return Status.NO_MUTATION if self.log and self.settings.still else None

    def _result(self, status: Status, aim: float | None) -> Result:
        return Result(self, status, aim)

    def save(self, directory: StrPath) -> None:
        """Write all that the run needs to go on, atomically; see `evolve.resume`."""
        from graphwright.evolve.saving import save

        save(self, directory)

    @property
    def table(self) -> Any:
        """Rows of this generation; see `array.population.table`."""
        from graphwright.array.population.table import tabulate

        if self._table is None:
            self._table = tabulate(self.genes, self.task.inputs, self.task.outputs)
        return self._table

    def population(self, genes: Any = None) -> Population:
        """Genomes as tasks see them; by default those of this generation, as they are scored."""
        from graphwright.array.population.table import tabulate

        table = self.table if genes is None else tabulate(genes, self.task.inputs, self.task.outputs)
        genes = self.scored if genes is None else genes
        return Population(
            genes, table, self.task.outputs, self.settings.output == "identity", self.seed, self.generation,
            self.threads, lambda g: self.program(genes, g),
        )  # fmt: skip

    def program(self, genes: Any, g: int) -> Any:
        """A genome as a Program that has no history."""
        from graphwright.evolve.genomes import genome
        from graphwright.evolve.program import founder

        return founder(genome(genes, g, self.task.inputs, self.task.outputs), self.task.names)

    def individual(self, key: Key) -> Individual:
        """An individual of the run, as long as its genes are kept."""
        return Individual(self, self.lineage.birth(key), self.lineage.genome(key))

    # -- by hand -----------------------------------------------------------------------------------------------------
    @contextmanager
    def edit(self, who: Key | int, why: str = "edited") -> Iterator[Transaction]:
        """Edit one of the living: `with run.edit(key, "why") as e:`, an edit of its program with its history.

        On leaving, new genes get numbers from the registry, the result is scored (not trained) and takes the place of
        who was edited: the next generation descends from it. The lineage has the edit, author "human".

        Args:
            who: a key of the present generation, or a place in it.
        Raises: UsageError for who does not live; TaskError for what genes can't hold; what the edit raises. Then
            nothing has changed.
        """
        key = self.alive(who)
        p, before = self.lineage.replay(key, batch=1), self.lineage.genome(key)
        sums = {n.id: p.node(f"n{n.id}.sum") for n in before.nodes}
        with p.edit(why, author="human") as e:
            yield e
        found = reading(p, before, self.task.names, self.settings)
        kept = [n.id for n in found.nodes if sums.get(n.id) == p.node(f"n{n.id}.sum")]
        after, self.registry = numbered(before, found, kept, self.registry)
        if after != before:
            self._replace(key, why, after)

    def alive(self, who: Key | int) -> Key:
        """The key of one of the living, by its place or its key. Raises: UsageError."""
        if self.fitness is None:
            raise UsageError("nobody lives yet that was scored", where=self.task.name, fix="run(max_generations=1)")
        place = who.index if isinstance(who, Key) else who
        last = f"0 to {len(self.fitness) - 1}, or a key of generation {self.generation}"
        if isinstance(place, int | np.integer) and 0 <= place < len(self.fitness):
            key = self.lineage.latest(self.generation, place)
            if who in (place, key):
                return key
            last = str(key)
        raise UsageError("nobody lives by this key", expected=last, got=who,
                         fix="run.alive(place); or edit its program, which goes its own way")  # fmt: skip

    def _replace(self, key: Key, why: str, after: Genome) -> None:
        """Score a genome, and put it in the place of one of the living."""
        assert self.fitness is not None
        old, one, place = self.lineage.columns(key), columns_of([after]), key.index
        inherited(one, old)
        population = self.population(one)
        scores, c = self.task.score(population), self.counters
        fitness, metric = float(scores.fitness[0]), float(scores.metric[0])
        c.evaluations += 1
        c.forward += scores.passes
        c.environment += scores.seconds
        if not np.isfinite(fitness):
            c.failed += 1
            self.failures.append(f"{key}, {why}: {scores.failures.get(0, f'fitness is {fitness}')}")
            fitness = metric = -np.inf
        heir = one
        if self.scored is not self.genes:  # children get weights as they were before training, but those set by hand
            self._trained = replaced(self._trained, place, one)
            heir = untrained(one, old, take(self.genes, np.array([place])))
        self.genes, self._table = replaced(self.genes, place, heir), None
        self.fitness, self.metric = self.fitness.copy(), self.metric.copy()
        self.fitness[place], self.metric[place] = fitness, metric
        self.species.note(self.fitness, self.generation)
        self._crown(self.lineage.edit(Edited(place, why, one, fitness, metric)), fitness)

    # -- one generation ----------------------------------------------------------------------------------------------
    def _evaluate(self, aim: float | None) -> None:
        s, count = self.settings, self.settings.population
        if s.train is not None:
            self._train()
        population = self.population()
        scores: Scores = self.task.score(population)
        fitness, metric, finite = scores.fitness, scores.metric, np.isfinite(scores.fitness)
        scored = fitness
        if not finite.all():
            scored = fitness[finite]
            fitness, metric = np.where(finite, fitness, -np.inf), np.where(finite, metric, -np.inf)
            self._failed(scores, fitness)
        if not self.generation and (getattr(self.task, "fitness", None) or getattr(self.task, "fitness_batch", None)):
            self._twice(fitness)
        c = self.counters
        c.evaluations += count
        c.forward += scores.passes
        c.environment += scores.seconds
        self.fitness, self.metric = fitness, metric
        self.species.note(fitness, self.generation)
        self.lineage.add(self.scored, self.births, self.species.ids[self.species.of], fitness, metric)
        top = int(fitness.argmax())
        best = self._crown(Key(self.generation, top), fitness[top])
        if aim is not None and np.fmax.reduce(metric) >= aim:
            self._confirm(aim, fitness, metric)
        shown = best if self.solution is None else self.solution
        if self._shown is None or self._shown[0] != shown:
            self._shown = (shown, self.lineage.birth(shown).metric, *self.lineage.size(shown))
        _, reached, hidden, links = self._shown
        numbers, sizes = self.species.ids.tolist(), self.species.sizes.tolist()
        self.log.append(
            Generation(
                self.generation,
                float(fitness[top]),
                _median(scored),
                reached,
                hidden,
                links,
                dict(zip(numbers, sizes, strict=True)),
                count - len(scored),
                float(self.species.threshold),
            )
        )

    def _crown(self, key: Key, fitness: float) -> Key:
        """Who is fitter than all before is the best; the best."""
        if self.best is None or fitness > self.lineage.birth(self.best).fitness:
            self.best, self.gained = key, self.generation
            self.lineage.pinned.add(key)
        return self.best

    def _twice(self, fitness: np.ndarray) -> None:
        """Warn if a fitness of the user's gives the best genome another value when it is asked again."""
        top = int(np.argmax(fitness))
        scores = self.task.score(self.population(take(self.scored, np.array([top]))))
        self.counters.forward += scores.passes
        again = float(scores.fitness[0])
        if again != fitness[top] and np.isfinite(again):
            text = f"{self.task.name}: the fitness of one genome was {float(fitness[top])!r}, then {again!r}"
            warnings.warn(NoisyFitness(text), stacklevel=4)

    def _confirm(self, aim: float, fitness: np.ndarray, metric: np.ndarray) -> None:
        """The fittest that reaches the target and is confirmed solves the task."""
        reached = np.flatnonzero(metric >= aim)
        for g in reached[np.argsort(-fitness[reached], kind="stable")][:3].tolist():
            trial = self.task.confirm(self.population(take(self.scored, np.array([g]))))
            self.counters.forward += trial.passes
            self.counters.environment += trial.seconds
            if trial.passed:
                self.solution = self.lineage.latest(self.generation, g)
                self.lineage.pinned.add(self.solution)
                return

    def _train(self) -> None:
        """Gradient steps on all genomes: on the genes themselves, or on copies if children shall not inherit them."""
        from graphwright.array.population.runner import fit

        s, count = self.settings, self.settings.population
        assert s.train is not None
        genes = self.genes
        if not self._blocked:
            self._warn_of_blocked()
        if s.inherit == "baldwin":
            genes = type(genes)(*(column.copy() for column in genes))
            self._trained = genes
        elif s.inherit == "none" and self.generation:
            rng = np.random.Generator(np.random.Philox(key=[self.seed, (_REDRAW << 32) | self.generation]))
            scale = 1.0 / np.sqrt(self.task.inputs)
            genes.weight[:] = rng.normal(size=len(genes.weight)) * scale
            for moments in (genes.first, genes.second, genes.steps):
                moments[:] = 0
        lesson = self.task.lesson()
        steps = np.full(count, s.train.steps, np.int64)
        fit(self.table, genes, lesson, steps, np.full(count, s.train.lr),
            s.train.clip, self.threads)  # fmt: skip
        self.counters.backward += count * s.train.steps * lesson.cases.count * lesson.cases.steps

    def _warn_of_blocked(self) -> None:
        """Say once that gradients can't reach some links."""
        genes = self.genes
        blocked = blocked_links(genes, self.task.inputs, self.task.outputs)
        if len(blocked):
            self._blocked = True
            of = np.searchsorted(genes.link_off, blocked, "right") - 1
            names = [f"link {genes.link_id[e]} of genome {g}" for e, g in zip(blocked, of, strict=True)]
            warn_of_blocked(f"{self.task.name}, generation {self.generation}", names, stacklevel=6)

    @property
    def scored(self) -> Any:
        """The genes that fitness is of: trained ones."""
        keeps = self.settings.train is not None and self.settings.inherit == "baldwin"
        return self._trained if keeps else self.genes

    def _reproduce(self) -> None:
        from graphwright.array.population.deal import representatives
        from graphwright.array.population.table import Past, tabulate

        assert self.fitness is not None
        s, silent, table = self.settings, self.generation - self.gained, self.table
        chosen = representatives(self.species.of, len(self.species), self.seed, self.generation)
        old = self.genes
        self.genes, self.births, self.registry = self._nursery.children(
            old, self.fitness, self.species, self.registry, self.generation + 1, silent
        )
        self._table = tabulate(
            self.genes, self.task.inputs, self.task.outputs, Past(old, table, self.births.fitter_parent)
        )
        self._refused(self.births)
        self.generation += 1
        self.species = self.species.next(old, chosen, self.genes, s, self.generation)
        self.fitness = None

    def _burst(self, nursery: Nursery) -> None:
        """Random mutations of each founder."""
        from graphwright.array.population.deal import Parents

        count = self.settings.population
        each = np.arange(count)
        alone = Parents(np.full(count, -1), each, np.arange(count + 1), each)
        for k in range(self.settings.burst):
            self.genes, _, self.registry = nursery.breed(
                self.genes, np.zeros(count), alone, self.registry, (1 << 30) + k
            )

    # -- bookkeeping -------------------------------------------------------------------------------------------------
    def _refused(self, births: Births) -> None:
        assert self.counters.refused is not None
        for name, count in zip(MUTATIONS, births.refused.tolist(), strict=True):
            if count:
                self.counters.refused[name] = self.counters.refused.get(name, 0) + count

    def _failed(self, scores: Scores, fitness: np.ndarray) -> None:
        """Record genomes without fitness. Raises: EvaluationFailed if they are more than half."""
        failed = np.flatnonzero(~np.isfinite(fitness))
        texts = [
            f"generation {self.generation}, genome {g} ({said(self.births, g)}): "
            f"{scores.failures.get(g, f'fitness is {scores.fitness[g]}')}"
            for g in failed.tolist()
        ]
        self.counters.failed += len(failed)
        self.failures += texts[: max(0, 100 - len(self.failures))]
        if 2 * len(failed) > len(fitness):
            raise EvaluationFailed(
                "more than half of a generation has no fitness",
                where=f"{self.task.name}, generation {self.generation}",
                expected=f"at most {len(fitness) // 2} of {len(fitness)}",
                got="; ".join(texts[:3]),
            )

    def _progress(self, generations: int | None, evaluations: int | None) -> Progress:
        line, c = self.log[-1], self.counters
        facts = {
            "best": line.best,
            self.task.metric: line.metric,
            "species": float(len(line.species)),
            "hidden": float(line.hidden),
            "evaluations/s": c.evaluations / max(c.seconds, 1e-9),
        }
        return Progress("evolve", len(self.log), generations or len(self.log), facts)


def _median(values: np.ndarray) -> float:
    """Numpy's, which takes longer than a generation's distances; -inf of nothing."""
    ordered = np.sort(values)
    return float((ordered[(len(ordered) - 1) // 2] + ordered[len(ordered) // 2]) / 2) if len(ordered) else -np.inf
