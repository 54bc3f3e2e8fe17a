"""Compiled loops of the CPU backend: random words, gates with gradients, scans. Importing this module loads numba."""

from __future__ import annotations

from math import exp, log
from pathlib import Path
from typing import Any

import numpy as np

from graphwright.array import formulas
from graphwright.array.formulas import activations, gates, specialise
from graphwright.array.formulas import philox as philox_formulas
from graphwright.array.formulas.philox import LOW
from graphwright.native import cached, inner

_inlined: Any = inner(error_model="numpy", nogil=True)
_PRIMITIVES = {
    "absolute": _inlined(lambda x: abs(x)), "exp": exp, "log": log,
    "select": _inlined(lambda condition, x, y: x if condition else y),
}  # fmt: skip
_activations: Any = specialise(activations, _PRIMITIVES, _inlined)
_sigmoids = {"sigmoid": _activations.sigmoid, "sigmoid_slope": _activations.sigmoid_slope}
_gates: Any = specialise(gates, {**_PRIMITIVES, **_sigmoids}, _inlined)
_philox: Any = specialise(philox_formulas, {}, _inlined).philox

_compiled = cached(Path(__file__), Path(formulas.__file__).parent, error_model="numpy", nogil=True)
LINEAR, HEATED, NOISY, ROUNDED, STRETCHED, ONE_OF = map(
    gates.by_code, ("linear", "heated", "noisy", "rounded", "stretched", "one_of")
)
SOFT, OPEN, CLOSED, FROZEN, FREE = range(len(gates.STATES))
EVAL, TRAIN, AS_SOFT, AS_HARD, AS_OPEN = range(len(gates.MODES))
KIND, GROUP, STATE, SLOT, GENERATION, ELEMENT, _ = range(len(gates.COLUMNS))
MARGIN = 1e-6
"""Noise is clipped to [MARGIN, 1 - MARGIN]."""


