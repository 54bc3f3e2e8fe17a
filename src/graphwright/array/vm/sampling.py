"""Random numbers, and sampling of tokens from rows of logits: penalties, temperature, filters, random draw.

Random numbers are those of `array.random` for a key and a stream, 16 counters at a time. The filters select by counting
instead of sorting: entries are counted in 2048 buckets by the upper bits of an integer of the same order (`_order`),
then the entries of one bucket by the next bits. Noise is computed exactly only for entries that can win the draw.
"""

from __future__ import annotations

from itertools import chain
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types

from graphwright.array.formulas import gates, philox, specialise
from graphwright.array.vm import vector as vec
from graphwright.array.vm.code import BERNOULLI, DROPOUT, TILES_END, ZEROS, Code
from graphwright.array.vm.elementwise import F, cell, loop, number
from graphwright.array.vm.math import exp, log, native

_LONGS = ir.VectorType(vec.I64, vec.LANES)
_WORDS = 4 * vec.LANES


class _Lanes:
    """A vector of 16 32-bit integers during code generation; its operators, used by Philox, emit LLVM instructions."""

    def __init__(self, builder: Any, value: Any) -> None:
        self.builder, self.value = builder, value

    def __xor__(self, other: _Lanes) -> _Lanes:
        return _Lanes(self.builder, self.builder.xor(self.value, other.value))

    def __add__(self, number: Any) -> _Lanes:
        return _Lanes(self.builder, self.builder.add(self.value, vec.constant(vec.I32, int(number))))


def _product(x: _Lanes, factor: Any) -> tuple[_Lanes, _Lanes]:
    b = x.builder
    wide = b.mul(b.zext(x.value, _LONGS), vec.constant(vec.I64, int(factor)))
    return _Lanes(b, b.trunc(b.lshr(wide, vec.constant(vec.I64, 32)), vec.INTS)), _Lanes(b, b.trunc(wide, vec.INTS))


_philox: Any = specialise(philox, {"product": _product, "wrapped": lambda x: x}).philox
_gumbel: Any = specialise(gates, {}, native).gumbel


def _uniform(b: Any, target: Any, block: Any, stream: Any, seed: Any, step: Any) -> None:
    """Write 64 uniform numbers to `target`: 4 for each of 16 Philox counters from `block`, a multiple of 16, on."""

    def word(value: Any, shift: int) -> Any:
        return vec.broadcast(b, b.trunc(b.lshr(value, vec.I64(shift)) if shift else value, vec.I32))

    lanes = ir.Constant(vec.INTS, [vec.I32(i) for i in range(vec.LANES)])
    counter = b.add(word(block, 0), lanes), word(block, 32), word(stream, 0), word(step, 0)
    words = _philox(*(_Lanes(b, w) for w in (*counter, word(seed, 0), word(seed, 32))))
    numbers = [b.uitofp(b.lshr(w.value, vec.constant(vec.I32, 8)), vec.FLOATS) for w in words]
    u = [b.fmul(n, vec.constant(vec.F32, 2.0**-24)) for n in numbers]
    pairs = zip(vec.interleaved(b, *u[:2]), vec.interleaved(b, *u[2:]), strict=True)
    for i, values in enumerate(chain.from_iterable(vec.interleaved(b, near, far, 2) for near, far in pairs)):
        vec.write(b, values, b.add(target, vec.I64(64 * i)))


uniforms = vec.define("uniforms", types.void, (types.int64,) * 5, vec.effect(_uniform))
"""Write 64 uniform numbers: target, first block, stream, seed, step."""


