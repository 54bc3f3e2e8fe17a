"""Distances between genomes, species, and selection: children per species, pools of parents, representatives.

The distance is NEAT's compatibility distance δ. Importing this module loads numba.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from graphwright.array.population.genes import SIZE, Genes, begin, below, compiled, native
from graphwright.array.vm import vector as vec

_SMALL = 20  # links below which both genomes are small: then N = 1


class Coefficients(NamedTuple):
    """Coefficients of NEAT's distance: of excess links (c1), disjoint links (c2), weights (c3), activations (c4)."""

    c1: float
    c2: float
    c3: float
    c4: float


@native
def _distance(a: Any, i: int, b: Any, j: int, c: Any, enough: float) -> float:
    """Return NEAT's distance of genomes i of `a` and j of `b`, or `enough` once disjoint links alone amount to that."""
    p, p_end, q, q_end = a.link_off[i], a.link_off[i + 1], b.link_off[j], b.link_off[j + 1]
    larger = max(p_end - p, q_end - q)
    size = 1.0 if larger < _SMALL else np.float64(larger)
    # addresses save the check for negative indices
    left_ids, left_weights = a.link_id.ctypes.data, a.weight.ctypes.data
    right_ids, right_weights = b.link_id.ctypes.data, b.weight.ctypes.data
    disjoint, matching, gap = 0, 0, 0.0
    while p < p_end and q < q_end:
        left, right = vec.load_i32(left_ids + 4 * p), vec.load_i32(right_ids + 4 * q)
        if left == right:
            matching += 1
            gap += abs(np.float64(vec.load_f32(left_weights + 4 * p)) - np.float64(vec.load_f32(right_weights + 4 * q)))
        else:
            disjoint += 1
            if c.c2 * disjoint / size >= enough:  # no other term is negative
                return enough
        p += left <= right
        q += right <= left
    excess = (p_end - p) + (q_end - q)
    total = (c.c1 * excess + c.c2 * disjoint) / size
    if matching:
        total += c.c3 * gap / matching
    if c.c4:
        p, p_end, q, q_end = a.node_off[i], a.node_off[i + 1], b.node_off[j], b.node_off[j + 1]
        shared, differ = 0, 0
        while p < p_end and q < q_end:
            left, right = a.node_id[p], b.node_id[q]
            if left == right:
                shared += 1
                differ += a.node_act[p] != b.node_act[q]
            p += left <= right
            q += right <= left
        total += c.c4 * differ / max(shared, 1)
    return total


@compiled
def _distances(a: Genes, b: Genes, c: Coefficients, out: np.ndarray) -> None:
    for i in range(out.shape[0]):
        for j in range(out.shape[1]):
            out[i, j] = _distance(a, i, b, j, c, np.inf)


def distances(a: Genes, b: Genes, c: Coefficients) -> np.ndarray:
    """Return the distance δ = (c1 E + c2 D)/N + c3 W + c4 A of each genome of `a` and each of `b`, as a float64 matrix.

    E and D are the numbers of excess and disjoint links; N is the number of links of the larger genome, or 1 if both
    have fewer than 20; W is the mean absolute difference of the weights of matching links; A is the share of matching
    nodes with different activations.
    Source: Stanley and Miikkulainen 2002, "Evolving Neural Networks through Augmenting Topologies", eq. 1.
    """
    out = np.empty((len(a.node_off) - 1, len(b.node_off) - 1))
    _distances(a, b, c, out)
    return out


def speciate(
    old: Genes, representatives: np.ndarray, genes: Genes, threshold: float, c: Coefficients
) -> tuple[np.ndarray, int]:
    """Assign each genome to the first species whose representative is nearer than `threshold`, else to a new one.

    Args:
        old: the genomes that contain the representatives of existing species.
        representatives: int64 [S]; indices into `old`.
    Returns: species indices, int64 [G], and the number of new species; the first genome of a new species represents it.
    """
    count = len(genes.node_off) - 1
    species, founders = np.empty(count, np.int64), np.empty(count, np.int64)
    made = _speciate(old, representatives, genes, threshold, c, species, founders)
    return species, made


