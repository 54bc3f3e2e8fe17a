"""The births of a generation: parents and mutation of each genome. Plain numpy: no numba is loaded."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from graphwright.array.population.names import MUTATIONS


class Births(NamedTuple):
    """One row per genome.

    Attributes:
        fitter_parent, other_parent: int32 [G]; indices in the previous generation, -1 for none. A child has the
            structure of its fitter parent.
        mutation: int8 [G]; an index of `MUTATIONS`; site: int32 [G]; innovation number of the gene, or -1.
        refused: int64; per mutation, how often it could not be made.
    """

    fitter_parent: np.ndarray
    other_parent: np.ndarray
    mutation: np.ndarray
    site: np.ndarray
    refused: np.ndarray


def founders(count: int) -> Births:
    """The births of founders, which have no parents."""
    fitter, other, site = np.full((3, count), -1, np.int32)
    return Births(fitter, other, np.zeros(count, np.int8), site, np.zeros(len(MUTATIONS), np.int64))
