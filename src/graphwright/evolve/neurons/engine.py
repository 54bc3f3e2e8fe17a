"""Evolution of neurons: each generation of genomes is scored, sorted into species, and bred."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from graphwright.array.population.names import MUTATIONS, founders
from graphwright.errors import UsageError
from graphwright.evolve.errors import LimitTooSmall, NoisyFitness, Status, TaskError
from graphwright.evolve.gradient_paths import blocked_links, warn_of_blocked
from graphwright.evolve.neurons.genomes import Genome, columns_of, genome, merge, minimal, renumbered, replaced, take
from graphwright.evolve.neurons.lineage import Birth, IndividualKey, Lineage, ManualEdit, birth_text
from graphwright.evolve.neurons.program import edited_genome, founder, inherited, numbered, untrained
from graphwright.evolve.neurons.scoring import MIN_SECONDS, Scorer
from graphwright.evolve.neurons.species import Breeder, Species, founding
from graphwright.evolve.run import EvolutionResult, EvolutionRun, cost, same_cases
from graphwright.evolve.saving import neuron_content
from graphwright.evolve.settings import NEAT
from graphwright.evolve.tasks.task import Population, Scores, Task
from graphwright.program import Program, Transaction
from graphwright.program.cost import flops
from graphwright.progress import Progress
from graphwright.workers import Workers

_STATE = ("genes", "registry", "births", "species", "fitness", "metric", "best", "solution", "_shown", "_trained",
          "generation", "gained", "warned", "counters", "failures")  # fmt: skip
_REDRAW = 6  # purpose of the stream of weights that are not inherited


@dataclass(frozen=True, slots=True, eq=False)
class Individual:
    """A genome of a run, with the record of its birth and scores."""

    evolution: NeuronEvolution = field(repr=False)
    birth: Birth
    genome: Genome

    @property
    def key(self) -> IndividualKey:
        """The key of the individual: generation, index, and number of manual edits."""
        return self.birth.key

    @property
    def fitness(self) -> float:
        """The fitness of the individual when it was scored."""
        return self.birth.fitness

    @property
    def metric(self) -> float:
        """The metric on the validation cases when the individual was scored."""
        return self.birth.metric

    @property
    def program(self) -> Program:
        """The individual as a Program, whose journal has one entry per generation that changed it."""
        return self.evolution.lineage.replay(self.key)

    def population(self) -> Population:
        """Return the individual as a population of one genome."""
        return self.evolution.population(self.evolution.lineage.columns(self.key))

    def rescore(self) -> float:
        """Compute the fitness again from the genes; on the same machine the result has the same bits."""
        population = replace(self.population(), generation=self.key.generation)
        return float(self.evolution.task.score(population).fitness[0])

    def predict(self, x: Any, head: str | None = None) -> np.ndarray:
        """Return predictions for inputs [N, inputs] or [N, T, inputs]: float32 [N, outputs] or [N, T, outputs].

        Predictions of classes are probabilities, even if the network computes logits; `program` returns logits.

        Args:
            x: inputs in the same units as those given to the task; they are standardised if the task is `scaled`.
            head: name of the head whose predictions to return; by default all heads.
        """
        from graphwright.array.population.runner import Cases  # loads numba

        task, population = self.evolution.task, self.population()
        seen = task.network_inputs(x) if isinstance(task, Task) else np.asarray(x)
        answers = population.answers(Cases.of(seen))[0]
        if isinstance(task, Task):
            answers = task.predictions(answers, population.logits, head)
        return answers if np.ndim(x) == 3 else answers[:, 0]


class Result(EvolutionResult):
    """The outcome of a run on neurons; see `EvolutionResult` for the attributes."""

    evolution: NeuronEvolution

    @property
    def best(self) -> Individual:
        """The individual that solved the task, else the fittest so far. Raises: UsageError if nothing was scored."""
        run = self.evolution
        key = run.solution or run.best
        if key is None:
            raise self._no_champion()
        return run.individual(key)

    @property
    def lineage(self) -> Lineage:
        """The ancestors of all living individuals and champions."""
        return self.evolution.lineage

    def test(self) -> float:
        """Return the metric of the best individual on the test cases; `task.test_reads` counts the calls."""
        return self.evolution.task.test(self.best.population())

    def predict(self, x: Any, head: str | None = None) -> np.ndarray:
        """Return the predictions of the best individual; see `Individual.predict`."""
        return self.best.predict(x, head)

    def _champion_facts(self) -> dict[str, Any]:
        run, best = self.evolution, self.best
        links = best.genome.open_links
        return {"fitness": {"best": best.fitness, "median": run.log[-1].median},
                "metric": {"name": run.task.metric, "valid": best.metric},
                "hidden": best.genome.hidden, "links": links, "parameters": links,
                "flops": flops(founder(best.genome), {"B": 1}), "species": len(run.log[-1].species),
                "champion": {"generation": best.key.generation, "index": best.key.index}}  # fmt: skip

    def _champion_lines(self, report: dict[str, Any]) -> list[str]:
        r, best = report, self.best
        return [
            f"  {r['metric']['name']} {best.metric:.4g}, fitness {best.fitness + 0.0:.4g}{same_cases(r)}",  # no -0
            f"  champion of generation {best.key.generation}: {r['hidden']} hidden, {r['links']} links",
            f"  {r['species']} species; {cost(r)}",
        ]


class Emigrants(NamedTuple):
    """Individuals on the way to another island: scored genes, genes that children inherit, registry, and origins."""

    scored: Any
    heirs: Any
    registry: Any
    names: list[str]


@dataclass(frozen=True, slots=True)
class NeuronGeneration:
    """A log entry: scores and sizes of the champion so far, and the size of each species by its number."""

    generation: int
    best: float
    median: float
    metric: float
    hidden: int
    links: int
    species: dict[int, int]
    failed: int
    threshold: float


class NeuronEvolution(EvolutionRun):
    """Evolution of neurons and links; created by `Evolution(task, scalar(), NEAT(...))`."""

    RESULT = Result

    def __init__(
        self, task: Any, settings: NEAT | None = None, *, seed: int = 0, threads: int = 1, workers: Workers = None
    ) -> None:
        self.settings = s = settings or NEAT()
        if not isinstance(s, NEAT):
            raise UsageError("these settings are not for neurons", got=type(s).__name__,
                             expected="NEAT(...) or Hybrid(...)")  # fmt: skip
        super().__init__(task, seed, threads, workers)
        if s.train is not None and task.lesson is None:
            raise TaskError("the task has no data for gradient steps", where=task.name, fix="use NEAT() without train")
        links = (task.inputs + 1) * task.outputs
        if task.outputs > s.max_nodes or links > s.max_links:
            raise LimitTooSmall("the initial genome exceeds the limits",
                                expected=f"limits of at least {task.outputs} nodes, {links} links",
                                got=f"max_nodes {s.max_nodes}, max_links {s.max_links}")  # fmt: skip
        _ready()
        self.genes, self.registry = minimal(task.inputs, task.outputs, s.population, s, seed)
        self.births = founders(s.population)
        self._table: Any = None
        self._scorer = Scorer(task, s, seed, threads)
        self._nursery = Breeder(s, task.inputs, task.outputs, seed)
        if s.start == "random":
            self._burst(Breeder(founding(s), task.inputs, task.outputs, seed))
        self.species = Species.founders(self.genes, s)
        self.fitness: np.ndarray | None = None  # of the current generation; None until it is scored
        self.metric = np.zeros(0)
        self.lineage: Lineage = Lineage(task.inputs, task.outputs, task.names)
        self.best: IndividualKey | None = None
        self.solution: IndividualKey | None = None
        self._shown: tuple[IndividualKey, float, int, int] | None = None
        self._trained: Any = None

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
        return Status.NO_MUTATION if self.log and self.settings.unchanging else None

    def _content(self, folder: Path) -> dict[str, Any]:
        return neuron_content(self, folder)

    def restore_log(self, lines: list[dict[str, Any]]) -> None:
        """Restore the log and the trained weights, after everything else was restored."""
        for line in lines:
            numbers = {name: float(line[name]) for name in ("best", "median", "metric")}
            sizes = {int(number): size for number, size in line["species"].items()}
            self.log.append(NeuronGeneration(**{**line, **numbers, "species": sizes}))
        if self.settings.inherit == "baldwin" and self.fitness is not None:
            self._trained = self.lineage.living()

    @property
    def table(self) -> Any:
        """The genomes of this generation in the form that native code runs; see `array.population.table`."""
        if self._table is None:
            self._table = self._scorer.tabulate(self.genes)
        return self._table

    def population(self, genes: Any = None) -> Population:
        """Return genomes as a `Population`, which tasks score; by default the scored genes of this generation."""
        table, genes = (self.table, self.scored) if genes is None else (self._scorer.tabulate(genes), genes)
        return self._scorer.population(genes, table, self.generation)

    def program(self, genes: Any, g: int) -> Any:
        """Build genome `g` of the population `genes` as a Program without history."""
        return founder(genome(genes, g, self.task.inputs, self.task.outputs), self.task.names)

    def individual(self, key: IndividualKey) -> Individual:
        """Return an individual of the run. Raises: KeyError if its genes are no longer stored."""
        return Individual(self, self.lineage.birth(key), self.lineage.genome(key))

    # -- manual edits ------------------------------------------------------------------------------------------------
    @contextmanager
    def edit(self, who: IndividualKey | int, why: str = "edited") -> Iterator[Transaction]:
        """Edit a living individual: `with run.edit(key, "why") as e:` edits its program.

        After the `with` block, new genes get innovation numbers, and the result is scored (not trained) and replaces
        the individual, so that the next generation descends from it. The lineage records the author "human".

        Args:
            who: a key of the current generation, or an index in the generation.
            why: the reason, which the lineage records.
        Raises: UsageError if the individual is not alive; TaskError if genes cannot express the edited program; errors
            of the `with` block. The run is then unchanged.
        """
        key = self.alive(who)
        p, before = self.lineage.replay(key, batch=1), self.lineage.genome(key)
        sums = {n.id: p.node(f"n{n.id}.sum") for n in before.nodes}
        with p.edit(why, author="human") as e:
            yield e
        found = edited_genome(p, before, self.task.names, self.settings)
        kept = [n.id for n in found.nodes if sums.get(n.id) == p.node(f"n{n.id}.sum")]
        after, self.registry = numbered(before, found, kept, self.registry)
        if after != before:
            self._replace(key, why, after)

    def alive(self, who: IndividualKey | int) -> IndividualKey:
        """Return the key of a living individual, given its index or its key. Raises: UsageError if it is not alive."""
        if self.fitness is None:
            raise UsageError("no individual was scored yet", where=self.task.name, fix="run(max_generations=1)")
        index = who.index if isinstance(who, IndividualKey) else who
        last = f"0 to {len(self.fitness) - 1}, or a key of generation {self.generation}"
        if isinstance(index, int | np.integer) and 0 <= index < len(self.fitness):
            key = self.lineage.latest(self.generation, index)
            if who in (index, key):
                return key
            last = str(key)
        raise UsageError("no living individual has this key or index", expected=last, got=who,
                         fix="run.alive(index); or edit the individual's program outside of the run")  # fmt: skip

    def _replace(self, key: IndividualKey, why: str, after: Genome) -> None:
        old, one = self.lineage.columns(key), columns_of([after])
        inherited(one, old)
        heir = one
        if self.scored is not self.genes:  # children inherit weights from before training, but those set by the edit
            heir = untrained(one, old, take(self.genes, np.array([key.index])))
        self._put(key.index, why, one, heir, "human")

    def _put(self, index: int, why: str, one: Any, heir: Any, author: str) -> None:
        """Score the genome `one` and replace an individual by it; children inherit the weights of `heir`."""
        assert self.fitness is not None
        scores = self.task.score(self.population(one))
        fitness, metric = float(scores.fitness[0]), float(scores.metric[0])
        self.counters.add(scores, 1)
        if not np.isfinite(fitness):
            self.counters.failed += 1
            key = self.lineage.latest(self.generation, index)
            self.failures.append(f"{key}, {why}: {scores.failures.get(0, f'fitness is {fitness}')}")
            fitness = metric = -np.inf
        if self.scored is not self.genes:
            self._trained = replaced(self._trained, index, one)
        self.genes, self._table = replaced(self.genes, index, heir), None
        self.fitness, self.metric = self.fitness.copy(), self.metric.copy()
        self.fitness[index], self.metric[index] = fitness, metric
        self.species.note(self.fitness, self.generation)
        self._record_best(self.lineage.edit(ManualEdit(index, why, one, fitness, metric, author)), fitness)

    # -- islands -----------------------------------------------------------------------------------------------------
    @property
    def scored_generations(self) -> int:
        """The number of generations that were scored."""
        return self.generation + (self.fitness is not None)

    def emigrants(self, count: int) -> Emigrants:
        """Return copies of the fittest individuals, best first."""
        assert self.fitness is not None
        which = np.argsort(-self.fitness, kind="stable")[:count]
        names = [f"generation {self.generation}, index {g}" for g in which.tolist()]
        return Emigrants(take(self.scored, which), take(self.genes, which), self.registry, names)

    def immigrate(self, arriving: Emigrants, origin: str) -> None:
        """Replace the least fit individuals by copies of those of another run, renumbered and scored again."""
        assert self.fitness is not None
        merged, numbers = merge(self.registry, arriving.registry)
        self.registry = merged
        ones, heirs = renumbered(arriving.scored, numbers), renumbered(arriving.heirs, numbers)
        worst = np.argsort(self.fitness, kind="stable")[: len(arriving.names)].tolist()
        for k, (index, name) in enumerate(zip(worst, arriving.names, strict=True)):
            one = take(ones, np.array([k]))
            heir = take(heirs, np.array([k])) if self.scored is not self.genes else one
            self._put(index, f"{origin}, {name}", one, heir, "migration")

    def state(self, since: int | None = None) -> dict[str, Any]:
        """Return what another process needs to continue the run, for `adopt`.

        With `since`, return what a process that has the first `since` generations needs.
        """
        keys = (self.best, self.solution, self._shown and self._shown[0])
        past = {"log": self.log[-1:], "lineage": self.lineage.recent(keys)}
        if since is not None:
            past = {
                "log": self.log[len(self.log) - self.scored_generations + since :],
                "lineage": self.lineage.since(since),
            }
        return {name: getattr(self, name) for name in _STATE} | past

    def adopt(self, state: dict[str, Any]) -> None:
        """Continue from a state: that of another process, in a run without generations; else one since the last."""
        for name in _STATE:
            setattr(self, name, state[name])
        self.log += state["log"]
        if len(self.lineage):
            self.lineage.extend(state["lineage"])
        else:
            self.lineage = state["lineage"]
        self._table = None

    # -- one generation ----------------------------------------------------------------------------------------------
    def _evaluate(self, aim: float | None) -> None:
        s, count = self.settings, self.settings.population
        if s.train is not None:
            self._prepare()
        if self.pool is not None and self._sends:
            scores = self._scorer.by_workers(self.scored, self.generation, self.pool)
        else:
            scores = self._scorer.score(self.scored, self.table, self.generation)
        if s.train is not None:
            self.counters.backward += count * s.train.steps * self.task.lesson().cases.count * self.task.steps
        fitness, metric, finite = scores.fitness, scores.metric, np.isfinite(scores.fitness)
        scored = fitness
        if not finite.all():
            scored = fitness[finite]
            fitness, metric = np.where(finite, fitness, -np.inf), np.where(finite, metric, -np.inf)
            self._record_failures(scores, fitness)
        if not self.generation and (getattr(self.task, "fitness", None) or getattr(self.task, "fitness_batch", None)):
            self._warn_if_noisy(fitness)
        self.counters.add(scores, count)
        self.fitness, self.metric = fitness, metric
        self.species.note(fitness, self.generation)
        self.lineage.add(self.scored, self.births, self.species.ids[self.species.of], fitness, metric)
        top = int(fitness.argmax())
        best = self._record_best(IndividualKey(self.generation, top), fitness[top])
        if aim is not None and np.fmax.reduce(metric) >= aim:
            self._confirm(aim, fitness, metric)
        shown = best if self.solution is None else self.solution
        if self._shown is None or self._shown[0] != shown:
            self._shown = (shown, self.lineage.birth(shown).metric, *self.lineage.size(shown))
        _, reached, hidden, links = self._shown
        numbers, sizes = self.species.ids.tolist(), self.species.sizes.tolist()
        self.log.append(NeuronGeneration(
            self.generation, float(fitness[top]), _median(scored), reached, hidden, links,
            dict(zip(numbers, sizes, strict=True)), count - len(scored), float(self.species.threshold),
        ))  # fmt: skip

    def _record_best(self, key: IndividualKey, fitness: float) -> IndividualKey:
        """Update the key of the fittest individual so far, and return it."""
        if self.best is None or fitness > self.lineage.birth(self.best).fitness:
            self.best, self.gained = key, self.generation
            self.lineage.pinned.add(key)
        return self.best

    def _warn_if_noisy(self, fitness: np.ndarray) -> None:
        """Warn if a user's fitness function returns a different value for the best genome in a second call."""
        top = int(np.argmax(fitness))
        scores = self.task.score(self.population(take(self.scored, np.array([top]))))
        self.counters.forward += scores.passes
        again = float(scores.fitness[0])
        if again != fitness[top] and np.isfinite(again):
            text = f"{self.task.name}: the fitness of one genome was {float(fitness[top])!r}, then {again!r}"
            warnings.warn(NoisyFitness(text), stacklevel=4)

    def _confirm(self, aim: float, fitness: np.ndarray, metric: np.ndarray) -> None:
        """Of the three fittest individuals that reach the target, record the first one that the task confirms."""
        reached = np.flatnonzero(metric >= aim)
        for g in reached[np.argsort(-fitness[reached], kind="stable")][:3].tolist():
            trial = self.task.confirm(self.population(take(self.scored, np.array([g]))))
            self.counters.add(trial)
            if trial.passed:
                self.solution = self.lineage.latest(self.generation, g)
                self.lineage.pinned.add(self.solution)
                return

    @property
    def _shared(self) -> Scorer:
        return self._scorer

    @property
    def _sends(self) -> bool:
        return self._scorer.foreign or self._scorer.seconds >= MIN_SECONDS

    def _prepare(self) -> None:
        """Prepare genes for training: for `inherit` "baldwin" copy them, for "none" redraw weights."""
        s, genes = self.settings, self.genes
        if not self.warned and len(blocked := blocked_links(genes, self.task.inputs, self.task.outputs)):
            self.warned = True
            of = np.searchsorted(genes.link_off, blocked, "right") - 1
            names = [f"link {genes.link_id[e]} of genome {g}" for e, g in zip(blocked, of, strict=True)]
            warn_of_blocked(f"{self.task.name}, generation {self.generation}", names, stacklevel=5)
        if s.inherit == "baldwin":
            genes = type(genes)(*(column.copy() for column in genes))
            self._trained = genes
        elif s.inherit == "none" and self.generation:
            rng = np.random.Generator(np.random.Philox(key=[self.seed, (_REDRAW << 32) | self.generation]))
            scale = 1.0 / np.sqrt(self.task.inputs)
            genes.weight[:] = rng.normal(size=len(genes.weight)) * scale
            for moments in (genes.first, genes.second, genes.steps):
                moments[:] = 0

    @property
    def scored(self) -> Any:
        """The genes that were scored: with trained weights, even if children inherit weights from before training."""
        keeps = self.settings.train is not None and self.settings.inherit == "baldwin"
        return self._trained if keeps else self.genes

    def _reproduce(self) -> None:
        from graphwright.array.population.species import representatives
        from graphwright.array.population.table import Past

        assert self.fitness is not None
        s, silent, table = self.settings, self.generation - self.gained, self._table
        chosen = representatives(self.species.of, len(self.species), self.seed, self.generation)
        old = self.genes
        self.genes, self.births, self.registry = self._nursery.children(
            old, self.fitness, self.species, self.registry, self.generation + 1, silent
        )
        past = () if table is None else (Past(old, table, self.births.fitter_parent),)
        self._table = None if self.pool is not None and self._sends else self._scorer.tabulate(self.genes, *past)
        for name, count in zip(MUTATIONS, self.births.refused.tolist(), strict=True):
            if count:
                self.counters.refuse(name, count)
        self.generation += 1
        self.species = self.species.next(old, chosen, self.genes, s, self.generation)
        self.fitness = None

    def _burst(self, nursery: Breeder) -> None:
        from graphwright.array.population.species import Parents

        count = self.settings.population
        each = np.arange(count)
        alone = Parents(np.full(count, -1), each, np.arange(count + 1), each)
        for k in range(self.settings.burst):
            stream = (1 << 30) + k
            self.genes, _, self.registry = nursery.breed(self.genes, np.zeros(count), alone, self.registry, stream)

    # -- bookkeeping -------------------------------------------------------------------------------------------------
    def _record_failures(self, scores: Scores, fitness: np.ndarray) -> None:
        """Record genomes without a finite fitness. Raises: EvaluationFailed if they are more than half."""
        failed = np.flatnonzero(~np.isfinite(fitness))
        here, given = f"generation {self.generation}, genome", scores.failures
        texts = [f"{here} {g} ({birth_text(self.births, g)}): {given.get(g, f'fitness is {scores.fitness[g]}')}"
                 for g in failed.tolist()]  # fmt: skip
        self.counters.failed += len(failed)
        self.failures += texts[: max(0, 100 - len(self.failures))]
        self._check_failures(len(fitness), texts, "fitness")

    def _progress(self, generations: int | None, evaluations: int | None) -> Progress:
        line, c = self.log[-1], self.counters
        facts = {"best": line.best, self.task.metric: line.metric, "species": float(len(line.species)),
                 "hidden": float(line.hidden), "evaluations/s": c.evaluations / max(c.seconds, 1e-9)}  # fmt: skip
        return Progress("evolve", len(self.log), generations or len(self.log), facts)


def _median(values: np.ndarray) -> float:
    """Return the median, or -inf if there are no values; `numpy.median` is slower."""
    ordered = np.sort(values)
    return float((ordered[(len(ordered) - 1) // 2] + ordered[len(ordered) // 2]) / 2) if len(ordered) else -np.inf


def _ready() -> None:
    """Wait until the code of populations is built; if it cannot be, its loops are compiled at their first use."""
    from graphwright.array.population.warmup import part  # loads numba

    part.wait()
