"""A copy of a pattern's arrays on a device, kept equal to the pattern by a queue of words that a kernel applies.

A word is (table, index, value): `table` is the number of the array's address in the pattern's table, or 0 for the table
itself. A transaction adds the words of the cells that it changed, so an edit costs the same at any length. The words
are copied to the queue before a run, in the order of the stream; the plan's first kernel applies them and empties the
queue, inside the captured graph, so no edit needs another capture. A cell is in the queue once, with its last value:
the kernel may write cells in any order. More words than the queue holds are applied in several launches before the run.
An edit that exceeds the fixed capacity makes new, larger arrays, and calls that were bound to the old ones are bound
again.
"""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any, Protocol
from weakref import ref

import numpy as np
import numpy.typing as npt

from graphwright.array.backend import Backend, Call
from graphwright.array.dtype import int32, int64, uint8
from graphwright.array.ndarray import NDArray, from_numpy
from graphwright.errors import UsageError
from graphwright.patterns import table as words
from graphwright.patterns.changes import WRITE

if TYPE_CHECKING:
    from graphwright.patterns import Pattern, PatternChange

Ints = npt.NDArray[np.int32]
TABLE = 0
"""The number of the table itself in a word."""
QUEUE = 4096
GROWTH = 1.5
FEWEST_EDGES, FEWEST_MASKS = 8, 8
NUMBERS = (
    *range(words.BLOCK, words.SYMMETRIC + 1), words.EDGES, words.EDGE_SLOTS, words.BUCKET, words.ROW_STRIDE,
    words.COL_STRIDE, words.GATES,
)  # fmt: skip
"""The words of a table that are numbers, not addresses."""
LISTS = ((words.IN_HEAD, "target", "incoming"), (words.OUT_HEAD, "source", "outgoing"))
"""First word of the lists of a direction, the end of an edge that has the list, and the edge's index in it."""
WRITTEN = (words.KIND, words.GATE, words.BITS)
COLUMNS = (words.SRC, words.DST, *WRITTEN)


class CapacityGrown(UserWarning):
    """An edit exceeded the capacity of a pattern's arrays on a device, which are now larger."""


class MirrorBackend(Backend, Protocol):
    """A backend whose kernels can read patterns."""

    def pointer(self, array: NDArray) -> int:
        """Return the address of the first element as kernels of the device use it."""
        ...

    def word_kernel(self, table: NDArray, memory: NDArray, queue: NDArray) -> Call:
        """Return the call that queues the kernel: it applies the words of `queue` to arrays and sets their number to 0.

        Args:
            table: int64 [WORDS], the addresses of the arrays.
            memory: int32, all arrays with the table, which the kernel writes.
            queue: int32 [1 + 3·capacity], the number of words and then the words.
        """
        ...


