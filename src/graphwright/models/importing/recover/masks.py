"""The mask recogniser: which keys a mask lets each query see, by running what makes it at several sizes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from graphwright.array.sizes import bound, names_of
from graphwright.errors import GraphwrightError
from graphwright.models.importing.recover.regions import PRIMES, Regions, arrays
from graphwright.ops import traits
from graphwright.program.kinds import CONST, INPUT, SOURCES
from graphwright.program.op_graph import Value

LARGEST = 8192
"""Largest window that is looked for: a mask is computed for more keys than that."""


@dataclass(frozen=True, slots=True)
class Mask:
    """What a mask means.

    Attributes:
        causal, window: as in the op `sdpa`.
        key_mask: the input [B, Tk] that is 0 or false for padding, or None.
    """

    causal: bool = False
    window: int | None = None
    key_mask: Value | None = None


@dataclass(frozen=True, slots=True)
class _Seen:
    """A mask at one set of sizes: which key each query sees, bool [B, Tq, Tk], and the padding [B, 1, Tk] it is for."""

    keys: np.ndarray
    padding: np.ndarray


def recognise(s: Regions, mask: Value, queries: int | str, keys: int | str) -> Mask | None:
    """Return what a mask means, bool or numbers added to the scores; None if it is no such mask.

    The mask is computed at three sets of sizes, the last with more keys than any whole number in what makes it, or with
    as many as a mask that is stored, and is compared entry by entry with: all keys, the causal mask, a causal window,
    each of them also with padding by an input of 0 and 1. Padding by finite numbers is none of them, since a query
    without visible keys would then see all.
    """
    region = _needed(s, mask)
    leaves = [v for v in region if s.is_op(v, *SOURCES) and not s.is_op(v, CONST)]
    if not all(s.is_op(v, INPUT) and len(s.shape(v)) == 2 and s.shape(v)[1] == keys for v in leaves) or len(leaves) > 1:
        return None
    key_mask = leaves[0] if leaves else None
    if key_mask is not None and s.p.spec(key_mask).dtype.kind == "float":
        return None
    numbers = {n for v in region for n in _integers(s, v) if n < 1 << 31}
    lengths = sorted(
        {max([least, *numbers]) + 3 for least in (64, 8)} | {n for v in region for n in _stored(s, v)}, reverse=True
    )
    if lengths[0] > LARGEST + 3:
        return None
    found = [_seen(s, mask, key_mask, sizes, queries, keys) for sizes in _small_sizes(s)]
    if names_of(keys):
        large = (
            _seen(s, mask, key_mask, sizes, queries, keys)
            for sizes in _large_sizes(s, key_mask, queries, keys, lengths)
        )
        found.append(next((seen for seen in large if seen is not None), None))
    complete = [seen for seen in found if seen is not None]
    if len(complete) < len(found):
        return None
    return next((m for m in _candidates(complete[-1], key_mask) if all(_fits(m, seen) for seen in complete)), None)


def _needed(s: Regions, mask: Value) -> list[Value]:
    """Return the values that a mask is made of; not those of which only the shape counts."""
    found, stack = {mask: None}, [mask]
    while stack:
        value = stack.pop()
        if s.is_op(value, *SOURCES) or traits(s.p.op(value.node)).valueless:
            continue
        for operand in s.p.operands(value.node):
            if operand not in found:
                found[operand] = None
                stack.append(operand)
    return list(found)


def _integers(s: Regions, value: Value) -> Iterator[int]:
    """Yield the sizes of the whole numbers above 1 in a value's attributes, or of the one that a constant holds."""
    if not s.is_op(value, *SOURCES):
        given = s.p.attrs(value.node).values()
        flat = (n for v in given for n in (v if isinstance(v, tuple) else (v,)))
        yield from (abs(n) for n in flat if type(n) is int and abs(n) > 1)
    elif s.is_op(value, CONST) and s.p.spec(value).dtype.kind != "bool":
        number = s.number(value)
        if number is not None and 1 < abs(number) < np.inf and number == int(number):
            yield int(abs(number))


def _names(s: Regions) -> list[str]:
    return list(dict.fromkeys(n for v in s.p.inputs() for d in s.p.spec(v).shape for n in names_of(d)))


def _small_sizes(s: Regions) -> Iterator[Mapping[str, int]]:
    for shift in (0, 1):
        yield {name: PRIMES[(i + shift) % len(PRIMES)] for i, name in enumerate(_names(s))}


def _stored(s: Regions, value: Value) -> list[int]:
    """Return the sizes of a constant with several rows, which may be a stored mask: as many keys as it has."""
    sizes = [n for n in s.p.spec(value).sizes if n > 1] if s.is_op(value, CONST) else []
    return sizes if len(sizes) > 1 else []


def _large_sizes(
    s: Regions, key_mask: Value | None, queries: int | str, keys: int | str, lengths: Iterable[int]
) -> Iterator[Mapping[str, int]]:
    """Yield sizes with these numbers of queries and keys."""
    names = {*names_of(queries), *names_of(keys)}
    for length in lengths:
        yield {name: length if name in names else 1 if key_mask is None else 2 for name in _names(s)}


def _seen(
    s: Regions, mask: Value, key_mask: Value | None, sizes: Mapping[str, int], queries: int | str, keys: int | str
) -> _Seen | None:
    """Compute a mask for random padding; None if that fails, or if it is no mask: the same for all heads."""
    rows, columns = int(bound(queries, sizes)), int(bound(keys, sizes))
    given, padding = {}, np.ones((1, 1, columns), bool)
    if key_mask is not None:
        spec = s.p.spec(key_mask).bind(sizes)
        drawn = np.random.default_rng(rows).random(spec.sizes) < 0.6
        drawn[0] = True  # of one sequence without padding, the window can be read
        given[key_mask], padding = arrays(drawn, spec), drawn[:, None]
    try:
        (made,) = s.compute([mask], given, sizes, shapes=True)
    except GraphwrightError:
        return None
    values = made.to_numpy()
    if made.dtype.kind != "bool":
        hidden, least = values < -1e4, np.finfo(values.dtype).min
        blurred = key_mask is not None and np.isfinite(values).all() and hidden.any()
        if blurred or ((values != 0) & ~hidden).any() or (hidden & (values > least / 2)).any():
            return None
        values = ~hidden
    values = values.reshape((1,) * (4 - values.ndim) + values.shape)
    if values.ndim != 4 or (values != values[:, :1]).any():
        return None
    return _Seen(np.broadcast_to(values[:, 0], (values.shape[0], rows, columns)), padding)


def _visible(mask: Mask, rows: int, columns: int) -> np.ndarray:
    ahead = np.arange(columns) - np.arange(rows)[:, None] - (columns - rows)
    seen = ahead <= 0 if mask.causal else np.ones((rows, columns), bool)
    return seen if mask.window is None else seen & (ahead > -mask.window)


def _fits(mask: Mask, seen: _Seen) -> bool:
    expected = _visible(mask, *seen.keys.shape[1:]) & seen.padding
    return bool((seen.keys == expected).all())


def _candidates(seen: _Seen, key_mask: Value | None) -> Iterator[Mask]:
    yield Mask(False, None, key_mask)
    yield Mask(True, None, key_mask)
    last = np.flatnonzero(seen.keys[0, -1])
    if last.size:
        yield Mask(True, int(seen.keys.shape[2] - last[0]), key_mask)
