"""A genome edited by hand: what its program became is read back as genes, with numbers from the registry of the run.

A number says what structure is, whoever made it: a link by its ends and delay, a neuron in the middle of a link that
closed by that link, any other neuron by what it was linked to.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from graphwright.evolve.errors import TaskError
from graphwright.evolve.genomes import HAND, LINK, SPLIT, Node, number, with_room
from graphwright.evolve.program import founder, read
from graphwright.files import blake2b_128

if TYPE_CHECKING:
    from graphwright.evolve.genomes import Genome, Link
    from graphwright.evolve.settings import NEAT
    from graphwright.program import Program


def reading(p: Program, before: Genome, names: tuple[str, ...], settings: NEAT) -> Genome:
    """The genome that an edited program is, its new genes numbered as the program names them.

    Raises: TaskError naming what columns of genes can't hold, and what to do instead.
    """
    after = read(p)
    twin = founder(after, names, batch=1)
    if twin.structure_hash() != p.structure_hash():
        odd = _strangers(p, twin) or _strangers(twin, p)
        raise TaskError(
            "a genome of neurons and links can't hold this", where=", ".join(odd[:3]) or p.name,
            expected="junctions n<k>.sum, activations n<k>.out, links n<k>.l<i> with one weight",
            fix="edit by evolve.mutations; champion.program goes its own way, evolve.blocks(program) evolves layers",
        )  # fmt: skip
    if (after.inputs, after.outputs) != (before.inputs, before.outputs):
        raise TaskError("the task has other inputs or outputs", where=p.name,
                        expected=(before.inputs, before.outputs), got=(after.inputs, after.outputs))  # fmt: skip
    if len(after.nodes) > settings.max_nodes or len(after.links) > settings.max_links:
        raise TaskError("larger than the limits of this run", where=p.name,
                        expected=f"at most {settings.max_nodes} nodes, {settings.max_links} links",
                        got=f"{len(after.nodes)}, {len(after.links)}", fix="NEAT(max_nodes=, max_links=)")  # fmt: skip
    for e in after.links:
        if not np.isfinite(e.weight):
            raise TaskError("a weight is finite", where=f"n{e.dst}.l{e.id}.weight", got=e.weight)
        if any((e.src, e.dst, e.delay) == (o.src, o.dst, o.delay) and o.id < e.id for o in after.links):
            raise TaskError("two links from one neuron to another with the same delay", where=f"n{e.dst}.l{e.id}",
                            fix="set the weight of one of them to the sum, and remove the other")  # fmt: skip
    _acyclic(after)
    return after


def numbered(before: Genome, after: Genome, kept: Collection[int], registry: Any) -> tuple[Genome, Any]:
    """The genome with the run's numbers, and the registry with room for them.

    Args:
        before: the genome that was edited.
        kept: numbers of the neurons of `before` that are still there.
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
    nodes, links = [Node(mine[n.id], n.activation) for n in after.nodes], []
    for e in after.links:
        src, dst = mine[e.src], mine[e.dst]
        links.append(e._replace(id=number(registry, LINK, src, dst, e.delay), src=src, dst=dst))
    return replace(after, nodes=tuple(sorted(nodes)), links=tuple(sorted(links))), registry


def _key(node: int, after: Genome, closed: list[Link], mine: dict[int, int]) -> tuple[int, int]:
    """What a new neuron is: (SPLIT, a link that it is in the middle of), or (HAND, a digest of its links)."""
    ends = {(mine.get(e.src, -1), mine.get(e.dst, -1), e.delay) for e in after.links if node in (e.src, e.dst)}
    for e in closed:
        if {(e.src, -1, e.delay), (-1, e.dst, 0)} <= ends:
            return SPLIT, e.id
    return HAND, int(blake2b_128(repr(sorted(ends)).encode())[:14], 16)


def inherited(one: Any, row: Any) -> None:
    """Give a population of one the moments of the links that it has in common with another, in place."""
    here, there = _common(one, row)
    for name in ("first", "second", "steps"):
        getattr(one, name)[here] = getattr(row, name)[there]


def untrained(one: Any, trained: Any, seeds: Any) -> Any:
    """A population of one with the weights of `seeds` where its own are as trained."""
    heir = type(one)(*(column.copy() for column in one))
    here, there = _common(one, trained)
    same = one.weight[here] == trained.weight[there]
    for name in ("weight", "first", "second", "steps"):
        getattr(heir, name)[here[same]] = getattr(seeds, name)[there[same]]
    return heir


def _common(one: Any, other: Any) -> np.ndarray:
    """Places of the links that two populations of one have in common, in either."""
    places = {i: k for k, i in enumerate(other.link_id.tolist())}
    pairs = [(k, places[i]) for k, i in enumerate(one.link_id.tolist()) if i in places]
    return np.array(pairs, np.int64).reshape(-1, 2).T


def _strangers(p: Program, other: Program) -> list[str]:
    """Paths of nodes that another program lacks, or has as something else."""
    theirs = {other.path(n): other.node_digest(n) for n in other.nodes()}
    return [p.path(n) for n in p.nodes() if theirs.get(p.path(n)) != p.node_digest(n)]


def _acyclic(genome: Genome) -> None:
    """Closed links count, as one could be opened. Raises: TaskError."""
    into = {n.id: {e.src for e in genome.links if e.dst == n.id and not e.delay} for n in genome.nodes}
    while ready := [n for n, before in into.items() if not before & into.keys()]:
        for n in ready:
            del into[n]
    if into:
        raise TaskError("a closed link would close a circle", where=", ".join(f"n{n}" for n in sorted(into)),
                        fix="remove it, or let it carry the value of the step before")  # fmt: skip
