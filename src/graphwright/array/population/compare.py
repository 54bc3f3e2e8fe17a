"""Distances between genomes, and assignment to species. Importing this module loads numba."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from graphwright.array.population.genes import Genes, compiled, native
from graphwright.array.vm import vector as vec

_SMALL = 20  # links below which both genomes are small: then N = 1


class Coefficients(NamedTuple):
    """Coefficients of δ: excess links, disjoint links, weights of matching links, activations of matching nodes."""

    c1: float
    c2: float
    c3: float
    c4: float


@native
def _distance(a: Any, i: int, b: Any, j: int, c: Any, enough: float) -> float:
    """δ; or `enough` where disjoint links alone reach it."""
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
    """δ of all pairs, float64 [G of a, G of b]: (c1 E + c2 D)/N + c3 W + c4 A.

    E excess and D disjoint links; N links of the larger genome, 1 if both have fewer than 20; W the mean difference of
    weights over matching links; A the share of matching nodes with another activation.
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
        representatives: int64 [S]; genomes of `old`.
    Returns: species int64 [G], and the number of new ones; the first genome of a new species represents it.
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
