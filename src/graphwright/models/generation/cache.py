"""Rows of keys and values that were computed with some state of a model: what every kind of cache does with them.

Rows know which structure and weights they were computed with; an edit upstream of them makes them stale, another edit
does not, and an undo makes them good again.
"""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as Several
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from graphwright.array import CPU, empty, from_numpy
from graphwright.autograd import Variable
from graphwright.errors import UsageError
from graphwright.models.errors import CacheFull, PromptError, StaleCache
from graphwright.models.generation.cached_program import LENGTH, Steps, derived_for, fingerprints
from graphwright.models.generation.sampling import Seen, need, need_one_each
from graphwright.models.generation.text import check_ids, vocabulary
from graphwright.models.health import check_finite
from graphwright.ops import OPS

if TYPE_CHECKING:
    from graphwright.array import Device, NDArray, Spec
    from graphwright.models.generation.cached_program import Fed
    from graphwright.models.generation.sampling import Draw
    from graphwright.program import Program

CHUNK = 512  # rows of a prefill that are run at once
LENGTH_DEPENDENT = tuple(name for name, row in OPS.items() if row.traits.looks_ahead)
MIXED = "rows of several models"
ENDLESS = 1 << 62


def independent(p: Program) -> int:
    """Length up to which no row of a text depends on how long it is; beyond it rotations follow the last position."""
    return min((p.attrs(n)["original"] for op in LENGTH_DEPENDENT for n in p.of_kind(op)), default=ENDLESS)


