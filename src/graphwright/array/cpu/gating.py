"""What each kind of gate computes, one native loop over all logits; importing this module loads numba.

Columns, kinds, states and modes are numbered as in `ops.gate`. `slope` is dg/dz of the soft gate; of a choice, whose
options depend on one another, it holds their softmax. `lean` is dg/dT over dg/dz.
"""

from __future__ import annotations

from math import exp, log
from typing import Any

import numpy as np

from graphwright.native import njit

_njit: Any = njit(cache=True, nogil=True, error_model="numpy")

SCALE, SIGMOID, STE, BERNOULLI, CONCRETE, CONCRETE_ST, HARD_CONCRETE, CHOICE = range(8)
SOFT, OPEN, CLOSED, FROZEN, FREE = range(5)
EVAL, TRAIN, AS_SOFT, AS_HARD, AS_OPEN = range(5)
KIND, GROUP, STATE, SLOT, GENERATION, ELEMENT = range(6)
LEAST = 1e-6
"""Noise lies between this and 1 minus this."""
THIN = 1e-3
"""A scale below this is closed."""


@_njit
def uniform(run: np.ndarray, slot: int, generation: int, element: int) -> float:
    """The number of one element in one step: the middle of its 24-bit cell, by Philox 4x32-10."""
    low = np.uint64(0xFFFFFFFF)
    seed = np.uint64(run[0])
    c0, c1 = np.uint64(element) & low, (np.uint64(slot) + np.uint64(0x80000000)) & low
    c2, c3 = np.uint64(generation) & low, np.uint64(run[1]) & low
    k0, k1 = seed & low, seed >> np.uint64(32)
    for _ in range(10):
        p0, p1 = np.uint64(0xD2511F53) * c0, np.uint64(0xCD9E8D57) * c2
        c0, c1, c2, c3 = (p1 >> np.uint64(32)) ^ c1 ^ k0, p1 & low, (p0 >> np.uint64(32)) ^ c3 ^ k1, p0 & low
        k0, k1 = (k0 + np.uint64(0x9E3779B9)) & low, (k1 + np.uint64(0xBB67AE85)) & low
    return min(max((float(c0 >> np.uint64(8)) + 0.5) * 2.0**-24, LEAST), 1.0 - LEAST)


@_njit
def sigmoid(x: float) -> float:
    """1 / (1 + e⁻ˣ), without overflow."""
    if x >= 0:
        return 1.0 / (1.0 + exp(-x))
    e = exp(x)
    return e / (1.0 + e)


@_njit
def _one(kind: int, mode: int, z: float, t: float, u: float) -> tuple[float, float, float]:
    """Value, slope and lean of one gate. Without noise u is 1/2, whose logit is 0."""
    if kind == SCALE:
        return (z if abs(z) >= THIN else 0.0) if mode == AS_HARD else z, 1.0, 0.0
    if SIGMOID <= kind <= BERNOULLI:
        p = sigmoid(z / t)
        hard = mode == AS_HARD or (kind != SIGMOID and mode != AS_SOFT)
        above = u < p if kind == BERNOULLI and mode == TRAIN else z > 0
        return (1.0 if above else 0.0) if hard else p, p * (1 - p) / t, -z / t
    heat = t if mode == TRAIN else 1.0
    score = (z + log(u) - log(1 - u)) / heat
    s, lean = sigmoid(score), -score if mode == TRAIN else 0.0
    slope = s * (1 - s) / heat
    if kind == HARD_CONCRETE:
        wide = 1.2 * s - 0.1
        slope = 1.2 * slope if 0 < wide < 1 else 0.0
        s = min(max(wide, 0.0), 1.0)
    if mode == AS_HARD or (kind == CONCRETE_ST and mode != AS_SOFT):
        above = s > 0.5 if mode == TRAIN else z > 0
        return 1.0 if above else 0.0, slope, lean
    return s, slope, lean


