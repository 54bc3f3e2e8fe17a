"""Changes of a pattern as values: arrays with a row per added edge, removed edge or written column.

A change says all that is needed to apply it, to invert it and to restore edges at their indices in the lists of the
graph. Rows are in the order of the edits.
"""

from __future__ import annotations

import base64
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from graphwright.graph.sorting import SavedLists

from .errors import PatternFileError

if TYPE_CHECKING:
    from .pattern import Pattern

Array = npt.NDArray[Any]
ADD, CUT, WRITE = 0, 1, 2
SCALARS: dict[str, Any] = {"gate": np.int32, "score": np.float32, "birth": np.int32, "pinned": np.uint8}
"""Edge columns that are written by name; the mask of an edge is its kind and bits."""
MASK = len(SCALARS)
FIELDS: dict[str, Any] = {
    "op": np.uint8, "source": np.int32, "target": np.int32, "generation": np.int32, "outgoing": np.int32,
    "incoming": np.int32, "kind": np.uint8, **SCALARS, "column": np.uint8, "old": np.float64, "new": np.float64,
    "old_mask": np.int32, "new_mask": np.int32,
}  # fmt: skip
"""Arrays of a change -> dtype.

op: ADD, CUT or WRITE. source, target: node slots of the key block and the query block. generation: that of the handle.
outgoing, incoming: the edge's indices in the lists. kind ... pinned: the columns of an added or removed edge.
column, old, new: a WRITE, of the column with this number; MASK: kinds. old_mask, new_mask: rows of `bits`, or -1; an
added or removed edge has its mask in `new_mask`.
"""


