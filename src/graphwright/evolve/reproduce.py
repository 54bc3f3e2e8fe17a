"""From one generation to the next: who breeds and what is copied is decided here, the children are one native call."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np

from graphwright.array.population.births import Births, founders
from graphwright.array.population.names import ACTIVATIONS
from graphwright.evolve.genomes import with_room
from graphwright.evolve.settings import NEAT
from graphwright.evolve.species import Species, breeding


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
    from graphwright.array.population.deal import offspring, parents

    breeds = breeding(species, settings, generation - 1, silent)
    counts = offspring(fitness, species.of, breeds, settings.population)
    of = parents(fitness, species.of, counts, settings.population, settings.survival, settings.champions)
    return breed(genes, fitness, of, settings, registry, inputs, outputs, seed, generation)


def breed(
    genes: Any, fitness: np.ndarray, of: Any, settings: NEAT, registry: Any, inputs: int, outputs: int, seed: int,
    generation: int,
) -> tuple[Any, Births, Any]:  # fmt: skip
    """The native call: children of `Parents`; see `array.population.breed`."""
    from graphwright.array.population import breed as native
    from graphwright.array.population.genes import Genes

    count = len(of.elite)
    unit = inputs + 1 + outputs  # links of a grown unit
    registry = with_room(registry, count * (unit + 4) + 64)
    most_nodes = int((genes.node_off[1:] - genes.node_off[:-1]).max()) + 1
    most_links = int((genes.link_off[1:] - genes.link_off[:-1]).max()) + max(unit, 2)
    ints = np.empty((7, count * max(most_nodes, most_links)), np.int32)
    floats = np.empty((4, count * most_links), np.float32)
    out = Genes(np.empty(count + 1, np.int64), *ints[:2], np.empty(count + 1, np.int64), *ints[2:], *floats)
    births = founders(count)
    acts = np.array([ACTIVATIONS.index(name) for name in settings.hidden], np.int32)
    native.breed(
        genes, fitness, of, out, births, registry, rates(settings), acts, inputs, outputs, seed, generation,
        *native.scratch(most_nodes),
    )  # fmt: skip
    nodes, links = out.node_off[-1], out.link_off[-1]
    node_columns, link_columns = ([c[:n].copy() for c in part] for n, part in ((nodes, out[1:3]), (links, out[4:])))
    return Genes._make([out.node_off, *node_columns, out.link_off, *link_columns]), births, registry
