"""Attention patterns of a program: variables whose arrays are the tables of patterns, and edits that the program owns.

A pattern belongs to at most one program. Its transactions become entries of the program's journal, and the program's
undo reverts them. A plan holds each pattern that it reads during a run, so edits wait for the run.
"""

from __future__ import annotations

from base64 import b64decode, b64encode
from collections.abc import Generator, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from math import prod
from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary
from weakref import ref as weak
from zlib import compress, decompressobj
from zlib import error as ZlibError

import numpy as np

from graphwright.array import from_numpy
from graphwright.autograd import Variable
from graphwright.errors import GraphwrightError, UsageError, check_type
from graphwright.patterns import Pattern, PatternChange
from graphwright.program.errors import ProgramFileError
from graphwright.program.exclusive import exclusive
from graphwright.program.kinds import PATTERN
from graphwright.program.pattern_digest import PatternDigest

if TYPE_CHECKING:
    from graphwright.graph import NodeId
    from graphwright.program.editing.journal import Entry
    from graphwright.program.program import Program


class PatternVariable(Variable):
    """The table of an attention pattern, int64 [WORDS], as the value of `pattern` nodes.

    Its array is the memory of `pattern.table`, which the pattern rewrites in place; nothing else writes it.

    Attributes:
        pattern: the pattern.
    """

    __slots__ = ("_digest", "_hashes", "pattern")

    def __init__(self, pattern: Pattern, name: str = "") -> None:
        super().__init__(from_numpy(pattern.table), False, name)
        self.pattern = pattern
        self._digest: str | None = None
        self._hashes: PatternDigest | None = None

    @property
    def hashes(self) -> PatternDigest:
        """Hashes of the pattern and of its rows, at the last call of `follow`."""
        if self._hashes is None:
            self._hashes = PatternDigest(self.pattern)
        return self._hashes

    @property
    def digest(self) -> str:
        """Hash of the pattern at the last call of `follow`, or at the first read of this property."""
        if self._digest is None:
            self._digest = self.hashes.text
        return self._digest

    def follow(self, change: PatternChange) -> None:
        """Note a change that was applied to the pattern, so that values computed from it are stale."""
        if self._hashes is not None and not self._hashes.follow(change):
            self._hashes = None
        self._digest = None
        self.data.storage.written()


_made: WeakValueDictionary[int, PatternVariable] = WeakValueDictionary()


def variable_of(pattern: Pattern) -> PatternVariable:
    """Return the one variable of a pattern, which a trace turns into a `pattern` node."""
    known = _made.get(id(pattern))
    if known is None or known.pattern is not pattern:
        known = _made[id(pattern)] = PatternVariable(pattern, pattern.name or "pattern")
    return known


def patterns(p: Program) -> dict[str, Pattern]:
    """Return the patterns that `pattern` nodes of a program read, by key."""
    keys = dict.fromkeys(p.key(n) for n in p.of_kind(PATTERN))
    return {key: variable.pattern for key in keys if isinstance(variable := p.weights.at_key(key), PatternVariable)}


def pattern_at(p: Program, node: NodeId) -> Pattern | None:
    """Return the pattern whose table a node has; None if it is no `pattern` node."""
    if p.op(node) != PATTERN:
        return None
    variable = p.weights.at_key(p.key(node))
    return variable.pattern if isinstance(variable, PatternVariable) else None


def visible(pattern: Pattern, queries: int, keys: int) -> float:
    """Return the fraction of the pairs of the first queries and keys whose blocks are connected, over all planes."""
    if not queries or not keys:
        return 0.0
    pairs, block = pattern.pairs(), pattern.block
    sizes = [np.clip(count - block * pairs[:, i].astype(np.int64), 0, block) for i, count in ((1, queries), (2, keys))]
    return float((sizes[0] * sizes[1]).sum() / (queries * keys * pattern.planes))


@contextmanager
def reading(found: Iterable[Pattern]) -> Generator[None]:
    """Hold patterns for a run: edits of other threads wait until the block is left."""
    with ExitStack() as held:
        for pattern in found:
            held.enter_context(pattern.reading())
        yield


