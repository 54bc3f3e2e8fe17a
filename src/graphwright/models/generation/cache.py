"""The plain KV cache: contiguous rows per attention node, carried as states of a program derived from the model's.

A cache knows which structure and weights its rows were computed with; an edit upstream of them makes it stale, another
edit does not, and an undo makes it good again. Rows past the length are zero: a NaN there would pass every mask.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from graphwright.array import NDArray, from_numpy
from graphwright.autograd import Tensor, Variable
from graphwright.errors import UsageError
from graphwright.models.errors import CacheFull, PromptError, StaleCache
from graphwright.models.generation.cached_program import LENGTH, Derived, derived_for, fingerprints
from graphwright.models.generation.prompt import check_ids, vocabulary
from graphwright.models.generation.sampling import need
from graphwright.models.health import check_finite
from graphwright.plan import Workspace, plan_for
from graphwright.program import Program

EXECUTOR = "auto"  # of its plans: the VM, which reads weights as they are stored, where it is built
CHUNK = 512  # rows of a prefill that are run at once
LENGTH_DEPENDENT = ("rope_dynamic", "rope_longer")  # ops whose result for one row depends on what comes later
_MIXED = "rows of several models"


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A place in a sequence to come back to: its ids, the logits behind them, and of which state of the model."""

    tokens: np.ndarray
    logits: np.ndarray | None
    model: object

    @property
    def length(self) -> int:
        """Rows at that time."""
        return self.tokens.shape[1]


