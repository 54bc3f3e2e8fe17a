"""KV caches: the keys and values of tokens, with fingerprints of the model state that computed them.

An edit upstream of cached entries makes them stale, other edits do not, and an undo makes them valid again.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from graphwright.arguments import checked
from graphwright.array import CPU, Device, NDArray, Spec, Writers, changes, empty, from_numpy
from graphwright.autograd import Variable
from graphwright.errors import UsageError
from graphwright.models.errors import CacheFull, PromptError, StaleCache
from graphwright.models.generation.cached_program import (
    LENGTH,
    BoundStep,
    StepPlans,
    StepResult,
    derived_for,
    fingerprints,
)
from graphwright.models.generation.pattern_rows import PatternRows, extend_patterns, pattern_versions, patterns_above
from graphwright.models.generation.sampling import Requests, SamplingRequest, TokenCounts, check_one_each
from graphwright.models.generation.text import check_ids, per_version, vocabulary
from graphwright.models.metrics import check_finite
from graphwright.program.patterns import PatternVariable
from graphwright.settings import Range

if TYPE_CHECKING:
    from graphwright.program.program import Program

CHUNK = 512  # tokens of a prefill that run at once
MIXED = "entries of several model states"
ENDLESS = 1 << 62


@per_version
def independent(p: Program) -> int:
    """Return the length beyond which a text's RoPE angles, and so its cache entries, depend on its length."""
    return min((p.attrs(n)["original"] for n in p.of_traits(looks_ahead=True)), default=ENDLESS)


ModelState = tuple[object, tuple[int, ...]]
"""Identifies the weights and structure of a model, and the versions of its patterns."""


class FingerprintWatch:
    """Caches hashes of the structure and weights that cached keys and values depend on; recomputes them if changed."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.mark: tuple[int, list[tuple[str, NDArray, int]]] = (-1, [])
        self._now: dict[str, str] = {}
        self._writers, self._seen = Writers(), (-1, 0)  # `changes.count` and runs at the last comparison of all weights

    def unchanged(self) -> bool:
        """Return True if neither the structure nor a weight changed since the fingerprints were computed."""
        return self._seen == (changes.count, self._writers.runs) or self._compared()

    def _compared(self) -> bool:
        version, weights = self.mark
        array, seen = self.program.weights.array, changes.count
        writers = Writers(a.storage for _, a, _ in weights)
        runs = writers.runs
        if version != self.program.plan_version or any(
            array(k) is not a or a.storage.version != v for k, a, v in weights
        ):
            return False
        self._writers, self._seen = writers, (seen, runs)
        return True

    @property
    def state(self) -> ModelState:
        """A value that identifies the model's state at the last call of `current`, and its patterns now."""
        return self.mark, pattern_versions(self.program)

    def is_state(self, state: ModelState | None) -> bool:
        """Return True if the model has the state that this value of `state` identifies."""
        if state is None or state[0] is not self.mark or not self.unchanged():
            return False
        return state[1] == pattern_versions(self.program)

    def current(self) -> dict[str, str]:
        """Map each attention path to the fingerprint of its keys and values, recomputing all if the model changed."""
        if not self.unchanged():
            p = self.program
            arrays = [(key, v.data) for key, v in p.weights.items() if not isinstance(v, PatternVariable)]
            for _, a in arrays:
                a.storage.watched = True  # a write increments `changes`
            self.mark = (p.plan_version, [(key, a, a.storage.version) for key, a in arrays])
            self._now = fingerprints(p)
        return self._now