@dataclass(frozen=True, slots=True)
class PatternChange:
    """One transaction on a pattern.

    Args:
        rows: the arrays that FIELDS describes, all of one length.
        bits: packed masks, uint64 [m, block, words].
        tokens: lengths (queries, keys) before and after, if the pattern was extended.
        segments: segments of the tokens that were added, (of queries, of keys).
        lists: saved lists of the graph before and after, if they were sorted.
    """

    rows: Mapping[str, Array]
    bits: Array
    tokens: tuple[tuple[int, int], tuple[int, int]] | None = None
    segments: tuple[Array, Array] | None = None
    lists: tuple[SavedLists, ...] | None = field(default=None, repr=False)

    def __len__(self) -> int:
        return len(self.rows["op"])

    def pairs(self, op: int) -> tuple[Array, Array]:
        """Return the node slots (sources, targets) of the rows with this op, in order."""
        rows = self.rows["op"] == op
        return self.rows["source"][rows], self.rows["target"][rows]

    def invert(self) -> PatternChange:
        """Return the change that undoes this one."""
        rows = {name: array[::-1] for name, array in self.rows.items()}
        write = rows["op"] == WRITE
        rows["op"] = np.where(write, WRITE, 1 - rows["op"] % 2).astype(np.uint8)
        rows["old"], rows["new"] = rows["new"], rows["old"]
        old, new = rows["old_mask"], rows["new_mask"]
        rows["old_mask"], rows["new_mask"] = np.where(write, new, old), np.where(write, old, new)
        return replace(self, rows=rows, tokens=_swapped(self.tokens), lists=_swapped(self.lists))

    def apply(self, pattern: Pattern) -> None:
        """Change a pattern; its history does not record it.

        Raises: NotUndoable if later edits were not undone first, EdgeExists, UsageError for an edge that is missing;
        then the pattern is unchanged.
        """
        pattern.apply(self)

    # -- JSON --------------------------------------------------------------------------------------------------------
    def to_json(self) -> dict[str, Any]:
        """Return the change as JSON values; arrays of one repeated value as this value, others compressed."""
        found: dict[str, Any] = {"n": len(self)}
        for name in FIELDS:
            if (value := _encoded(self.rows[name])) != _DEFAULTS.get(name, 0):
                found[name] = value
        if len(self.bits):
            found["bits"] = [*self.bits.shape, _text(self.bits)]
        if self.tokens is not None:
            found["tokens"] = [list(each) for each in self.tokens]
        if self.segments is not None:
            found["segments"] = [[len(each), _encoded(each)] for each in self.segments]
        if self.lists is not None:
            found["lists"] = [
                [[len(part), _encoded(part)] for side in (each.outgoing, each.incoming) for part in side]
                for each in self.lists
            ]
        return found

    @classmethod
    def from_json(cls, data: Mapping[str, Any], block: int) -> PatternChange:
        """Return the change that `to_json` saved, of a pattern of this block size. Raises: PatternFileError."""
        try:
            n = int(data["n"])
            rows = {name: _decoded(data.get(name, _DEFAULTS.get(name, 0)), dtype, n) for name, dtype in FIELDS.items()}
            bits = np.empty((0, block, -(-block // 64)), np.uint64)
            if "bits" in data:
                *shape, text = data["bits"]
                bits = _array(text, np.uint64, shape[0] * bits[:0].size + shape[0] * block * bits.shape[2])
                bits = bits.reshape(shape[0], block, -1)
            tokens = segments = lists = None
            if "tokens" in data:
                before, after = (tuple(int(each) for each in pair) for pair in data["tokens"])
                tokens = (before[0], before[1]), (after[0], after[1])
            if "segments" in data:
                queries, keys = (_decoded(value, np.int32, int(count)) for count, value in data["segments"])
                segments = queries, keys
            if "lists" in data:
                lists = tuple(_lists(each) for each in data["lists"])
            return cls(rows, bits, tokens, segments, lists)
        except (KeyError, TypeError, ValueError, IndexError, zlib.error) as error:
            raise PatternFileError(f"a saved change of a pattern is malformed: {error}") from error


_DEFAULTS: dict[str, Any] = {"generation": 1, "gate": -1, "old_mask": -1, "new_mask": -1}


def _lists(data: Any) -> SavedLists:
    parts = [_decoded(value, np.int64, int(count)) for count, value in data]
    return SavedLists((parts[0], parts[1], parts[2]), (parts[3], parts[4], parts[5]))


def _swapped(pair: Any) -> Any:
    return None if pair is None else (pair[1], pair[0])


def _encoded(array: Array) -> Any:
    if not len(array):
        return 0
    first = array[0].item()
    return first if (array == first).all() else _text(array)


def _decoded(value: Any, dtype: Any, count: int) -> Array:
    return _array(value, dtype, count) if isinstance(value, str) else np.full(count, value, dtype)


def _text(array: Array) -> str:
    """Return the bytes of an array, all first ones, then all second ones, and so on: compressed, in base 85."""
    size = array.dtype.itemsize
    plain = np.ascontiguousarray(array.astype(array.dtype.newbyteorder("<"), copy=False)).reshape(-1)
    return base64.b85encode(zlib.compress(plain.view(np.uint8).reshape(-1, size).T.tobytes(), 9)).decode()


def _array(text: str, dtype: Any, count: int) -> Array:
    size = np.dtype(dtype).itemsize
    engine = zlib.decompressobj()
    raw = engine.decompress(base64.b85decode(text), count * size + 1)
    if len(raw) != count * size:
        raise PatternFileError("an array of a saved change has the wrong length", expected=count * size, got=len(raw))
    plain = np.ascontiguousarray(np.frombuffer(raw, np.uint8).reshape(size, count).T)
    return plain.view(np.dtype(dtype).newbyteorder("<")).reshape(count).astype(dtype)


SINGLE = ("op", "source", "target", "generation", "outgoing", "incoming", "kind", *SCALARS)
"""Fields of the tuple of a single edit; an eleventh value is its packed mask or None."""


def build(parts: list[tuple[Any, ...] | dict[str, Any]], block: int) -> PatternChange:
    """Return the change of noted parts: tuples of SINGLE and a mask, or dicts of arrays with "bits" of the masked."""
    pieces: list[dict[str, Array]] = []
    bits: list[Array] = []
    facts: dict[str, Any] = {}
    count = 0
    singles: list[tuple[Any, ...]] = []

    def flush() -> None:
        nonlocal count
        if not singles:
            return
        columns = list(zip(*singles, strict=True))
        rows = {name: np.array(column, FIELDS[name]) for name, column in zip(SINGLE, columns, strict=False)}
        masks = columns[len(SINGLE)]
        rows["new_mask"] = np.full(len(singles), -1, np.int32)
        for row, mask in enumerate(masks):
            if mask is not None:
                rows["new_mask"][row] = count
                bits.append(mask[None])
                count += 1
        pieces.append(rows)
        singles.clear()

    for part in parts:
        if isinstance(part, tuple):
            singles.append(part)
            continue
        flush()
        rows = dict(part)
        facts |= {name: rows.pop(name) for name in ("tokens", "segments", "lists") if name in rows}
        own = rows.pop("bits", None)
        if own is not None and len(own):
            for name in ("old_mask", "new_mask"):
                if name in rows:
                    rows[name] = np.where(rows[name] >= 0, rows[name] + count, -1).astype(np.int32)
            bits.append(own)
            count += len(own)
        pieces.append(rows)
    flush()
    joined: dict[str, Array] = {}
    sizes = [len(rows["op"]) for rows in pieces]
    for name, dtype in FIELDS.items():
        default = _DEFAULTS.get(name, 0)
        arrays = [
            np.asarray(rows[name], dtype) if name in rows else np.full(n, default, dtype)
            for rows, n in zip(pieces, sizes, strict=True)
        ]
        joined[name] = np.concatenate(arrays) if arrays else np.empty(0, dtype)
    packed = np.concatenate(bits) if bits else np.empty((0, block, -(-block // 64)), np.uint64)
    return PatternChange(joined, packed, **facts)
