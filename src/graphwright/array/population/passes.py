"""Run and train the genomes of a table on all cases (input sequences), 16 cases at a time. This module loads numba.

Memory: all genomes share one array of inputs and bias; the values of a genome are stored in one buffer per call, with
as many steps as the longest delay needs. Cases are padded to whole vectors. Training is one native call: forward
through time, backward, clipping, Adam; the whole set of cases is one batch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from graphwright.array.population.genes import Genes, compiled, inlined, native
from graphwright.array.population.names import ACTIVATIONS
from graphwright.array.population.table import Table
from graphwright.array.vm import vector as vec
from graphwright.array.vm.math import exp, formulas, log, updates


def _by_kind(functions: list[Any]) -> Any:
    """Return one compiled function of (kind, x, y) that computes functions[kind](x, y)."""

    def either(code: int, function: Any, others: Any) -> Callable[..., Any]:
        @inlined
        def run(kind: Any, x: Any, y: Any) -> Any:
            return function(x, y) if kind == code else others(kind, x, y)

        return run

    chosen: Any = native(lambda kind, x, y: x)
    for code in reversed(range(len(functions))):
        chosen = either(code, functions[code], chosen)
    return chosen


def _of_two(function: Any) -> Any:
    """Return a compiled function of (x, y) that computes function(x)."""
    return native(lambda x, y: function(x))


activate: Any = _by_kind([_of_two(getattr(formulas, name)) for name in ACTIVATIONS])
"""activate(kind, x, x): the activation of a weighted sum."""
slope: Any = _by_kind([getattr(formulas, f"{name}_slope") for name in ACTIVATIONS])
"""slope(kind, x, y): dy/dx at a weighted sum x with activation y."""


LANES = 16
LINE = 64
"""Bytes of a cache line, and of a vector."""


@native
def _slot(step: int, ring: int) -> int:
    """Return step % ring, the index of a step in a ring buffer, without a slow division if `ring` is 1."""
    return step % ring if ring > 1 else 0


@native
def _genome(
    rows: int, count: int, links: int, ends: int, outputs: int, weight: int, x: int, x_ring: int, inputs: int,
    begin: int, steps: int, padded: int, values: int, ring: int, most: int, y: int,
) -> None:  # fmt: skip
    """Run one genome, of `count` rows, for `steps` steps from step `begin` on. Arrays are given as addresses.

    `rows` and `ends`: the genome's rows and outputs in a `Table`; `links` and `weight`: those of all genomes; `x`:
    inputs and bias [x_ring, inputs + 1, padded]; `values`: of neurons [ring, most, padded]; `y`: outputs, written.
    """
    row_bytes = 4 * padded
    step_bytes, seen_bytes = most * row_bytes, (inputs + 1) * row_bytes
    for t in range(begin, begin + steps):
        now, shown = values + _slot(t, ring) * step_bytes, x + _slot(t, x_ring) * seen_bytes
        for r in range(count):
            row = rows + 12 * r
            kind, low, high = vec.load_i32(row), vec.load_i32(row + 4), vec.load_i32(row + 8)
            for n in range(0, row_bytes, LINE):
                total = vec.splat(np.float32(0.0))
                for i in range(low, high):
                    link = links + 12 * i
                    src, delay = vec.load_i32(link), vec.load_i32(link + 4)
                    base = now - seen_bytes if src > inputs else shown  # rows follow inputs and bias
                    known = True
                    if delay:
                        before = t - delay
                        known = src > inputs or before >= 0
                        if src > inputs:
                            base = values + _slot(before + ring, ring) * step_bytes - seen_bytes
                        elif known:
                            base = x + _slot(before, x_ring) * seen_bytes
                    part = vec.splat(np.float32(0.0))
                    if known:
                        one = vec.splat(vec.load_f32(weight + 4 * vec.load_i32(link + 8)))
                        part = vec.load(base + src * row_bytes + n) * one
                    total = part if i == low else total + part
                vec.store(now + r * row_bytes + n, activate(kind, total, total))
        for o in range(outputs):
            source = now + vec.load_i32(ends + 4 * o) * row_bytes
            for n in range(0, row_bytes, LINE):
                vec.store(y + n, vec.load(source + n))
            y += row_bytes


@compiled
def answer(
    table: Table, weight: np.ndarray, x: np.ndarray, values: np.ndarray, y: np.ndarray, low: int, high: int
) -> None:
    """Compute the outputs `y` of genomes `low` to `high` for all cases and steps.

    Args:
        x: float32 [tiles, steps, inputs + 1, padded]: inputs and bias of the cases.
        values: scratch of `table.ring`·`table.most`·padded float32 and one cache line; genomes use it in turn.
        y: float32 [tiles, G, steps, outputs, padded], written.
    """
    tiles, steps, seen, padded = x.shape
    rows, links, ends = table.rows.ctypes.data, table.links.ctypes.data, table.outputs.ctypes.data
    outputs = y.shape[3]
    memory = (values.ctypes.data + LINE - 1) // LINE * LINE
    size = 4 * table.ring * table.most * padded
    for k in range(tiles):
        for g in range(low, high):
            if table.ring > 1:  # delayed links read 0 before the first step
                for at in range(memory, memory + size, LINE):
                    vec.store(at, vec.splat(np.float32(0.0)))
            _genome(
                rows + 12 * table.row_off[g], table.row_off[g + 1] - table.row_off[g], links, ends + 4 * g * outputs,
                outputs, weight.ctypes.data, x.ctypes.data + k * x.strides[0], steps, seen - 1, 0, steps, padded,
                memory, table.ring, table.most, y.ctypes.data + k * y.strides[0] + g * y.strides[1],
            )  # fmt: skip


@compiled
def advance(
    table: Table, weight: np.ndarray, x: np.ndarray, values: np.ndarray, y: np.ndarray, step: int, low: int, high: int
) -> None:
    """Run one step of genomes `low` to `high`, each on its own cases.

    Args:
        x: float32 [G, ring, inputs + 1, padded]: inputs and bias; step s is stored at index s modulo ring.
        values: float32 [G, ring, most, padded]: values of neurons, stored likewise; zeros before the first step.
        y: float32 [G, outputs, padded], written.
        step: index of the step.
    """
    _, ring, seen, padded = x.shape
    rows, links, ends = table.rows.ctypes.data, table.links.ctypes.data, table.outputs.ctypes.data
    outputs = y.shape[1]
    for g in range(low, high):
        _genome(
            rows + 12 * table.row_off[g], table.row_off[g + 1] - table.row_off[g], links, ends + 4 * g * outputs,
            outputs, weight.ctypes.data, x.ctypes.data + g * x.strides[0], ring, seen - 1, step, 1, padded,
            values.ctypes.data + g * values.strides[0], ring, table.most, y.ctypes.data + g * y.strides[0],
        )  # fmt: skip


MSE, BCE, CROSS_ENTROPY = range(3)
BETA1, BETA2, EPS = 0.9, 0.999, 1e-8


@native
def _forward(
    table: Any, weights: Any, base: Any, count: Any, x: Any, inputs: Any, steps: Any, row_bytes: Any, step_bytes: Any,
    sums: Any, values: Any, slopes: Any,
) -> None:  # fmt: skip
    """Run all steps of the genome in rows base:base + count of `table`.

    Write, per neuron and step, its weighted sum to address `sums`, its activation to `values` and 0 to `slopes`.
    """
    zero = vec.splat(np.float32(0.0))
    for t in range(steps):
        for r in range(count):
            kind, low, high = table.rows[base + r, 0], table.rows[base + r, 1], table.rows[base + r, 2]
            for n in range(0, row_bytes, LINE):
                total = zero
                for i in range(low, high):
                    src, then = np.int64(table.links[i, 0]), t - table.links[i, 1]
                    w, part = weights[table.links[i, 2]], zero
                    if then >= 0 and src > inputs:
                        part = vec.load(values + then * step_bytes + (src - inputs - 1) * row_bytes + n) * w
                    elif then >= 0:
                        part = vec.load(x + (then * (inputs + 1) + src) * row_bytes + n) * w
                    total = part if i == low else total + part
                at = t * step_bytes + r * row_bytes + n
                vec.store(sums + at, total)
                vec.store(values + at, activate(kind, total, total))
                vec.store(slopes + at, zero)


@native
def _cross_entropy(outputs: Any, target: Any, values: Any, slopes: Any, row_bytes: Any, weight: Any) -> Any:
    """Return the cross entropy of 16 cases (logits: rows `outputs` of `values`); add `weight`·gradient to `slopes`."""
    best = vec.load(values + np.int64(outputs[0]) * row_bytes)
    for o in range(1, len(outputs)):
        best = vec.maximum(best, vec.load(values + np.int64(outputs[o]) * row_bytes))
    mass = vec.splat(np.float32(0.0))
    for o in range(len(outputs)):
        mass = mass + exp(vec.load(values + np.int64(outputs[o]) * row_bytes) - best)
    rest = log(mass) + best
    loss = vec.splat(np.float32(0.0))
    for o in range(len(outputs)):
        at = np.int64(outputs[o]) * row_bytes
        wanted = vec.load(target + o * row_bytes)
        score = vec.load(values + at) - rest
        loss = loss - wanted * score
        vec.store(slopes + at, vec.load(slopes + at) + (exp(score) - wanted) * weight)
    return loss


@native
def _pointwise(
    kind: Any, outputs: Any, target: Any, values: Any, slopes: Any, row_bytes: Any, share: Any, weight: Any
) -> Any:
    """Return the MSE or BCE of 16 cases, summed over rows `outputs` of `values`, the results of the network.

    Add `share` · `weight` · gradient to these rows of `slopes`.
    """
    loss = vec.splat(np.float32(0.0))
    for o in range(len(outputs)):
        at = np.int64(outputs[o]) * row_bytes
        wanted, score = vec.load(target + o * row_bytes), vec.load(values + at)
        if kind == MSE:
            gap = score - wanted
            loss = loss + gap * gap
            delta = gap + gap
        else:
            loss = loss + formulas.bce_with_logits(score, wanted)
            delta = formulas.bce_with_logits_slope(score, wanted)
        vec.store(slopes + at, vec.load(slopes + at) + delta * share * weight)
    return loss


@native
def _backward(
    table: Any, weights: Any, base: Any, count: Any, x: Any, inputs: Any, steps: Any, row_bytes: Any, step_bytes: Any,
    sums: Any, values: Any, slopes: Any, gradient: Any,
) -> None:  # fmt: skip
    """Backpropagate through time from the output gradients in `slopes`; add the gradients of weights to `gradient`."""
    for t in range(steps - 1, -1, -1):
        for r in range(count - 1, -1, -1):
            kind, low, high = table.rows[base + r, 0], table.rows[base + r, 1], table.rows[base + r, 2]
            here = t * step_bytes + r * row_bytes
            for n in range(here, here + row_bytes, LINE):
                vec.store(slopes + n, vec.load(slopes + n) * slope(kind, vec.load(sums + n), vec.load(values + n)))
            for i in range(low, high):
                src, then = np.int64(table.links[i, 0]), t - table.links[i, 1]
                if then < 0:
                    continue
                w, inner = weights[table.links[i, 2]], src > inputs
                shift = then * step_bytes + (src - inputs - 1) * row_bytes
                feed = values + shift if inner else x + (then * (inputs + 1) + src) * row_bytes
                total = vec.splat(np.float32(0.0))
                for n in range(0, row_bytes, LINE):
                    delta = vec.load(slopes + here + n)
                    total = vec.fma(delta, vec.load(feed + n), total)
                    if inner:
                        at = slopes + shift + n
                        vec.store(at, vec.fma(delta, w, vec.load(at)))
                gradient[table.links[i, 2]] += vec.total(total)


@native
def _adam(genes: Any, links: Any, low: Any, high: Any, gradient: Any, lr: Any, clip: Any) -> None:
    """Clip the gradient of `links[low:high]` to the norm `clip`; do a step of Adam, with a step count per weight."""
    norm = 0.0
    for i in range(low, high):
        norm += np.float64(gradient[links[i, 2]]) ** 2
    norm = np.sqrt(norm)
    factor = clip / (norm + 1e-6) if clip > 0.0 and norm > clip else 1.0
    for i in range(low, high):
        e = links[i, 2]
        genes.steps[e] += np.float32(1.0)
        grad, steps = np.float64(gradient[e]) * factor, np.float64(genes.steps[e])
        m, second = updates.adam_moments(
            grad, np.float64(genes.first[e]), np.float64(genes.second[e]), BETA1, BETA2, 1.0 - BETA1, 1.0 - BETA2
        )
        rate, scale = updates.adam_scales(lr, BETA1**steps, BETA2**steps)
        genes.first[e], genes.second[e] = m, second
        genes.weight[e] -= updates.adam_update(m, second, rate, scale, EPS)


@compiled
def train(
    table: Table, genes: Genes, x: int, inputs: int, steps: int, padded: int, target: int, share: int, outputs: int,
    heads: np.ndarray, loss_weights: np.ndarray, epochs: np.ndarray, lr: np.ndarray, clip: float, memory: int,
    most_rows: int, gradient: np.ndarray, losses: np.ndarray, low: int, high: int,
) -> None:  # fmt: skip
    """Run `epochs[g]` steps of Adam with rate `lr[g]` on genomes `low` to `high`; genes are changed in place.

    Args:
        x: address of float32 [steps, inputs + 1, padded]: inputs and bias of the cases.
        target: address of float32 [steps, outputs, padded]: the targets; one-hot for cross entropy.
        share: address of float32 [steps, padded]: weights of cases, with sum 1, and 0 in the padding.
        heads: int64 [H, 3]; per head the kind of its loss (index into `LOSSES`), its first output, its last output + 1.
        loss_weights: float64 [H], a factor per head.
        clip: bound on a genome's gradient norm; 0 for no bound.
        memory: address of scratch, float32 [3, steps, most_rows, padded]: sums, values, gradients.
        gradient: float32, one per weight: scratch.
        losses: float64 [G, 2], written: the losses before the first and before the last step.
    """
    row_bytes = 4 * padded
    step_bytes = row_bytes * most_rows
    sums, values, slopes = memory, memory + steps * step_bytes, memory + 2 * steps * step_bytes
    for g in range(low, high):
        base, count = table.row_off[g], table.row_off[g + 1] - table.row_off[g]
        if count == 0:
            continue
        l0, l1 = table.rows[base, 1], table.rows[base + count - 1, 2]
        for epoch in range(epochs[g]):
            _forward(table, genes.weight, base, count, x, inputs, steps, row_bytes, step_bytes, sums, values, slopes)
            loss = 0.0
            for h in range(len(heads)):
                kind, o0, o1 = heads[h, 0], heads[h, 1], heads[h, 2]
                part = np.float32(1.0 if kind == CROSS_ENTROPY else 1.0 / (o1 - o0))
                for t in range(steps):
                    for n in range(0, row_bytes, LINE):
                        weight = vec.load(share + t * row_bytes + n) * np.float32(loss_weights[h])
                        wanted, at = target + (t * outputs + o0) * row_bytes + n, t * step_bytes + n
                        ends = table.outputs[g, o0:o1]
                        if kind == CROSS_ENTROPY:
                            lost = _cross_entropy(ends, wanted, values + at, slopes + at, row_bytes, weight)
                        else:
                            lost = _pointwise(kind, ends, wanted, values + at, slopes + at, row_bytes, part, weight)
                        loss += np.float64(vec.total(lost * part * weight))
            if epoch == 0:
                losses[g, 0] = loss
            losses[g, 1] = loss
            for i in range(l0, l1):
                gradient[table.links[i, 2]] = np.float32(0.0)
            _backward(
                table, genes.weight, base, count, x, inputs, steps, row_bytes, step_bytes, sums, values, slopes,
                gradient,
            )  # fmt: skip
            _adam(genes, table.links, l0, l1, gradient, lr[g], clip)
