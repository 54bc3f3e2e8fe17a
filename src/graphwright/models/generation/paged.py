"""The paged KV cache: rows of many sequences in blocks of one pool per layer; what sequences share is held once.

All memory is there from the start. A sequence is a list of blocks and a length (`sequence.py`); a block fills up, is
shared, copied when one of its holders writes, and kept for prompts that begin alike (`prefix.py`).
"""

from __future__ import annotations

from collections.abc import Sequence as Several
from contextlib import ExitStack
from hashlib import blake2b
from threading import RLock
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

import numpy as np

from graphwright.array import CPU, dtype, empty
from graphwright.autograd import Variable
from graphwright.errors import UsageError
from graphwright.models.errors import BlockError, CacheFull, PromptError, StaleCache
from graphwright.models.generation.block_pool import BlockPool, PrefixCache
from graphwright.models.generation.cache import FingerprintWatch, fill, filled, independent
from graphwright.models.generation.cached_program import LENGTHS, TABLE, StepPlans, derive_paged
from graphwright.models.generation.sampling import check_one_each, need
from graphwright.models.generation.text import check_ids, vocabulary

if TYPE_CHECKING:
    from graphwright.array import Device, NDArray
    from graphwright.models.generation.cached_program import Derived
    from graphwright.models.generation.sampling import SamplingRequest
    from graphwright.models.generation.sequence import PagedSnapshot, Sequence
    from graphwright.program import Program

KINDS = ("float32", "bfloat16", "float16")


