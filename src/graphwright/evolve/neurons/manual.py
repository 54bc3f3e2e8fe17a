"""Manual edits of a genome: the edited program is read back as genes, with innovation numbers of the run.

A number identifies structure independently of its author: a link by its ends and delay, a neuron in the middle of a
link that was closed by that link, any other neuron by its links.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from graphwright.evolve.errors import TaskError
from graphwright.evolve.neurons.genomes import LINK, MANUAL, SPLIT, NodeGene, number, with_room
from graphwright.evolve.neurons.program import founder, read
from graphwright.files import blake2b_128

if TYPE_CHECKING:
    from graphwright.evolve.neurons.genomes import Genome, LinkGene
    from graphwright.evolve.settings import NEAT
    from graphwright.program import Program


def edited_genome(p: Program, before: Genome, names: tuple[str, ...], settings: NEAT) -> Genome:
    """Read the genome of an edited program; new genes have the numbers in their names.

    Raises: TaskError for a program that genes cannot express.
    """
    after = read(p)
    twin = founder(after, names, batch=1)
    if twin.structure_hash() != p.structure_hash():
        odd = _differing_paths(p, twin) or _differing_paths(twin, p)
        raise TaskError(
            "the edited program is no longer a genome of neurons and links", where=", ".join(odd[:3]) or p.name,
            expected="junctions n<k>.sum, activations n<k>.out, links n<k>.l<i> with one weight",
            fix="edit by evolve.mutations; edit champion.program apart from the run; or evolve.blocks(program)",
        )  # fmt: skip
    if (after.inputs, after.outputs) != (before.inputs, before.outputs):
        raise TaskError("the edit changed the inputs or outputs", where=p.name,
                        expected=(before.inputs, before.outputs), got=(after.inputs, after.outputs))  # fmt: skip
    if len(after.nodes) > settings.max_nodes or len(after.links) > settings.max_links:
        raise TaskError("the edited genome exceeds the limits of the run", where=p.name,
                        expected=f"at most {settings.max_nodes} nodes, {settings.max_links} links",
                        got=f"{len(after.nodes)}, {len(after.links)}", fix="NEAT(max_nodes=, max_links=)")  # fmt: skip
    for e in after.links:
        if not np.isfinite(e.weight):
            raise TaskError("a weight is not finite", where=f"n{e.dst}.l{e.id}.weight", got=e.weight)
        if any((e.src, e.dst, e.delay) == (o.src, o.dst, o.delay) and o.id < e.id for o in after.links):
            raise TaskError("two links have the same ends and delay", where=f"n{e.dst}.l{e.id}",
                            fix="set the weight of one of them to the sum, and remove the other")  # fmt: skip
    _acyclic(after)
    return after


def numbered(before: Genome, after: Genome, kept: Collection[int], registry: Any) -> tuple[Genome, Any]:
    """Renumber an edited genome by the registry of the run; also return the registry.

    Args:
        before: the genome before the edit; after: the genome to renumber.
        kept: numbers of the neurons of `before` that still exist.
        registry: innovation numbers of the run.
    """
    registry = with_room(registry, len(after.nodes) + len(after.links))
    mine = {i: i for i in range(before.inputs + 1)} | {n: n for n in kept}
    still = {e.id: e for e in after.links}
    closed = [e for e in before.links if e.open and not (e.id in still and still[e.id].open)]
    for node in after.nodes:
        if node.id not in mine:
            kind, what = _key(node.id, after, closed, mine)
            k = 0
            while (given := number(registry, kind, what, k)) in mine.values():
                k += 1
            mine[node.id] = given
    nodes, links = [NodeGene(mine[n.id], n.activation) for n in after.nodes], []
    for e in after.links:
        src, dst = mine[e.src], mine[e.dst]
        links.append(e._replace(id=number(registry, LINK, src, dst, e.delay), src=src, dst=dst))
    return replace(after, nodes=tuple(sorted(nodes)), links=tuple(sorted(links))), registry


def _key(node: int, after: Genome, closed: list[LinkGene], mine: dict[int, int]) -> tuple[int, int]:
    """The registry key of a new neuron: (SPLIT, the link it is in the middle of), or (MANUAL, digest of its links)."""
    ends = {(mine.get(e.src, -1), mine.get(e.dst, -1), e.delay) for e in after.links if node in (e.src, e.dst)}
    for e in closed:
        if {(e.src, -1, e.delay), (-1, e.dst, 0)} <= ends:
            return SPLIT, e.id
    return MANUAL, int(blake2b_128(repr(sorted(ends)).encode())[:14], 16)


def inherited(one: Any, row: Any) -> None:
    """Copy the optimizer moments of common links from another population of one, in place."""
    here, there = _common(one, row)
    for name in ("first", "second", "steps"):
        getattr(one, name)[here] = getattr(row, name)[there]


def untrained(one: Any, trained: Any, seeds: Any) -> Any:
    """Copy a population of one, with the weights of `seeds` where its own are unchanged since training."""
    heir = type(one)(*(column.copy() for column in one))
    here, there = _common(one, trained)
    same = one.weight[here] == trained.weight[there]
    for name in ("weight", "first", "second", "steps"):
        getattr(heir, name)[here[same]] = getattr(seeds, name)[there[same]]
    return heir


def _common(one: Any, other: Any) -> np.ndarray:
    """Indices, in each population of one, of the links that both have."""
    index = {i: k for k, i in enumerate(other.link_id.tolist())}
    pairs = [(k, index[i]) for k, i in enumerate(one.link_id.tolist()) if i in index]
    return np.array(pairs, np.int64).reshape(-1, 2).T


def _differing_paths(p: Program, other: Program) -> list[str]:
    """Paths of nodes that are missing or different in another program."""
    theirs = {other.path(n): other.node_digest(n) for n in other.nodes()}
    return [p.path(n) for n in p.nodes() if theirs.get(p.path(n)) != p.node_digest(n)]


def _acyclic(genome: Genome) -> None:
    """Check that links without delay form no cycle; closed links count too, since they can open. Raises: TaskError."""
    into = {n.id: {e.src for e in genome.links if e.dst == n.id and not e.delay} for n in genome.nodes}
    while ready := [n for n, before in into.items() if not before & into.keys()]:
        for n in ready:
            del into[n]
    if into:
        raise TaskError("links without delay form a cycle", where=", ".join(f"n{n}" for n in sorted(into)),
                        fix="remove one of the links, or give it a delay")  # fmt: skip