@compiled
def _speciate(
    old: Genes, representatives: np.ndarray, genes: Genes, threshold: float, c: Coefficients, species: np.ndarray,
    founders: np.ndarray,
) -> int:  # fmt: skip
    known, made = len(representatives), 0
    for g in range(len(species)):
        found = -1
        for s in range(known):
            if _distance(old, representatives[s], genes, g, c, threshold) < threshold:
                found = s
                break
        if found < 0:
            for s in range(made):
                if _distance(genes, founders[s], genes, g, c, threshold) < threshold:
                    found = known + s
                    break
        if found < 0:
            founders[made] = g
            found = known + made
            made += 1
        species[g] = found
    return made


_CHOICE = 2  # purpose of the stream that picks representatives


class Parents(NamedTuple):
    """The parents that `breed` selects from, for C children and S species.

    Attributes:
        elite: int64 [C]; a genome that the child copies unchanged, or -1.
        species: int64 [C]; the species whose pool the parents of the child are drawn from.
        pool_off: int64 [S + 1]; species s has the pool `pool[pool_off[s]:pool_off[s + 1]]`.
        pool: int64; the genomes that can become parents, by species, best first.
    """

    elite: np.ndarray
    species: np.ndarray
    pool_off: np.ndarray
    pool: np.ndarray


def offspring(fitness: np.ndarray, of: np.ndarray, breeds: np.ndarray, total: int) -> np.ndarray:
    """Return the number of children per species, int64 [S], with sum `total`, in proportion to shared fitness.

    A genome's shared fitness is (f - min(0, min f)) / size of its species; that of a species is the sum over its
    genomes, without those of fitness -inf. Numbers are rounded down; the largest remainders get one child more.

    Args:
        fitness: float64 [G], without NaN.
        of: int64 [G], the species index of each genome.
        breeds: bool [S], whether a species may have children.
    Source: Stanley and Miikkulainen 2002, section 3.3.
    """
    counts = np.empty(len(breeds), np.int64)
    _offspring(fitness, of, breeds, total, counts, np.empty((2, len(breeds))))
    return counts


@compiled
def _offspring(
    fitness: np.ndarray, of: np.ndarray, breeds: np.ndarray, total: int, counts: np.ndarray, scratch: np.ndarray
) -> None:
    left, sizes = scratch[0], scratch[1]  # sums of shared fitness, then remainders of rounding down
    low, whole, breeding, given = 0.0, 0.0, 0, 0
    for f in fitness:
        if np.isfinite(f):
            low = min(low, f)
    for s in range(len(breeds)):
        left[s], sizes[s] = 0.0, 0.0
    for g in range(len(fitness)):
        sizes[of[g]] += 1.0
        if np.isfinite(fitness[g]):
            left[of[g]] += fitness[g] - low
    for s in range(len(breeds)):
        left[s] = left[s] / max(sizes[s], 1.0) if breeds[s] else 0.0
        whole += left[s]
        breeding += breeds[s]
    for s in range(len(breeds)):
        share = left[s] / whole if whole > 0.0 and np.isfinite(whole) else breeds[s] / breeding
        counts[s] = np.int64(share * total)
        left[s] = share * total - counts[s] if breeds[s] else -1.0
        given += counts[s]
    while given < total:
        most = 0
        for s in range(len(breeds)):
            if left[s] > left[most]:
                most = s
        counts[most] += 1
        left[most] = -2.0
        given += 1


def parents(
    fitness: np.ndarray, of: np.ndarray, counts: np.ndarray, total: int, survival: float, champions: int
) -> Parents:
    """Select the parents of the next generation: build the pools, and assign a species to each of `total` children.

    Args:
        fitness: float64 [G].
        of: int64 [G], the species index of each genome.
        counts: int64 [S], number of children of each species.
        survival: share of a species that enters its pool: its best genomes, at least one.
        champions: a species with more genomes than this keeps its best genome unchanged as a child. If 0, only the best
            genome of all is kept.
    """
    ranked, order = np.argsort(-fitness, kind="stable"), np.empty(len(fitness), np.int64)
    elite, species = np.empty(total, np.int64), np.empty(total, np.int64)
    pool_off, pool = np.empty(len(counts) + 1, np.int64), np.empty(len(order), np.int64)
    made = _parents(ranked, order, fitness, of, counts, survival, champions, elite, species, pool_off, pool)
    return Parents(elite, species, pool_off, pool[:made])


