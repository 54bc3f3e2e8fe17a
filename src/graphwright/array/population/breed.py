"""Breed a generation in one call: crossover by innovation number, then at most one structural mutation.

The genes of a child are written after those of the previous child; innovation numbers are assigned in child order.
Importing this module loads numba.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from graphwright.array.population import genes as genome
from graphwright.array.population.genes import Genes, Registry, below, compiled, find, native, number_of, uniform
from graphwright.array.population.names import Births
from graphwright.array.population.species import Parents

COPY, WEIGHTS, GROW, SPLIT_LINK, ADD_LINK, ADD_DELAY, TOGGLE, REMOVE_LINK, SET_ACTIVATION, REMOVE_DELAY = range(10)
_ORDER = (GROW, SPLIT_LINK, ADD_LINK, TOGGLE, REMOVE_LINK, REMOVE_DELAY, SET_ACTIVATION)
"""Structural mutations in the order in which they are tried."""
BREEDING = 1  # purpose of the random stream
WHOLE = frozenset({"tries", "tournament", "max_nodes", "max_links"})
"""Settings that are integers."""


class Rates(NamedTuple):
    """Probabilities and sizes of mutations. If a mutation is impossible for a child, the next one is tried.

    Attributes:
        grow, split_link, add_link, toggle_link, remove_link, remove_delay_link, set_activation: probabilities of the
            structural mutations; they are tried in this order, and a child gets at most one.
        weights: probability of changing all weights of a child that has no structural mutation.
        perturb: probability that such a weight moves by a random step; otherwise it is drawn again.
        power: the largest random step, and the standard deviation of a weight that is drawn again.
        new_link: standard deviation of the weight of an added link.
        fine, fine_power: with probability `fine`, the largest step of a child is multiplied by `fine_power`.
        most: the largest absolute value of a weight.
        delays: share of added links that carry the value of the previous step.
        tries: number of attempts to find a source and a target for an added link.
        mutate_only: probability that a child has only one parent.
        interspecies: probability that the two parents of any other child are of different species.
        reclose: probability that a link that both parents have is closed (disabled) in the child, if it is closed in a
            parent.
        tournament: size of the tournament that selects a parent.
        max_nodes, max_links: the largest size of a genome.
    """

    grow: float
    split_link: float
    add_link: float
    toggle_link: float
    remove_link: float
    remove_delay_link: float
    set_activation: float
    weights: float
    perturb: float
    power: float
    new_link: float
    fine: float
    fine_power: float
    most: float
    delays: float
    tries: int
    mutate_only: float
    interspecies: float
    reclose: float
    tournament: int
    max_nodes: int
    max_links: int


def scratch(nodes: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Allocate the scratch arrays `rng`, `seen` and `stack` of `breed`, for children of at most `nodes` nodes."""
    return np.empty(genome.SIZE, np.uint64), np.empty(nodes + 2, np.uint8), np.empty(nodes + 2, np.int64)


@native
def _copy(src: Any, p: int, out: Any, at: int) -> None:
    out.link_id[at], out.link_src[at], out.link_dst[at] = src.link_id[p], src.link_src[p], src.link_dst[p]
    out.link_delay[at], out.link_open[at] = src.link_delay[p], src.link_open[p]
    out.weight[at], out.first[at] = src.weight[p], src.first[p]
    out.second[at], out.steps[at] = src.second[p], src.steps[p]


@native
def _link(out: Any, low: int, high: int, number: int, src: int, dst: int, delay: int, weight: float) -> int:
    """Insert an open link into links low:high of `out`, sorted by innovation number; return the new `high`."""
    at = high
    while at > low and out.link_id[at - 1] > number:
        _copy(out, at - 1, out, at)
        at -= 1
    out.link_id[at], out.link_src[at], out.link_dst[at] = number, src, dst
    out.link_delay[at], out.link_open[at] = delay, 1
    out.weight[at], out.first[at], out.second[at], out.steps[at] = weight, 0.0, 0.0, 0.0
    return high + 1