@checked
class KVCache:
    """Keys and values of `batch` sequences of equal length; base of `StaticCache` and `CachedSequence`.

    Attributes:
        program: the program of the model that fills the cache.
        tokens: int64 [batch, length], the ids of the entries.
        fingerprints: dict from attention path to the fingerprint of the model state that computed its entries.
        stale_runs: paths of attention ops that ran although their entries were stale.
        stream: number of the random stream that `Model.decode` draws from.
        steps: compiled steps; all sequences of a paged cache share them.
    """

    stream: int = 0
    steps: StepPlans

    def __init__(self, program: Program, batch: int, watch: FingerprintWatch) -> None:
        self.program, self.batch, self._watch = program, batch, watch
        self.tokens = np.zeros((batch, 0), np.int64)
        self.fingerprints: dict[str, str] = {}
        self.stale_runs: tuple[str, ...] = ()
        self._logits: np.ndarray | None = None
        self._logits_of: ModelState | None = None  # the model state that computed them
        self._rows = PatternRows()
        self._sampled: tuple[tuple[SamplingRequest, ...], np.ndarray] | None = None  # ids sampled within the last step
        self._counts: dict[int, TokenCounts] = {}
        self._valid_at = program.version
        self._long_from = ENDLESS  # first entry that was rotated for a text longer than `independent`

    # -- storage, by kind of cache -----------------------------------------------------------------------------------
    @property
    def capacity(self) -> int:
        """Largest number of entries per sequence."""
        raise NotImplementedError

    @property
    def length(self) -> int:
        """Number of entries per sequence."""
        raise NotImplementedError

    def _run(self, ids: np.ndarray, all_logits: bool, requests: Requests) -> StepResult:
        """Append entries for ids; return logits and sampled ids. After a failure the caller must call `rollback`."""
        raise NotImplementedError

    def rollback(self, length: int) -> None:
        """Drop the entries from index `length` on, including those of a step that failed halfway."""
        raise NotImplementedError

    def _set_length(self, length: int) -> None:
        """Set the length; the content of entries beyond the old length is undefined."""
        raise NotImplementedError

    def _make_writable(self, at: int) -> None:
        """Copy the memory of entry `at` if another sequence shares it. Raises: CacheFull, with nothing changed."""

    def _entry(self, at: int) -> Iterator[NDArray]:
        """Yield entry `at` of the keys and of the values of each attention, as writable views."""
        raise NotImplementedError

    def snapshot(self) -> Any:
        """Return a snapshot of the current state for `restore`; the caller releases it after use."""
        raise NotImplementedError

    def restore(self, mark: Any) -> None:
        """Restore the state of a snapshot, which stays usable. Raises: UsageError if it does not fit this cache."""
        raise NotImplementedError

    def _start(self) -> None:
        """Allocate memory for an empty cache, unless it already has the shapes that the model's current state needs."""

    def _fits(self) -> bool:
        """Return True if the entries have the shapes that the model's current state needs."""
        raise NotImplementedError

    def exclusive(self) -> AbstractContextManager[None]:
        """Return a context that locks the cache for this thread, if threads may share its memory."""
        return nullcontext()

    # -- filling -----------------------------------------------------------------------------------------------------
    def step(
        self, ids: np.ndarray, *, all_logits: bool = False, allow_stale: bool = False,
        requests: Requests = (),
    ) -> NDArray:  # fmt: skip
        """Append ids int64 [batch, T] and return the logits [batch, 1 or T, vocab].

        Args:
            ids: tokens to append to each sequence.
            all_logits: return logits of every token instead of the last only.
            allow_stale: run on stale entries; the journal records it.
            requests: one sampling request per sequence, served in the same run of the plan; `sampled` returns the ids.
        Raises: StaleCache if an edit changed what the entries depend on; CacheFull, PromptError, NonFinite; UsageError
            if another thread is using a paged sequence. After any error the cache is unchanged.
        """
        check_one_each(requests, self.batch)
        return self._append(ids, requests, allow_stale, lambda ids: (self._run(ids, all_logits, requests), ids))[0]

    def _append(
        self, ids: np.ndarray, requests: Requests, allow_stale: bool,
        run: Callable[[np.ndarray], tuple[StepResult, np.ndarray]],
    ) -> tuple[NDArray, np.ndarray]:  # fmt: skip
        """Append by `run`, a function from checked ids to (result, ids that ran); return the logits and these ids."""
        with self.exclusive():
            length = self.length
            ids = self._checked(ids)
            self.admit(allow_stale)
            extend_patterns(self.program, length + ids.shape[1])
            try:
                (logits, sampled), ids = run(ids)
                self.record(ids, logits.to_numpy("float32")[:, -1], requests, sampled)
            except BaseException:  # also an interrupt: half a step must leave no trace
                self.rollback(length)
                raise
            return logits, ids

    def record(
        self, ids: np.ndarray, last: np.ndarray, requests: Requests = (),
        sampled: np.ndarray | None = None,
    ) -> None:  # fmt: skip
        """Store the input ids, last logits and sampled ids of a step. Raises: NonFinite if a logit is not finite."""
        tokens = np.concatenate([self.tokens, ids], axis=1)
        check_finite(self.program, last, tokens)
        if tokens.shape[1] > independent(self.program):
            self._long_from = min(self._long_from, self.tokens.shape[1])
        self._rows.record(self.program, self.tokens.shape[1], tokens.shape[1])
        self.tokens = tokens
        self._logits, self._logits_of = last, self._watch.state
        self._sampled = (tuple(requests), sampled) if requests and sampled is not None else None

    def sampled(self, requests: Requests) -> np.ndarray:
        """Return the next ids, int64 [batch], sampled within the last step or now on the host from its logits.

        The host samples if the step ran with different requests, and for requests with processors. Raises: NonFinite;
        UsageError unless there is one request per sequence.
        """
        check_one_each(requests, self.batch, none=False)
        if self._sampled is not None and self._sampled[0] == tuple(requests):
            ids = self._sampled[1].copy()
        else:
            ids = np.full(self.batch, -1)
        for row, token in enumerate(ids.tolist()):
            if token < 0:
                assert self._logits is not None
                ids[row] = requests[row].sample(self._logits[row], self.tokens[row])
        return ids

    def advance(self, count: int, requests: Requests, *, allow_stale: bool = False) -> np.ndarray:
        """Append `count` ids per sequence, each sampled from the logits after the one before; at least one is appended.

        Fewer are appended if the host must sample. Returns: the ids, int64 [batch, n]. Raises: the errors of `step`.
        """
        ids = self.sampled(requests)[:, None]
        self.step(ids, allow_stale=allow_stale, requests=requests)
        return ids

    def request(self, step: BoundStep, at: int, ids: np.ndarray, request: SamplingRequest, row: int = 0) -> None:
        """Write into row `at` of a step's inputs the request to sample the id after `ids` [T] of sequence `row`."""
        counts = self._counts.get(row)
        if counts is None or counts.prompt != request.prompt:
            counts = self._counts[row] = TokenCounts(request.prompt)
        if request.rule.penalises:
            counts.add(self.tokens[row, counts.length :].tolist())
            counts.add(ids.tolist())
        step.request(at, request, self.length + len(ids), counts.pairs)

    def prefill(self, ids: np.ndarray, *, chunk: int = CHUNK, allow_stale: bool = False) -> np.ndarray:
        """Append ids in chunks; return the last token's logits, float32 [batch, vocab]. On an error, append nothing.

        With dynamic RoPE a long text runs in one chunk, so that all tokens get the same frequencies.
        """
        Range(1, whole=True).check("chunk", chunk)
        start = self.length
        ids = self._checked(ids)
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
        """Recompute all entries with the model's current state; they equal those of a new prefill bit for bit.

        If that fails, the cache keeps its tokens and remains stale, so that it can be refilled later.
        """
        with self.exclusive():
            tokens = self.tokens
            if not tokens.shape[1]:
                return
            check_ids(tokens, vocabulary(self.program))  # raises for unknown ids (-1) before entries are dropped
            self.reset()
            try:
                self.prefill(tokens)
            except BaseException:
                self.tokens, self.fingerprints = tokens, dict.fromkeys(self._watch.current(), MIXED)
                self._set_length(tokens.shape[1])
                raise

    def last_logits(self, *, allow_stale: bool = False) -> np.ndarray:
        """Return the logits after the last token, float32 [batch, vocab]; recompute them if the model changed since.

        Entries do not change, but a single stale entry is recomputed. Raises: PromptError if empty; StaleCache.
        """
        if not self.tokens.shape[1]:
            raise PromptError("the cache is empty", fix="model.prefill(cache, ids) first")
        if self._logits is not None and self._watch.is_state(self._logits_of):
            return self._logits
        if not allow_stale:
            self.check()
        tokens, at = self.tokens, self.length - 1
        if not at and not all(self.validity().values()):  # one stale entry: refill computes all of it
            self.refill()
            return self.last_logits()
        self._make_writable(at)
        saved = [entry.copy() for entry in self._entry(at)]
        self.rollback(at)
        logits = None
        try:
            self.step(tokens[:, -1:], allow_stale=allow_stale)
            logits = self._logits
        finally:
            self._set_length(at + 1)
            for entry, bits in zip(self._entry(at), saved, strict=True):
                entry.copy_from(bits)
            self.tokens, self._logits, self._sampled = tokens, logits, None
        assert logits is not None
        return logits

    def _checked(self, ids: np.ndarray) -> np.ndarray:
        ids = check_ids(ids, vocabulary(self.program))
        if len(ids) != self.batch:
            what = "the number of rows of ids is not the cache's number of sequences"
            raise PromptError(what, where="ids", expected=f"{self.batch} rows", got=f"{len(ids)} rows")
        left = self.capacity - self.length
        if ids.shape[1] > left:
            raise CacheFull("the cache has no room for these tokens", expected=f"<= {left}", got=ids.shape[1],
                            fix=self.way_out)  # fmt: skip
        return ids

    @property
    def way_out(self) -> str:
        """What to do where a text has no room."""
        return "call model.new_cache(tokens) with more tokens"

    # -- validity ----------------------------------------------------------------------------------------------------
    def validity(self, program: Program | None = None) -> dict[str, bool]:
        """Map each attention path to whether its cached entries equal those that the program would compute now."""
        now = self._watch.current() if program is None else fingerprints(program)
        valid = {path: self.fingerprints.get(path) == digest for path, digest in now.items()}
        p = self.program if program is None else program
        if edited := self._rows.changed(p, self.length):
            valid |= {path: False for path, above in patterns_above(p).items() if above & edited}
        return valid

    def check(self) -> None:
        """Raise StaleCache if entries are stale, naming their attention nodes and the edits since they were valid."""
        stale = sorted(path for path, valid in self.validity().items() if not valid) if self.length else []
        if stale:
            since = [e.why for e in self.program.journal if e.base_version >= self._valid_at]
            more = f" and {len(stale) - 4} more" if len(stale) > 4 else ""
            error = StaleCache("the model changed upstream of cached keys and values",
                               where=", ".join(stale[:4]) + more,
                               got="; ".join(since[-3:]) or "weights written in place",
                               fix="model.reprefill(cache), or cache.reset()")  # fmt: skip
            error.layers = tuple(stale)
            raise error
        self._valid_at = self.program.version

    def admit(self, allow_stale: bool) -> None:
        """Check for stale entries before a step, and update fingerprints. Raises: StaleCache unless `allow_stale`."""
        if not self.length:
            self._start()
            self.fingerprints, self.stale_runs = dict(self._watch.current()), ()
        same = not self.stale_runs and self.fingerprints == self._watch.current()
        if same and not self._rows.changed(self.program, self.length):
            self._valid_at = self.program.version
            return
        try:
            self.check()
        except StaleCache as error:
            if not allow_stale or not self._fits():
                raise
            self._record_stale(error.layers)
        stale = set(self.stale_runs)
        self.fingerprints = {path: MIXED if path in stale else now for path, now in self._watch.current().items()}

    def _record_stale(self, layers: tuple[str, ...]) -> None:
        if set(layers) <= set(self.stale_runs):
            return
        self.stale_runs = tuple(sorted({*self.stale_runs, *layers}))
        p, why = self.program, f"ran on a stale cache: {', '.join(layers)}"
        state = p.state_hash()
        p.journal.append(why, "human", base_version=p.version, edits=[], before=state, after=state,
                         warnings=("stale cache",))  # fmt: skip

    # -- going back --------------------------------------------------------------------------------------------------
    def reset(self) -> None:
        """Drop all entries."""
        self.truncate(0)

    def reusable(self, ids: np.ndarray) -> int:
        """Return how many leading entries a run of the prompt `ids` [T] can reuse; at least one token is left to run.

        The result is 0 for a prompt so long that dynamic RoPE changes the frequencies.
        """
        if len(ids) > independent(self.program):
            return 0
        known = self.tokens[0][: min(len(ids) - 1, self._long_from)]
        same = known == ids[: len(known)]
        return int(len(known) if same.all() else np.argmin(same))

    def truncate(self, length: int) -> None:
        """Keep the first `length` entries. Raises: CacheFull if there are fewer; UsageError if `length` is negative."""
        with self.exclusive():
            Range(0, whole=True).check("length", length)
            if length > self.length:
                what = "cannot truncate the cache to this length"
                raise CacheFull(what, where="length", expected=f"0..{self.length}", got=length)
            self.rollback(length)

    def _forget(self, length: int) -> None:
        """Drop ids from `length` on, and all cached results that depend on them."""
        self.tokens, self._logits, self._sampled = self.tokens[:, :length], None, None
        self._counts.clear()
        if length <= self._long_from:
            self._long_from = ENDLESS


