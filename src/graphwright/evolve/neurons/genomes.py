"""The genomes of a population as arrays, and the registry of innovation numbers.

A population is a `Genes` tuple of `array.population`: one array per property of all nodes and links, with the genomes
one after the other. A single genome is a population of one. The registry maps the key (kind, a, b, c) of a gene,
such as (LINK, source, target, delay), to its innovation number.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from graphwright.array.population.names import ACTIVATIONS, LINK_COLUMNS, NODE_COLUMNS
from graphwright.evolve.errors import RegistryConflict
from graphwright.evolve.settings import NEAT

IN, BIAS, OUT, LINK, SPLIT, UNIT, MANUAL = range(7)
"""Kinds of registry keys: those of `array.population.genes`, and MANUAL for neurons made by manual edits.

A manual neuron has the key (MANUAL, digest of its links, k), where k counts equal digests.
"""


class NodeGene(NamedTuple):
    """A node gene: innovation number and activation."""

    id: int
    activation: str


class LinkGene(NamedTuple):
    """A link gene: innovation number, source and target node, delay in steps, True if open, and weight."""

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
        inputs, outputs: numbers of inputs and outputs. Inputs are the nodes 0 to inputs - 1, then come the bias and the
            outputs.
        nodes: genes of outputs, then of hidden nodes, sorted by innovation number.
        links: link genes, sorted by innovation number.
    """

    inputs: int
    outputs: int
    nodes: tuple[NodeGene, ...]
    links: tuple[LinkGene, ...]

    def __repr__(self) -> str:
        counts = {"inputs": self.inputs, "outputs": self.outputs, "hidden": self.hidden, "links": len(self.links)}
        return f"Genome({', '.join(f'{name} {n}' for name, n in counts.items())})"

    @property
    def hidden(self) -> int:
        """The number of hidden nodes."""
        return len(self.nodes) - self.outputs

    @property
    def open_links(self) -> int:
        """The number of open links."""
        return sum(link.open for link in self.links)

    def node(self, number: int) -> NodeGene:
        """Return the node gene with an innovation number. Raises: KeyError if no node has it."""
        return {n.id: n for n in self.nodes}[number]


def genome(genes: Any, g: int, inputs: int, outputs: int) -> Genome:
    """Return genome `g` of a population as a `Genome`."""
    n, e = slice(genes.node_off[g], genes.node_off[g + 1]), slice(genes.link_off[g], genes.link_off[g + 1])
    nodes = zip(genes.node_id[n].tolist(), genes.node_act[n].tolist(), strict=True)
    columns = (genes.link_id, genes.link_src, genes.link_dst, genes.link_delay, genes.link_open, genes.weight)
    links = zip(*(c[e].tolist() for c in columns), strict=True)
    there = tuple(LinkGene(i, s, d, k, bool(o), w) for i, s, d, k, o, w in links)
    return Genome(inputs, outputs, tuple(NodeGene(i, ACTIVATIONS[a]) for i, a in nodes), there)


def columns_of(genomes: list[Genome]) -> Any:
    """Create a population (a `Genes` tuple) of these genomes, with optimizer moments of 0."""
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
    """Create the first generation (inputs and bias linked to all outputs with random weights) and its registry."""
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
    """Create an empty registry with room for at least `keys` keys."""
    from graphwright.array.population.genes import Registry

    capacity = max(1024, 1 << max(keys - 1, 0).bit_length())
    return Registry(np.zeros((capacity, 4), np.int64), np.full(2 * capacity, -1, np.int64), np.zeros(1, np.int64))


def new_registry(inputs: int, outputs: int) -> Any:
    """Create a registry with numbers for inputs, bias and outputs, in this order."""
    registry = empty_registry(inputs + outputs + 1)
    for key in (*((IN, i) for i in range(inputs)), (BIAS,), *((OUT, i) for i in range(outputs))):
        number(registry, *key)
    return registry


def number(registry: Any, kind: int, a: int = 0, b: int = 0, c: int = 0) -> int:
    """Return the innovation number of the key (kind, a, b, c); a new key gets the next one, if `registry` has room."""
    from graphwright.array.population.genes import number_of

    return int(number_of(registry, kind, a, b, c))


def with_room(registry: Any, more: int) -> Any:
    """Return a registry with room for `more` new keys: the given one, or a larger copy with the same numbers."""
    used = int(registry.count[0])
    if used + more <= len(registry.keys):
        return registry
    grown = empty_registry(used + more)
    for key in registry.keys[:used].tolist():
        number(grown, *key)
    return grown


def take(genes: Any, which: np.ndarray) -> Any:
    """Return a population of the genomes with the indices `which`, in this order."""
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
    """Return a population in which genome `g` is replaced by the only genome of the population `one`."""
    order = np.arange(len(genes.node_off) - 1)
    order[g] = len(order)
    return take(join(genes, one), order)


def merge(mine: Any, other: Any) -> tuple[Any, np.ndarray]:
    """Merge the registries of two runs into a new registry, in which the keys of `mine` keep their numbers.

    A key of `other` contains numbers of nodes and links; these are translated to the new numbers first. A manual neuron
    is identified by a digest of numbers, which cannot be translated: both registries share it only if all lower numbers
    have the same keys in both.

    Args:
        mine, other: `run.registry` of runs with the same inputs and outputs.
    Returns: the merged registry, and the new number of each number of `other`: int64, all different.
    Raises: RegistryConflict if the runs have different numbers of inputs or outputs.
    """
    ends, others = _ends(mine), _ends(other)
    if ends != others:
        raise RegistryConflict("the runs have different numbers of inputs or outputs", expected=ends, got=others)
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
    """Replace each innovation number n by `numbers[n]`, and sort the genes of each genome by the new numbers.

    A neuron sums its links in the order of their numbers, so outputs may differ in the last bits.
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
    """Return the numbers of inputs and outputs in a registry."""
    kinds = registry.keys[: int(registry.count[0]), 0].tolist()
    assert kinds.count(BIAS) == 1
    return kinds.count(IN), kinds.count(OUT)


def _unused(registry: Any, digest: int) -> int:
    """Return the number of manual neurons with this digest, which is the index k in the key of the next such neuron."""
    return int((registry.keys[: int(registry.count[0]), :2] == (MANUAL, digest)).all(1).sum())