@native
def _node(out: Any, low: int, high: int, number: int, activation: int) -> int:
    """Insert a node into nodes low:high of `out`, sorted by innovation number; return the new `high`."""
    at = high
    while at > low and out.node_id[at - 1] > number:
        out.node_id[at], out.node_act[at] = out.node_id[at - 1], out.node_act[at - 1]
        at -= 1
    out.node_id[at], out.node_act[at] = number, activation
    return high + 1


@native
def _reaches(out: Any, n0: int, n1: int, l0: int, l1: int, start: int, goal: int, seen: Any, stack: Any) -> bool:
    """Return whether delay-free links in l0:l1 of `out` (nodes n0:n1), open or closed, lead from `start` to `goal`."""
    if start == goal:
        return True
    for n in range(n1 - n0):
        seen[n] = 0
    stack[0], depth = start, 1
    while depth:
        depth -= 1
        node = stack[depth]
        for e in range(l0, l1):
            if out.link_src[e] != node or out.link_delay[e]:
                continue
            after = out.link_dst[e]
            if after == goal:
                return True
            at = find(out.node_id, n0, n1, after) - n0
            if not seen[at]:
                seen[at] = 1
                stack[depth] = after
                depth += 1
    return False


@native
def _parent(rng: Any, pool: Any, low: int, high: int, tournament: int) -> int:
    """Select a parent: the best of `tournament` random ones in entries `low` to `high` of `pool`, sorted best first."""
    at = below(rng, high - low)
    for _ in range(tournament - 1):
        at = min(at, below(rng, high - low))
    return pool[low + at]


@native
def _fitter(parents: Any, fitness: Any, a: int, b: int) -> bool:
    """Return whether genome a is fitter than genome b: by fitness, then fewer genes, then the lower index."""
    if fitness[a] != fitness[b]:
        return fitness[a] > fitness[b]
    size_a = parents.link_off[a + 1] - parents.link_off[a] + parents.node_off[a + 1] - parents.node_off[a]
    size_b = parents.link_off[b + 1] - parents.link_off[b] + parents.node_off[b + 1] - parents.node_off[b]
    return size_a < size_b or (size_a == size_b and a < b)


@native
def _inherit(
    parents: Any, fitter_parent: int, other_parent: int, out: Any, n1: int, l1: int, reclose: float, rng: Any
) -> Any:
    """Write a child to `out`, from node n1 and link l1 on; return the indices after its last node and its last link.

    It has the structure of the fitter parent, of which it is a copy if `other_parent` is -1. A gene that both have is
    copied from one at random; a link that is closed (disabled) in either is closed with probability `reclose`.
    """
    n0, nodes = parents.node_off[fitter_parent], parents.node_off[fitter_parent + 1] - parents.node_off[fitter_parent]
    l0, links = parents.link_off[fitter_parent], parents.link_off[fitter_parent + 1] - parents.link_off[fitter_parent]
    genome.copy_run(parents.node_id, n0, nodes, out.node_id, n1)
    genome.copy_run(parents.node_act, n0, nodes, out.node_act, n1)
    genome.copy_run(parents.link_id, l0, links, out.link_id, l1)
    genome.copy_run(parents.link_src, l0, links, out.link_src, l1)
    genome.copy_run(parents.link_dst, l0, links, out.link_dst, l1)
    genome.copy_run(parents.link_delay, l0, links, out.link_delay, l1)
    genome.copy_run(parents.link_open, l0, links, out.link_open, l1)
    genome.copy_run(parents.weight, l0, links, out.weight, l1)
    genome.copy_run(parents.first, l0, links, out.first, l1)
    genome.copy_run(parents.second, l0, links, out.second, l1)
    genome.copy_run(parents.steps, l0, links, out.steps, l1)
    if other_parent < 0:
        return n1 + nodes, l1 + links
    q, q_end = parents.node_off[other_parent], parents.node_off[other_parent + 1]
    for n in range(n1, n1 + nodes):
        while q < q_end and parents.node_id[q] < out.node_id[n]:
            q += 1
        if q < q_end and parents.node_id[q] == out.node_id[n] and uniform(rng) < 0.5:
            out.node_act[n] = parents.node_act[q]
    q, q_end = parents.link_off[other_parent], parents.link_off[other_parent + 1]
    for e in range(l1, l1 + links):
        while q < q_end and parents.link_id[q] < out.link_id[e]:
            q += 1
        if q < q_end and parents.link_id[q] == out.link_id[e]:
            both = out.link_open[e] and parents.link_open[q]
            if uniform(rng) < 0.5:
                _copy(parents, q, out, e)
            out.link_open[e] = 1
            if not both:
                out.link_open[e] = 0 if uniform(rng) < reclose else 1
    return n1 + nodes, l1 + links


