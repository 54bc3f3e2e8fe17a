"""Sample the next token from rows of logits: penalties, temperature, filters and the draw, as the op defines them.

The filters select by counting instead of sorting: entries are counted in 2048 buckets by the upper bits of their order,
then the entries of one bucket by the next bits. Noise is computed exactly only for entries that can win.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from graphwright.array.vm.code import TILES_END, ZEROS
from graphwright.array.vm.elementwise import F, cell
from graphwright.array.vm.math import exp, log, native
from graphwright.array.vm.noise import uniforms
from graphwright.array.vm.vector import (
    first,
    largest,
    load,
    load_f32,
    load_f64,
    load_first,
    load_i32,
    load_i64,
    maximum,
    only,
    select,
    splat,
    store,
    store_f32,
    store_f64,
    store_first,
    store_i64,
    top,
)

_BUCKETS = 2048
_LOWEST = F(-np.inf)
_MOST_NOISE = F(17.5)  # -ln(-ln u) of the largest u, 1 - 2⁻²⁵, is 17.33
_SLACK = F(1e-3)  # above the error of `log` there
_FAINT = F(-87.0)  # exponentials of smaller numbers are subnormal, and slow


@native
def sample_token(row: Any, scratch: Any) -> None:
    """Cells 1 rows, 2 columns, 3 logits, 4 rules, 5 keys, 6 seen, 7 pairs in a row of it, 8 ids, 9 kept logits."""
    n = cell(row, 2)
    for b in range(cell(row, 1)):
        z = cell(row, 9) + 4 * n * b
        seen = cell(row, 6) + 8 * cell(row, 7) * b
        found = _chosen(
            z, cell(row, 3) + 4 * n * b, n, cell(row, 4) + 24 * b, cell(row, 5) + 32 * b, seen, cell(row, 7), scratch
        )
        store_i64(cell(row, 8) + 8 * b, found)


@native
def _chosen(z: Any, x: Any, n: Any, rules: Any, key: Any, seen: Any, pairs: Any, scratch: Any) -> Any:
    best, position, k = _copied(z, x, n), load_i64(key + 16), load_i64(key + 24)
    if position < 0:
        return -1
    temperature, p, least = load_f32(rules + 12), load_f32(rules + 16), load_f32(rules + 20)
    if _penalised(z, n, rules, seen, pairs):
        best = _copied(z, z, n)
    if temperature != F(0.0) and temperature != F(1.0):
        best = _divided(z, n, temperature)
    if not (best > _LOWEST and best < F(np.inf)):  # of NaN neither is true
        return -1
    if temperature == F(0.0):
        return _first_of(z, n, best)
    if 0 < k < n:
        _cut(z, n, best, F(k), False, scratch)
    if p < F(1.0):
        _cut(z, n, best, p, True, scratch)
    if least > F(0.0):
        for i in range(0, n, 16):
            mask = first(n - i)
            v = load_first(z + 4 * i, mask)
            store_first(z + 4 * i, select(_share(v, best) < least, _LOWEST, v), mask)
    return _drawn(z, n, load_i64(key), load_i64(key + 8), position, scratch)


@native
def _copied(z: Any, x: Any, n: Any) -> Any:
    """Copy logits; returns the largest, NaN if there is a NaN."""
    best = splat(_LOWEST)
    for i in range(0, n, 16):
        mask = first(n - i)
        v = load_first(x + 4 * i, mask)
        store_first(z + 4 * i, v, mask)
        best = maximum(best, select(mask, v, _LOWEST))
    return largest(best)


@native
def _penalised(z: Any, n: Any, rules: Any, seen: Any, pairs: Any) -> Any:
    """True if there is a penalty; pairs are (id, count in the output), up to the first id below 0."""
    repetition, presence, frequency = load_f32(rules), load_f32(rules + 4), load_f32(rules + 8)
    if repetition == F(1.0) and presence == F(0.0) and frequency == F(0.0):
        return False
    for j in range(pairs):
        index, count = load_i32(seen + 8 * j), load_i32(seen + 8 * j + 4)
        if index < 0:
            break
        if index < n:
            v = load_f32(z + 4 * index)
            v = v / repetition if v > F(0.0) else v * repetition
            store_f32(z + 4 * index, v - (presence + frequency * F(count)) if count > 0 else v)
    return True


@native
def _divided(z: Any, n: Any, temperature: Any) -> Any:
    """Divide by the temperature; returns the largest, NaN if there is a NaN."""
    best = splat(_LOWEST)
    for i in range(0, n, 16):
        mask = first(n - i)
        v = load_first(z + 4 * i, mask) / temperature
        store_first(z + 4 * i, v, mask)
        best = maximum(best, select(mask, v, _LOWEST))
    return largest(best)


@native
def _first_of(z: Any, n: Any, best: Any) -> Any:
    """The lowest id of the largest entry; both zeros are equal."""
    for i in range(0, n, 16):
        mask = first(n - i)
        v = select(mask, load_first(z + 4 * i, mask), _LOWEST)
        if top(select(v == best, 1.0, 0.0)) > F(0.0):
            for j in range(i, min(i + 16, n)):
                if load_f32(z + 4 * j) == best:
                    return j
    return -1


@native
def _order(z: Any) -> Any:
    """A 32-bit integer that grows with the float at an address, equal for both zeros."""
    bits = load_i32(z)
    return (bits if bits >= 0 else -(1 << 31) - bits) + (1 << 31)


@native
def _share(v: Any, best: Any) -> Any:
    """Probabilities relative to the largest."""
    away = v - best
    return select(away < _FAINT, 0.0, exp(maximum(away, _FAINT)))


@native
def _weights(v: Any, best: Any, weighed: Any) -> Any:
    return _share(v, best) if weighed else splat(F(1.0))


@native
def _reached(sum_: Any, total: Any, limit: Any) -> Any:
    return F(sum_ / total) >= limit


@native
def _cut(z: Any, n: Any, best: Any, limit: Any, weighed: Any, scratch: Any) -> None:
    """Drop entries after the shortest prefix of the descending order (ties: lower ids first) that reaches the limit.

    The limit is a number of entries, or a share of the total probability in float32; sums are float64.
    """
    buckets, lanes = scratch + TILES_END, scratch + ZEROS
    prefix, base, total = 0, 0.0, 1.0
    for level in range(3):
        shift, width = (21, 11) if level == 0 else (10, 11) if level == 1 else (0, 10)
        size = 1 << width
        for i in range(size):
            store_f64(buckets + 8 * i, 0.0)
        for i in range(0, n, 16):
            v = load_first(z + 4 * i, first(n - i))
            if weighed and largest(v) == _LOWEST:  # dropped before: weight 0
                continue
            store(lanes, _weights(v, best, weighed))
            for j in range(min(16, n - i)):
                order = _order(z + 4 * (i + j))
                if order >> (shift + width) == prefix:
                    place = buckets + 8 * ((order >> shift) & (size - 1))
                    store_f64(place, load_f64(place) + np.float64(load_f32(lanes + 4 * j)))
        if level == 0 and weighed:
            total = 0.0
            for i in range(size):
                total += load_f64(buckets + 8 * i)
        at, last = size - 1, -1
        while at >= 0 and not _reached(base + load_f64(buckets + 8 * at), total, limit):
            base += load_f64(buckets + 8 * at)
            last = at if load_f64(buckets + 8 * at) > 0.0 else last
            at -= 1
        if at < 0:
            if level == 0:
                return  # rounded shares never reach the limit: keep all
            at = last
            base -= load_f64(buckets + 8 * at)
        prefix = prefix << width | at
    full = False
    for i in range(n):
        order = _order(z + 4 * i)
        if order == prefix and not full:
            base += np.float64(only(_weights(splat(load_f32(z + 4 * i)), best, weighed)))
            full = _reached(base, total, limit)  # the last one kept
        elif order <= prefix:
            store_f32(z + 4 * i, _LOWEST)


@native
def _drawn(z: Any, n: Any, seed: Any, stream: Any, step: Any, scratch: Any) -> Any:
    """Index of the largest z - ln(-ln u), the lowest of equal ones.

    As -ln u >= 1 - u, noise is at most -ln(1 - u): where this bound cannot win, the noise is not computed.
    """
    noise, best, found = scratch + ZEROS, _LOWEST, -1
    for start in range(0, n, 64):
        highest = splat(_LOWEST)
        for i in range(start, min(start + 64, n), 16):
            mask = first(n - i)
            highest = maximum(highest, select(mask, load_first(z + 4 * i, mask), _LOWEST))
        if largest(highest) + _MOST_NOISE <= best:
            continue
        uniforms(noise, start // 4, stream, seed, step)
        for i in range(start, min(start + 64, n), 16):
            mask = first(n - i)
            v = select(mask, load_first(z + 4 * i, mask), _LOWEST)
            above = 1.0 - load(noise + 4 * (i - start)) - F(2.0**-25)
            bound = v + (_SLACK - log(above))
            if top(bound) > best:
                for j in range(i, min(i + 16, n)):
                    u = np.float64(load_f32(noise + 4 * (j - start))) + 2.0**-25
                    sum_ = load_f32(z + 4 * j) + F(-np.log(-np.log(u)))
                    if sum_ > best:
                        best, found = sum_, j
    return found
