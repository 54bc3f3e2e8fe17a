"""Rules: which query may see which key, by position; generators of patterns are rules.

A rule answers three questions, each for arrays of arguments: `allowed`, for pairs of tokens; `cover`, whether all, some
or none of the pairs of two blocks are allowed; `candidates`, the pairs of blocks of some rows that may have allowed
pairs. A rule stores no edges, so the edges of new rows cost only their number. Invariant: ALL and NONE agree with
`allowed`; SOME may be answered for any two blocks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar, NamedTuple, Protocol, cast

import numpy as np
import numpy.typing as npt

from .errors import PatternFileError, PatternShape

Array = npt.NDArray[Any]
NONE, SOME, ALL = 0, 1, 2


@dataclass(frozen=True, slots=True)
class Frame:
    """The tokens of a pattern: `queries` at positions q_start, q_start + 1, ..., `keys` at 0, 1, ...; in blocks."""

    queries: int
    keys: int
    block: int
    q_start: int

    @property
    def rows(self) -> int:
        """Number of query blocks."""
        return -(-self.queries // self.block)

    @property
    def columns(self) -> int:
        """Number of key blocks."""
        return -(-self.keys // self.block)

    def query_span(self, q: Any) -> tuple[Any, Any]:
        """Return the positions of the first and the last query of each block."""
        return self.q_start + q * self.block, self.q_start + np.minimum((q + 1) * self.block, self.queries) - 1

    def key_span(self, k: Any) -> tuple[Any, Any]:
        """Return the positions of the first and the last key of each block."""
        return k * self.block, np.minimum((k + 1) * self.block, self.keys) - 1

    def positions(self, q: Array, k: Array) -> tuple[Array, Array, Array]:
        """Return positions [n, block, 1] of queries, [n, 1, block] of keys, and [n, block, block]: both exist."""
        step = np.arange(self.block)
        i, j = q[:, None] * self.block + step, k[:, None] * self.block + step
        exist = (i < self.queries)[:, :, None] & (j < self.keys)[:, None, :]
        return self.q_start + i[:, :, None], j[:, None, :], exist


class Pairs(NamedTuple):
    """Pairs of blocks, as two int64 arrays."""

    q: Array
    k: Array


class Rule(Protocol):
    """A mask over pairs of positions; subclasses are frozen dataclasses whose fields are the generator's arguments."""

    kind: ClassVar[str]

    @property
    def causal(self) -> bool:
        """Whether no key after its query is allowed."""
        ...

    def allowed(self, frame: Frame, i: Array, j: Array) -> Array:
        """Return whether the query at position i sees the key at position j; i and j broadcast."""
        ...

    def cover(self, frame: Frame, q: Array, k: Array) -> Array:
        """Return NONE, SOME or ALL for each pair of a query block and a key block, uint8."""
        ...

    def candidates(self, frame: Frame, q: Array) -> Pairs:
        """Return a superset of the pairs of blocks, of the rows `q`, that have an allowed pair of tokens."""
        ...


@dataclass(frozen=True)
class Segments:
    """The document of each query and of each key: int32 arrays."""

    q: Array
    k: Array

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Segments) and np.array_equal(self.q, other.q) and np.array_equal(self.k, other.k)

    def __hash__(self) -> int:
        return hash((len(self.q), len(self.k)))