@native
def _split(out: Any, n0: int, n1: int, l0: int, l1: int, registry: Any, acts: Any, rng: Any) -> Any:
    """Replace a random open link by a new node with an input link of weight 1 and an output link of the old weight.

    The old link is closed. The child is nodes n0:n1 and links l0:l1 of `out`; the node gets one of the activations
    `acts`. Returns (new n1, new l1, innovation number of the old link, or -1 if no link is open).
    """
    still = 0
    for e in range(l0, l1):
        still += out.link_open[e]
    if not still:
        return n1, l1, np.int64(-1)
    wanted, e = below(rng, still), l0
    while wanted or not out.link_open[e]:
        wanted -= out.link_open[e]
        e += 1
    number, src, dst = np.int64(out.link_id[e]), np.int64(out.link_src[e]), np.int64(out.link_dst[e])
    delay, weight = np.int64(out.link_delay[e]), np.float64(out.weight[e])
    out.link_open[e] = 0
    k = 0
    node = number_of(registry, genome.SPLIT, number, k, 0)
    while find(out.node_id, n0, n1, node) >= 0:
        k += 1
        node = number_of(registry, genome.SPLIT, number, k, 0)
    n1 = _node(out, n0, n1, node, acts[below(rng, len(acts))] if len(acts) > 1 else acts[0])
    l1 = _link(out, l0, l1, number_of(registry, genome.LINK, src, node, delay), src, node, delay, 1.0)
    l1 = _link(out, l0, l1, number_of(registry, genome.LINK, node, dst, 0), node, dst, 0, weight)
    return n1, l1, number


@native
def _grow(
    out: Any, n0: int, n1: int, l0: int, l1: int, inputs: int, outputs: int, registry: Any, acts: Any, rng: Any
) -> Any:
    """Add a node with random weights from all inputs and weight 0 to all outputs, so that no output changes.

    The child is nodes n0:n1 and links l0:l1 of `out`. Returns (new n1, new l1, innovation number of the node).
    """
    k = 0
    node = number_of(registry, genome.UNIT, k, 0, 0)
    while find(out.node_id, n0, n1, node) >= 0:
        k += 1
        node = number_of(registry, genome.UNIT, k, 0, 0)
    n1 = _node(out, n0, n1, node, acts[below(rng, len(acts))] if len(acts) > 1 else acts[0])
    scale = 1.0 / np.sqrt(max(inputs, 1))
    for i in range(inputs + 1):
        l1 = _link(out, l0, l1, number_of(registry, genome.LINK, i, node, 0), i, node, 0, genome.normal(rng) * scale)
    for o in range(outputs):
        dst = inputs + 1 + o
        l1 = _link(out, l0, l1, number_of(registry, genome.LINK, node, dst, 0), node, dst, 0, 0.0)
    return n1, l1, node


