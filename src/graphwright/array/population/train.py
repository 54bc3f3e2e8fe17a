"""Gradient steps on all genomes: forward through time, backward, clipping, Adam, in one call.

The whole set of cases is one batch. Importing this module loads numba.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from graphwright.array.population.activations import activate, slope
from graphwright.array.population.genes import Genes
from graphwright.array.population.table import Table
from graphwright.array.vm import vector as v
from graphwright.array.vm.machine import source
from graphwright.array.vm.math import exp, log, sigmoid
from graphwright.native import njit

LANES = 16
MSE, BCE, CROSS_ENTROPY = range(3)
BETA1, BETA2, EPS = 0.9, 0.999, 1e-8


@cache
def train() -> Any:
    """The compiled loop; see `run` in its body for what the arguments are."""
    return _build(source(Path(__file__).parent))


def _build(stamp: int) -> Any:
    @njit(cache=True, error_model="numpy", nogil=True, _nrt=False)  # without an allocator: nothing here may need one
    def run(
        table: Table,
        genes: Genes,
        x: int,
        inputs: int,
        steps: int,
        padded: int,
        target: int,
        share: int,
        outputs: int,
        heads: np.ndarray,
        worth: np.ndarray,
        epochs: np.ndarray,
        lr: np.ndarray,
        clip: float,
        memory: int,
        most_rows: int,
        gradient: np.ndarray,
        losses: np.ndarray,
        low: int,
        high: int,
    ) -> int:
        """Genomes low to high, each `epochs[g]` steps of Adam with rate `lr[g]`; genes are changed in place.

        Args:
            x: address of float32 [steps, inputs + 1, padded].
            heads: int64 [H, 3]: kind of the loss, first output, one behind the last; worth: float64 [H], their weights.
            target: address of float32 [steps, outputs, padded]; one-hot for cross entropy.
            share: address of float32 [steps, padded]: what each case counts; sums to 1, 0 where padded.
            clip: bound on a genome's gradient norm; 0 for none.
            memory: address of float32 [3, steps, most_rows, padded]: sums, values, gradients.
            gradient: float32, one per weight: room to work in, so that nothing is allocated here.
            losses: float64 [G, 2], written: before the first step, and before the last one.
        """
        row_bytes = 4 * padded
        step_bytes = row_bytes * most_rows
        sums, values, slopes = memory, memory + steps * step_bytes, memory + 2 * steps * step_bytes
        zero, one = np.float32(0.0), np.float32(1.0)
        for g in range(low, high):
            base, count = table.row_off[g], table.row_off[g + 1] - table.row_off[g]
            if count == 0:
                continue
            l0, l1 = table.rows[base, 1], table.rows[base + count - 1, 2]
            for epoch in range(epochs[g]):
                # forward, everything kept
                for t in range(steps):
                    for r in range(count):
                        kind, first, last = table.rows[base + r, 0], table.rows[base + r, 1], table.rows[base + r, 2]
                        for n in range(0, row_bytes, 4 * LANES):
                            total = v.splat(zero)
                            for i in range(first, last):
                                src, then = np.int64(table.links[i, 0]), t - table.links[i, 1]
                                w = v.splat(genes.weight[table.links[i, 2]])
                                part = v.splat(zero)
                                if then >= 0 and src > inputs:
                                    at = values + then * step_bytes + (src - inputs - 1) * row_bytes
                                    part = v.mul(v.load(at + n), w)
                                elif then >= 0:
                                    part = v.mul(v.load(x + (then * (inputs + 1) + src) * row_bytes + n), w)
                                total = part if i == first else v.add(total, part)
                            place = t * step_bytes + r * row_bytes + n
                            v.store(sums + place, total)
                            v.store(values + place, activate(kind, total))
                            v.store(slopes + place, v.splat(zero))
                # loss, and its gradient in the outputs
                loss = 0.0
                for h in range(len(heads)):
                    loss_kind, o0, o1 = heads[h, 0], heads[h, 1], heads[h, 2]
                    part_of = v.splat(np.float32(1.0 if loss_kind == CROSS_ENTROPY else 1.0 / (o1 - o0)))
                    counts = v.splat(np.float32(worth[h]))
                    for t in range(steps):
                        for n in range(0, row_bytes, 4 * LANES):
                            weight = v.mul(v.load(share + t * row_bytes + n), counts)
                            lost = v.splat(zero)
                            if loss_kind == CROSS_ENTROPY:
                                top = v.load(values + t * step_bytes + np.int64(table.outputs[g, o0]) * row_bytes + n)
                                for o in range(o0 + 1, o1):
                                    at = values + t * step_bytes + np.int64(table.outputs[g, o]) * row_bytes + n
                                    top = v.maximum(top, v.load(at))
                                mass = v.splat(zero)
                                for o in range(o0, o1):
                                    at = values + t * step_bytes + np.int64(table.outputs[g, o]) * row_bytes + n
                                    mass = v.add(mass, exp(v.sub(v.load(at), top)))
                                rest = v.add(log(mass), top)
                                for o in range(o0, o1):
                                    place = t * step_bytes + np.int64(table.outputs[g, o]) * row_bytes + n
                                    wanted = v.load(target + (t * outputs + o) * row_bytes + n)
                                    score = v.sub(v.load(values + place), rest)
                                    lost = v.sub(lost, v.mul(wanted, score))
                                    delta = v.mul(v.sub(exp(score), wanted), weight)
                                    v.store(slopes + place, v.add(v.load(slopes + place), delta))
                            else:
                                for o in range(o0, o1):
                                    place = t * step_bytes + np.int64(table.outputs[g, o]) * row_bytes + n
                                    wanted = v.load(target + (t * outputs + o) * row_bytes + n)
                                    score = v.load(values + place)
                                    if loss_kind == MSE:
                                        gap = v.sub(score, wanted)
                                        lost = v.add(lost, v.mul(gap, gap))
                                        delta = v.add(gap, gap)
                                    else:
                                        soft = log(v.add(v.splat(one), exp(v.neg(v.absolute(score)))))
                                        hard = v.sub(v.maximum(score, v.splat(zero)), v.mul(score, wanted))
                                        lost = v.add(lost, v.add(hard, soft))
                                        delta = v.sub(sigmoid(score), wanted)
                                    delta = v.mul(v.mul(delta, part_of), weight)
                                    v.store(slopes + place, v.add(v.load(slopes + place), delta))
                            loss += np.float64(v.total(v.mul(v.mul(lost, part_of), weight)))
                if epoch == 0:
                    losses[g, 0] = loss
                losses[g, 1] = loss
                # backward
                for i in range(l0, l1):
                    gradient[table.links[i, 2]] = zero
                for back in range(steps):
                    t = steps - 1 - back
                    for down in range(count):
                        r = count - 1 - down
                        kind, first, last = table.rows[base + r, 0], table.rows[base + r, 1], table.rows[base + r, 2]
                        for n in range(0, row_bytes, 4 * LANES):
                            place = t * step_bytes + r * row_bytes + n
                            local = slope(kind, v.load(sums + place), v.load(values + place))
                            v.store(slopes + place, v.mul(v.load(slopes + place), local))
                        for i in range(first, last):
                            src, then = np.int64(table.links[i, 0]), t - table.links[i, 1]
                            if then < 0:
                                continue
                            w = v.splat(genes.weight[table.links[i, 2]])
                            inner = src > inputs
                            shift = then * step_bytes + (src - inputs - 1) * row_bytes
                            feed = values + shift if inner else x + (then * (inputs + 1) + src) * row_bytes
                            total = v.splat(zero)
                            for n in range(0, row_bytes, 4 * LANES):
                                delta = v.load(slopes + t * step_bytes + r * row_bytes + n)
                                total = v.fma(delta, v.load(feed + n), total)
                                if inner:
                                    at = slopes + shift + n
                                    v.store(at, v.fma(delta, w, v.load(at)))
                            gradient[table.links[i, 2]] += v.total(total)
                # clip, then Adam with a count of steps per weight
                norm = 0.0
                for i in range(l0, l1):
                    norm += np.float64(gradient[table.links[i, 2]]) ** 2
                norm = np.sqrt(norm)
                scale = clip / (norm + 1e-6) if clip > 0.0 and norm > clip else 1.0
                for i in range(l0, l1):
                    e = table.links[i, 2]
                    slope_ = np.float64(gradient[e]) * scale
                    genes.steps[e] += one
                    genes.first[e] = BETA1 * genes.first[e] + (1.0 - BETA1) * slope_
                    genes.second[e] = BETA2 * genes.second[e] + (1.0 - BETA2) * slope_ * slope_
                    root = np.sqrt(np.float64(genes.second[e]) / (1.0 - BETA2 ** np.float64(genes.steps[e])))
                    mean = np.float64(genes.first[e]) / (1.0 - BETA1 ** np.float64(genes.steps[e]))
                    genes.weight[e] -= lr[g] * mean / (root + EPS)
        return 0 if stamp else 1

    return run