@dataclass(frozen=True)
class Position:
    """`j <= i` if causal, `i - j < window` (`|i - j| < window` if symmetric), and equal segments."""

    kind: ClassVar[str] = "position"
    causal: bool = True
    window: int | None = None
    symmetric: bool = False
    segments: Segments | None = None

    def allowed(self, frame: Frame, i: Array, j: Array) -> Array:
        """Return whether the query at position i sees the key at position j."""
        seen = np.ones(np.broadcast_shapes(i.shape, j.shape), bool)
        if self.causal:
            seen &= j <= i
        if self.window is not None:
            seen &= i - j < self.window
            if self.symmetric:
                seen &= j - i < self.window
        if self.segments is not None:
            q, k = self.segments.q, self.segments.k
            rows = np.clip(i - frame.q_start, 0, len(q) - 1)
            seen &= q[rows] == k[np.clip(j, 0, len(k) - 1)]
        return seen

    def cover(self, frame: Frame, q: Array, k: Array) -> Array:
        """Return NONE, SOME or ALL for each pair of blocks; exact, but for segments."""
        (i0, i1), (j0, j1) = frame.query_span(q), frame.key_span(k)
        every, some = np.ones(np.shape(q), bool), np.ones(np.shape(q), bool)
        if self.causal:
            every &= j1 <= i0
            some &= j0 <= i1
        if self.window is not None:
            every &= i1 - j0 < self.window
            some &= i0 - j1 < self.window
            if self.symmetric:
                every &= j1 - i0 < self.window
                some &= j0 - i1 < self.window
        if self.segments is not None:
            (q0, q1), (k0, k1) = self._extremes(frame)
            a0, a1, b0, b1 = q0[q], q1[q], k0[k], k1[k]
            every &= (a0 == a1) & (b0 == b1) & (a0 == b0)
            some &= (a0 <= b1) & (b0 <= a1)
        return _verdict(every, some)

    def candidates(self, frame: Frame, q: Array) -> Pairs:
        """Return the pairs of blocks within the window; with segments, those of equal segments among them."""
        i0, i1 = frame.query_span(q)
        low = np.zeros_like(q) if self.window is None else i0 - self.window + 1
        high = np.full_like(q, frame.keys - 1)
        if self.causal:
            high = np.minimum(high, i1)
        if self.window is not None and self.symmetric:
            high = np.minimum(high, i1 + self.window - 1)
        if self.segments is not None:
            (q0, q1), (k0, k1) = self._extremes(frame)
            first, last = np.minimum.accumulate(k0[::-1])[::-1], np.maximum.accumulate(k1)
            low = np.maximum(low, np.searchsorted(last, q0[q], "left") * frame.block)
            high = np.minimum(high, np.searchsorted(first, q1[q], "right") * frame.block - 1)
        return _key_ranges(frame, q, low, high)

    def _extremes(self, frame: Frame) -> list[tuple[Array, Array]]:
        """Return the least and the greatest segment of each query block, and of each key block."""
        assert self.segments is not None
        found: list[tuple[Array, Array]] = []
        for ids in (self.segments.q[: frame.queries], self.segments.k[: frame.keys]):
            starts = np.arange(0, len(ids), frame.block)
            found.append((np.minimum.reduceat(ids, starts), np.maximum.reduceat(ids, starts)))
        return found