# -- ownership ---------------------------------------------------------------------------------------------------------
class PatternOwner:
    """The program that journals the edits of a pattern; it is held weakly."""

    __slots__ = ("_program", "_variable")

    def __init__(self, p: Program, variable: PatternVariable) -> None:
        self._program, self._variable = weak(p), weak(variable)

    @property
    def program(self) -> Program | None:
        """The program, or None once it is garbage."""
        return self._program()

    @contextmanager
    def holding(self) -> Generator[None]:
        """Hold the program for an edit of the pattern, before the pattern is locked.

        Raises: UsageError if the program is read-only or no longer has the pattern; EditBusy.
        """
        p, _ = self._found()
        with exclusive(p):
            p.history.check_writable()
            yield

    def __call__(self, change: PatternChange, why: str, author: str | None) -> None:
        """Journal a change of the pattern that was applied already."""
        p, key = self._found()
        p.history.commit_pattern(key, change, why, author)

    def changes(self) -> Iterator[tuple[Entry, PatternChange]]:
        """Yield (entry, change) of each change of the pattern in the program's journal, also of those undone."""
        p, key = self._found()
        for entry in p.journal:
            for record in entry.edits:
                if record["edit"] == "EditPattern" and record["key"] == key:
                    yield entry, PatternChange.from_json(record["change"], record["change"]["block"])

    def _found(self) -> tuple[Program, str]:
        p, variable = self._program(), self._variable()
        key = None if p is None else next((k for k, v in p.weights.items() if v is variable), None)
        if p is None or key is None:
            raise UsageError("the program of this pattern no longer has it, so the edit cannot be journalled",
                             where=None if p is None else p.name, expected="a pattern that nodes of a program read",
                             fix="program.redo(), or edit a copy: pattern.copy()")  # fmt: skip
        return p, key


def check_free(pattern: object, p: Program, where: str) -> None:
    """Raise UsageError if an object is not a pattern, or belongs to another program than `p`, or to another node."""
    check_type("pattern", pattern, Pattern, "an attention pattern", "graphwright.attention.sliding_window(tokens, 512)")
    assert isinstance(pattern, Pattern)
    owner = pattern.owner
    if isinstance(owner, PatternOwner) and (other := owner.program) is not None:
        if other is p and all(pattern is not known for known in p.patterns.values()):
            return
        fix = "pass pattern.copy(), or let the nodes read the `pattern` node that is there"
        raise UsageError("the pattern already belongs to a program", where=where, got=other.name, fix=fix)


def adopt(p: Program, variable: PatternVariable) -> None:
    """Make a program the owner of a pattern, so that the program journals the pattern's edits."""
    assert variable.digest  # the hash before the first edit
    variable.pattern.owner = PatternOwner(p, variable)


def adopt_all(p: Program) -> None:
    """Make a program the owner of all its patterns that have no owner."""
    for key, pattern in patterns(p).items():
        variable = p.weights.at_key(key)
        if pattern.owner is None and isinstance(variable, PatternVariable):
            pattern.name = key
            adopt(p, variable)


PATTERN_DTYPES = {"I64": "<i8", "I32": "<i4", "F32": "<f4", "U8": "|u1", "U64": "<u8"}
"""Dtype tag in a file -> numpy dtype, of the arrays of patterns."""


# -- saved forms -------------------------------------------------------------------------------------------------------
def pattern_form(pattern: Pattern) -> dict[str, Any]:
    """Return the arrays of a pattern as JSON values: name -> [dtype, shape, base64 of the compressed bytes]."""
    return {
        name: [array.dtype.str, list(array.shape), b64encode(compress(np.ascontiguousarray(array).tobytes())).decode()]
        for name, array in pattern.to_arrays().items()
    }


def read_pattern(form: Any) -> Pattern:
    """Return the pattern whose `pattern_form` is `form`. Raises: ProgramFileError."""
    try:
        arrays = {
            name: np.frombuffer(bytearray(_bytes(text, shape, kind)), kind).reshape(shape)
            for name, (kind, shape, text) in form.items()
        }
    except (ValueError, TypeError, AttributeError, OverflowError, ZlibError) as error:
        raise ProgramFileError("the saved pattern is damaged", got=str(error)[:120]) from error
    return pattern_from_arrays(arrays)


def _bytes(text: str, shape: list[int], kind: str) -> bytes:
    size = prod(shape) * np.dtype(kind).itemsize
    if np.dtype(kind).kind not in "iuf" or any(type(n) is not int or n < 0 for n in shape):
        raise ValueError(f"dtype {kind}, shape {shape}")
    made = decompressobj()
    content = made.decompress(b64decode(text, validate=True), size + 1)
    if len(content) != size:
        raise ValueError(f"{len(content)} bytes in place of {size}")
    return content


def pattern_from_arrays(arrays: Mapping[str, np.ndarray], where: str | None = None) -> Pattern:
    """Return the pattern with these arrays, checked. Raises: ProgramFileError."""
    try:
        return Pattern.from_arrays(arrays)
    except (GraphwrightError, ValueError, TypeError, LookupError, OverflowError) as error:
        what = f"{error.what}, got {error.got}" if isinstance(error, GraphwrightError) else str(error)
        raise ProgramFileError("the saved pattern is damaged", where=where, got=what[:200]) from error
