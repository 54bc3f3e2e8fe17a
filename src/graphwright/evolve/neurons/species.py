"""Species of genomes: assignment of genomes to species, selection of the species that breed, and reproduction.

Source: Stanley and Miikkulainen 2002, sections 3.3 and 4.1. All functions work on arrays of whole generations.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import numpy as np

from graphwright.array.population.names import ACTIVATIONS, Births, founders
from graphwright.evolve.neurons.genomes import with_room
from graphwright.evolve.settings import NEAT, STRUCTURAL

_STEP, _LEAST = 0.3, 0.3  # step of the threshold towards `target_species`, and its lower bound


@cache
def _loops() -> Any:
    """Return the module of compiled loops over species; importing it loads numba."""
    from graphwright.array.population import species

    return species


@dataclass(slots=True)
class Species:
    """The species of a generation, oldest first.

    Attributes:
        of: int64 [G]; index of the species of each genome.
        ids: int64 [S]; number of each species, which is never reused.
        best: float64 [S]; best fitness so far; gained: int64 [S]; the generation in which it was reached.
        threshold: current threshold of the compatibility distance δ.
        next_id: number of the next new species.
    """

    of: np.ndarray
    ids: np.ndarray
    best: np.ndarray
    gained: np.ndarray
    threshold: float
    next_id: int

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def sizes(self) -> np.ndarray:
        """The number of genomes in each species."""
        return np.bincount(self.of, minlength=len(self))

    def note(self, fitness: np.ndarray, generation: int) -> None:
        """Update the best fitness of each species and the generation in which it was reached."""
        _loops().note(self.of, fitness, generation, self.best, self.gained)

    @staticmethod
    def founders(genes: Any, settings: NEAT, generation: int = 0) -> Species:
        """Form the species of the first generation."""
        none = np.zeros(0, np.int64)
        empty = Species(none, none, np.zeros(0), none, settings.threshold, 0)
        return empty.next(genes, none, genes, settings, generation)

    def next(self, old: Any, representatives: np.ndarray, genes: Any, settings: NEAT, generation: int) -> Species:
        """Assign the genomes of the next generation to species, and drop empty species.

        Args:
            old: genomes of this generation; representatives: index in `old` of one genome per species.
            genes, generation: the next generation and its number.
        """
        if settings.species:
            of, made = _loops().speciate(old, representatives, genes, self.threshold, coefficients(settings))
        else:
            of, made = np.zeros(len(genes.node_off) - 1, np.int64), 0 if len(self) else 1
        ids, best, gained = _loops().survivors(of, made, self.ids, self.best, self.gained, self.next_id, generation)
        threshold = self.threshold
        if settings.target_species is not None:
            gap = len(ids) - settings.target_species
            threshold = max(_LEAST, threshold + _STEP * (gap > 0) - _STEP * (gap < 0))
        return Species(of, ids, best, gained, threshold, self.next_id + made)


def coefficients(settings: NEAT) -> Any:
    """Return c1 to c4, the coefficients of the distance δ, as the tuple that the compiled loops take."""
    return _loops().Coefficients(float(settings.c1), float(settings.c2), float(settings.c3), float(settings.c4))


def distance(a: Any, b: Any, settings: NEAT) -> np.ndarray:
    """Compute the distance δ between all genomes of two populations: float64 [genomes of a, genomes of b]."""
    return _loops().distances(a, b, coefficients(settings))


def breeding(species: Species, settings: NEAT, generation: int, silent: int) -> np.ndarray:
    """Return a mask of the species that breed, bool [S]: those that improved recently, and the best species.

    Args:
        species: the species; settings: settings of the run; generation: the current generation.
        silent: number of generations since the population improved. When it becomes `silence` + 1, only the two best
            species breed and count as newly improved, so the search restarts from them.
    """
    breeds = generation - species.gained < settings.stagnation
    breeds[np.argmax(species.best)] = True
    if silent == settings.silence + 1:
        best = np.argsort(-species.best, kind="stable")[:2]
        breeds[:], breeds[best] = False, True
        species.gained[best] = generation
    return breeds


def rates(settings: NEAT) -> Any:
    """Convert the settings to the `Rates` tuple that the compiled breeding loop takes."""
    from graphwright.array.population.breed import WHOLE, Rates

    values = {name: getattr(settings, name) for name in Rates._fields if hasattr(settings, name)}
    if not settings.growth:
        values |= dict.fromkeys(("grow", "split_link", "add_link"), 0.0)
    if not settings.crossover:
        values["mutate_only"] = 1.0
    typed: dict[str, Any] = {name: int(v) if name in WHOLE else float(v) for name, v in values.items()}
    return Rates(**typed)


def founding(settings: NEAT) -> NEAT:
    """Return settings that give each child one structural mutation, even if `growth` is False, for start="random"."""
    left, hits = 1.0, {}
    for name in STRUCTURAL:
        hits[name] = left * getattr(settings, name)
        left -= hits[name]
    rest, shares = sum(hits.values()), {}
    for name, hit in hits.items():
        shares[name] = min(1.0, hit / rest) if hit else 0.0
        rest -= hit
    return replace(settings, weights=0.0, growth=True, **shares)


class Breeder:
    """A breeder of generations, which reuses buffers, since allocating new pages takes longer than writing to them.

    Args:
        settings, seed: settings and seed of the run; inputs, outputs: numbers of inputs and outputs of a genome.
    """

    def __init__(self, settings: NEAT, inputs: int, outputs: int, seed: int) -> None:
        self.settings, self._sizes, self._seed = settings, (inputs, outputs), seed
        self._unit = inputs + 1 + outputs  # links of a grown unit
        self._rates = rates(settings)
        self._acts = np.array([ACTIVATIONS.index(name) for name in settings.hidden], np.int32)
        self._space = _space(0, 0)
        self._columns: Any = ()
        self._scratch: Any = ()

    def children(
        self, genes: Any, fitness: np.ndarray, species: Species, registry: Any, generation: int, silent: int
    ) -> tuple[Any, Births, Any]:
        """Breed the next generation; return its genes, their births, and the registry with the new numbers.

        Args:
            genes, species: the current generation; fitness: float64 [G], -inf for failed genomes.
            registry: innovation numbers; generation: index of the next generation; silent: see `breeding`.
        """
        s, loops = self.settings, _loops()
        breeds = breeding(species, s, generation - 1, silent)
        counts = loops.offspring(fitness, species.of, breeds, s.population)
        of = loops.parents(fitness, species.of, counts, s.population, s.survival, s.champions)
        return self.breed(genes, fitness, of, registry, generation)

    def breed(
        self, genes: Any, fitness: np.ndarray, of: Any, registry: Any, generation: int
    ) -> tuple[Any, Births, Any]:
        """Breed the children whose parents the `Parents` tuple `of` lists; return the same values as `children`."""
        from graphwright.array.population.breed import breed, largest

        count = len(of.elite)
        registry = with_room(registry, count * (self._unit + 4) + 64)
        nodes, links = largest(genes)
        out, births = self._room(count, nodes + 1, links + max(self._unit, 2)), founders(count)
        breed(genes, fitness, of, out, births, registry, self._rates, self._acts, *self._sizes, self._seed, generation,
              *self._scratch)  # fmt: skip
        ends = int(out.node_off[-1]), int(out.link_off[-1]), int(out.link_off[-1])
        ids, ints, floats = (part[:, :end].copy() for part, end in zip(self._space, ends, strict=True))
        return out._make((out.node_off, *ids, out.link_off, *ints, *floats)), births, registry

    def _room(self, children: int, nodes: int, links: int) -> Any:
        """Return output arrays with room for `children` genomes of at most `nodes` nodes and `links` links each."""
        from graphwright.array.population.breed import scratch
        from graphwright.array.population.genes import Genes

        if self._space[0].shape[1] < children * nodes or self._space[1].shape[1] < children * links:
            nodes, links = 2 * children * nodes, 2 * children * links
            self._space, self._scratch = _space(nodes, links), scratch(nodes)
            self._columns = tuple(tuple(part) for part in self._space)
        ids, ints, floats = self._columns
        offsets = [np.empty(children + 1, np.int64) for _ in range(2)]
        return Genes._make((offsets[0], *ids, offsets[1], *ints, *floats))


def _space(nodes: int, links: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    return np.empty((2, nodes), np.int32), np.empty((5, links), np.int32), np.empty((4, links), np.float32)