class PagedCache:
    """Blocks of keys and values, for sequences of any lengths.

    Args:
        program: of the model.
        tokens: rows to make room for: ⌈tokens / block⌉ blocks, and one for each of `sequences`.
        blocks, nbytes: the size in blocks or bytes instead.
        block: rows in a block.
        sequences: how many are expected, see `tokens`.
        prefix_bytes: bytes of blocks kept for prompts that begin alike, by default up to the whole pool: they leave
            when a sequence needs them; 0 keeps none.
        kind: dtype that rows are held in, "float32", "bfloat16" or "float16"; by default that of the activations.
        device: where they lie, and steps run.
        poison: fill free blocks with NaN, so that a row read by mistake shows.

    Attributes:
        pool: who holds which block.
        prefix: blocks kept for later prompts.
        variables: pools by key, [blocks, kv heads, block, head dim].
        watch: fingerprints of the model.
        steps: what runs them.
    Raises: UsageError for sizes below 1 or more memory than there is.
    """

    def __init__(
        self,
        program: Program,
        *,
        tokens: int | None = None,
        blocks: int | None = None,
        nbytes: int | None = None,
        block: int = 16,
        sequences: int = 1,
        prefix_bytes: int | None = None,
        kind: str | None = None,
        device: Device = CPU,
        poison: bool = False,
    ) -> None:
        given = {"tokens": tokens, "blocks": blocks, "nbytes": nbytes}
        if sum(v is not None for v in given.values()) != 1:
            raise UsageError("one of tokens, blocks and nbytes says how large the cache is", got=given)
        if prefix_bytes is not None:
            need("prefix_bytes", prefix_bytes)
            if prefix_bytes < 0:
                raise UsageError("0 keeps no blocks", where="prefix_bytes", expected=">= 0", got=prefix_bytes)
        for name, value in {**given, "block": block, "sequences": sequences}.items():
            if value is not None:
                need(name, value)
                if value < 1:
                    raise UsageError("a cache has at least one block of one row", where=name, got=value)
        if kind not in (None, *KINDS):
            raise UsageError("rows are held in one of these dtypes", where="dtype", expected=KINDS, got=kind)
        self.program, self.block, self.watch, self.lock = program, block, FingerprintWatch(program), RLock()
        self.kind, self.device, self._poison = None if kind is None else dtype(kind), device, poison
        one = derive_paged(program, 1, block, True, self.kind).states
        per_block = sum(s.nbytes for s in one.values())
        if blocks is None:
            blocks = -(-tokens // block) + sequences if tokens is not None else (nbytes or 0) // max(per_block, 1)
            if blocks < 1:
                raise UsageError("no block fits", where="nbytes", expected=f">= {per_block}", got=nbytes)
        self.variables: dict[str, Variable] = {}
        self.steps = StepPlans(program, self._derive, device)
        self._alive: WeakSet[Sequence] = WeakSet()
        self._marks: WeakSet[PagedSnapshot] = WeakSet()
        try:
            if device == CPU:
                np.empty(blocks * per_block, np.uint8)  # is refused at once; lists of so many blocks are not
            self.pool = BlockPool(blocks, per_block, self._freed if poison else None)
            kept = blocks if prefix_bytes is None else prefix_bytes // max(per_block, 1)
            self.prefix = PrefixCache(self.pool, block, kept)
            self.start()
        except MemoryError as error:
            raise UsageError("there is no memory for so many blocks", got=str(error)) from error

    @property
    def nbytes(self) -> int:
        """Bytes of keys and values."""
        return self.pool.bytes

    def sequence(self) -> Sequence:
        """An empty sequence; release it, or use it in `with`."""
        from graphwright.models.generation.sequence import Sequence

        made = Sequence(self)
        self._alive.add(made)
        return made

    def holders(self) -> list[Any]:
        """Sequences and snapshots that hold blocks."""
        with self.lock:
            return [h for h in (*self._alive, *self._marks) if h.table]

    # -- running -----------------------------------------------------------------------------------------------------
    def step(
        self,
        sequences: Several[Sequence],
        ids: Any,
        *,
        all_logits: bool = False,
        allow_stale: bool = False,
        draws: Several[SamplingRequest] = (),
    ) -> NDArray:
        """Append ids int64 [B, T] to B sequences, each at its own length; logits [B, 1 or T, vocab].

        With `draws`, one for each, the run of the plan draws the next ids too: `sequence.drawn([draw])` gives them.

        Sequences may join and leave from step to step. Raises: as `Sequence.step`; after any error all are as before.
        """
        batch = check_ids(ids, vocabulary(self.program))
        if len(batch) != len(sequences) or len({id(s) for s in sequences}) != len(sequences):
            raise PromptError("a row of ids for each of different sequences", expected=len(sequences), got=len(batch))
        if any(s.cache is not self for s in sequences):
            raise BlockError("a sequence of another cache")
        check_one_each(draws, len(sequences))
        with ExitStack() as held:
            for s in sequences:
                held.enter_context(s.alone())  # which takes the lock too
            before = [s.length for s in sequences]
            try:
                for s in sequences:
                    s.admit(allow_stale)
                logits, chosen = self.run(sequences, batch, all_logits, draws)
                last = logits.to_numpy("float32")[:, -1]
                for i, s in enumerate(sequences):
                    one = slice(i, i + 1)
                    s.took(batch[one], last[one], draws[one], None if chosen is None else chosen[one])
            except BaseException:
                for s, length in zip(sequences, before, strict=True):
                    s.cut(length)
                raise
            return logits

    def run(
        self, sequences: Several[Sequence], ids: np.ndarray, all_logits: bool, draws: Several[SamplingRequest]
    ) -> tuple[NDArray, np.ndarray | None]:
        """Reserve, run, and let the lengths rise; ids were checked. Logits, and ids drawn."""
        rows = ids.shape[1]
        if len(sequences) > 1 and max(s.length for s in sequences) + rows > independent(self.program):
            return self._run_apart(sequences, ids, all_logits, draws)
        with self.lock:
            for s in sequences:
                s.reserve(rows)
            places = 1 << (len(sequences) - 1).bit_length()  # the others write nothing: few plans for many batches
            fed = self.steps.space(not all_logits, places, rows, self.variables)
            whole, table, lengths = fed.hosts["ids"], fed.hosts[TABLE], fed.hosts[LENGTHS]
            whole[...], table[...], lengths[...] = 0, -1, -1
            for i, s in enumerate(sequences):
                table[i, : len(s.table)], lengths[i], whole[i] = s.table, s.length, ids[i]
            if "positions" in fed.hosts:
                fed.hosts["positions"][...] = np.maximum(lengths, 0)[:, None] + np.arange(rows)
            fed.ask_nothing()
            for i, draw in enumerate(() if all_logits else draws):
                sequences[i].ask(fed, i, ids[i], draw)
            logits, chosen = fed.run()
            for s in sequences:
                s.grew(rows)
            return logits if places == len(sequences) else logits[: len(sequences)], chosen

    def _run_apart(
        self, sequences: Several[Sequence], ids: np.ndarray, all_logits: bool, draws: Several[SamplingRequest]
    ) -> tuple[NDArray, np.ndarray | None]:
        """`run`, one sequence after the other: where the longest text decides how all of a step are turned."""
        made = [self.run([s], ids[i : i + 1], all_logits, draws[i : i + 1]) for i, s in enumerate(sequences)]
        first = made[0][0]
        logits = empty((len(made), *first.shape[1:]), first.dtype, first.device)
        for i, (one, _) in enumerate(made):
            logits[i : i + 1].copy_from(one)
        drawn = [ids for _, ids in made if ids is not None]
        return logits, np.concatenate(drawn) if drawn else None

    # -- memory ------------------------------------------------------------------------------------------------------
    def start(self) -> None:
        """Pools for the model as it is. Raises: StaleCache if blocks of other shapes are held."""
        if self.fits():
            return
        self.prefix.clear()
        if self.pool.used:
            raise StaleCache(
                "keys or values have other shapes than the blocks that sequences hold",
                got=f"{self.pool.used} blocks held",
                fix="release the sequences (cache.holders()), or a new cache",
            )
        states = self.steps.derived().states
        self.steps.spaces.clear()
        start = np.nan if self._poison else 0.0
        self.variables = {k: Variable(filled(s, start, self.device), name=k) for k, s in states.items()}

    def _derive(self, last_only: bool) -> Derived:
        return derive_paged(self.program, self.pool.cap, self.block, last_only, self.kind)

    def fits(self) -> bool:
        """True if the pools have the shapes of the model as it is."""
        return {k: v.spec for k, v in self.variables.items()} == self.steps.derived().states

    def pools(self) -> list[NDArray]:
        """Writable pools [blocks, kv heads, block, head dim]: keys and values of one attention after the other."""
        return [variable.own() for variable in self.variables.values()]

    def claim(self, count: int) -> list[int]:
        """Free blocks, after kept ones were let go of if there are too few. Raises: CacheFull, with nothing changed."""
        missing = count - self.pool.free
        if missing > 0:
            if missing > self.prefix.evictable:
                raise CacheFull(
                    "the cache has no room for these tokens",
                    expected=f"{count} blocks of {self.block} rows",
                    got=f"{self.pool.free} free, {self.prefix.evictable} evictable",
                    fix="release sequences (cache.holders()), or model.new_cache with more room",
                )
            self.prefix.evict(missing)
        return self.pool.take(count)

    def copy_block(self, source: int, target: int, rows: int) -> None:
        """The first rows of a block into another, in all layers."""
        for pool in self.pools():
            pool[target, :, :rows].copy_from(pool[source, :, :rows])

    def root(self, fingerprints: dict[str, str]) -> bytes:
        """Where chains of blocks computed with this model begin."""
        text = repr((sorted(fingerprints.items()), [v.spec for v in self.variables.values()]))
        return blake2b(text.encode(), digest_size=16).digest()

    def held(self, mark: PagedSnapshot) -> None:
        """Note a snapshot, for `holders`."""
        self._marks.add(mark)

    def _freed(self, block: int) -> None:
        for pool in self.pools():
            fill(pool[block], np.nan)

    def __repr__(self) -> str:
        return f"PagedCache({self.pool.used} of {self.pool.cap} blocks of {self.block} rows used)"