class Watch:
    """Fingerprints of a model as it is now, taken again when structure or a weight was written."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.mark: tuple[int, list[tuple[str, NDArray, int]]] = (-1, [])
        self._now: dict[str, str] = {}

    def unchanged(self) -> bool:
        """True if neither structure nor a weight was written since fingerprints were taken."""
        version, weights = self.mark
        if version != self.program.version:
            return False
        array = self.program.weights.array
        for key, a, v in weights:  # noqa: SIM110  # half the time of all(...)
            if array(key) is not a or a.storage.version != v:
                return False
        return True

    def current(self) -> dict[str, str]:
        """Attention path -> what its keys and values are computed with; `mark` is another object if that changed."""
        if not self.unchanged():
            p = self.program
            arrays = [(key, p.weights.array(key)) for key in p.weights]
            self.mark = (p.version, [(key, a, a.storage.version) for key, a in arrays])
            self._now = fingerprints(p)
        return self._now


class Rows:
    """Keys and values of `batch` sequences of equal length.

    Attributes:
        program: of the model that fills them.
        tokens: int64 [batch, length], the ids they were filled with.
        fingerprints: attention path -> what its rows were computed with.
        stale_runs: attention paths that were run on although stale.
        stream: number of the random stream that `Model.decode` draws from.
    """

    batch: int
    stream: int = 0

    def __init__(self, program: Program, batch: int, watch: Watch) -> None:
        self.program, self.batch, self._watch = program, batch, watch
        self.tokens = np.zeros((batch, 0), np.int64)
        self.fingerprints: dict[str, str] = {}
        self.stale_runs: tuple[str, ...] = ()
        self._logits: np.ndarray | None = None
        self._logits_of: object = None  # mark of the model that gave them
        self._drawn: tuple[tuple[Draw, ...], np.ndarray] | None = None  # from those logits, within the step
        self._seen: dict[int, Seen] = {}
        self._valid_at = program.version
        self._stretched = ENDLESS  # the first row that was turned as one of a text longer than `independent`

    # -- what a kind of cache brings ---------------------------------------------------------------------------------
    @property
    def capacity(self) -> int:
        """Rows there may be."""
        raise NotImplementedError

    @property
    def length(self) -> int:
        """Rows filled."""
        raise NotImplementedError

    def _run(self, ids: np.ndarray, all_logits: bool, draws: Several[Draw]) -> tuple[NDArray, np.ndarray | None]:
        """Append the rows of ids; logits, and ids drawn. What a failure leaves behind the length `cut` takes back."""
        raise NotImplementedError

    def cut(self, length: int) -> None:
        """Drop the rows behind `length`, and what a failed step left of them."""
        raise NotImplementedError

    def _regrow(self, length: int) -> None:
        """Have `length` rows, of whatever content behind those there are."""
        raise NotImplementedError

    def _own(self, at: int) -> None:
        """Nobody else reads the memory of the row `at`. Raises: CacheFull, with nothing changed."""

    def _row(self, at: int) -> Iterator[NDArray]:
        """One row of every key and value, as writable views."""
        raise NotImplementedError

    def snapshot(self) -> Any:
        """A place to come back to; `release` it when it is not needed any more."""
        raise NotImplementedError

    def restore(self, mark: Any) -> None:
        """Go back to a snapshot, any number of times. Raises: UsageError."""
        raise NotImplementedError

    def _start(self) -> None:
        """An empty cache takes the shapes of the model as it is."""

    def _fits(self) -> bool:
        """True if there are rows of the right shape for every attention."""
        raise NotImplementedError

    # -- filling -----------------------------------------------------------------------------------------------------
    def step(
        self, ids: np.ndarray, *, all_logits: bool = False, allow_stale: bool = False, draws: Several[Draw] = ()
    ) -> NDArray:
        """Append ids int64 [batch, T] and give the logits [batch, 1 or T, vocab].

        Args:
            ids: of every sequence.
            all_logits: of every row and not of the last one only.
            allow_stale: see below.
            draws: how the next id of every sequence is drawn, in the same run of the plan; `drawn` gives them.
        Raises: StaleCache if an edit changed what the rows depend on (with `allow_stale` it runs all the same, and
            the journal notes it); CacheFull, PromptError, NonFinite. After any error the cache is as before.
        """
        length = self.length
        ids = self._fitting(ids)
        need_one_each(draws, self.batch)
        self.admit(allow_stale)
        try:
            logits, chosen = self._run(ids, all_logits, draws)
            self.took(ids, logits.to_numpy("float32")[:, -1], draws, chosen)
        except BaseException:  # an interrupt too: half a step must leave no trace
            self.cut(length)
            raise
        return logits

    def took(
        self, ids: np.ndarray, last: np.ndarray, draws: Several[Draw] = (), chosen: np.ndarray | None = None
    ) -> None:
        """Note the ids of a step and what it gave. Raises: NonFinite."""
        tokens = np.concatenate([self.tokens, ids], axis=1)
        check_finite(self.program, last, tokens)
        if tokens.shape[1] > independent(self.program):
            self._stretched = min(self._stretched, self.tokens.shape[1])
        self.tokens = tokens
        self._logits, self._logits_of = last, self._watch.mark
        self._drawn = (tuple(draws), chosen) if draws and chosen is not None else None

    def drawn(self, draws: Several[Draw]) -> np.ndarray:
        """The ids int64 [batch] behind the last step: as it drew them, or drawn from its logits on the host.

        The host draws what the step was not asked for, and where there are processors. Raises: NonFinite.
        """
        ids = np.full(self.batch, -1)
        if self._drawn is not None and self._drawn[0] == tuple(draws):
            ids = self._drawn[1].copy()
        for row in np.flatnonzero(ids < 0).tolist():
            assert self._logits is not None
            ids[row] = draws[row].choose(self._logits[row], self.tokens[row])
        return ids

    def ask(self, fed: Fed, place: int, ids: np.ndarray, draw: Draw, row: int = 0) -> None:
        """Have the id behind the `ids` [T] of a step drawn, at a place of its plan."""
        seen = self._seen.get(row)
        if seen is None or seen.prompt != draw.prompt:
            seen = self._seen[row] = Seen(draw.prompt)
        if draw.rule.penalises:
            seen.add(self.tokens[row, seen.length :].tolist())
            seen.add(ids.tolist())
        fed.ask(place, draw, self.length + len(ids), seen.pairs)

    def prefill(self, ids: np.ndarray, *, chunk: int = CHUNK, allow_stale: bool = False) -> np.ndarray:
        """Append ids in pieces of `chunk` rows; logits of the last one, float32 [batch, vocab]. All rows or none.

        Where the rotation follows the longest position they are run in one piece, so that all get the same frequencies.
        """
        need("chunk", chunk)
        if chunk < 1:
            raise UsageError("a chunk has at least one row", got=chunk)
        start = self.length
        ids = self._fitting(ids)
        if start + ids.shape[1] > independent(self.program):
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
        check_ids(tokens, vocabulary(self.program))  # some rows may have none: say so before they are lost
        self.reset()
        try:
            self.prefill(tokens)
        except BaseException:
            self.tokens, self.fingerprints = tokens, dict.fromkeys(self._current(), MIXED)
            self._regrow(tokens.shape[1])
            raise

    def last_logits(self, *, allow_stale: bool = False) -> np.ndarray:
        """Logits behind the last token, float32 [batch, vocab]: as computed, or again if the model changed since.

        The rows stay as they are, to the bit. Raises: PromptError for an empty cache; StaleCache.
        """
        if not self.tokens.shape[1]:
            raise PromptError("the cache is empty", fix="model.prefill(cache, ids) first")
        if self._logits is None or self._logits_of is not self._watch.mark or not self._watch.unchanged():
            if not allow_stale:
                self.check()
            tokens, at = self.tokens, self.length - 1
            if not at and not all(self.validity().values()):  # nothing is left that would be of another model
                self.refill()
                return self.last_logits()
            self._own(at)
            held = [row.copy() for row in self._row(at)]
            self.cut(at)
            logits = None
            try:
                self.step(tokens[:, -1:], allow_stale=allow_stale)
                logits = self._logits
            finally:
                self._regrow(at + 1)
                for row, bits in zip(self._row(at), held, strict=True):
                    row.copy_from(bits)
                self.tokens, self._logits, self._drawn = tokens, logits, None
        assert self._logits is not None
        return self._logits

    def _fitting(self, ids: np.ndarray) -> np.ndarray:
        ids = check_ids(ids, vocabulary(self.program))
        if len(ids) != self.batch:
            raise PromptError("the cache is for another number of sequences", expected=self.batch, got=len(ids))
        left = self.capacity - self.length
        if ids.shape[1] > left:
            raise CacheFull(
                "the cache has no room for these tokens",
                expected=f"<= {left}",
                got=ids.shape[1],
                fix="model.new_cache with more room",
            )
        return ids

    # -- the model behind them ---------------------------------------------------------------------------------------
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

    def admit(self, allow_stale: bool) -> None:
        """Check rows against the model; note what is run on although stale, and what is no longer filled."""
        if not self.length:
            self._start()
            self.fingerprints, self.stale_runs = dict(self._current()), ()
            self._valid_at = self.program.version
            return
        if not self.stale_runs and self.fingerprints == self._current():
            self._valid_at = self.program.version
            return
        try:
            self.check()
        except StaleCache as error:
            if not allow_stale or not self._fits():
                raise
            self._note(error.layers)
        stale = set(self.stale_runs)
        self.fingerprints = {path: MIXED if path in stale else now for path, now in self._current().items()}

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

    def _current(self) -> dict[str, str]:
        return self._watch.current()

    # -- going back --------------------------------------------------------------------------------------------------
    def reset(self) -> None:
        """Forget all rows."""
        self.truncate(0)

    def reusable(self, ids: np.ndarray) -> int:
        """Rows with which a run of the prompt `ids` [T] may begin: it has the same ids there, and one is left to run.

        Where the rotation follows the longest position, only those that a prompt of that length would have.
        """
        if len(ids) > independent(self.program):
            return 0
        held = self.tokens[0][: min(len(ids) - 1, self._stretched)]
        same = held == ids[: len(held)]
        return int(len(held) if same.all() else np.argmin(same))

    def truncate(self, length: int) -> None:
        """Keep the first `length` rows. Raises: CacheFull if there are fewer."""
        need("length", length)
        if not 0 <= length <= self.length:
            raise CacheFull("the cache has fewer rows", expected=f"0..{self.length}", got=length)
        self.cut(length)

    def _forget(self, length: int) -> None:
        """Drop the ids behind `length`, and what was said behind them."""
        self.tokens, self._logits, self._drawn = self.tokens[:, :length], None, None
        self._seen.clear()
        if length <= self._stretched:
            self._stretched = ENDLESS


def need_rows_of(program: Program, cache: object) -> None:
    """Raises: StaleCache for a cache of another model, whose rows and program are not this one's; UsageError."""
    if not isinstance(cache, Rows):
        raise UsageError(
            "this is no cache",
            got=type(cache).__name__,
            fix="model.new_cache(tokens).sequence(), or model.new_cache(tokens, kind='static')",
        )
    if cache.program is not program:
        raise StaleCache("the cache belongs to another model", where=cache.program.name, fix="model.new_cache(tokens)")