@_compiled
def fill_words(out: np.ndarray, key: np.ndarray, stream: int, shift: int) -> None:
    """Fill `out` with the Philox words of a key and a stream, each shifted right by `shift` bits.

    Args:
        out: int32 or int64 [n]; a shift of 0 needs int64.
        key: int64 [2]: the bits of the seed, and the step.
    """
    shift_by, seed, step = np.uint64(shift), np.uint64(key[0]), np.uint64(key[1]) & LOW
    for block in range((len(out) + 3) // 4):
        counter = np.uint64(block)
        words = _philox(
            counter & LOW, counter >> np.uint64(32), np.uint64(stream), step, seed & LOW, seed >> np.uint64(32)
        )
        at = 4 * block
        for i in range(min(4, len(out) - at)):
            out[at + i] = words[i] >> shift_by


@_inlined
def _noise(run: Any, table: Any, i: Any) -> Any:
    """Return the uniform noise of gate i in step run[1]: (k + 1/2)·2⁻²⁴ for 24 random bits k, clipped."""
    seed, element, slot = np.uint64(run[0]), np.uint64(table[i, ELEMENT]), np.uint64(table[i, SLOT])
    generation, step = np.uint64(table[i, GENERATION]) & LOW, np.uint64(run[1]) & LOW
    word = _philox(
        element & LOW, (slot + np.uint64(0x80000000)) & LOW, generation, step, seed & LOW, seed >> np.uint64(32)
    )[0]
    return min(max((float(word >> np.uint64(8)) + 0.5) * 2.0**-24, MARGIN), 1.0 - MARGIN)


@_inlined
def _gate(kind: Any, mode: Any, z: Any, t: Any, u: Any) -> Any:
    """Return (value g, slope dg/dz, factor (dg/dT)/(dg/dz)) of a gate with logit z, temperature T = t and noise u.

    u = 1/2 means no noise. A hard gate has the slope of the soft gate that it thresholds.
    """
    if LINEAR[kind]:
        return _gates.thinned(z) if mode == AS_HARD else z, 1.0, 0.0
    heated, training = HEATED[kind], mode == TRAIN
    if heated:
        value, slope = _gates.soft(z, t)
        factor = -z / t
    else:
        score, heat = _gates.logistic(z, u), t if training else 1.0
        value, slope = _gates.soft(score, heat)
        factor = -(score / heat) if training else 0.0
    if STRETCHED[kind]:
        value, slope = _gates.hard_concrete(value, slope)
    if mode == AS_HARD or (ROUNDED[kind] and mode != AS_SOFT):
        above = value > (u if heated else 0.5) if training and NOISY[kind] else z > 0
        value = 1.0 if above else 0.0
    return value, slope, factor


@_inlined
def _choice(
    values: Any, slope: Any, factor: Any, logits: Any, table: Any, t: Any, run: Any, start: Any, end: Any
) -> None:
    """Write to `values` and `slope` the softmax over the options (gates start:end) of a choice that are not closed.

    In mode `hard`, the value of the option with the largest logit is 1 instead, and that of the others 0.
    """
    mode = run[2]
    train = mode == TRAIN
    heat = t if train else 1.0
    top, first = -np.inf, -1
    for i in range(start, end):
        closed = table[i, STATE] == CLOSED or table[i, STATE] == FREE
        score = float(logits[i])
        if train and not closed:
            score += _gates.gumbel(_noise(run, table, i))
        values[i] = -np.inf if closed else score / heat
        factor[i] = -score / heat if train and not closed else 0.0
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


@_compiled
def fill_gates(
    values: np.ndarray, slope: np.ndarray, factor: np.ndarray, logits: np.ndarray, table: np.ndarray,
    temperature: np.ndarray, run: np.ndarray, ends: np.ndarray,
) -> None:  # fmt: skip
    """Write the value g, the slope dg/dz and the factor (dg/dT)/(dg/dz) of every gate, where T is its temperature.

    The value of an option depends on the logits of all options of its choice. For options, `slope` is therefore the
    softmax, from which `pull_back` computes the gradient.

    Args:
        values, slope, factor: floating [N], written.
        logits: floating [N].
        table: int64 [N, 7]: kind, group, state, slot, generation, element and cost of each gate (numbers as in
            `formulas.gates`).
        temperature: floating [G], one per group of gates.
        run: int64 [3]: seed, step, mode.
        ends: int64; for each part (all options of a choice, or other gates) the index one past its last gate.
    """
    mode = run[2]
    start = 0
    for end in ends:
        if mode != AS_OPEN and end > start and ONE_OF[table[start, KIND]]:
            _choice(values, slope, factor, logits, table, float(temperature[table[start, GROUP]]), run, start, end)
            start = end
            continue
        for i in range(start, end):
            kind, state = table[i, KIND], table[i, STATE]
            if state in (CLOSED, FREE):
                values[i], slope[i], factor[i] = 0.0, 0.0, 0.0
            elif state == OPEN or mode == AS_OPEN:
                values[i], slope[i], factor[i] = 1.0, 0.0, 0.0
            else:
                noisy = mode == TRAIN and NOISY[kind] and state == SOFT
                u = _noise(run, table, i) if noisy else 0.5
                how = EVAL if state == FROZEN and mode == TRAIN else mode
                t = float(temperature[table[i, GROUP]])
                values[i], slope[i], factor[i] = _gate(kind, how, float(logits[i]), t, u)
                if state == FROZEN:
                    slope[i] = 0.0
        start = end


@_compiled
def pull_back(
    out: np.ndarray, out_temperature: np.ndarray, slope: np.ndarray, factor: np.ndarray, grads: np.ndarray,
    table: np.ndarray, temperature: np.ndarray, run: np.ndarray, ends: np.ndarray,
) -> None:  # fmt: skip
    """Compute dL/dz, and dL/dT = Σ dL/dz·factor per group, from `grads` dL/dg and the results of `fill_gates`.

    dL/dz = slope · dL/dg; for the options of a choice, with softmax y in `slope`, dL/dz = y·(dL/dg - Σ y·dL/dg)/T.
    """
    out_temperature[:] = 0.0
    start = 0
    for end in ends:
        if run[2] != AS_OPEN and end > start and ONE_OF[table[start, KIND]]:
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
            out_temperature[table[i, GROUP]] += out[i] * factor[i]
        start = end


@_compiled
def scan_rows(out: np.ndarray, a: np.ndarray, b: np.ndarray, reverse: bool) -> None:
    """h = a·h + b along the middle axis of three, from 0; with `reverse`, from its end. `out` may be `a` or `b`."""
    rows, steps, width = out.shape
    for row in range(rows):
        for step in range(steps):
            t = steps - 1 - step if reverse else step
            if step == 0:
                for i in range(width):
                    out[row, t, i] = b[row, t, i]
            else:
                before = t + 1 if reverse else t - 1
                for i in range(width):
                    out[row, t, i] = a[row, t, i] * out[row, before, i] + b[row, t, i]


def warmup() -> None:
    """Compile each loop for the dtypes that plans and eager ops pass; numba caches the loops on disk."""
    table, run, ends = np.zeros((1, 7), np.int64), np.zeros(3, np.int64), np.ones(1, np.int64)
    for kind in (np.float32, np.float64):
        values, slope, factor, logits, temperature = (np.ones(1, kind) for _ in range(5))
        fill_gates(values, slope, factor, logits, table, temperature, run, ends)
        pull_back(logits, factor, slope, factor, values, table, temperature, run, ends)
        cell = np.zeros((1, 1, 1), kind)
        scan_rows(cell, cell, cell, False)
    for kind in (np.int32, np.int64):
        fill_words(np.zeros(1, kind), np.zeros(2, np.int64), 0, 0)