def check_cache_of(program: Program, cache: object) -> None:
    """Raise UsageError if `cache` is not a cache, and StaleCache if it belongs to a different model."""
    if not isinstance(cache, KVCache):
        fix = "pass model.new_cache(tokens).sequence(), or model.new_cache(tokens, kind='static')"
        raise UsageError("the argument is not a KV cache", got=type(cache).__name__, fix=fix)
    if cache.program is not program:
        what, fix = "the cache belongs to a different model", "make a cache of this model: model.new_cache(tokens)"
        raise StaleCache(what, where=cache.program.name, fix=fix)


def fill(array: NDArray, value: float) -> None:
    """Fill an array with one number."""
    if array.size:
        array.copy_from(from_numpy(np.float32(value)).expand(*array.shape))


_LARGEST = sys.maxsize - 64  # bytes of an array
BATCH = Range(1, 2**31, whole=True)
"""Numbers of sequences of a cache."""


def filled(spec: Spec, value: float, device: Device) -> NDArray:
    """Return a new array filled with one number. Raises: MemoryError."""
    if device == CPU and not value:  # unwritten pages take no memory; the last bits of products depend on alignment
        if spec.nbytes > _LARGEST:
            raise MemoryError(f"{spec.nbytes} bytes")  # numpy raises a ValueError
        block = np.zeros(spec.nbytes + 64, np.uint8)
        start = -block.ctypes.data % 64
        host = block[start : start + spec.nbytes].view(spec.dtype.numpy).reshape(spec.sizes)
        return from_numpy(host, bits=spec.dtype)
    made = empty(spec.sizes, spec.dtype, device)
    fill(made, value)
    return made