class PatternMirror:
    """The arrays of one pattern on one device, for the runs of one executable.

    Args:
        pattern: the pattern; the mirror follows its edits.
        backend: of the device.
        capacity: number of edge slots for which there is room; by default twice the present ones.
        queue: number of words that one launch applies.

    Attributes:
        table: int64 [WORDS] on the device, which kernels read in place of `pattern.table`.
        growths: number of times that capacity was exceeded; `table` and `apply` are then other ones.
        sent: number of words that runs copied to the queue.
        launches: number of launches before runs, of words that the queue had no room for.
        copies: number of copies of all arrays.
    Raises: UsageError for a capacity below the number of edge slots, or a queue without words.
    """

    def __init__(
        self, pattern: Pattern, backend: MirrorBackend, capacity: int | None = None, queue: int = QUEUE
    ) -> None:
        slots = int(pattern.table[words.EDGE_SLOTS])
        if queue < 1 or (capacity is not None and capacity < max(slots, 1)):
            raise UsageError("a mirror of a pattern is too small", where=pattern.name or None,
                             expected=f"capacity >= {max(slots, 1)}, queue >= 1",
                             got=f"capacity={capacity}, queue={queue}")  # fmt: skip
        self.pattern, self.backend = pattern, backend
        self.growths = self.sent = self.launches = self.copies = 0
        self._outgrown: list[NDArray] = []  # until no graph uses it
        self._pending: dict[tuple[int, int], int] = {}
        self._queue = backend.empty((1 + 3 * queue,), int32)
        backend.copy(self._queue, from_numpy(np.zeros(1 + 3 * queue, np.int32)))
        with pattern.reading():
            self._edges = max(2 * slots, FEWEST_EDGES) if capacity is None else capacity
            self._allocate(2)
            self._seen = pattern.version
            self._copy()  # kernels read numbers of the table when they are bound
            pattern.watchers.append(ref(self))

    @property
    def capacity(self) -> int:
        """Number of edge slots for which there is room."""
        return self._edges

    # -- memory ------------------------------------------------------------------------------------------------------
    def _allocate(self, spare: float) -> None:
        """Make arrays of `capacity` edges, with room for `spare` times the present nodes, tokens and masks."""
        held, t = self._arrays(), self.pattern.table
        nodes = int(spare * max(self.pattern.query_nodes.max(), self.pattern.key_nodes.max()) + spare)
        buckets = {}
        for first, _, side in LISTS:
            used = -(-_length(held[first + 3]) // int(t[words.BUCKET]))
            buckets[side] = max(min(self._edges, nodes + self._edges // int(t[words.BUCKET]) + 1), used)
        masks = int(spare * self._masks()) + FEWEST_MASKS
        each = held[words.POOL].size // max(len(self.pattern.masks), 1)
        room = {word: self._edges for word in COLUMNS} | {words.INDEX: nodes, words.POOL: masks * each}
        for first, _, side in LISTS:
            room |= {first: nodes, first + 1: nodes, first + 2: buckets[side]}
            room[first + 3] = buckets[side] * int(t[words.BUCKET])
        for word in (words.ROWS, words.COLS, words.SEG_Q, words.SEG_K):
            room[word] = int(spare * held[word].size)
        self._room = room
        self._start: dict[int, int] = {}
        end = 2 * words.WORDS
        for word, size in room.items():
            self._start[word] = end
            end += -(-size // 4) if word == words.KIND else size
        self.memory = self.backend.empty((end,), int32)
        self.table = NDArray(self.memory.storage, int64, (words.WORDS,))
        self._numbers = np.zeros(words.WORDS, np.int64)
        self.apply = self.backend.word_kernel(self.table, self.memory, self._queue)
        self._whole = True

    def _arrays(self) -> dict[int, Any]:
        """Return the pattern's arrays by their word, flat, with the part that is in use (or more)."""
        pattern, held = self.pattern, self.pattern.graph.buffers()
        segments = pattern.base.segments
        found = {
            words.ROWS: pattern.query_nodes, words.COLS: pattern.key_nodes, words.SRC: held.source,
            words.DST: held.target, words.INDEX: held.node_columns["number"],
            **{word: held.edge_columns[name] for word, name in
               ((words.KIND, "kind"), (words.GATE, "gate"), (words.BITS, "bits"))},
            words.POOL: pattern.masks.view(np.int32),
            words.SEG_Q: _NONE if segments is None else segments.q,
            words.SEG_K: _NONE if segments is None else segments.k,
        }  # fmt: skip
        for first, _, side in LISTS:
            lists = getattr(held, side)
            found |= {first: lists.head, first + 1: lists.degree, first + 2: lists.after, first + 3: lists.items}
        return {word: array.reshape(-1) for word, array in found.items()}

    def _masks(self) -> int:
        """Return the number of rows of the pool up to the last one that an edge has."""
        used = self.pattern.graph.buffers().edge_columns["bits"][: int(self.pattern.table[words.EDGE_SLOTS])]
        return int(used.max(initial=-1)) + 1

    def _used(self, word: int, array: Any) -> int:
        """Return how many elements of an array are in use, or more."""
        if word in COLUMNS:
            return int(self.pattern.table[words.EDGE_SLOTS])
        if word == words.POOL:
            return self._masks() * (array.size // max(len(self.pattern.masks), 1))
        if word in (words.INDEX, words.IN_HEAD, words.IN_HEAD + 1, words.OUT_HEAD, words.OUT_HEAD + 1):
            return int(max(self.pattern.query_nodes.max(), self.pattern.key_nodes.max())) + 1
        return _length(array) if word not in (words.ROWS, words.COLS, words.SEG_Q, words.SEG_K) else array.size

    # -- edits -------------------------------------------------------------------------------------------------------
    def changed(self, change: PatternChange) -> None:
        """Note the words of a transaction that the pattern has just made; the pattern calls this."""
        if change.tokens is not None or change.lists is not None:
            self._whole = True
        self._seen += 1
        if self._whole:
            self._pending.clear()
            return
        rows = change.rows
        ends = {end: rows[end].astype(np.int64) for end in ("source", "target")}
        arrays = self._arrays()
        for first, end, side in LISTS:
            self._note_lists(first, arrays, ends[end], rows[side][rows["op"] != WRITE])
        slots = self.pattern.slots_of(ends["source"], ends["target"])
        self._note_columns(arrays, slots[slots >= 0].tolist())
        self._note_numbers()

    def _note_lists(self, first: int, arrays: dict[int, Any], nodes: Any, at: Any) -> None:
        """Note the cells of lists that changed: the noted indices, and the last ones of the list of each node."""
        degree, bucket = arrays[first + 1], int(self.pattern.table[words.BUCKET])
        lists = getattr(self.pattern.graph.buffers(), "incoming" if first == words.IN_HEAD else "outgoing")
        cells = dict.fromkeys(at.tolist())
        touched, counts = np.unique(nodes, return_counts=True)
        for node, count in zip(touched.tolist(), counts.tolist(), strict=True):
            self._note(first + 1, node, degree[node])
            left, block = int(degree[node]), int(lists.tail[node])
            for _ in range(min(count + 1, left)):  # an edit moves at most the last entry
                left -= 1
                cells[block * bucket + left % bucket] = None
                if left % bucket == 0:
                    block = int(lists.before[block])
            if degree[node]:
                self._note(first, node, arrays[first][node])
        for cell in cells:
            self._note(first + 3, cell, arrays[first + 3][cell])
            before = int(lists.before[cell // bucket])
            if before >= 0:
                self._note(first + 2, before, arrays[first + 2][before])

    def _note_columns(self, arrays: dict[int, Any], slots: list[int]) -> None:
        each = arrays[words.POOL].size // max(len(self.pattern.masks), 1)
        for slot in slots:
            for word in COLUMNS:
                self._note(word, slot, arrays[word][slot])
            row = int(arrays[words.BITS][slot])
            if row >= 0:
                cells = range(row * each, (row + 1) * each)
                for cell, value in zip(cells, arrays[words.POOL][row * each : (row + 1) * each].tolist(), strict=True):
                    self._note(words.POOL, cell, value)

    def _note_numbers(self) -> None:
        now = self.pattern.table
        for word in NUMBERS:
            if now[word] != self._numbers[word]:
                self._numbers[word] = now[word]
                self._note(TABLE, word, now[word])

    def _note(self, word: int, index: int, value: Any) -> None:
        if word != TABLE and index >= self._room[word]:
            self._whole = True  # the next run makes larger arrays
        self._pending.pop((word, index), None)
        self._pending[word, index] = int(value)

    # -- runs --------------------------------------------------------------------------------------------------------
    def send(self) -> bool:
        """Queue what makes the device's arrays equal to the pattern, for a run that begins with `apply`.

        The caller holds `pattern.reading()`. Returns True if the arrays were replaced by larger ones: calls have to be
        bound to the new `table` and `apply`.
        """
        before = self.growths
        if self._whole or len(self._pending) > self.memory.size:
            self._copy()
            return self.growths != before
        if self.pattern.version != self._seen:
            self._copy_written()
        limit = (self._queue.size - 1) // 3
        found = np.array([(*cell, value) for cell, value in self._pending.items()], np.int32).reshape(-1, 3)
        last = max((len(found) - 1) // limit, 0) * limit
        for at in range(0, last, limit):
            self._send(found[at : at + limit])
            self.apply()
            self.launches += 1
        if len(found):
            self._send(found[last:])
        return False

    def ran(self) -> None:
        """Note that a run was launched after `send`; without it, the next `send` queues the same words again."""
        self._pending.clear()
        self._outgrown.clear()

    def _send(self, found: Ints) -> None:
        """Queue a copy of words to the queue."""
        message = np.concatenate([np.array([len(found)], np.int32), found.reshape(-1)])
        self.backend.copy(NDArray(self._queue.storage, int32, message.shape), from_numpy(message))
        self.sent += len(found)

    def _copy_written(self) -> None:
        """Copy the columns that are written outside of transactions too, through `pattern.edges`."""
        self._seen = self.pattern.version
        self._pending = {cell: value for cell, value in self._pending.items() if cell[0] not in WRITTEN}
        arrays, slots = self._arrays(), int(self.pattern.table[words.EDGE_SLOTS])
        for word in WRITTEN:
            dtype = uint8 if word == words.KIND else int32
            offset = self._start[word] * (4 // dtype.itemsize)
            target = NDArray(self.memory.storage, dtype, (slots,), offset=offset)
            self.backend.copy(target, from_numpy(arrays[word][:slots]))

    def _copy(self) -> None:
        """Copy all arrays, into larger ones if they exceed the room."""
        arrays = self._arrays()
        used = {word: self._used(word, array) for word, array in arrays.items()}
        if any(used[word] > size for word, size in self._room.items()):
            before = self._edges
            slots = int(self.pattern.table[words.EDGE_SLOTS])
            if slots > self._edges:
                self._edges = max(int(GROWTH * self._edges), int(GROWTH * slots))
            self.growths += 1
            self._outgrown.append(self.memory)
            self._allocate(GROWTH)
            text = (f"the pattern {self.pattern.name!r} outgrew its arrays on {self.backend.device}: room for "
                    f"{before} edges before, {self._edges} now; captured graphs that read it "
                    "are captured again")  # fmt: skip
            warnings.warn(text, CapacityGrown, stacklevel=2)
        self._seen = self.pattern.version
        host = np.zeros(self.memory.size, np.int32)
        header = host[: 2 * words.WORDS].view(np.int64)
        header[:] = self.pattern.table
        self._numbers[:] = self.pattern.table
        base = self.backend.pointer(self.memory)
        for word, start in self._start.items():
            present = word not in (words.SEG_Q, words.SEG_K) or arrays[word].size
            header[word] = base + 4 * start if present else 0
            part = host[start:].view(np.uint8) if word == words.KIND else host[start:]
            part[: used[word]] = arrays[word][: used[word]]
        header[words.ROOM] = self._edges
        self.backend.copy(self.memory, from_numpy(host))
        self.copies += 1
        self._pending.clear()
        self._whole = False


_NONE = np.empty(0, np.int32)


def _length(items: Any) -> int:
    """Return the length of an array up to its last entry that was ever used; entries that were not are -1."""
    filled = np.flatnonzero(items != -1)
    return int(filled[-1]) + 1 if len(filled) else 0
