"""Generate text: prefill a KV cache, then decode token by token, greedily or by sampling, until a stop condition."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field, fields, replace
from hashlib import blake2b
from time import perf_counter
from typing import TYPE_CHECKING, Any, ClassVar, Unpack

import numpy as np

from graphwright.arguments import checked
from graphwright.errors import UsageError
from graphwright.models.errors import CacheFull, PromptError
from graphwright.models.generation.cache import KVCache, check_cache_of
from graphwright.models.generation.cached_program import EXECUTOR
from graphwright.models.generation.recomputed import RecomputedCache, RecomputedGeneration
from graphwright.models.generation.sampling import Sampling, SamplingKeywords, SamplingRequest
from graphwright.models.generation.text import TextStream, prompt_ids
from graphwright.models.inspect import kv_bytes_per_token, weight_bytes_per_token
from graphwright.models.metrics import log_softmax
from graphwright.models.tokenizer import generation_defaults
from graphwright.plan.planning.lowering import on_vm
from graphwright.program.exclusive import exclusive
from graphwright.report import Report
from graphwright.settings import Count, Range, Whole
from graphwright.signatures import keywords

if TYPE_CHECKING:
    from graphwright.models.model import Model

BURST = 0.002
"""Seconds of decoding after which new tokens are added to the text; a token that takes longer is added at once."""
_ROUND = 64  # capacities are multiples of this, so that prompts of similar length share their plans
_FROM_FILE = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationOptions(Sampling):
    """Sampling rules and further options of text generation.

    Attributes:
        stop: strings that end the text, also across token borders; the text is cut before them.
        logprobs: record the log-probability of each token and of this many best tokens; 0 records none.
        first_stream: number of the first sample's random stream; sample i draws from stream `first_stream` + i.
        allow_stale: run on a cache that an edit made stale; the journal and the result record it.
        use_model_defaults: use generation_config.json for the sampling fields that have their default value.
        deterministic: as in `CompileOptions`; a given cache must have been made with it.
    """

    stop: str | Sequence[str] = ()
    logprobs: Count = 0
    first_stream: Whole = 0
    allow_stale: bool = False
    use_model_defaults: bool = False
    deterministic: bool = False

    def __post_init__(self) -> None:
        Sampling.__post_init__(self)
        stop = (self.stop,) if isinstance(self.stop, str) else self.stop
        if not isinstance(stop, Sequence) or not all(isinstance(text, str) and text for text in stop):
            raise self.out_of_range("stop", "a nonempty string or a list of nonempty strings")
        object.__setattr__(self, "stop", tuple(stop))

    @property
    def sampling(self) -> Sampling:
        """The sampling rules among the options, as a `Sampling`."""
        return Sampling(**{f.name: getattr(self, f.name) for f in fields(Sampling)})


class GenerationKeywords(SamplingKeywords, total=False):
    """The fields of `GenerationOptions` as keyword arguments."""

    stop: str | Sequence[str]
    logprobs: Count
    first_stream: Whole
    allow_stale: bool
    use_model_defaults: bool
    deterministic: bool


_SHOWN = 60
"""Characters of the text in the repr of a result."""


@checked
@dataclass(frozen=True, slots=True, repr=False)
class GenerationResult(Report):
    """One generated text.

    Attributes:
        ids, text: new tokens, without the prompt; their text, cut before a stop string; "" without a tokenizer.
        finish_reason: `eos`, `stop`, `length` or `cancelled`.
        prompt_tokens: length of the prompt.
        logprobs: log-probability of each token under the model without sampling rules, if requested.
        top: per token the requested number of (id, log-probability), largest first.
        setup_s: seconds to make the cache and to compile the steps, where this call had to.
        prefill_s, decode_s: seconds for the prompt, and for the tokens, without `setup_s`.
        token_s: seconds for each token: to sample it, and to run it if another one follows; of tokens that ran in one
            burst, their mean.
        sampling, stream: the rules as applied, and number of the random stream.
        reused_tokens: prompt tokens that a given cache already held.
        cache_tokens, cache_capacity: entries filled at the end, and available.
        bytes_per_token: bytes of weights and, on average, of KV entries that are read for one token.
        fingerprint: BLAKE2b-128 of the structure and weights that the cached entries were computed with.
        stale_layers: attention nodes that ran on entries of an earlier state of the model, under `allow_stale`.
    """

    ids: list[int]
    text: str
    finish_reason: str
    prompt_tokens: int
    logprobs: list[float] = field(default_factory=list)
    top: list[list[tuple[int, float]]] = field(default_factory=list)
    setup_s: float = 0.0
    prefill_s: float = 0.0
    decode_s: float = 0.0
    token_s: list[float] = field(default_factory=list)
    sampling: Sampling = field(default_factory=Sampling)
    stream: int = 0
    reused_tokens: int = 0
    cache_tokens: int = 0
    cache_capacity: int = 0
    bytes_per_token: int = 0
    fingerprint: str = ""
    stale_layers: tuple[str, ...] = ()
    FIGURES: ClassVar = ("tokens_per_s",)

    @property
    def tokens_per_s(self) -> float:
        """Decoded tokens per second, without the first token."""
        return (len(self.ids) - 1) / self.decode_s if self.decode_s > 0 and len(self.ids) > 1 else 0.0

    def reached(self, bandwidth: float) -> float:
        """Return the fraction of `bandwidth`, a measured memory bandwidth in bytes/s, that decoding used."""
        return self.tokens_per_s * self.bytes_per_token / bandwidth

    def __str__(self) -> str:
        return self.text

    def __repr__(self) -> str:
        text = self.text if len(self.text) <= _SHOWN else f"{self.text[:_SHOWN]}…"
        return (
            f"GenerationResult({text!r}, {len(self.ids)} tokens, {self.finish_reason}, {self.tokens_per_s:.0f} token/s)"
        )


@checked
@keywords(GenerationOptions)
def generate(
    model: Model, prompt: Any, max_new_tokens: int = 64, *, cache: KVCache | None = None,
    stream: Callable[[str], object] | None = None, cancel: Callable[[], bool] | None = None,
    **options: Unpack[GenerationKeywords],
) -> GenerationResult:  # fmt: skip
    """Continue a prompt; greedy by default.

    Args:
        prompt: text, or ids.
        max_new_tokens: limit; 0 generates none.
        cache: a cache to continue; tokens of the prompt that it holds are not run again, the others are appended.
        stream: called with each piece of text once it is complete UTF-8 and cannot start a stop string; short tokens
            run in bursts of some 2 ms, so their pieces come together.
        cancel: called before each token, e.g. `threading.Event().is_set`; true ends with the reason `cancelled`.
        options: see `GenerationOptions`.
    Raises: PromptError; UsageError for a wrong option; NonFinite naming a weight or node; StaleCache; CacheFull
        with the text so far in `partial`. The cache then holds the tokens that ran, and stays usable.
    """
    return generate_many(model, prompt, 1, max_new_tokens, cache=cache, stream=stream, cancel=cancel, **options)[0]


@checked
@keywords(GenerationOptions)
def generate_many(
    model: Model, prompt: Any, n: int, max_new_tokens: int = 64, *, cache: KVCache | None = None,
    stream: Callable[[str], object] | None = None, cancel: Callable[[], bool] | None = None,
    **options: Unpack[GenerationKeywords],
) -> list[GenerationResult]:  # fmt: skip
    """Sample `n` continuations of one prompt, which is run once; a sample does not depend on the others.

    Arguments and errors are those of `generate`.
    """
    given = GenerationOptions(**options)
    Range(1, whole=True).check("n", n)
    Range(0, whole=True).check("max_new_tokens", max_new_tokens)
    for name, value in (("stream", stream), ("cancel", cancel)):
        if value is not None and not callable(value):
            raise UsageError(f"{name} is not callable", where=name, got=type(value).__name__)
    if given.stop and model.tokenizer is None:
        raise UsageError("stop strings need a tokenizer, but the model has none", where="stop", got=given.stop)
    rule = _with_model_defaults(model, given.sampling) if given.use_model_defaults else given.sampling
    with exclusive(model.program):
        ids = prompt_ids(model, prompt)
        clock = _Clock(None)
        if cache is None:
            entries = len(ids) + max(max_new_tokens - 1, 0)
            tokens = -(-entries // _ROUND) * _ROUND
            cache = _new_cache(model, tokens, given.deterministic)
        check_cache_of(model.program, cache)
        if given.deterministic and not cache.steps.deterministic:
            raise UsageError("the steps of this cache are not deterministic", where="cache",
                             expected="a cache made with deterministic=True", got="deterministic=False",
                             fix="model.new_cache(tokens, deterministic=True)")  # fmt: skip
        made_s, clock = clock.seconds, _Clock(cache)
        reused, logits = _fill(cache, ids, given.allow_stale)
        prefill, setup = clock.seconds, made_s + clock.setup
        mark = cache.snapshot() if n > 1 else None
        results = []
        try:
            for number in range(given.first_stream, given.first_stream + n):
                if mark is not None:
                    cache.restore(mark)
                text = TextStream(model.tokenizer, tuple(given.stop), stream)
                made = GenerationResult([], "", "", len(ids), setup_s=setup, prefill_s=prefill, sampling=rule,
                                        stream=number, reused_tokens=reused)  # fmt: skip
                sample = _Continuation(model, cache, SamplingRequest(rule, number, len(ids)), text, given, made)
                results.append(sample.run(logits, max_new_tokens, cancel))
        finally:
            if mark is not None:
                mark.release()
        return results


def _new_cache(model: Model, tokens: int, deterministic: bool) -> KVCache:
    """Return a cache for one text; for a program whose steps cannot be cached, one that runs all of it again."""
    try:
        return model.new_cache(tokens, kind="static", deterministic=deterministic)
    except UsageError as error:
        if model.arch.imported is None or "cannot be cached" not in error.what:
            raise
        text = f"{error.what}; each token runs the whole text again ({model.directory.name})"
        warnings.warn(text, RecomputedGeneration, stacklevel=_callers_level())
        return RecomputedCache(model.program, model.device)


def _callers_level() -> int:
    """Return the `stacklevel` of the first caller outside of this package, for a warning of the calling function."""
    level, frame = 1, sys._getframe(1)
    while frame is not None and frame.f_globals.get("__name__", "").startswith("graphwright."):
        level, frame = level + 1, frame.f_back
    return level


@checked
@keywords(Sampling)
def decode(
    model: Model, cache: KVCache, steps: int = 1, *, stream: int | None = None, allow_stale: bool = False,
    **sampling: Unpack[SamplingKeywords],
) -> Generator[int]:  # fmt: skip
    """Sample and append up to `steps` tokens, one by one; a token is in the cache when it is yielded.

    Closing the iterator leaves the cache with the yielded tokens; a new iterator continues from there.

    Args:
        cache: one sequence with at least one token.
        steps: limit.
        stream: number of the random stream; by default the sequence's own, which differs between forks.
        allow_stale: run on entries of an earlier state of the model.
        sampling: see `Sampling`.
    """
    check_cache_of(model.program, cache)
    number, rule = cache.stream if stream is None else stream, Sampling(**sampling)
    Range(0, whole=True).check("steps", steps)
    Range(whole=True).check("stream", number)
    return _decoded(cache, steps, rule, number, allow_stale)


def _decoded(cache: KVCache, steps: int, rule: Sampling, stream: int, allow_stale: bool) -> Generator[int]:
    if cache.batch != 1:
        raise PromptError("decode cannot use a cache of several sequences", expected="one sequence", got=cache.batch)
    requests = (SamplingRequest(rule, stream, cache.length if rule.penalises else 0),)  # equal in the next call
    for _ in range(steps):
        cache.last_logits(allow_stale=allow_stale)  # recomputed if the model or the cache changed since
        token = cache.sampled(requests)
        cache.step(token[None], allow_stale=allow_stale, requests=requests)
        yield int(token[0])


def _with_model_defaults(model: Model, rule: Sampling) -> Sampling:
    """Return the rules, replacing fields that have their default value by those of generation_config.json.

    Without `do_sample` only the file's repetition penalty is used; with it, a missing temperature means 1.
    """
    file, unset = {k: v for k, v in generation_defaults(model.directory).items() if v is not None}, Sampling()
    sampled = bool(file.get("do_sample"))
    found = {k: file[k] for k in (_FROM_FILE if sampled else ("repetition_penalty",)) if k in file}
    if sampled:
        found.setdefault("temperature", 1.0)
    return replace(rule, **{k: v for k, v in found.items() if getattr(rule, k) == getattr(unset, k)})


def _fill(cache: KVCache, ids: np.ndarray, allow_stale: bool) -> tuple[int, np.ndarray]:
    """Fill the cache with exactly the prompt; return (number of reused tokens, logits [V] after the prompt)."""
    if cache.batch != 1:
        raise PromptError("generate cannot use a cache of several sequences", expected="one sequence", got=cache.batch)
    if len(ids) > cache.capacity:
        raise PromptError("the prompt exceeds the cache's capacity", expected=f"<= {cache.capacity}", got=len(ids),
                          fix=cache.way_out)  # fmt: skip
    if cache.length and not allow_stale:
        cache.check()
    reused = cache.reusable(ids)
    cache.truncate(reused)
    return reused, cache.prefill(ids[None, reused:], allow_stale=allow_stale)[0]


class _Clock:
    """Measures the seconds since it was made, apart from those in which the cache set up steps."""

    def __init__(self, cache: KVCache | None) -> None:
        self.cache, self.began, self.before = cache, perf_counter(), 0.0 if cache is None else cache.steps.setup_s

    @property
    def setup(self) -> float:
        return 0.0 if self.cache is None else self.cache.steps.setup_s - self.before

    @property
    def seconds(self) -> float:
        return perf_counter() - self.began - self.setup


@dataclass(slots=True)
class _Continuation:
    """The state of one sample during generation; `made` collects its tokens."""

    model: Model
    cache: KVCache
    request: SamplingRequest
    text: TextStream
    options: GenerationOptions
    made: GenerationResult

    def run(self, logits: np.ndarray, limit: int, cancel: Callable[[], bool] | None) -> GenerationResult:
        clock = _Clock(self.cache)
        try:
            reason = self._loop(logits, limit, cancel)
        except CacheFull as error:
            self.text.close()
            error.partial = self.text.text
            raise
        if reason != "stop" and self.text.close():
            reason = "stop"
        spent, p, length, prompt = clock.seconds, self.model.program, self.cache.length, self.request.prompt
        read = weight_bytes_per_token(p, on_vm(EXECUTOR)) + kv_bytes_per_token(p) * (prompt + length) // 2
        prints = "".join(v for _, v in sorted(self.cache.fingerprints.items()))
        digest = blake2b(prints.encode(), digest_size=16).hexdigest()
        return replace(self.made, text=self.text.text, finish_reason=reason, decode_s=spent, cache_tokens=length,
                       setup_s=self.made.setup_s + clock.setup, cache_capacity=self.cache.capacity,
                       bytes_per_token=read, fingerprint=digest, stale_layers=self.cache.stale_runs)  # fmt: skip

    def _loop(self, logits: np.ndarray, limit: int, cancel: Callable[[], bool] | None) -> str:
        allow_stale, requests, made = self.options.allow_stale, (self.request,), self.made
        while len(made.ids) < limit:
            if cancel is not None and cancel():
                return "cancelled"
            clock = _Clock(self.cache)
            if (burst := self._burst(limit, cancel)) > 1:
                if end := self._run_ahead(burst, clock):
                    return end
                continue
            token = int(self.cache.sampled(requests)[0])
            if most := self.options.logprobs:
                logp = log_softmax(logits)
                made.logprobs.append(float(logp[token]))
                best = np.argsort(-logp, kind="stable")[:most]
                made.top.append([(int(i), float(logp[i])) for i in best])
            end = self._end(token)
            if not end and len(made.ids) < limit:
                step = self.cache.step(np.asarray([[token]]), allow_stale=allow_stale, requests=requests)
                logits = step.to_numpy("float32")[0, -1]
            made.token_s.append(clock.seconds)
            if end:
                return end
        return "length"

    def _end(self, token: int) -> str:
        """Add a token to the result; return the reason if the text ends with it, else an empty string."""
        self.made.ids.append(token)
        return "eos" if token in self.model.eos_ids else "stop" if self.text.add(token) else ""

    def _burst(self, limit: int, cancel: Callable[[], bool] | None) -> int:
        """Return how many tokens to run before the text is looked at: as many as take some `BURST` seconds."""
        made = self.made
        if cancel is not None or self.options.logprobs or not made.token_s:
            return 1
        room = min(limit - len(made.ids) - 1, self.cache.capacity - self.cache.length)
        return min(room, int(BURST / max(made.token_s[-1], 1e-6)))

    def _run_ahead(self, burst: int, clock: _Clock) -> str:
        """Run several tokens at once and add them to the result; drop those after the end from the cache."""
        start, kept = self.cache.length, 0
        tokens = self.cache.advance(burst, (self.request,), allow_stale=self.options.allow_stale)[0].tolist()
        try:
            if not self.options.stop and set(tokens).isdisjoint(self.model.eos_ids):
                kept = len(tokens)
                self.made.ids.extend(tokens)
                self.text.add(*tokens)
                return ""
            for token in tokens:
                if end := self._end(token):
                    return end
                kept += 1
            return ""
        finally:
            if kept < len(tokens):
                self.cache.truncate(start + kept)
            ran = max(len(self.made.ids) - len(self.made.token_s), 1)
            self.made.token_s.extend([clock.seconds / ran] * ran)