@dataclass(frozen=True, slots=True)
class StaticSnapshot:
    """State of a `StaticCache`: its ids, the logits after the last id, and the model state that computed them."""

    tokens: np.ndarray
    logits: np.ndarray | None
    model: ModelState | None

    def release(self) -> None:
        """Do nothing: the snapshot owns no entries."""


@checked
class StaticCache(KVCache):
    """Contiguous keys and values of `batch` sequences of equal length.

    Attributes:
        variables: the cache states by key: the length, and the keys and values of each attention.
        device: the device that holds the entries and runs the steps.
    """

    def __init__(
        self, program: Program, batch: int, capacity: int, device: Device = CPU, deterministic: bool = False
    ) -> None:
        BATCH.check("batch", batch)
        Range(1, whole=True).check("tokens", capacity)
        super().__init__(program, batch, FingerprintWatch(program))
        self._capacity, self.device = capacity, device
        self._length = 0  # also the value of the state LENGTH, except within a step
        self.variables: dict[str, Variable] = {}
        self.steps = StepPlans(program, partial(derived_for, program, capacity), device, deterministic)
        try:
            self._start()
        except MemoryError as error:
            raise UsageError("not enough memory for this cache", where="tokens", got=str(error)) from error
        self.fingerprints = dict(self._watch.current())

    @property
    def capacity(self) -> int:
        """Largest number of entries per sequence."""
        return self._capacity

    @property
    def length(self) -> int:
        """Number of entries per sequence."""
        return self._length

    @property
    def nbytes(self) -> int:
        """Bytes of keys and values."""
        return sum(v.data.nbytes for v in self.variables.values())

    def _run(self, ids: np.ndarray, all_logits: bool, requests: Requests) -> StepResult:
        made = self._fed(ids, all_logits, requests).run()
        self._length += ids.shape[1]
        return made

    def _fed(self, ids: np.ndarray, all_logits: bool, requests: Requests) -> BoundStep:
        """Return the step for ids [batch, T], with its inputs written."""
        count = ids.shape[1]
        step = self.steps.bound(not all_logits, self.batch, count, self.variables)
        step.hosts["ids"][...] = ids
        if "positions" in step.hosts:
            step.hosts["positions"][...] = np.arange(self._length, self._length + count) if count > 1 else self._length
        asked = () if all_logits else requests
        if len(asked) < self.batch:
            step.clear_requests()
        for row, request in enumerate(asked):
            self.request(step, row, ids[row], request, row)
        return step

    def advance(self, count: int, requests: Requests, *, allow_stale: bool = False) -> np.ndarray:
        """Append ids as `KVCache.advance` does. The compiled step samples them, and is called again and again.

        Requests with penalties or processors, and steps that cannot sample, advance by one id.
        """
        single = count < 2 or any(r.rule.penalises or r.rule.processors for r in requests)
        if single or not self.steps.bound(True, self.batch, 1, self.variables).samples:
            return super().advance(count, requests, allow_stale=allow_stale)
        count = min(count, self._capacity - self._length)

        def burst(first: np.ndarray) -> tuple[StepResult, np.ndarray]:
            extend_patterns(self.program, self._length + count)
            result, ids = self._fed(first, False, requests).repeat(count)
            self._length += ids.shape[1]
            return result, ids

        _, ids = self._append(self.sampled(requests)[:, None], requests, allow_stale, burst)
        return ids

    def _fits(self) -> bool:
        return all(k in self.variables and self.variables[k].spec == spec for k, spec in self._specs().items())

    def _specs(self) -> dict[str, Spec]:
        return {k: s.bind({"B": self.batch}) for k, s in self.steps.derived().states.items()}

    def _start(self) -> None:
        specs = self._specs()
        if {k: v.spec for k, v in self.variables.items()} != specs:
            self.steps.spaces.clear()
            self._length = 0
            self.variables = {k: Variable(filled(s, 0.0, self.device), name=k) for k, s in specs.items()}

    def rollback(self, length: int) -> None:
        """Overwrite the entries from index `length` on with zeros, and set the length. Raises: UsageError."""
        Range(0, self.capacity, whole=True).check("length", length)
        for entries in self._entries():
            if self.device == CPU:
                entries.writable()
                entries.to_numpy(bits=True)[:, :, length:] = 0
            else:
                fill(entries[:, :, length:], 0.0)
        self._set_length(length)
        self._forget(length)

    def _entry(self, at: int) -> Iterator[NDArray]:
        return (entries[:, :, at] for entries in self._entries())

    def _entries(self) -> list[NDArray]:
        return [variable.own() for key, variable in self.variables.items() if key != LENGTH]

    def _set_length(self, length: int) -> None:
        self._length = length
        self.variables[LENGTH].own().copy_from(from_numpy(np.asarray(length, np.int64)))

    def snapshot(self) -> StaticSnapshot:
        """Return a snapshot of the ids and the last logits; entries are not copied."""
        return StaticSnapshot(self.tokens, self._logits, self._watch.state)

    def restore(self, mark: StaticSnapshot) -> None:
        """Truncate to the length of a snapshot. Raises: UsageError if its entries were dropped or overwritten since."""
        length = mark.tokens.shape[1]
        if not np.array_equal(self.tokens[:, :length], mark.tokens):
            raise UsageError("entries of this snapshot were dropped or overwritten",
                             expected=f"the {length} ids of the snapshot",
                             got=f"{self.length} entries that do not start with these ids",
                             fix="cache.reset(); model.prefill(cache, mark.tokens)")  # fmt: skip
        self.truncate(length)
        self._logits, self._logits_of = mark.logits, mark.model