class Cache:
    """Keys and values of `batch` sequences of equal length.

    Attributes:
        capacity: rows it holds.
        tokens: int64 [batch, length], the ids it was filled with.
        variables: the carried states by key.
        fingerprints: attention path -> what its rows were computed with.
        stale_runs: attention paths that were run on although stale.
    """

    def __init__(self, program: Program, batch: int, capacity: int) -> None:
        need("batch", batch)
        need("capacity", capacity)
        if batch < 1 or capacity < 1:
            raise UsageError("a cache has at least one sequence and one row", got=f"batch {batch}, capacity {capacity}")
        self.program, self.batch, self.capacity = program, batch, capacity
        self.tokens = np.zeros((batch, 0), np.int64)
        self.variables: dict[str, Variable] = {}
        self.fingerprints: dict[str, str] = {}
        self.stale_runs: tuple[str, ...] = ()
        self._logits: np.ndarray | None = None
        self._derived: dict[bool, tuple[int, Derived]] = {}
        self._spaces: dict[tuple[int, bool, int], Workspace] = {}
        self._mark: tuple[int, list[tuple[str, NDArray, int]]] = (-1, [])
        self._now: dict[str, str] = {}
        self._valid_at = program.version
        try:
            self._prepare(self._derive(True))
        except MemoryError as error:
            raise UsageError("there is no memory for so many rows", where="capacity", got=str(error)) from error

    @property
    def length(self) -> int:
        """Rows filled."""
        return int(self.variables[LENGTH].item())

    @property
    def nbytes(self) -> int:
        """Bytes of keys and values."""
        return sum(v.data.nbytes for v in self.variables.values())

    # -- filling -----------------------------------------------------------------------------------------------------
    def step(self, ids: np.ndarray, *, all_logits: bool = False, allow_stale: bool = False) -> NDArray:
        """Append ids int64 [batch, T] and give the logits [batch, 1 or T, vocab].

        Raises: StaleCache if an edit changed what the rows depend on (with `allow_stale` it runs all the same, and
            the journal notes it); CacheFull, PromptError, NonFinite. After any error the cache is as before.
        """
        length, derived = self.length, self._derive(not all_logits)
        ids = self._fitting(ids, length)
        if length:
            self._admit(derived, allow_stale)
        else:
            self._prepare(derived)
        rows = ids.shape[1]
        space = self._space(derived, not all_logits, rows)
        feeds: dict[str, Any] = {"ids": ids}
        if "positions" in space.plan.inputs:
            positions = np.broadcast_to(np.arange(length, length + rows), (self.batch, rows))
            feeds["positions"] = np.ascontiguousarray(positions)
        try:
            logits = space.run(feeds)["logits"]
            last = logits.to_numpy("float32")[:, -1]
            check_finite(self.program, last, np.concatenate([self.tokens, ids], axis=1))
        except BaseException:  # an interrupt too: half a step must leave no trace
            self._cut(length)
            raise
        self.tokens = np.concatenate([self.tokens, ids], axis=1)
        self._logits = last
        return logits

    def prefill(self, ids: np.ndarray, *, chunk: int = CHUNK, allow_stale: bool = False) -> np.ndarray:
        """Append ids in pieces of `chunk` rows; logits of the last one, float32 [batch, vocab]. All rows or none.

        Where the rotation follows the longest position they are run in one piece, so that all get the same frequencies.
        """
        if chunk < 1:
            raise UsageError("a chunk has at least one row", got=chunk)
        start = self.length
        ids = self._fitting(ids, start)
        if any(self.program.of_kind(op) for op in LENGTH_DEPENDENT):
            chunk = ids.shape[1]
        try:
            for at in range(0, ids.shape[1], chunk):
                self.step(ids[:, at : at + chunk], allow_stale=allow_stale)
        except BaseException:
            if self.length > start:
                self.truncate(start)
            raise
        assert self._logits is not None
        return self._logits

    def refill(self) -> None:
        """Run the tokens again with the model as it is now: the bits of a fresh prefill.

        If that fails the cache keeps its tokens and stays stale, so that it can be tried again.
        """
        tokens = self.tokens
        if not tokens.shape[1]:
            return
        self.reset()
        try:
            self.prefill(tokens)
        except BaseException:
            self.tokens, self.fingerprints = tokens, dict.fromkeys(self._current(), _MIXED)
            self._set_length(tokens.shape[1])
            raise

    def last_logits(self, *, allow_stale: bool = False) -> np.ndarray:
        """Logits behind the last token, float32 [batch, vocab]: as computed, or again if the model changed since.

        The rows stay as they are, to the bit. Raises: PromptError for an empty cache; StaleCache.
        """
        if not self.tokens.shape[1]:
            raise PromptError("the cache is empty", fix="model.prefill(cache, ids) first")
        if self._logits is None or not self._unchanged():
            if not allow_stale:
                self.check()
            tokens, at = self.tokens, self.length - 1
            if not at:  # nothing before it: the whole row is of the model as it is now
                self.refill()
                return self.last_logits()
            held = {k: row.copy() for k, row in self._rows(at)}
            self._cut(at)
            logits = None
            try:
                self.step(tokens[:, -1:], allow_stale=allow_stale)
                logits = self._logits
            finally:
                for key, row in self._rows(at):
                    row[...] = held[key]
                self._set_length(at + 1)
                self.tokens, self._logits = tokens, logits
        assert self._logits is not None
        return self._logits

    def _fitting(self, ids: np.ndarray, length: int) -> np.ndarray:
        ids = check_ids(ids, vocabulary(self.program))
        if len(ids) != self.batch:
            raise PromptError("the cache is for another number of sequences", expected=self.batch, got=len(ids))
        if length + ids.shape[1] > self.capacity:
            raise CacheFull(
                "the cache has no room for these tokens",
                expected=f"<= {self.capacity - length}",
                got=ids.shape[1],
                fix="model.new_cache(capacity) with more rows",
            )
        return ids

    # -- the model behind it -----------------------------------------------------------------------------------------
    def validity(self, program: Program | None = None) -> dict[str, bool]:
        """Attention path -> whether its rows are what the program would compute now."""
        now = self._current() if program is None else fingerprints(program)
        return {path: self.fingerprints.get(path) == digest for path, digest in now.items()}

    def check(self) -> None:
        """Raises: StaleCache naming the attention nodes whose keys or values an edit changed, and the edits since."""
        stale = sorted(path for path, fine in self.validity().items() if not fine) if self.length else []
        if stale:
            since = [e.why for e in self.program.journal if e.base_version >= self._valid_at]
            error = StaleCache(
                "the model was changed upstream of cached keys and values",
                where=", ".join(stale[:4]) + (f" and {len(stale) - 4} more" if len(stale) > 4 else ""),
                got="; ".join(since[-3:]) or "weights written in place",
                fix="model.reprefill(cache), or cache.reset()",
            )
            error.layers = tuple(stale)
            raise error
        self._valid_at = self.program.version

    def _admit(self, derived: Derived, allow_stale: bool) -> None:
        """Check rows against the model; note what is run on although stale, and what is no longer filled."""
        try:
            self.check()
        except StaleCache as error:
            if not allow_stale or not self._holds(derived):
                raise
            self._note(error.layers)
        stale = set(self.stale_runs)
        self.fingerprints = {path: _MIXED if path in stale else now for path, now in self._current().items()}

    def _holds(self, derived: Derived) -> bool:
        """True if there are rows of the right shape for every attention."""
        sizes = {"B": self.batch}
        return all(k in self.variables and self.variables[k].spec == s.bind(sizes) for k, s in derived.states.items())

    def _note(self, layers: tuple[str, ...]) -> None:
        if set(layers) <= set(self.stale_runs):
            return
        self.stale_runs = tuple(sorted({*self.stale_runs, *layers}))
        p = self.program
        state = p.state_hash()
        p.journal.append(
            undo=None,
            why=f"ran on a stale cache: {', '.join(layers)}",
            author="human",
            tool=None,
            line=None,
            base_version=p.version,
            edits=[],
            before=state,
            after=state,
            warnings=("stale cache",),
        )

    def _unchanged(self) -> bool:
        """True if neither structure nor a weight was written since fingerprints were taken."""
        version, weights = self._mark
        p = self.program
        return version == p.version and all(p.weights.array(k) is a and a.storage.version == v for k, a, v in weights)

    def _current(self) -> dict[str, str]:
        if not self._unchanged():
            p = self.program
            arrays = [(key, p.weights.array(key)) for key in p.weights]
            self._mark = (p.version, [(key, a, a.storage.version) for key, a in arrays])
            self._now = fingerprints(p)
            self._logits = None
        return self._now

    def _derive(self, last_only: bool) -> Derived:
        known = self._derived.get(last_only)
        if known is None or known[0] != self.program.version:
            known = (self.program.version, derived_for(self.program, self.capacity, last_only))
            self._derived[last_only] = known
            self._spaces = {k: w for k, w in self._spaces.items() if k[0] == self.program.version}
        return known[1]

    def _prepare(self, derived: Derived) -> None:
        """An empty cache takes the shapes and fingerprints of the model as it is."""
        specs = {k: s.bind({"B": self.batch}) for k, s in derived.states.items()}
        if {k: v.spec for k, v in self.variables.items()} != specs:
            self._spaces.clear()
            self.variables = {
                k: Variable(from_numpy(np.zeros(s.sizes, s.dtype.numpy), bits=s.dtype), name=k)
                for k, s in specs.items()
            }
        self.fingerprints, self.stale_runs = dict(self._current()), ()
        self._valid_at = self.program.version

    def _space(self, derived: Derived, last_only: bool, rows: int) -> Workspace:
        key = (self.program.version, last_only, rows)
        if key not in self._spaces:
            p, sizes = derived.program, {"B": self.batch, "T": rows}
            specs = {p.path(n): p.spec(n).bind(sizes) for n in p.inputs()}
            self._spaces[key] = Workspace(plan_for(p, specs, freeze=True, executor=EXECUTOR), self.variables)
        return self._spaces[key]

    # -- going back --------------------------------------------------------------------------------------------------
    def reset(self) -> None:
        """Forget all rows."""
        self.truncate(0)

    def truncate(self, length: int) -> None:
        """Keep the first `length` rows. Raises: CacheFull if there are fewer."""
        if not 0 <= length <= self.length:
            raise CacheFull("the cache has fewer rows", expected=f"0..{self.length}", got=length)
        self._cut(length)

    def _cut(self, length: int) -> None:
        for key, variable in self.variables.items():
            if key != LENGTH:
                array = variable.own()
                array.writable()
                array.to_numpy(bits=True)[:, :, length:] = 0
        self._set_length(length)
        self.tokens = self.tokens[:, :length]
        self._logits = None

    def _rows(self, at: int) -> Iterator[tuple[str, np.ndarray]]:
        """Writable bits of one row of every key and value."""
        for key, variable in self.variables.items():
            if key != LENGTH:
                array = variable.own()
                array.writable()
                yield key, array.to_numpy(bits=True)[:, :, at]

    def _set_length(self, length: int) -> None:
        self.variables[LENGTH].assign(Tensor(from_numpy(np.asarray(length, np.int64))))

    def snapshot(self) -> Snapshot:
        """A place to come back to; costs the ids, not the rows."""
        return Snapshot(self.tokens, self._logits, self._mark)

    def restore(self, mark: Snapshot) -> None:
        """Go back to a snapshot, any number of times. Raises: UsageError if its rows were overwritten since."""
        if not isinstance(mark, Snapshot):
            raise UsageError("not a snapshot", got=type(mark).__name__, expected="what cache.snapshot() gave")
        if not np.array_equal(self.tokens[:, : mark.length], mark.tokens):
            raise UsageError(
                "rows of this snapshot were dropped or overwritten",
                expected=f"{mark.length} rows",
                got=f"{self.length} rows",
                fix="cache.reset(); model.prefill(cache, mark.tokens)",
            )
        self.truncate(mark.length)
        self._logits = mark.logits if mark.model is self._mark else None


def need_cache_of(program: Program, cache: object) -> None:
    """Raises: StaleCache for a cache of another model, whose rows and program are not this one's; UsageError."""
    if not isinstance(cache, Cache):
        raise UsageError("this is no cache", got=type(cache).__name__, fix="model.new_cache(capacity)")
    if cache.program is not program:
        raise StaleCache(
            "the cache belongs to another model", where=cache.program.name, fix="model.new_cache(capacity)"
        )
