"""The genomes of a population as columns, and the registry of innovation numbers.

The columns are `Genes` of `array.population`; this module is numpy on them. A single genome is a population of one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from graphwright.array.population.names import ACTIVATIONS, LINK_COLUMNS, NODE_COLUMNS
from graphwright.evolve.errors import RegistryConflict
from graphwright.evolve.settings import NEAT

IN, BIAS, OUT, LINK, SPLIT, UNIT, MANUAL = range(7)
"""Kinds of registry keys: those of `array.population.genes`, and (MANUAL, digest of links, k) for manual neurons."""


class NodeGene(NamedTuple):
    """A node gene: innovation number, activation."""

    id: int
    activation: str


class LinkGene(NamedTuple):
    """A link gene: innovation number, ends, delay in steps, open or closed, weight."""

    id: int
    src: int
    dst: int
    delay: int
    open: bool
    weight: float


@dataclass(frozen=True, slots=True)
class Genome:
    """One genome as tuples.

    Attributes:
        inputs, outputs: counts; inputs are nodes 0 to inputs - 1, then the bias, then the outputs.
        nodes: outputs, then hidden nodes, sorted by number.
        links: sorted by number.
    """

    inputs: int
    outputs: int
    nodes: tuple[NodeGene, ...]
    links: tuple[LinkGene, ...]

    @property
    def hidden(self) -> int:
        """The number of hidden nodes."""
        return len(self.nodes) - self.outputs

    @property
    def open_links(self) -> int:
        """The number of open links."""
        return sum(link.open for link in self.links)

    def node(self, number: int) -> NodeGene:
        """The node gene with a number. Raises: KeyError."""
        return {n.id: n for n in self.nodes}[number]


def genome(genes: Any, g: int, inputs: int, outputs: int) -> Genome:
    """Read genome g of a population."""
    n, e = slice(genes.node_off[g], genes.node_off[g + 1]), slice(genes.link_off[g], genes.link_off[g + 1])
    nodes = zip(genes.node_id[n].tolist(), genes.node_act[n].tolist(), strict=True)
    columns = (genes.link_id, genes.link_src, genes.link_dst, genes.link_delay, genes.link_open, genes.weight)
    links = zip(*(c[e].tolist() for c in columns), strict=True)
    there = tuple(LinkGene(i, s, d, k, bool(o), w) for i, s, d, k, o, w in links)
    return Genome(inputs, outputs, tuple(NodeGene(i, ACTIVATIONS[a]) for i, a in nodes), there)


def columns_of(genomes: list[Genome]) -> Any:
    """Make a population of single genomes, with zero moments."""
    from graphwright.array.population.genes import Genes

    nodes, links = [n for g in genomes for n in g.nodes], [e for g in genomes for e in g.links]

    ends = np.cumsum([0, *(len(g.nodes) for g in genomes)]), np.cumsum([0, *(len(g.links) for g in genomes)])
    acts = [ACTIVATIONS.index(n.activation) for n in nodes]
    node_columns = np.array([[n.id for n in nodes], acts], np.int32)
    whole = np.array([e[:5] for e in links], np.int32).reshape(-1, 5).T.copy()
    real = np.zeros((4, len(links)), np.float32)
    real[0] = [e.weight for e in links]
    return Genes._make((ends[0], *node_columns, ends[1], *whole, *real))


def minimal(inputs: int, outputs: int, count: int, settings: NEAT, seed: int) -> tuple[Any, Any]:
    """Make founders and their registry: inputs and bias connected to all outputs with weights N(0, power²)."""
    registry, first = new_registry(inputs, outputs), inputs + 1
    ends = [(src, first + out) for out in range(outputs) for src in range(first)]
    links = tuple(LinkGene(number(registry, LINK, *both, 0), *both, 0, True, 0.0) for both in ends)
    nodes = tuple(NodeGene(first + out, settings.output) for out in range(outputs))
    genes = take(columns_of([Genome(inputs, outputs, nodes, links)]), np.zeros(count, np.int64))
    rng = np.random.Generator(np.random.Philox(key=[seed, 0]))
    scale = settings.power if settings.train is None else 1.0 / np.sqrt(max(inputs, 1))
    genes.weight[:] = np.clip(rng.normal(size=count * len(links)) * scale, -settings.most, settings.most)
    return genes, registry


def empty_registry(keys: int = 0) -> Any:
    """Make an empty registry with room for at least so many keys."""
    from graphwright.array.population.genes import Registry

    capacity = max(1024, 1 << max(keys - 1, 0).bit_length())
    return Registry(np.zeros((capacity, 4), np.int64), np.full(2 * capacity, -1, np.int64), np.zeros(1, np.int64))


def new_registry(inputs: int, outputs: int) -> Any:
    """Make a registry with inputs, bias and outputs, in this order."""
    registry = empty_registry(inputs + outputs + 1)
    for key in (*((IN, i) for i in range(inputs)), (BIAS,), *((OUT, i) for i in range(outputs))):
        number(registry, *key)
    return registry


def number(registry: Any, kind: int, a: int = 0, b: int = 0, c: int = 0) -> int:
    """Return the innovation number of a key; a new key gets the next one. The registry must have room for it."""
    from graphwright.array.population.genes import number_of

    return int(number_of(registry, kind, a, b, c))


def with_room(registry: Any, more: int) -> Any:
    """Return the registry, or a larger one with the same numbers, so that `more` keys fit."""
    used = int(registry.count[0])
    if used + more <= len(registry.keys):
        return registry
    grown = empty_registry(used + more)
    for key in registry.keys[:used].tolist():
        number(grown, *key)
    return grown


def take(genes: Any, which: np.ndarray) -> Any:
    """Select genomes of a population, in the given order."""
    parts: dict[str, np.ndarray] = {}
    for offsets, columns in (("node_off", NODE_COLUMNS), ("link_off", LINK_COLUMNS)):
        off = getattr(genes, offsets)
        sizes = off[1:][which] - off[:-1][which]
        new = np.concatenate([[0], np.cumsum(sizes)])
        rows = np.arange(new[-1]) + np.repeat(off[:-1][which] - new[:-1], sizes)
        parts[offsets] = new
        parts |= {name: getattr(genes, name)[rows] for name in columns}
    return type(genes)(**parts)


def join(first: Any, second: Any) -> Any:
    """Concatenate two populations."""
    parts = {name: np.concatenate([getattr(first, name), getattr(second, name)]) for name in first._fields}
    for name in ("node_off", "link_off"):
        a, b = getattr(first, name), getattr(second, name)
        parts[name] = np.concatenate([a, b[1:] + a[-1]])
    return type(first)(**parts)


def replaced(genes: Any, g: int, one: Any) -> Any:
    """Replace genome g of a population by a population of one."""
    order = np.arange(len(genes.node_off) - 1)
    order[g] = len(order)
    return take(join(genes, one), order)


def merge(mine: Any, other: Any) -> tuple[Any, np.ndarray]:
    """Merge the registries of two runs into a new one, in which the numbers of `mine` stay.

    Keys refer to structure by number, so each key of `other` is translated with the numbers of its parts first. A
    manual neuron is identified by a digest of numbers, which cannot be translated: it is equal in both registries only
    where the runs have the same past.

    Args:
        mine, other: `run.registry` of runs with the same inputs and outputs.
    Returns: the registry, and the new number of each number of `other`: int64, all different.
    Raises: RegistryConflict for different inputs or outputs.
    """
    ends, others = _ends(mine), _ends(other)
    if ends != others:
        raise RegistryConflict("the runs have different inputs or outputs", expected=ends, got=others)
    merged, used = type(mine)(*(column.copy() for column in mine)), int(other.count[0])
    merged = with_room(merged, used)
    numbers, same = np.zeros(used, np.int64), True
    for n, (kind, a, b, c) in enumerate(other.keys[:used].tolist()):
        if kind == LINK:
            a, b = int(numbers[a]), int(numbers[b])
        elif kind == SPLIT:
            a = int(numbers[a])
        elif kind == MANUAL and not (same and mine.keys[n].tolist() == [kind, a, b, c]):
            b = _unused(merged, a)
        numbers[n] = number(merged, kind, a, b, c)
        same = same and int(numbers[n]) == n
    return merged, numbers


def renumbered(genes: Any, numbers: np.ndarray) -> Any:
    """Renumber the genes of a population and sort each genome by the new numbers, with weights and moments.

    A neuron adds its links in the order of their numbers, so answers may differ in the last bits.
    """
    parts: dict[str, np.ndarray] = {"node_off": genes.node_off, "link_off": genes.link_off}
    for off, columns, ids in (("node_off", NODE_COLUMNS, "node_id"), ("link_off", LINK_COLUMNS, "link_id")):
        new = numbers[getattr(genes, ids)]
        order = np.lexsort((new, np.repeat(np.arange(len(genes.node_off) - 1), np.diff(getattr(genes, off)))))
        parts |= {name: getattr(genes, name)[order] for name in columns}
    for name in ("node_id", "link_id", "link_src", "link_dst"):
        parts[name] = numbers[parts[name]].astype(np.int32)
    return type(genes)(**parts)


def _ends(registry: Any) -> tuple[int, int]:
    """Count the inputs and outputs at the beginning of a registry."""
    kinds = registry.keys[: int(registry.count[0]), 0].tolist()
    assert kinds.count(BIAS) == 1
    return kinds.count(IN), kinds.count(OUT)


def _unused(registry: Any, digest: int) -> int:
    """The next unused count of manual neurons with this digest."""
    return int((registry.keys[: int(registry.count[0]), :2] == (MANUAL, digest)).all(1).sum())