_ALIGNED = 64


def fill(array: NDArray, value: float) -> None:
    """Write one number everywhere."""
    if array.size:
        array.copy_from(from_numpy(np.float32(value)).expand(*array.shape))


def filled(spec: Spec, value: float, device: Device) -> NDArray:
    """A new array of one number. Raises: MemoryError."""
    if device == CPU and not value:  # pages that nobody writes take no memory; where it begins decides on last bits
        block = np.zeros(spec.nbytes + _ALIGNED, np.uint8)
        start = -block.ctypes.data % _ALIGNED
        host = block[start : start + spec.nbytes].view(spec.dtype.numpy).reshape(spec.sizes)
        return from_numpy(host, bits=spec.dtype)
    made = empty(spec.sizes, spec.dtype, device)
    fill(made, value)
    return made


def numbers(array: NDArray) -> np.ndarray:
    """Elements as numpy, shared where it knows the dtype and the memory is the host's; others widened to float32."""
    return array.to_numpy("float32" if array.dtype.as_bits else None)


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

    def release(self) -> None:
        """Nothing is held."""


class Cache(Rows):
    """Contiguous keys and values of `batch` sequences of equal length.

    Attributes:
        variables: the carried states by key.
        device: where they lie, and steps run.
        steps: what runs them.
    """

    def __init__(self, program: Program, batch: int, capacity: int, device: Device = CPU) -> None:
        need("batch", batch)
        need("tokens", capacity)
        if batch < 1 or capacity < 1:
            raise UsageError("a cache has at least one sequence and one row", got=f"batch {batch}, capacity {capacity}")
        super().__init__(program, batch, Watch(program))
        self._capacity, self.device = capacity, device
        self.variables: dict[str, Variable] = {}
        self.steps = Steps(program, lambda last_only: derived_for(program, capacity, last_only), device)
        try:
            self._start()
        except MemoryError as error:
            raise UsageError("there is no memory for so many rows", where="tokens", got=str(error)) from error
        self.fingerprints = dict(self._current())

    @property
    def capacity(self) -> int:
        """Rows it holds."""
        return self._capacity

    @property
    def length(self) -> int:
        """Rows filled."""
        return int(self.variables[LENGTH].item())

    @property
    def nbytes(self) -> int:
        """Bytes of keys and values."""
        return sum(v.data.nbytes for v in self.variables.values())

    def _run(self, ids: np.ndarray, all_logits: bool, draws: Several[Draw]) -> tuple[NDArray, np.ndarray | None]:
        length, rows = self.length, ids.shape[1]
        fed = self.steps.space(not all_logits, self.batch, rows, self.variables)
        fed.hosts["ids"][...] = ids
        if "positions" in fed.hosts:
            fed.hosts["positions"][...] = np.arange(length, length + rows)
        fed.ask_nothing()
        for row, draw in enumerate(() if all_logits else draws):
            self.ask(fed, row, ids[row], draw, row)
        return fed.run()

    def _fits(self) -> bool:
        sizes, states = {"B": self.batch}, self.steps.derived().states
        return all(k in self.variables and self.variables[k].spec == s.bind(sizes) for k, s in states.items())

    def _start(self) -> None:
        specs = {k: s.bind({"B": self.batch}) for k, s in self.steps.derived().states.items()}
        if {k: v.spec for k, v in self.variables.items()} != specs:
            self.steps.spaces.clear()
            self.variables = {k: Variable(filled(s, 0.0, self.device), name=k) for k, s in specs.items()}

    # -- going back --------------------------------------------------------------------------------------------------
    def cut(self, length: int) -> None:
        """As `Rows.cut`."""
        for key, variable in self.variables.items():
            if key != LENGTH:
                fill(variable.own()[:, :, length:], 0.0)
        self._regrow(length)
        self._forget(length)

    def _row(self, at: int) -> Iterator[NDArray]:
        for key, variable in self.variables.items():
            if key != LENGTH:
                yield variable.own()[:, :, at]

    def _regrow(self, length: int) -> None:
        self.variables[LENGTH].own().copy_from(from_numpy(np.asarray(length, np.int64)))

    def snapshot(self) -> Snapshot:
        """A place to come back to; costs the ids, not the rows."""
        return Snapshot(self.tokens, self._logits, self._watch.mark)

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
        self._logits, self._logits_of = mark.logits, mark.model