@dataclass(frozen=True)
class BlockLocal:
    """Blocks b - previous, ..., b of a query in block b."""

    kind: ClassVar[str] = "block_local"
    previous: int = 1
    causal: bool = True

    def allowed(self, frame: Frame, i: Array, j: Array) -> Array:
        """Return whether the query at position i sees the key at position j."""
        back = i // frame.block - j // frame.block
        seen = (back >= 0) & (back <= self.previous)
        return seen & (j <= i) if self.causal else seen

    def cover(self, frame: Frame, q: Array, k: Array) -> Array:
        """Return NONE, SOME or ALL for each pair of blocks; exact."""
        (i0, i1), (j0, j1) = frame.query_span(q), frame.key_span(k)
        b0, b1 = i0 // frame.block, i1 // frame.block
        every = (k <= b0) & (b1 - k <= self.previous)
        some = (k <= b1) & (b0 - k <= self.previous)
        if self.causal:
            every &= j1 <= i0
            some &= j0 <= i1
        return _verdict(every, some)

    def candidates(self, frame: Frame, q: Array) -> Pairs:
        """Return the pairs of blocks that are at most `previous` blocks apart."""
        i0, i1 = frame.query_span(q)
        return _key_ranges(frame, q, (i0 // frame.block - self.previous) * frame.block, i1 // frame.block * frame.block)


@dataclass(frozen=True)
class Star:
    """`j < global_tokens`, or `i < global_tokens`, or within a window; all of it causal if `causal`."""

    kind: ClassVar[str] = "star"
    global_tokens: int = 1
    window: int = 64
    causal: bool = True

    @property
    def local(self) -> Position:
        """The window around each query."""
        return Position(self.causal, self.window, symmetric=not self.causal)

    def allowed(self, frame: Frame, i: Array, j: Array) -> Array:
        """Return whether the query at position i sees the key at position j."""
        seen = (j < self.global_tokens) | (i < self.global_tokens)
        return (seen & (j <= i) if self.causal else seen) | self.local.allowed(frame, i, j)

    def cover(self, frame: Frame, q: Array, k: Array) -> Array:
        """Return NONE, SOME or ALL for each pair of blocks."""
        (i0, i1), (j0, j1) = frame.query_span(q), frame.key_span(k)
        g = self.global_tokens
        every, some = (j1 < g) | (i1 < g), (j0 < g) | (i0 < g)
        if self.causal:
            every &= j1 <= i0
            some &= j0 <= i1
        return np.maximum(_verdict(every, some), self.local.cover(frame, q, k))

    def candidates(self, frame: Frame, q: Array) -> Pairs:
        """Return the blocks of the window and of the global tokens."""
        i0, _ = frame.query_span(q)
        low = np.zeros_like(q)
        star = _key_ranges(frame, q, low, low + self.global_tokens - 1)
        every = Position(self.causal).candidates(frame, q[i0 < self.global_tokens])
        return _joined(self.local.candidates(frame, q), star, every)


@dataclass(frozen=True)
class Dilated:
    """`i - j` = m·stride with 0 <= m < n, or within a window; without `causal` also `j - i`."""

    kind: ClassVar[str] = "dilated"
    stride: int
    n: int
    window: int = 0
    causal: bool = True

    def _local(self) -> Position:
        return Position(self.causal, self.window, symmetric=not self.causal)

    def allowed(self, frame: Frame, i: Array, j: Array) -> Array:
        """Return whether the query at position i sees the key at position j."""
        back = i - j
        if not self.causal:
            back = np.abs(back)
        seen = (back >= 0) & (back % self.stride == 0) & (back < self.stride * self.n)
        return seen | self._local().allowed(frame, i, j) if self.window else seen

    def cover(self, frame: Frame, q: Array, k: Array) -> Array:
        """Return NONE, SOME or ALL for each pair of blocks."""
        (i0, i1), (j0, j1) = frame.query_span(q), frame.key_span(k)
        some = self._meets(i0 - j1, i1 - j0)
        if not self.causal:
            some |= self._meets(j0 - i1, j1 - i0)
        found = _verdict(np.zeros(np.shape(q), bool), some)
        return np.maximum(found, self._local().cover(frame, q, k)) if self.window else found

    def _meets(self, least: Array, most: Array) -> Array:
        """Return whether a multiple m·stride, 0 <= m < n, is between `least` and `most`."""
        first = np.maximum(-(-least // self.stride), 0)
        return (first < self.n) & (first * self.stride <= most)

    def candidates(self, frame: Frame, q: Array) -> Pairs:
        """Return the blocks on the diagonals m·stride, and those of the window."""
        found: list[Pairs] = []
        i0, i1 = frame.query_span(q)
        for side in (1,) if self.causal else (1, -1):
            for m in range(min(self.n, (frame.keys + frame.q_start + frame.queries) // self.stride + 1)):
                shift = side * m * self.stride
                found.append(_key_ranges(frame, q, i0 - shift, i1 - shift))
        if self.window:
            found.append(self._local().candidates(frame, q))
        return _joined(*found)


@dataclass(frozen=True)
class RandomBlocks:
    """`n` distinct earlier key blocks of each query block (any others without `causal`), drawn by Philox(seed, row)."""

    kind: ClassVar[str] = "random"
    n: int
    seed: int = 0
    causal: bool = True

    def drawn(self, frame: Frame, row: int) -> list[int]:
        """Return the key blocks of a row, ascending."""
        i0, _ = frame.query_span(row)
        own = int(i0) // frame.block
        # earlier: the block ends before the first query of the row. Others: all but the row's own.
        count = min(own, frame.columns) if self.causal else frame.columns - (own < frame.columns)
        take = min(self.n, count)
        draws = np.random.Philox(key=self.seed, counter=row).random_raw(max(take, 1))[:take]
        taken: set[int] = set()
        for top, raw in zip(range(count - take, count), draws.tolist(), strict=True):  # Floyd's sampling
            pick = int(raw) * (top + 1) >> 64
            taken.add(top if pick in taken else pick)
        return sorted(b + (not self.causal and b >= own) for b in taken)

    def allowed(self, frame: Frame, i: Array, j: Array) -> Array:
        """Return whether the query at position i sees the key at position j."""
        rows, columns = np.broadcast_arrays((i - frame.q_start) // frame.block, j // frame.block)
        return self._has(frame, rows.ravel(), columns.ravel()).reshape(rows.shape)

    def cover(self, frame: Frame, q: Array, k: Array) -> Array:
        """Return NONE or ALL for each pair of blocks."""
        has = self._has(frame, np.asarray(q), np.asarray(k))
        return _verdict(has, has)

    def candidates(self, frame: Frame, q: Array) -> Pairs:
        """Return the blocks that were drawn."""
        drawn = [self.drawn(frame, row) for row in q.tolist()]
        k = np.array([b for row in drawn for b in row], np.int64)
        return Pairs(np.repeat(q, [len(row) for row in drawn]), k)

    def _has(self, frame: Frame, rows: Array, columns: Array) -> Array:
        inside = (rows >= 0) & (rows < frame.rows)
        pairs = self.candidates(frame, np.unique(rows[inside]))
        width = frame.columns + 1
        return inside & np.isin(rows * width + np.minimum(columns, width - 1), pairs.q * width + pairs.k)


@dataclass(frozen=True)
class Combined:
    """Two rules joined: `or` (a or b), `and` (a and b), `minus` (a and not b)."""

    kind: ClassVar[str] = "combined"
    how: str
    a: Rule
    b: Rule

    @property
    def causal(self) -> bool:
        """Whether no key after its query is allowed."""
        a, b = self.a.causal, self.b.causal
        return {"or": a and b, "and": a or b, "minus": a}[self.how]

    def allowed(self, frame: Frame, i: Array, j: Array) -> Array:
        """Return whether the query at position i sees the key at position j."""
        return HOW[self.how](self.a.allowed(frame, i, j), self.b.allowed(frame, i, j))

    def cover(self, frame: Frame, q: Array, k: Array) -> Array:
        """Return NONE, SOME or ALL for each pair of blocks."""
        a, b = self.a.cover(frame, q, k), self.b.cover(frame, q, k)
        if self.how == "minus":
            b = ALL - b
        return np.maximum(a, b) if self.how == "or" else np.minimum(a, b)

    def candidates(self, frame: Frame, q: Array) -> Pairs:
        """Return the candidates of both, or of the first."""
        a = self.a.candidates(frame, q)
        return _joined(a, self.b.candidates(frame, q)) if self.how == "or" else a


HOW: dict[str, Callable[[Array, Array], Array]] = {
    "or": np.logical_or,
    "and": np.logical_and,
    "minus": lambda a, b: a & ~b,
}
KINDS: dict[str, type[Any]] = {
    each.kind: each for each in (Position, BlockLocal, Star, Dilated, RandomBlocks, Combined)
}


def extensible(rule: Rule) -> bool:
    """Return whether a rule allows the same pairs of tokens, whatever the number of tokens after them."""
    if isinstance(rule, Combined):
        return extensible(rule.a) and extensible(rule.b)
    return not isinstance(rule, RandomBlocks) or rule.causal


def document_ids(side: str, given: Any, count: int) -> npt.NDArray[np.int32]:
    """Return the document ids of `count` tokens as int32. Raises: PatternShape for other lengths, types and values."""
    found, held = np.asarray(given), np.iinfo(np.int32)
    expected, fix = f"integers of shape ({count},)", None
    if found.shape == (count,) and found.dtype.kind in "iu":
        if not count or (found.min() >= held.min and found.max() <= held.max):
            return np.ascontiguousarray(found, np.int32)
        expected, fix = "integers of 32 bits", "number the documents: np.unique(ids, return_inverse=True)[1]"
        got = f"{found.min()} to {found.max()}"
    else:
        got = f"{found.dtype} of shape {found.shape}"
    raise PatternShape(f"segments of the {side} do not fit", expected=expected, got=got, fix=fix)


def segments(rule: Rule | None) -> Segments | None:
    """Return the first segments that a rule uses."""
    if isinstance(rule, Combined):
        return segments(rule.a) or segments(rule.b)
    return rule.segments if isinstance(rule, Position) else None


def mapped(rule: Rule, change: Callable[[Segments | None], Segments | None]) -> Rule:
    """Return the rule with other segments."""
    if isinstance(rule, Combined):
        return replace(rule, a=mapped(rule.a, change), b=mapped(rule.b, change))
    return replace(rule, segments=change(rule.segments)) if isinstance(rule, Position) else rule


_LEAST = {("position", "window"): 1, ("star", "window"): 1, ("dilated", "stride"): 1}


def to_json(rule: Rule, found: list[Segments]) -> dict[str, Any]:
    """Return a rule as JSON values; its segments are appended to `found`, and written as their index."""
    saved: dict[str, Any] = {"kind": rule.kind}
    for field in fields(rule):  # pyright: ignore[reportArgumentType]  # rules are dataclasses
        value = getattr(rule, field.name)
        if isinstance(value, Segments):
            if value not in found:
                found.append(value)
            value = found.index(value)
        saved[field.name] = to_json(cast("Rule", value), found) if field.name in ("a", "b") else value
    return saved


def from_json(saved: Any, found: list[Segments]) -> Rule:
    """Return the rule that `to_json` wrote. Raises: PatternFileError for an unknown one, or values out of range."""
    given = dict(saved)
    kind = given.pop("kind", None)
    if kind not in KINDS:
        raise PatternFileError("the rule of the saved pattern is unknown", expected=sorted(KINDS), got=kind)
    for name, value in given.items():
        if name in ("a", "b"):
            given[name] = from_json(value, found)
        elif name == "segments" and value is not None:
            given[name] = found[value]
        elif name == "how":
            if value not in HOW:
                raise PatternFileError("the rule of the saved pattern is unknown", expected=sorted(HOW), got=value)
        elif value is not None and (not isinstance(value, int) or value < _LEAST.get((kind, name), 0)):
            raise PatternFileError("a number of the saved rule is out of range", where=f"{kind}.{name}", got=value)
    return KINDS[kind](**given)


def _verdict(every: Array, some: Array) -> Array:
    return np.where(every, ALL, np.where(some, SOME, NONE)).astype(np.uint8)


def _key_ranges(frame: Frame, q: Array, low: Array, high: Array) -> Pairs:
    """Return the pairs of each block q with the key blocks of positions low..high."""
    first = np.maximum(low, 0) // frame.block
    last = np.minimum(high, frame.keys - 1) // frame.block
    count = np.maximum(last - first + 1, 0)
    offset = np.arange(int(count.sum())) - np.repeat(np.cumsum(count) - count, count)
    return Pairs(np.repeat(q, count), np.repeat(first, count) + offset)


def _joined(*pairs: Pairs) -> Pairs:
    none = np.empty(0, np.int64)
    return Pairs(*(np.concatenate(each) for each in zip((none, none), *pairs, strict=True)))