@loop(Code.NOISE)
def noise(row: Any, scratch: Any) -> None:
    """Draw uniform numbers or Bernoulli samples, or apply dropout.

    Instruction words: 2 count, 3 out, 6 x or the probabilities, 7 address of seed and step, 8 stream, 9 UNIFORM,
    BERNOULLI or DROPOUT; for dropout 10 the least uniform number that keeps an entry, 11 the divisor.
    """
    count, o, x, key, kind = cell(row, 2), cell(row, 3), cell(row, 6), cell(row, 7), cell(row, 9)
    least, divisor, drawn = F(number(row, 10)), F(number(row, 11)), scratch + ZEROS
    for start in range(0, count, _WORDS):
        uniforms(drawn, start // 4, cell(row, 8), vec.load_i64(key), vec.load_i64(key + 8))
        for i in range(start, min(count, start + _WORDS), 16):
            mask, u = vec.first(count - i), vec.load(drawn + 4 * (i - start))
            if kind == DROPOUT:
                u = vec.select(u >= least, vec.load_first(x + 4 * i, mask), 0.0) / divisor
            elif kind == BERNOULLI:
                u = vec.select(u < vec.load_first(x + 4 * i, mask), 1.0, 0.0)
            vec.store_first(o + 4 * i, u, mask)


# -- tokens ------------------------------------------------------------------------------------------------------------
_LOWEST = F(-np.inf)
_MOST_NOISE = F(17.5)  # -ln(-ln u) of the largest u, 1 - 2⁻²⁵, is 17.33
_SLACK = F(1e-3)  # above the error of `log` there
_FAINT = F(-87.0)  # exponentials of smaller numbers are subnormal, and slow


@loop(Code.SAMPLE_TOKEN)
def sample_token(row: Any, scratch: Any) -> None:
    """Sample one token id for each row of logits.

    Instruction words: 1 rows, 2 columns, 3 logits, 4 sampling parameters, 5 random keys, 6 pairs (id, count) of
    earlier tokens, 7 pairs per row, 8 ids, 9 the logits after all filters.
    """
    n = cell(row, 2)
    for b in range(cell(row, 1)):
        z = cell(row, 9) + 4 * n * b
        seen = cell(row, 6) + 8 * cell(row, 7) * b
        found = _chosen(
            z, cell(row, 3) + 4 * n * b, n, cell(row, 4) + 24 * b, cell(row, 5) + 32 * b, seen, cell(row, 7), scratch
        )
        vec.store_i64(cell(row, 8) + 8 * b, found)


@native
def _chosen(z: Any, x: Any, n: Any, rules: Any, key: Any, seen: Any, pairs: Any, scratch: Any) -> Any:
    best, position, k = _copied(z, x, n, F(1.0)), vec.load_i64(key + 16), vec.load_i64(key + 24)
    if position < 0:
        return -1
    temperature, p, least = vec.load_f32(rules + 12), vec.load_f32(rules + 16), vec.load_f32(rules + 20)
    if _penalised(z, n, rules, seen, pairs):
        best = _copied(z, z, n, F(1.0))
    if temperature != F(0.0) and temperature != F(1.0):
        best = _copied(z, z, n, temperature)
    if not (best > _LOWEST and best < F(np.inf)):  # both comparisons are false for NaN
        return -1
    if temperature == F(0.0):
        return _first_of(z, n, best)
    if 0 < k < n:
        _cut(z, n, best, F(k), False, scratch)
    if p < F(1.0):
        _cut(z, n, best, p, True, scratch)
    if least > F(0.0):
        for i in range(0, n, 16):
            mask = vec.first(n - i)
            v = vec.load_first(z + 4 * i, mask)
            vec.store_first(z + 4 * i, vec.select(_share(v, best) < least, _LOWEST, v), mask)
    return _drawn(z, n, vec.load_i64(key), vec.load_i64(key + 8), position, scratch)


@native
def _copied(z: Any, x: Any, n: Any, temperature: Any) -> Any:
    """Copy n logits from x to z, divided by a temperature; return the largest, or NaN if one is NaN."""
    best = vec.splat(_LOWEST)
    for i in range(0, n, 16):
        mask = vec.first(n - i)
        v = vec.load_first(x + 4 * i, mask)
        if temperature != F(1.0):
            v = v / temperature
        vec.store_first(z + 4 * i, v, mask)
        best = vec.maximum(best, vec.select(mask, v, _LOWEST))
    return vec.largest(best)


@native
def _penalised(z: Any, n: Any, rules: Any, seen: Any, pairs: Any) -> Any:
    """Apply the penalties of the sampling parameters `rules` to logits of earlier tokens; return False if none is set.

    `seen` holds `pairs` pairs (id, count in the output), up to the first negative id.
    """
    repetition, presence, frequency = vec.load_f32(rules), vec.load_f32(rules + 4), vec.load_f32(rules + 8)
    if repetition == F(1.0) and presence == F(0.0) and frequency == F(0.0):
        return False
    for j in range(pairs):
        index, count = vec.load_i32(seen + 8 * j), vec.load_i32(seen + 8 * j + 4)
        if index < 0:
            break
        if index < n:
            v = vec.load_f32(z + 4 * index)
            v = v / repetition if v > F(0.0) else v * repetition
            vec.store_f32(z + 4 * index, v - (presence + frequency * F(count)) if count > 0 else v)
    return True


@native
def _first_of(z: Any, n: Any, best: Any) -> Any:
    """Return the lowest index at which the n logits at z equal `best`; -0 equals 0."""
    for i in range(0, n, 16):
        mask = vec.first(n - i)
        v = vec.select(mask, vec.load_first(z + 4 * i, mask), _LOWEST)
        if vec.top(vec.select(v == best, 1.0, 0.0)) > F(0.0):
            for j in range(i, min(i + 16, n)):
                if vec.load_f32(z + 4 * j) == best:
                    return j
    return -1


@native
def _order(z: Any) -> Any:
    """Map the float at address z to a 32-bit integer, keeping the order of floats; -0 and 0 give the same integer."""
    bits = vec.load_i32(z)
    return (bits if bits >= 0 else -(1 << 31) - bits) + (1 << 31)


@native
def _share(v: Any, best: Any) -> Any:
    """Return exp(v - best), the probabilities of logits v relative to the largest one, or 0 where it is subnormal."""
    away = v - best
    return vec.select(away < _FAINT, 0.0, exp(vec.maximum(away, _FAINT)))


@native
def _cut(z: Any, n: Any, best: Any, limit: Any, weighed: Any, scratch: Any) -> None:
    """Apply top-k or top-p: keep the fewest largest logits that reach `limit`, and set the others to -inf.

    Equal logits are ordered by id. The limit is their number or, if `weighed`, their share of the total probability in
    float32; sums are float64.
    """
    buckets, lanes = scratch + TILES_END, scratch + ZEROS
    prefix, base, total = 0, 0.0, 1.0
    for level in range(3):
        shift, width = (21, 11) if level == 0 else (10, 11) if level == 1 else (0, 10)
        size = 1 << width
        for i in range(size):
            vec.store_f64(buckets + 8 * i, 0.0)
        for i in range(0, n, 16):
            v = vec.load_first(z + 4 * i, vec.first(n - i))
            if weighed and vec.largest(v) == _LOWEST:  # dropped before: weight 0
                continue
            vec.store(lanes, _share(v, best) if weighed else vec.splat(F(1.0)))
            for j in range(min(16, n - i)):
                order = _order(z + 4 * (i + j))
                if order >> (shift + width) == prefix:
                    bucket = buckets + 8 * ((order >> shift) & (size - 1))
                    vec.store_f64(bucket, vec.load_f64(bucket) + np.float64(vec.load_f32(lanes + 4 * j)))
        if level == 0 and weighed:
            total = 0.0
            for i in range(size):
                total += vec.load_f64(buckets + 8 * i)
        at, last = size - 1, -1
        while at >= 0 and not F((base + vec.load_f64(buckets + 8 * at)) / total) >= limit:
            base += vec.load_f64(buckets + 8 * at)
            last = at if vec.load_f64(buckets + 8 * at) > 0.0 else last
            at -= 1
        if at < 0:
            if level == 0:
                return  # rounded shares never reach the limit: keep all
            at = last
            base -= vec.load_f64(buckets + 8 * at)
        prefix = prefix << width | at
    full = False
    for i in range(n):
        order = _order(z + 4 * i)
        if order == prefix and not full:
            v = vec.splat(vec.load_f32(z + 4 * i))
            base += np.float64(vec.only(_share(v, best) if weighed else vec.splat(F(1.0))))
            full = F(base / total) >= limit  # the last one kept
        elif order <= prefix:
            vec.store_f32(z + 4 * i, _LOWEST)


@native
def _drawn(z: Any, n: Any, seed: Any, stream: Any, step: Any, scratch: Any) -> Any:
    """Return the index of the largest z - ln(-ln u) with uniform u (Gumbel-max); the lowest index if several are equal.

    As -ln u >= 1 - u, noise is at most -ln(1 - u): where this bound cannot win, the noise is not computed.
    """
    noise, best, found = scratch + ZEROS, _LOWEST, -1
    for start in range(0, n, 64):
        highest = vec.splat(_LOWEST)
        for i in range(start, min(start + 64, n), 16):
            mask = vec.first(n - i)
            highest = vec.maximum(highest, vec.select(mask, vec.load_first(z + 4 * i, mask), _LOWEST))
        if vec.largest(highest) + _MOST_NOISE <= best:
            continue
        uniforms(noise, start // 4, stream, seed, step)
        for i in range(start, min(start + 64, n), 16):
            mask = vec.first(n - i)
            v = vec.select(mask, vec.load_first(z + 4 * i, mask), _LOWEST)
            above = 1.0 - vec.load(noise + 4 * (i - start)) - F(2.0**-25)
            bound = v + (_SLACK - log(above))
            if vec.top(bound) > best:
                for j in range(i, min(i + 16, n)):
                    u = np.float64(vec.load_f32(noise + 4 * (j - start))) + 2.0**-25
                    sum_ = vec.load_f32(z + 4 * j) + F(_gumbel(u))
                    if sum_ > best:
                        best, found = sum_, j
    return found
