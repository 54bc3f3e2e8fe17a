"""From one generation to the next: who breeds and what is copied is decided here, the children are one native call."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from graphwright.array.population.names import ACTIVATIONS, MUTATIONS
from graphwright.evolve.genomes import with_room
from graphwright.evolve.settings import NEAT
from graphwright.evolve.species import Species, breeding, offspring

_CHOICE = 2  # purpose of the stream that picks representatives


@dataclass(frozen=True, slots=True)
class Births:
    """How each genome of a generation came to be.

    Attributes:
        mother, father: int32 [G]; places in the generation before; -1 for founders, or without a father. The structure
            is the mother's.
        mutation: int8 [G]; an index of `MUTATIONS`; site: int32 [G]; innovation number of the gene, or -1.
        refused: int64; per mutation, how often it could not be made.
    """

    mother: np.ndarray
    father: np.ndarray
    mutation: np.ndarray
    site: np.ndarray
    refused: np.ndarray

    @staticmethod
    def founders(count: int) -> Births:
        """Nobody's children."""
        none = np.full(count, -1, np.int32)
        return Births(none, none, np.zeros(count, np.int8), none, np.zeros(len(MUTATIONS), np.int64))


@lru_cache(maxsize=16)
def rates(settings: NEAT) -> Any:
    """The settings as the native loop takes them."""
    from graphwright.array.population.breed import WHOLE, Rates

    values = {name: getattr(settings, name) for name in Rates._fields if hasattr(settings, name)}
    if not settings.growth:
        values |= dict.fromkeys(("grow", "split_link", "add_link"), 0.0)
    if not settings.crossover:
        values["mutate_only"] = 1.0
    typed: dict[str, Any] = {name: int(v) if name in WHOLE else float(v) for name, v in values.items()}
    return Rates(**typed)


def children(
    genes: Any,
    fitness: np.ndarray,
    species: Species,
    settings: NEAT,
    registry: Any,
    inputs: int,
    outputs: int,
    seed: int,
    generation: int,
    silent: int,
) -> tuple[Any, Births, Any]:
    """The next generation: its genes, how they came to be, and the registry with room for what was new.

    Args:
        fitness: float64 [G]; -inf for those that have none.
        generation: number of the next one.
        silent: generations in which the best did not gain.
    """
    breeds = breeding(species, settings, generation - 1, silent)
    counts = offspring(fitness, species.of, breeds, settings.population)
    order = np.lexsort((np.arange(len(fitness)), -fitness, species.of))
    sizes = species.sizes
    starts = np.cumsum(sizes) - sizes
    kept = np.maximum(1, np.ceil(settings.survival * sizes).astype(np.int64))
    rank = np.arange(len(order)) - np.repeat(starts, sizes)
    survives = (rank < np.repeat(kept, sizes)) & np.repeat(counts > 0, sizes)
    pool = order[survives]
    pool_off = np.concatenate([[0], np.cumsum(np.where(counts > 0, kept, 0))])
    child_species = np.repeat(np.arange(len(species)), counts)
    elite = np.full(settings.population, -1, np.int64)
    if settings.champions:
        copies = (counts > 0) & (sizes > settings.champions)
        elite[(np.cumsum(counts) - counts)[copies]] = order[starts[copies]]
    else:
        best = int(np.argmax(fitness))
        elite[(np.cumsum(counts) - counts)[species.of[best]]] = best
    return breed(
        genes, fitness, elite, child_species, pool_off, pool, settings, registry, inputs, outputs, seed, generation
    )


def breed(
    genes: Any,
    fitness: np.ndarray,
    elite: np.ndarray,
    child_species: np.ndarray,
    pool_off: np.ndarray,
    pool: np.ndarray,
    settings: NEAT,
    registry: Any,
    inputs: int,
    outputs: int,
    seed: int,
    generation: int,
) -> tuple[Any, Births, Any]:
    """The native call: children of the parents in `pool`, best first, by species; see `array.population.breed`."""
    from graphwright.array.population import breed as native
    from graphwright.array.population.genes import Genes

    count = len(elite)
    unit = inputs + 1 + outputs  # links of a grown unit
    registry = with_room(registry, count * (unit + 4) + 64)
    most_nodes, most_links = int(np.diff(genes.node_off).max()) + 1, int(np.diff(genes.link_off).max()) + max(unit, 2)
    ints, floats = (
        np.empty((7, count * max(most_nodes, most_links)), np.int32),
        np.empty((4, count * most_links), np.float32),
    )
    out = Genes(np.empty(count + 1, np.int64), ints[0], ints[1], np.empty(count + 1, np.int64), *ints[2:], *floats)
    record = native.Record._make([*(np.empty(count, np.int64) for _ in range(4)), np.zeros(len(MUTATIONS), np.int64)])
    acts = np.array([ACTIVATIONS.index(name) for name in settings.hidden], np.int32)
    native.breed(
        genes, fitness, elite, child_species, pool_off, pool, out, record, registry, rates(settings), acts, inputs,
        outputs, seed, generation, *native.scratch(most_nodes),
    )  # fmt: skip
    nodes, links = out.node_off[-1], out.link_off[-1]
    node_columns, link_columns = ([c[:n].copy() for c in part] for n, part in ((nodes, out[1:3]), (links, out[4:])))
    trimmed = Genes._make([out.node_off, *node_columns, out.link_off, *link_columns])
    births = Births(
        record.mother.astype(np.int32),
        record.father.astype(np.int32),
        record.mutation.astype(np.int8),
        record.site.astype(np.int32),
        record.refused,
    )
    return trimmed, births, registry


def representatives(species: Species, seed: int, generation: int) -> np.ndarray:
    """A random member of each species, int64 [S]."""
    rng = np.random.Generator(np.random.Philox(key=[seed, (_CHOICE << 32) | generation]))
    sizes = species.sizes
    picks = (rng.random(len(sizes)) * sizes).astype(np.int64)
    return species.of.argsort(kind="stable")[sizes.cumsum() - sizes + picks]
