"""Species: who belongs to which, which of them breed, and how many children each has.

Source: Stanley and Miikkulainen 2002, sections 3.3 and 4.1. All of it is numpy on whole generations.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from graphwright.evolve.settings import NEAT

_STEP, _LEAST = 0.3, 0.3  # by which a threshold moves towards `target_species`, and where it ends


@dataclass(slots=True)
class Species:
    """The species of a generation; rows are in order of age.

    Attributes:
        of: int64 [G]; the row of each genome's species.
        ids: int64 [S]; numbers that stay.
        best: float64 [S]; best fitness so far; gained: int64 [S]; the generation that brought it.
        threshold: of δ, as it is now.
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
        """Genomes per species."""
        return np.bincount(self.of, minlength=len(self))

    def note(self, fitness: np.ndarray, generation: int) -> None:
        """Keep the best fitness of each species, and when it came."""
        from graphwright.array.population.deal import note

        note(self.of, fitness, generation, self.best, self.gained)

    @staticmethod
    def founders(genes: Any, settings: NEAT, generation: int = 0) -> Species:
        """Species of the first generation."""
        none = np.zeros(0, np.int64)
        empty = Species(none, none, np.zeros(0), none, settings.threshold, 0)
        return empty.next(genes, none, genes, settings, generation)

    def next(self, old: Any, representatives: np.ndarray, genes: Any, settings: NEAT, generation: int) -> Species:
        """Species of the next generation; those that nobody belongs to any more are gone.

        Args:
            old, representatives: a genome of `old` per species of this generation.
        """
        from graphwright.array.population.deal import survivors

        count = len(genes.node_off) - 1
        if settings.species:
            from graphwright.array.population.compare import Coefficients, speciate

            c = Coefficients(float(settings.c1), float(settings.c2), float(settings.c3), float(settings.c4))
            of, made = speciate(old, representatives, genes, self.threshold, c)
        else:
            of, made = np.zeros(count, np.int64), 0 if len(self) else 1
        ids, best, gained = survivors(of, made, self.ids, self.best, self.gained, self.next_id, generation)
        threshold = self.threshold
        if settings.target_species is not None:
            gap = len(ids) - settings.target_species
            threshold = max(_LEAST, threshold + _STEP * (gap > 0) - _STEP * (gap < 0))
        return Species(of, ids, best, gained, threshold, self.next_id + made)


def distance(a: Any, b: Any, settings: NEAT) -> np.ndarray:
    """δ between all genomes of two populations, float64 [G of a, G of b]."""
    from graphwright.array.population.compare import Coefficients, distances

    return distances(a, b, Coefficients(float(settings.c1), float(settings.c2), float(settings.c3), float(settings.c4)))


def breeding(species: Species, settings: NEAT, generation: int, silent: int) -> np.ndarray:
    """Which species breed, bool [S]: not those without gain for long, but always the one that holds the best.

    Args:
        silent: generations in which the population's best did not gain. When these are more than `silence`, the two
            best species alone breed, once, and count as new: the search starts again from them.
    """
    breeds = generation - species.gained < settings.stagnation
    breeds[np.argmax(species.best)] = True
    if silent == settings.silence + 1:
        order = np.argsort(-species.best, kind="stable")
        breeds[:] = False
        breeds[order[:2]] = True
        species.gained[order[:2]] = generation
    return breeds