@compiled
def _parents(
    ranked: np.ndarray, order: np.ndarray, fitness: np.ndarray, of: np.ndarray, counts: np.ndarray, survival: float,
    champions: int, elite: np.ndarray, species: np.ndarray, pool_off: np.ndarray, pool: np.ndarray,
) -> int:  # fmt: skip
    """Fill the arrays `elite`, `species`, `pool_off` and `pool` of a `Parents`; return the number of entries of `pool`.

    `ranked` holds all genomes, best first; `order` is scratch for the genomes sorted by species, best first.
    """
    for s in range(len(pool_off)):
        pool_off[s] = 0
    for g in of:
        pool_off[g + 1] += 1
    for s in range(len(counts)):
        pool_off[s + 1] += pool_off[s]
    for g in ranked:
        order[pool_off[of[g]]] = g
        pool_off[of[g]] += 1
    made, at, child, best, home = 0, 0, 0, 0, 0
    for g in range(1, len(fitness)):
        if fitness[g] > fitness[best]:
            best = g
    for s in range(len(counts)):
        low = at
        while at < len(order) and of[order[at]] == s:
            at += 1
        pool_off[s] = made
        if not counts[s]:
            continue
        for k in range(max(1, np.int64(np.ceil(survival * (at - low))))):
            pool[made] = order[low + k]
            made += 1
        if s == of[best]:
            home = child
        for k in range(counts[s]):
            species[child + k], elite[child + k] = s, -1
        if champions and at - low > champions:
            elite[child] = order[low]
        child += counts[s]
    pool_off[len(counts)] = made
    if not champions:
        elite[home] = best
    return made


@compiled
def note(of: np.ndarray, fitness: np.ndarray, generation: int, best: np.ndarray, gained: np.ndarray) -> None:
    """Update `best`, the best fitness of each species; where it rises, set `gained` to `generation`.

    Genome g has fitness[g] and belongs to species of[g].
    """
    for g in range(len(of)):
        if fitness[g] > best[of[g]]:
            best[of[g]], gained[of[g]] = fitness[g], generation


def survivors(
    of: np.ndarray, made: int, ids: np.ndarray, best: np.ndarray, gained: np.ndarray, next_id: int, generation: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return (ids, best fitness so far, generation of the last improvement) of the species that have members.

    Args:
        of: int64 [G], the species of each genome: an index into the S old ones, then the `made` new ones. It is
            renumbered in place to indices into the result.
        ids, best, gained: of the S old species: the same three arrays.
        next_id: id of the first new species. A new species has best fitness -inf, and `generation` as last improvement.
    """
    count = len(ids) + made
    new = np.empty(count, np.int64), np.empty(count), np.empty(count, np.int64)
    left = _survivors(of, ids, best, gained, next_id, generation, *new, np.empty(count, np.int64))
    return new[0][:left], new[1][:left], new[2][:left]


@compiled
def _survivors(
    of: np.ndarray, ids: np.ndarray, best: np.ndarray, gained: np.ndarray, next_id: int, generation: int,
    new_ids: np.ndarray, new_best: np.ndarray, new_gained: np.ndarray, row: np.ndarray,
) -> int:  # fmt: skip
    for s in range(len(row)):
        row[s] = 0
    for s in of:
        row[s] = 1
    left = 0
    for s in range(len(row)):
        if not row[s]:
            continue
        if s < len(ids):
            new_ids[left], new_best[left], new_gained[left] = ids[s], best[s], gained[s]
        else:
            new_ids[left], new_best[left], new_gained[left] = next_id + s - len(ids), -np.inf, generation
        row[s] = left
        left += 1
    for g in range(len(of)):
        of[g] = row[of[g]]
    return left


def representatives(of: np.ndarray, count: int, seed: int, generation: int) -> np.ndarray:
    """Return a random member of each of `count` species, int64 [S]; `of`, int64 [G], holds species indices."""
    chosen = np.empty(count, np.int64)
    _representatives(of, seed, generation, chosen, np.empty(SIZE, np.uint64), np.empty((2, count), np.int64))
    return chosen


@compiled
def _representatives(
    of: np.ndarray, seed: int, generation: int, chosen: np.ndarray, rng: np.ndarray, scratch: np.ndarray
) -> None:
    sizes, left = scratch[0], scratch[1]
    for s in range(len(chosen)):
        sizes[s] = 0
    for g in range(len(of)):
        sizes[of[g]] += 1
    for s in range(len(chosen)):
        begin(rng, seed, s, generation, _CHOICE)
        left[s] = below(rng, sizes[s])
    for g in range(len(of)):
        if left[of[g]] == 0:
            chosen[of[g]] = g
        left[of[g]] -= 1
