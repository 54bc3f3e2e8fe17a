"""How each genome of a generation came to be. Plain numpy: no numba is loaded."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from graphwright.array.population.names import MUTATIONS


class Births(NamedTuple):
    """One row per genome.

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


def founders(count: int) -> Births:
    """Nobody's children."""
    mother, father, site = np.full((3, count), -1, np.int32)
    return Births(mother, father, np.zeros(count, np.int8), site, np.zeros(len(MUTATIONS), np.int64))
