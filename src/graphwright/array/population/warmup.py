"""Compilation of the loops of populations before their first use; numba caches the loops on disk."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from graphwright.array.population import breed as breeding
from graphwright.array.population import species
from graphwright.array.population.genes import SOURCES, Genes, Registry, number_of
from graphwright.array.population.names import founders
from graphwright.array.population.poles import act
from graphwright.array.population.runner import Cases, Lesson, Session, fit, outputs
from graphwright.array.population.table import tabulate
from graphwright.builds import Part
from graphwright.native import marker


def warmup() -> None:
    """Compile all loops by running each on two genomes with one input: score, train, compare, breed."""
    floats = [np.zeros(4, np.float32) for _ in range(4)]
    links = [np.array(v, np.int32) for v in ([3, 4] * 2, [0, 1] * 2, [2] * 4, [0] * 4, [1] * 4)]
    nodes = np.full(2, 2, np.int32), np.zeros(2, np.int32)
    genes = Genes(np.arange(3, dtype=np.int64), *nodes, np.array([0, 2, 4]), *links, *floats)
    registry = Registry(np.zeros((64, 4), np.int64), np.full(128, -1, np.int64), np.zeros(1, np.int64))
    for key in ((0, 0, 0, 0), (1, 0, 0, 0), (2, 0, 0, 0), (3, 0, 2, 0), (3, 1, 2, 0)):
        number_of(registry, *key)
    x = np.zeros((2, 1))
    table = tabulate(genes, 1, 1)
    outputs(table, genes, Cases.of(x))
    Session(table, genes, 1, 1).step(np.zeros((2, 1, 1), np.float32))
    act(np.zeros((1, 6)), np.zeros(1), 0.0, np.zeros(1, bool))
    fit(table, genes, Lesson.of(x, x, "mse"), np.ones(2, np.int64), np.zeros(2))
    c = species.Coefficients(1.0, 1.0, 1.0, 1.0)
    species.distances(genes, genes, c)
    of, _ = species.speciate(genes, np.zeros(1, np.int64), genes, 3.0, c)
    _, best, gained = species.survivors(of, 0, np.zeros(1, np.int64), np.zeros(1), np.zeros(1, np.int64), 1, 0)
    species.note(of, np.zeros(2), 0, best, gained)
    out = Genes._make(np.zeros(32, column.dtype) for column in genes)
    of = np.zeros(2, np.int64)
    counts = species.offspring(np.zeros(2), of, np.ones(1, bool), 2)
    species.representatives(of, 1, 0, 1)
    rates = breeding.Rates._make((int if n in breeding.WHOLE else float)(1) for n in breeding.Rates._fields)
    breeding.largest(genes)
    breeding.breed(
        genes, np.zeros(2), species.parents(np.zeros(2), of, counts, 2, 1.0, 0), out, founders(2), registry, rates,
        np.zeros(1, np.int32), 1, 1, 0, 1,
        *breeding.scratch(1),
    )  # fmt: skip


def _marker() -> Path:
    breed: Any = breeding.breed
    return marker("populations", getattr(breed, "py_func", breed), *SOURCES)  # it is plain Python without the JIT


part = Part("the code of populations", f"{__name__}:part", warmup, _marker)
