"""Generation without a cache, for programs whose tokens depend on earlier ones by more than attention that was found.

A program that no template built may mix tokens in a scan, in a convolution, or in attention that was not recognised.
Whether its steps can be cached is tried out: a prompt that runs in two parts must give the logits of one run.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from graphwright.array import CPU, Device, NDArray
from graphwright.errors import UsageError
from graphwright.models.generation.cache import FingerprintWatch, KVCache, StaticCache, StaticSnapshot
from graphwright.models.generation.cached_program import StepPlans, StepResult, derived_for
from graphwright.models.generation.sampling import Requests
from graphwright.models.generation.text import (
    OTHER_LENGTH,
    feeds_of,
    fixed_length,
    longest_text,
    padded_ids,
    vocabulary,
)
from graphwright.plan.compile import plan_for
from graphwright.plan.options import CompileOptions

if TYPE_CHECKING:
    from graphwright.program.program import Program

_TOKENS, _FIRST = 7, 4
"""Tokens of the trial, and how many of them run first."""
_EQUAL = 1e-4


class RecomputedGeneration(UserWarning):
    """Generation that runs the whole text again for each token."""


def check_cacheable_program(p: Program) -> None:
    """Raise UsageError if steps with a cache do not compute what the program computes; tried once per structure."""
    if (error := _known_reason(p)) is not None:
        raise error


def is_cacheable(p: Program) -> bool:
    """Return whether steps with a cache compute what the program computes; see `check_cacheable_program`."""
    return _known_reason(p) is None


def _known_reason(p: Program) -> UsageError | None:
    version, error = p.derived.get("cacheable", (-1, None))
    if version != p.plan_version:
        error = _why_not(p)
        p.derived["cacheable"] = p.plan_version, error
    return error


def _why_not(p: Program) -> UsageError | None:
    if (length := fixed_length(p)) is not None:
        return UsageError("this program cannot be cached: it runs texts of one length", where=p.name,
                          got=f"{length} tokens", fix=OTHER_LENGTH)  # fmt: skip
    ids = np.arange(_TOKENS)[None] % min(vocabulary(p), _TOKENS)
    whole = _logits(p, ids)
    try:
        cache = StaticCache(p, 1, _TOKENS)
        cache.step(ids[:, :_FIRST])
        rest = cache.step(ids[:, _FIRST:], all_logits=True).to_numpy("float32")
    except UsageError as error:
        return error
    if np.abs(rest - whole[:, _FIRST:]).max() <= _EQUAL * np.abs(whole).max():
        return None
    return UsageError("this program cannot be cached: its tokens depend on earlier ones by other ops than attention",
                      where=p.name, fix="use model.logits, which needs no cache")  # fmt: skip


def _logits(p: Program, ids: np.ndarray) -> np.ndarray:
    return _run(p, ids).to_numpy("float32")


def _run(p: Program, ids: np.ndarray, device: Device = CPU) -> NDArray:
    length, ids = ids.shape[1], padded_ids(p, ids)
    feeds = feeds_of(p, ids)
    sizes = {"B": ids.shape[0], "T": ids.shape[1]}
    specs = {p.path(n): p.spec(n).bind(sizes) for n in p.inputs()}
    options = CompileOptions(freeze=True, device=device)
    return plan_for(p, specs, ("logits",), options)(feeds)["logits"].to(CPU)[:, :length]


class RecomputedCache(KVCache):
    """The ids of one sequence, without keys and values: each step runs the program on all of them."""

    def __init__(self, program: Program, device: Device = CPU) -> None:
        self.device = device
        super().__init__(program, 1, FingerprintWatch(program))
        self.steps = StepPlans(program, lambda last_only: derived_for(program, 1, last_only), CPU, True)

    @property
    def capacity(self) -> int:
        """Longest text that the program can run."""
        return longest_text(self.program)

    @property
    def way_out(self) -> str:
        """What to do where a text has no room."""
        return super().way_out if fixed_length(self.program) is None else OTHER_LENGTH

    @property
    def length(self) -> int:
        """Number of ids."""
        return self.tokens.shape[1]

    def _run(self, ids: np.ndarray, all_logits: bool, requests: Requests) -> StepResult:
        logits = _run(self.program, np.concatenate([self.tokens, ids], axis=1), self.device)
        return logits[:, -ids.shape[1] if all_logits else -1 :], None

    def prefill(self, ids: np.ndarray, *, chunk: int = 0, allow_stale: bool = False) -> np.ndarray:
        """Append ids in one run; return the last token's logits, float32 [1, vocab]."""
        return self.step(ids).to_numpy("float32")[:, -1]

    def admit(self, allow_stale: bool) -> None:
        """Do nothing: there are no entries that an edit could make stale."""

    def check(self) -> None:
        """Do nothing, as `admit`."""

    def rollback(self, length: int) -> None:
        """Drop the ids from index `length` on."""
        self._forget(length)

    def _make_writable(self, at: int) -> None:
        pass

    def _entry(self, at: int) -> Iterator[NDArray]:
        return iter(())

    def _set_length(self, length: int) -> None:
        pass

    def snapshot(self) -> StaticSnapshot:
        """Return a snapshot of the ids; see `KVCache.snapshot`."""
        return StaticSnapshot(self.tokens, self._logits, self._logits_of)

    def restore(self, mark: Any) -> None:
        """Restore the ids of a snapshot."""
        self._forget(0)
        self.tokens, self._logits, self._logits_of = mark.tokens, mark.logits, mark.model
