"""Convert genomes to tables of the neurons to compute, in topological order. Importing this module loads numba.

A row of a table is one neuron: the weighted sum of its open links in ascending order of their numbers, then its
activation. Nodes that no output depends on have no row.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from graphwright.array.population.genes import Genes, compiled, find, native


class Table(NamedTuple):
    """The neurons of all genomes as rows, one genome after another. A genome has n inputs.

    Attributes:
        row_off: int64 [G + 1]; genome g has the rows `row_off[g]:row_off[g + 1]`.
        rows: int32 [R, 3]: activation, index of the first link in `links`, index of the last link + 1.
        links: int32 [L, 3]: source, delay in steps, index of the weight in the genes. A source below n + 1 is an input
            or the bias, n + 1 + r is row r of the genome.
        outputs: int32 [G, outputs]: row of each output, counted from the first row of the genome.
        node: int32 [R]: index of the row's node in the genes.
        most: rows of the largest genome, at least 1.
        ring: number of steps whose values must be stored, one more than the longest delay.
        written: number of rows that were computed, not copied from a parent.
    """

    row_off: Any
    rows: Any
    links: Any
    outputs: Any
    node: Any
    most: int
    ring: int
    written: int


@native
def _visit(
    genes: Any, g: int, root: int, first: Any, by_target: Any, source: Any, at: Any, row: Any, node: Any,
    base: int, made: int, stack: Any,
) -> int:  # fmt: skip
    """Assign rows to node `root` and to all nodes that it reads without delay, sources first; return the row count.

    Nodes are numbered within genome g. `by_target[first[n]:first[n + 1]]` are the links into node n, `at` the next one
    to follow, `source` the source of each link or -1, `row` the row of each node or -1, `made` the number of rows so
    far, `node[base:]` the node of each row.
    """
    n0 = genes.node_off[g]
    if row[root] >= 0 or at[root] >= 0:
        return made
    stack[0], depth, at[root] = root, 1, first[root]
    while depth:
        here = stack[depth - 1]
        if at[here] == first[here + 1]:
            row[here], node[base + made] = made, n0 + here
            made += 1
            depth -= 1
            continue
        e = by_target[at[here]]
        at[here] += 1
        if genes.link_delay[e] or not genes.link_open[e]:
            continue
        before = source[e - genes.link_off[g]]
        if before >= 0 and at[before - n0] < 0:
            stack[depth], at[before - n0] = before - n0, first[before - n0]
            depth += 1
    return made


@native
def _same(genes: Any, g: int, before: Any, m: int) -> bool:
    """Return whether genome g of `genes` and genome m of `before` are equal except for their weights."""
    n0, p0, l0, q0 = genes.node_off[g], before.node_off[m], genes.link_off[g], before.link_off[m]
    if genes.node_off[g + 1] - n0 != before.node_off[m + 1] - p0:
        return False
    if genes.link_off[g + 1] - l0 != before.link_off[m + 1] - q0:
        return False
    for n in range(genes.node_off[g + 1] - n0):
        if genes.node_id[n0 + n] != before.node_id[p0 + n] or genes.node_act[n0 + n] != before.node_act[p0 + n]:
            return False
    for e in range(genes.link_off[g + 1] - l0):
        if genes.link_id[l0 + e] != before.link_id[q0 + e] or genes.link_open[l0 + e] != before.link_open[q0 + e]:
            return False
    return True  # an innovation number determines ends and delay


class Past(NamedTuple):
    """The previous generation, its table, and the index of the fitter parent of each new genome, int32 [G], or -1."""

    genes: Genes
    table: Table
    fitter_parent: Any


def tabulate(genes: Genes, inputs: int, outputs: int, past: Past | None = None) -> Table:
    """Return the table of a population whose genomes have `inputs` inputs and `outputs` outputs.

    Given `past`, a genome that has the same structure as its fitter parent gets a copy of the parent's rows. This saves
    time; the result is the same.
    """
    count = len(genes.node_off) - 1
    nodes, links = int(genes.node_off[-1]), int(genes.link_off[-1])
    row_off, rows, node = np.empty(count + 1, np.int64), np.empty((nodes, 3), np.int32), np.empty(nodes, np.int32)
    ends, read = np.empty((count, outputs), np.int32), np.empty((links, 3), np.int32)
    # enough for one genome; the size of all is an upper bound, and pages that are never written cost nothing
    scratch, more_scratch = np.empty((4, nodes + 2), np.int64), np.empty((3, links), np.int64)
    if past is None:
        past = Past(genes, Table(row_off, rows, read, ends, node, 1, 1, 0), np.full(count, -1, np.int32))
    facts = _tabulate(genes, inputs, outputs, past, row_off, rows, read, ends, node, scratch, more_scratch)
    made = int(row_off[-1])
    return Table(row_off, rows[:made], read[: facts[0]], ends, node[:made], *facts[1:])


@compiled
def _tabulate(
    genes: Genes, inputs: int, outputs: int, past: Past, row_off: np.ndarray, rows: np.ndarray, links: np.ndarray,
    ends: np.ndarray, node: np.ndarray, scratch: np.ndarray, more_scratch: np.ndarray,
) -> tuple[Any, ...]:  # fmt: skip
    """Write the arrays of a `Table` (`ends`: its `outputs`); return the number of links, `most`, `ring`, `written`."""
    first, at, row, stack = scratch[0], scratch[1], scratch[2], scratch[3]
    target, source, by_target = more_scratch[0], more_scratch[1], more_scratch[2]
    row_off[0], used, most, longest, written = 0, 0, 1, 0, 0
    for g in range(len(row_off) - 1):
        n0, n1, l0, l1 = genes.node_off[g], genes.node_off[g + 1], genes.link_off[g], genes.link_off[g + 1]
        fitter_parent = past.fitter_parent[g]
        if fitter_parent >= 0 and _same(genes, g, past.genes, fitter_parent):
            table, base = past.table, row_off[g]
            low, high = table.row_off[fitter_parent], table.row_off[fitter_parent + 1]
            start = table.rows[low, 1] if high > low else 0
            for r in range(high - low):
                rows[base + r, 0] = table.rows[low + r, 0]
                rows[base + r, 1] = table.rows[low + r, 1] - start + used
                rows[base + r, 2] = table.rows[low + r, 2] - start + used
                node[base + r] = table.node[low + r] - past.genes.node_off[fitter_parent] + n0
            for i in range(start, table.rows[high - 1, 2] if high > low else 0):
                links[used, 0], links[used, 1] = table.links[i, 0], table.links[i, 1]
                links[used, 2] = table.links[i, 2] - past.genes.link_off[fitter_parent] + l0
                longest = max(longest, np.int64(table.links[i, 1]))
                used += 1
            for o in range(outputs):
                ends[g, o] = table.outputs[fitter_parent, o]
            row_off[g + 1] = base + high - low
            most = max(most, high - low)
            continue
        first[0] = 0
        for n in range(n1 - n0):
            first[n + 1], at[n], row[n] = 0, -1, -1
        for e in range(l0, l1):  # a counting sort by target keeps links in the order of their numbers
            target[e - l0] = find(genes.node_id, n0, n1, genes.link_dst[e]) - n0
            source[e - l0] = find(genes.node_id, n0, n1, genes.link_src[e]) if genes.link_src[e] > inputs else -1
            first[target[e - l0] + 1] += 1
        for n in range(n1 - n0):
            first[n + 1] += first[n]
            stack[n] = first[n]
        for e in range(l0, l1):
            by_target[stack[target[e - l0]]] = e
            stack[target[e - l0]] += 1
        base, made = row_off[g], 0
        for o in range(outputs):
            made = _visit(genes, g, o, first, by_target, source, at, row, node, base, made, stack)
        looked = 0
        while looked < made:  # nodes that are read with a delay are computed as well
            here = node[base + looked] - n0
            for i in range(first[here], first[here + 1]):
                e = by_target[i]
                before = source[e - l0]
                if genes.link_open[e] and genes.link_delay[e] and before >= 0:
                    made = _visit(genes, g, before - n0, first, by_target, source, at, row, node, base, made, stack)
            looked += 1
        for r in range(made):
            here = node[base + r] - n0
            rows[base + r, 0], rows[base + r, 1] = genes.node_act[n0 + here], used
            for i in range(first[here], first[here + 1]):
                e = by_target[i]
                if genes.link_open[e]:
                    before = source[e - l0]
                    links[used, 0] = genes.link_src[e] if before < 0 else inputs + 1 + row[before - n0]
                    links[used, 1], links[used, 2] = genes.link_delay[e], e
                    longest = max(longest, np.int64(genes.link_delay[e]))
                    used += 1
            rows[base + r, 2] = used
        for o in range(outputs):
            ends[g, o] = row[o]
        row_off[g + 1] = base + made
        most = max(most, made)
        written += made
    return used, most, 1 + longest, written