@native
def _add(
    out: Any, n0: int, n1: int, l0: int, l1: int, inputs: int, registry: Any, rates: Any, rng: Any, seen: Any,
    stack: Any,
) -> Any:  # fmt: skip
    """Add a random link to l0:l1 of `out`; return (new l1, innovation number or -1 if no try succeeded, delay)."""
    delay = 1 if rates.delays > 0.0 and uniform(rng) < rates.delays else 0
    for _ in range(rates.tries):
        pick = below(rng, inputs + 1 + n1 - n0)
        src = np.int64(pick) if pick <= inputs else np.int64(out.node_id[n0 + pick - inputs - 1])
        dst = np.int64(out.node_id[n0 + below(rng, n1 - n0)])
        if delay and src == inputs:
            continue  # the bias is the same in each step
        taken = False
        for e in range(l0, l1):
            taken |= out.link_src[e] == src and out.link_dst[e] == dst and out.link_delay[e] == delay
        if taken:
            continue
        if not delay and src > inputs and _reaches(out, n0, n1, l0, l1, dst, src, seen, stack):
            continue
        number = number_of(registry, genome.LINK, src, dst, delay)
        weight = min(max(genome.normal(rng) * rates.new_link, -rates.most), rates.most)
        return _link(out, l0, l1, number, src, dst, delay, weight), number, np.int64(delay)
    return l1, np.int64(-1), np.int64(delay)


@native
def _remove(out: Any, n0: int, n1: int, l0: int, l1: int, inputs: int, outputs: int, delayed: bool, rng: Any) -> Any:
    """Remove a random link (if `delayed`, a random link with a delay) and the hidden nodes that have no link left.

    The child is nodes n0:n1, links l0:l1 of `out`. Returns (new n1, new l1, removed innovation number or -1).
    """
    there = 0
    for e in range(l0, l1):
        there += not delayed or out.link_delay[e] > 0
    if not there:
        return n1, l1, np.int64(-1)
    wanted, at = below(rng, there), l0
    while wanted or (delayed and not out.link_delay[at]):
        wanted -= not delayed or out.link_delay[at] > 0
        at += 1
    number = np.int64(out.link_id[at])
    for e in range(at + 1, l1):
        _copy(out, e, out, e - 1)
    l1 -= 1
    kept = n0
    for n in range(n0, n1):
        used = out.node_id[n] <= inputs + outputs
        for e in range(l0, l1):
            used |= out.link_src[e] == out.node_id[n] or out.link_dst[e] == out.node_id[n]
        if used:
            out.node_id[kept], out.node_act[kept] = out.node_id[n], out.node_act[n]
            kept += 1
    return kept, l1, number


@native
def _activate(out: Any, n0: int, n1: int, inputs: int, outputs: int, acts: Any, rng: Any) -> Any:
    """Give a random hidden node of n0:n1 another of `acts`; return its innovation number, or -1 if impossible."""
    first = n0 + outputs
    if n1 == first or len(acts) < 2:
        return np.int64(-1)
    at = first + below(rng, n1 - first)
    choice = acts[below(rng, len(acts) - 1)]
    out.node_act[at] = acts[len(acts) - 1] if choice == out.node_act[at] else choice
    return np.int64(out.node_id[at])


@native
def _perturb(out: Any, l0: int, l1: int, rates: Any, rng: Any) -> None:
    """Move each weight of links l0:l1 by a random step, or draw it again, with the probabilities in `rates`."""
    step = rates.power * (rates.fine_power if uniform(rng) < rates.fine else 1.0)
    for e in range(l0, l1):
        if uniform(rng) < rates.perturb:
            weight = out.weight[e] + (2.0 * uniform(rng) - 1.0) * step
        else:
            weight = genome.normal(rng) * rates.power
        out.weight[e] = min(max(weight, -rates.most), rates.most)


@compiled
def largest(genes: Genes) -> tuple[int, int]:
    """Return (the largest number of nodes in a genome, the largest number of links in a genome)."""
    nodes, links = 0, 0
    for g in range(len(genes.node_off) - 1):
        nodes = max(nodes, genes.node_off[g + 1] - genes.node_off[g])
        links = max(links, genes.link_off[g + 1] - genes.link_off[g])
    return nodes, links


