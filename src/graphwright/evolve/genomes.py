"""Genomes of a whole population as columns: making, taking, joining and reading them; and the registry's growth.

The columns are `Genes` of `array.population`; this module is numpy on them. A single genome is a population of one.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from graphwright.array.population.names import ACTIVATIONS, LINK_COLUMNS, NODE_COLUMNS
from graphwright.evolve.errors import RegistryConflict

if TYPE_CHECKING:
    from graphwright.evolve.settings import NEAT

IN, BIAS, OUT, LINK, SPLIT, UNIT, HAND = range(7)
"""Kinds of registry keys: those of `array.population.genes`, and (HAND, digest of its links, k), a neuron by hand."""


class Node(NamedTuple):
    """A node gene: innovation number, activation."""

    id: int
    activation: str


class Link(NamedTuple):
    """A link gene: innovation number, ends, delay in steps, open or closed, weight."""

    id: int
    src: int
    dst: int
    delay: int
    open: bool
    weight: float


@dataclass(frozen=True, slots=True)
class Genome:
    """One genome, to be read.

    Attributes:
        inputs, outputs: counts; inputs are nodes 0 to inputs - 1, then the bias, then the outputs.
        nodes: outputs, then hidden nodes, by number; links: by number.
    """

    inputs: int
    outputs: int
    nodes: tuple[Node, ...]
    links: tuple[Link, ...]

    @property
    def hidden(self) -> int:
        """Number of hidden nodes."""
        return len(self.nodes) - self.outputs

    @property
    def open_links(self) -> int:
        """Number of links that are open."""
        return sum(link.open for link in self.links)

    def node(self, number: int) -> Node:
        """The node gene of a number. Raises: KeyError."""
        return {n.id: n for n in self.nodes}[number]


def genome(genes: Any, g: int, inputs: int, outputs: int) -> Genome:
    """Genome g of a population."""
    n, e = slice(genes.node_off[g], genes.node_off[g + 1]), slice(genes.link_off[g], genes.link_off[g + 1])
    nodes = zip(genes.node_id[n].tolist(), genes.node_act[n].tolist(), strict=True)
    columns = (genes.link_id, genes.link_src, genes.link_dst, genes.link_delay, genes.link_open, genes.weight)
    links = zip(*(c[e].tolist() for c in columns), strict=True)
    return Genome(
        inputs,
        outputs,
        tuple(Node(i, ACTIVATIONS[a]) for i, a in nodes),
        tuple(Link(i, s, d, k, bool(o), w) for i, s, d, k, o, w in links),
    )


def columns_of(genomes: list[Genome]) -> Any:
    """A population made of single genomes; moments are zero."""
    from graphwright.array.population.genes import Genes

    nodes, links = [n for g in genomes for n in g.nodes], [e for g in genomes for e in g.links]

    def ints(values: Iterator[int]) -> np.ndarray:
        return np.fromiter(values, np.int32)

    def offsets(counts: list[int]) -> np.ndarray:
        return np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)

    zeros = [np.zeros(len(links), np.float32) for _ in range(3)]
    columns: list[Any] = [
        offsets([len(g.nodes) for g in genomes]),
        ints(n.id for n in nodes),
        ints(ACTIVATIONS.index(n.activation) for n in nodes),
        offsets([len(g.links) for g in genomes]),
        *(ints(getattr(e, name) for e in links) for name in ("id", "src", "dst", "delay", "open")),
        np.array([e.weight for e in links], np.float32),
        *zeros,
    ]
    return Genes._make(columns)


def minimal(inputs: int, outputs: int, count: int, settings: NEAT, seed: int) -> tuple[Any, Any]:
    """Founders, inputs and bias wired to all outputs with weights N(0, power²), and their registry."""
    from graphwright.array.population.genes import Genes

    rng = np.random.Generator(np.random.Philox(key=[seed, 0]))
    per = (inputs + 1) * outputs
    registry = new_registry(inputs, outputs)
    src = np.tile(np.arange(inputs + 1), outputs)
    dst = np.repeat(np.arange(outputs) + inputs + 1, inputs + 1)
    ids = [number(registry, LINK, s, d, 0) for s, d in zip(src.tolist(), dst.tolist(), strict=True)]
    scale = settings.power if settings.train is None else 1.0 / np.sqrt(max(inputs, 1))
    weight = np.clip(rng.normal(size=count * per) * scale, -settings.most, settings.most).astype(np.float32)

    def tiled(values: Any) -> np.ndarray:
        return np.tile(np.asarray(values, np.int32), count)

    return Genes(
        np.arange(count + 1, dtype=np.int64) * outputs,
        tiled(np.arange(outputs) + inputs + 1),
        np.full(count * outputs, ACTIVATIONS.index(settings.output), np.int32),
        np.arange(count + 1, dtype=np.int64) * per,
        tiled(ids),
        tiled(src),
        tiled(dst),
        np.zeros(count * per, np.int32),
        np.ones(count * per, np.int32),
        weight,
        *(np.zeros(count * per, np.float32) for _ in range(3)),
    ), registry


def new_registry(inputs: int, outputs: int, capacity: int = 1024) -> Any:
    """A registry that knows inputs, bias and outputs, in this order."""
    from graphwright.array.population.genes import Registry

    registry = Registry(np.zeros((capacity, 4), np.int64), np.full(2 * capacity, -1, np.int64), np.zeros(1, np.int64))
    registry = with_room(registry, inputs + outputs + 1)
    for i in range(inputs):
        number(registry, IN, i)
    number(registry, BIAS)
    for i in range(outputs):
        number(registry, OUT, i)
    return registry


def number(registry: Any, kind: int, a: int = 0, b: int = 0, c: int = 0) -> int:
    """The innovation number of a key: the one it has, or the next. The registry must have room for it."""
    from graphwright.array.population.genes import number_of

    return int(number_of(registry, kind, a, b, c))


def with_room(registry: Any, more: int) -> Any:
    """The registry, or one of twice the size with the same numbers, so that `more` keys fit."""
    from graphwright.array.population.genes import Registry

    used, capacity = int(registry.count[0]), len(registry.keys)
    if used + more <= capacity:
        return registry
    while capacity < used + more:
        capacity *= 2
    grown = Registry(np.zeros((capacity, 4), np.int64), np.full(2 * capacity, -1, np.int64), np.zeros(1, np.int64))
    for key in registry.keys[:used].tolist():
        number(grown, *key)
    return grown


def take(genes: Any, which: np.ndarray) -> Any:
    """Some genomes of a population, in the order asked for."""
    parts: dict[str, np.ndarray] = {}
    for offsets, columns in (("node_off", NODE_COLUMNS), ("link_off", LINK_COLUMNS)):
        off = getattr(genes, offsets)
        sizes = off[1:][which] - off[:-1][which]
        new = np.concatenate([[0], np.cumsum(sizes)])
        places = np.arange(new[-1]) + np.repeat(off[:-1][which] - new[:-1], sizes)
        parts[offsets] = new
        parts |= {name: getattr(genes, name)[places] for name in columns}
    return type(genes)(**parts)


def join(first: Any, second: Any) -> Any:
    """Two populations as one."""
    parts = {name: np.concatenate([getattr(first, name), getattr(second, name)]) for name in first._fields}
    for name in ("node_off", "link_off"):
        a, b = getattr(first, name), getattr(second, name)
        parts[name] = np.concatenate([a, b[1:] + a[-1]])
    return type(first)(**parts)


def replaced(genes: Any, g: int, one: Any) -> Any:
    """A population with another genome at one place."""
    order = np.arange(len(genes.node_off) - 1)
    order[g] = len(order)
    return take(join(genes, one), order)


def merge(mine: Any, other: Any) -> tuple[Any, np.ndarray]:
    """One registry of all that two runs know; both are left as they are, and `mine` keeps its numbers.

    Keys name structure by numbers, so a key of `other` is looked up with those that its parts have got by then. A
    neuron made by hand is known by a digest of such numbers, which can't be translated: it is the same in both only
    where the runs have the same past.

    Args:
        mine, other: `run.registry` of runs with the same inputs and outputs.
    Returns: the registry; by number in `other` the number there, int64 [numbers of other], no two alike.
    Raises: RegistryConflict for other inputs or outputs.
    """
    ends, others = _ends(mine), _ends(other)
    if ends != others:
        raise RegistryConflict("runs that meet have the same inputs and outputs", expected=ends, got=others)
    merged, used = type(mine)(*(column.copy() for column in mine)), int(other.count[0])
    merged = with_room(merged, used)
    numbers, same = np.zeros(used, np.int64), True
    for n, (kind, a, b, c) in enumerate(other.keys[:used].tolist()):
        if kind == LINK:
            a, b = int(numbers[a]), int(numbers[b])
        elif kind == SPLIT:
            a = int(numbers[a])
        elif kind == HAND and not (same and mine.keys[n].tolist() == [kind, a, b, c]):
            b = _unused(merged, a)
        numbers[n] = number(merged, kind, a, b, c)
        same = same and int(numbers[n]) == n
    return merged, numbers


def renumbered(genes: Any, numbers: np.ndarray) -> Any:
    """A population under other numbers, each genome in their order; weights and moments go along.

    Sums of a neuron run in the order of its links' numbers, so that answers may differ in their last bits.
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
    """How many inputs and outputs a registry begins with."""
    kinds = registry.keys[: int(registry.count[0]), 0].tolist()
    assert kinds.count(BIAS) == 1
    return kinds.count(IN), kinds.count(OUT)


def _unused(registry: Any, digest: int) -> int:
    """The next count that no neuron by hand of this digest has."""
    keys = registry.keys[: int(registry.count[0])]
    return int(((keys[:, 0] == HAND) & (keys[:, 1] == digest)).sum())