@_njit
def _choice(
    values: np.ndarray,
    slope: np.ndarray,
    lean: np.ndarray,
    logits: np.ndarray,
    table: np.ndarray,
    t: float,
    run: np.ndarray,
    start: int,
    end: int,
) -> None:
    """Softmax over the open options of one slot; hard takes the first of the largest."""
    mode = run[2]
    train = mode == TRAIN
    heat = t if train else 1.0
    top, first = -np.inf, -1
    for i in range(start, end):
        closed = table[i, STATE] == CLOSED or table[i, STATE] == FREE
        score = float(logits[i])
        if train and not closed:
            score += -log(-log(uniform(run, table[i, SLOT], table[i, GENERATION], table[i, ELEMENT])))
        values[i] = -np.inf if closed else score / heat
        lean[i] = -score / heat if train and not closed else 0.0
        if not closed and values[i] > top:
            top, first = values[i], i
    total = 0.0
    for i in range(start, end):
        values[i] = exp(values[i] - top) if values[i] > -np.inf else 0.0
        total += values[i]
    for i in range(start, end):
        values[i] = values[i] / total if total > 0 else 0.0
        slope[i] = values[i]
        if mode == AS_HARD:
            values[i] = 1.0 if i == first else 0.0


@_njit
def fill(
    values: np.ndarray,
    slope: np.ndarray,
    lean: np.ndarray,
    logits: np.ndarray,
    table: np.ndarray,
    temperature: np.ndarray,
    run: np.ndarray,
    ends: np.ndarray,
) -> None:
    """Write the value, slope and lean of every gate.

    Args:
        values, slope, lean: floating [N].
        logits: floating [N].
        table: int64 [N, 7].
        temperature: floating [G].
        run: int64 [3].
        ends: int64, where each part ends.
    """
    mode = run[2]
    start = 0
    for end in ends:
        if mode != AS_OPEN and end > start and table[start, KIND] == CHOICE:
            _choice(values, slope, lean, logits, table, float(temperature[table[start, GROUP]]), run, start, end)
            start = end
            continue
        for i in range(start, end):
            kind, state = table[i, KIND], table[i, STATE]
            if state in (CLOSED, FREE):
                values[i], slope[i], lean[i] = 0.0, 0.0, 0.0
            elif state == OPEN or mode == AS_OPEN:
                values[i], slope[i], lean[i] = 1.0, 0.0, 0.0
            else:
                noisy = mode == TRAIN and kind >= BERNOULLI and state == SOFT
                u = uniform(run, table[i, SLOT], table[i, GENERATION], table[i, ELEMENT]) if noisy else 0.5
                how = EVAL if state == FROZEN and mode == TRAIN else mode
                t = float(temperature[table[i, GROUP]])
                values[i], slope[i], lean[i] = _one(kind, how, float(logits[i]), t, u)
                if state == FROZEN:
                    slope[i] = 0.0
        start = end


@_njit
def pull_back(
    out: np.ndarray,
    warm: np.ndarray,
    slope: np.ndarray,
    lean: np.ndarray,
    grads: np.ndarray,
    table: np.ndarray,
    temperature: np.ndarray,
    run: np.ndarray,
    ends: np.ndarray,
) -> None:
    """dL/dz from dL/dg: times the slope, of a choice y(g - Σ g·y)/T; and dL/dT = Σ dL/dz · lean."""
    warm[:] = 0.0
    start = 0
    for end in ends:
        if run[2] != AS_OPEN and end > start and table[start, KIND] == CHOICE:
            mean = 0.0
            for i in range(start, end):
                mean += grads[i] * slope[i]
            heat = temperature[table[start, GROUP]] if run[2] == TRAIN else 1.0
            for i in range(start, end):
                out[i] = slope[i] * (grads[i] - mean) / heat
        else:
            for i in range(start, end):
                out[i] = grads[i] * slope[i]
        for i in range(start, end):
            warm[table[i, GROUP]] += out[i] * lean[i]
        start = end