@compiled
def breed(
    parents: Genes, fitness: np.ndarray, of: Parents, out: Genes, births: Births, registry: Registry, rates: Rates,
    acts: np.ndarray, inputs: int, outputs: int, seed: int, generation: int, rng: np.ndarray, seen: np.ndarray,
    stack: np.ndarray,
) -> None:  # fmt: skip
    """Write the children of a generation to `out`.

    Args:
        parents: genomes of the previous generation.
        fitness: float64 [G], the fitness of each genome of `parents`, without NaN.
        of: the pools from which parents are selected.
        out: columns with room for all children; all are written, including the offsets.
        births: parents and mutation of each child, written; entries of `refused` are incremented.
        registry: innovation numbers, extended; it must have room for all new links and nodes of a generation.
        acts: int32; codes of the activations that new nodes can get.
        inputs, outputs: number of inputs and of outputs of each genome.
        seed, generation: with the index of a child, they determine its random stream.
        rng, seen, stack: scratch arrays, as `scratch` allocates them.
    """
    chances = (
        rates.grow, rates.split_link, rates.add_link, rates.toggle_link, rates.remove_link, rates.remove_delay_link,
        rates.set_activation,
    )  # fmt: skip
    out.node_off[0], out.link_off[0] = 0, 0
    for child in range(len(of.elite)):
        genome.begin(rng, seed, child, generation, BREEDING)
        n0, l0 = out.node_off[child], out.link_off[child]
        mutation, site = np.int64(COPY), np.int64(-1)
        if of.elite[child] >= 0:
            fitter_parent, other_parent = of.elite[child], np.int64(-1)
            n1, l1 = _inherit(parents, fitter_parent, other_parent, out, n0, l0, rates.reclose, rng)
        else:
            low, high = of.pool_off[of.species[child]], of.pool_off[of.species[child] + 1]
            fitter_parent, other_parent = _parent(rng, of.pool, low, high, rates.tournament), np.int64(-1)
            if uniform(rng) >= rates.mutate_only:
                others = len(of.pool) - (high - low)
                if uniform(rng) < rates.interspecies and others:
                    at = below(rng, others)  # index in the pool without the child's own species
                    other_parent = of.pool[at if at < low else at + high - low]
                else:
                    other_parent = _parent(rng, of.pool, low, high, rates.tournament)
                if other_parent == fitter_parent:
                    other_parent = np.int64(-1)
                elif _fitter(parents, fitness, other_parent, fitter_parent):
                    fitter_parent, other_parent = other_parent, fitter_parent
            n1, l1 = _inherit(parents, fitter_parent, other_parent, out, n0, l0, rates.reclose, rng)
            nodes_left, links_left = rates.max_nodes - (n1 - n0), rates.max_links - (l1 - l0)
            for kind, chance in zip(_ORDER, chances):  # noqa: B905 (numba has no `strict`)
                if mutation != COPY:
                    break
                if not chance > 0.0 or uniform(rng) >= chance:
                    continue
                made = kind
                if kind == GROW:
                    if nodes_left >= 1 and links_left >= inputs + 1 + outputs:
                        n1, l1, site = _grow(out, n0, n1, l0, l1, inputs, outputs, registry, acts, rng)
                elif kind == SPLIT_LINK:
                    if nodes_left >= 1 and links_left >= 2:
                        n1, l1, site = _split(out, n0, n1, l0, l1, registry, acts, rng)
                elif kind == ADD_LINK:
                    if links_left >= 1:
                        l1, site, delay = _add(out, n0, n1, l0, l1, inputs, registry, rates, rng, seen, stack)
                        made = ADD_DELAY if delay else ADD_LINK
                elif kind == TOGGLE:
                    if l1 > l0:
                        at = l0 + below(rng, l1 - l0)
                        out.link_open[at], site = 1 - out.link_open[at], np.int64(out.link_id[at])
                elif kind == SET_ACTIVATION:
                    site = _activate(out, n0, n1, inputs, outputs, acts, rng)
                else:
                    n1, l1, site = _remove(out, n0, n1, l0, l1, inputs, outputs, kind == REMOVE_DELAY, rng)
                if site >= 0:
                    mutation = np.int64(made)
                else:
                    births.refused[kind] += 1
            if mutation == COPY and uniform(rng) < rates.weights:
                _perturb(out, l0, l1, rates, rng)
                mutation = WEIGHTS
        out.node_off[child + 1], out.link_off[child + 1] = n1, l1
        births.fitter_parent[child], births.other_parent[child] = fitter_parent, other_parent
        births.mutation[child], births.site[child] = mutation, site
