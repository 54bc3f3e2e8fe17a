"""Generating text: prefill, then one token at a time through the cache; greedy or sampled, streamed, stoppable."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field, fields
from hashlib import blake2b
from time import perf_counter
from typing import TYPE_CHECKING, Any

import numpy as np

from graphwright.errors import UsageError
from graphwright.models.errors import CacheFull, PromptError
from graphwright.models.generation.cache import need_rows_of
from graphwright.models.generation.cached_program import EXECUTOR
from graphwright.models.generation.sampling import Draw, Sampling, log_softmax, need
from graphwright.models.generation.text import TextStream, prompt_ids
from graphwright.models.inspect import kv_bytes_per_token, weight_bytes_per_token
from graphwright.models.tokenizer import generation_defaults
from graphwright.plan.planning.executors import on_vm

if TYPE_CHECKING:
    from graphwright.models.generation.cache import Rows
    from graphwright.models.model import Model

_ROWS = 64  # capacities are rounded up to this, so that prompts of similar length share their plans
_FROM_FILE = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")


@dataclass(frozen=True, slots=True)
class Generation:
    """What was generated.

    Attributes:
        ids: new tokens, without the prompt.
        text: their text, cut before a stop string; "" without a tokenizer.
        finish_reason: `eos`, `stop`, `length` or `cancelled`.
        prompt_tokens: length of the prompt.
        logprobs: log-probability of each chosen token under the unfiltered model, if asked for.
        top: per token the asked number of (id, log-probability), largest first.
        prefill_s, decode_s: seconds for the prompt, and for the tokens.
        token_s: seconds per token: choosing it, and running it if another follows.
        sampling: the rules as they were applied.
        stream: number of the random stream.
        reused_tokens: prompt tokens that a given cache held already.
        cache_tokens, cache_capacity: rows filled at the end, and there were.
        bytes_per_token: weights touched and mean KV rows read for one token; what memory bandwidth bounds.
        fingerprint: BLAKE2b-128 of structure and weights that the cached rows were computed with.
        stale_layers: attention nodes that ran on rows of another state of the model, as `allow_stale` permits.
    """

    ids: list[int]
    text: str
    finish_reason: str
    prompt_tokens: int
    logprobs: list[float] = field(default_factory=list)
    top: list[list[tuple[int, float]]] = field(default_factory=list)
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

    @property
    def tokens_per_s(self) -> float:
        """Decoding speed after the first token."""
        return (len(self.ids) - 1) / self.decode_s if self.decode_s > 0 and len(self.ids) > 1 else 0.0

    def reached(self, bandwidth: float) -> float:
        """Share of a measured memory bandwidth (bytes/s) that decoding used."""
        return self.tokens_per_s * self.bytes_per_token / bandwidth

    def to_json(self) -> dict[str, Any]:
        """Plain values for `--json`."""
        facts = {f.name: getattr(self, f.name) for f in fields(self)}
        return {**facts, "sampling": self.sampling.to_json(), "tokens_per_s": self.tokens_per_s}

    def __str__(self) -> str:
        return self.text


def generate(
    model: Model,
    prompt: Any,
    max_new_tokens: int = 64,
    *,
    stop: str | Sequence[str] = (),
    n: int = 1,
    stream: Callable[[str], object] | None = None,
    logprobs: int = 0,
    cache: Rows | None = None,
    first_stream: int = 0,
    allow_stale: bool = False,
    use_model_defaults: bool = False,
    cancel: Callable[[], bool] | None = None,
    **sampling: Any,
) -> Generation | list[Generation]:
    """Continue a prompt.

    Args:
        model: what to run.
        prompt: text, or ids.
        max_new_tokens: limit; 0 gives none.
        stop: strings that end the text, also across token borders; the text is cut before them.
        n: samples; sample i draws from stream `first_stream` + i and does not depend on the others.
        stream: called with each piece of text as soon as it is complete UTF-8 and cannot begin a stop string.
        logprobs: also record the chosen token's log-probability and this many of the largest.
        cache: one to continue: the prompt's tokens that it holds are not run again, the others are appended.
        first_stream: number of the first sample's random stream.
        allow_stale: run on a cache that an edit made stale; the journal and the result say so.
        use_model_defaults: take sampling values left at their default from the model's generation_config.json.
        cancel: asked before each token, e.g. `threading.Event().is_set`; true ends with the reason `cancelled`.
        sampling: fields of `Sampling`.
    Returns: one Generation, or a list for n > 1.
    Raises: PromptError, UsageError naming the range, NonFinite naming a weight or node, StaleCache, CacheFull with the
        text so far in `partial`. The cache then holds the tokens that were run, and can be used on.
    """
    numbers = {"n": n, "max_new_tokens": max_new_tokens, "logprobs": logprobs, "first_stream": first_stream}
    for name, value in numbers.items():
        need(name, value)
    for name, value in (("stream", stream), ("cancel", cancel)):
        if value is not None and not callable(value):
            raise UsageError(f"{name} is no function", where=name, got=type(value).__name__)
    if n < 1 or max_new_tokens < 0 or logprobs < 0:
        raise UsageError(
            "n is at least 1, max_new_tokens and logprobs at least 0",
            got=f"n={n}, max_new_tokens={max_new_tokens}, logprobs={logprobs}",
        )
    stop = (stop,) if isinstance(stop, str) else stop
    if not isinstance(stop, Sequence) or not all(isinstance(text, str) for text in stop):
        raise UsageError("stop is a string, or several in a list", where="stop", got=repr(stop))
    stop = tuple(stop)
    if stop and (model.tokenizer is None or not all(stop)):
        raise UsageError("stop strings need a tokenizer and at least one character", got=repr(stop))
    rule = Sampling(**(_model_defaults(model, sampling) if use_model_defaults else sampling))
    ids = prompt_ids(model, prompt)
    started = perf_counter()
    if cache is None:
        rows = len(ids) + max(max_new_tokens - 1, 0)
        cache = model.new_cache(-(-rows // _ROWS) * _ROWS, kind="static")
    need_rows_of(model.program, cache)
    reused, logits = _fill(cache, ids, allow_stale)
    prefill = perf_counter() - started
    mark = cache.snapshot() if n > 1 else None
    results = []
    try:
        for number in range(first_stream, first_stream + n):
            if mark is not None:
                cache.restore(mark)
            text = TextStream(model.tokenizer, stop, stream)
            sample = _Sample(model, cache, Draw(rule, number, len(ids)), text, logprobs, allow_stale)
            results.append(sample.run(logits, max_new_tokens, cancel, prefill, reused))
    finally:
        if mark is not None:
            mark.release()
    return results[0] if n == 1 else results


def decode(cache: Rows, steps: int, rule: Sampling, number: int = 0, allow_stale: bool = False) -> Generator[int]:
    """Choose and append one token after the other; a token is in the cache when it is given out.

    Closing the iterator leaves the cache with the tokens given out; a new one goes on as if nothing had happened.
    """
    if cache.batch != 1:
        raise PromptError("one sequence at a time", expected=1, got=cache.batch)
    draws = (Draw(rule, number, cache.length if rule.penalises else 0),)  # the same in the next call, where it can be
    for _ in range(steps):
        cache.last_logits(allow_stale=allow_stale)  # again, if the model or the cache is another since
        token = cache.drawn(draws)
        cache.step(token[None], allow_stale=allow_stale, draws=draws)
        yield int(token[0])


def _model_defaults(model: Model, given: dict[str, Any]) -> dict[str, Any]:
    """Values of generation_config.json under those given; without `do_sample` it asks for no temperature.

    With it and no temperature it asks for 1, which older files leave out.
    """
    found = {
        k: v
        for k, v in generation_defaults(model.directory).items()
        if k in (*_FROM_FILE, "do_sample") and v is not None
    }
    if not found.pop("do_sample", False):
        return {**{k: v for k, v in found.items() if k == "repetition_penalty"}, **given}
    return {"temperature": 1.0, **found, **given}


def _fill(cache: Rows, ids: np.ndarray, allow_stale: bool) -> tuple[int, np.ndarray]:
    """Bring the prompt into the cache: (tokens it held already, logits [V] behind the prompt)."""
    if cache.batch != 1:
        raise PromptError("the cache is for several sequences", expected=1, got=cache.batch)
    if len(ids) > cache.capacity:
        raise PromptError(
            "the prompt is longer than the cache",
            expected=f"<= {cache.capacity}",
            got=len(ids),
            fix="model.new_cache(tokens) with more",
        )
    if cache.length and not allow_stale:
        cache.check()
    reused = cache.reusable(ids)
    cache.truncate(reused)
    return reused, cache.prefill(ids[None, reused:], allow_stale=allow_stale)[0]


@dataclass(slots=True)
class _Sample:
    """One continuation: what it is made with, and what was drawn so far."""

    model: Model
    cache: Rows
    draw: Draw
    text: TextStream
    logprobs: int
    allow_stale: bool
    ids: list[int] = field(default_factory=list)
    chosen: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    top: list[list[tuple[int, float]]] = field(default_factory=list)

    def run(
        self, logits: np.ndarray, limit: int, cancel: Callable[[], bool] | None, prefill: float, reused: int
    ) -> Generation:
        """Draw tokens until an end."""
        started = perf_counter()
        try:
            reason = self._loop(logits, limit, cancel)
        except CacheFull as error:
            self.text.close()
            error.partial = self.text.text
            raise
        if reason != "stop" and self.text.close():
            reason = "stop"
        spent, p, length = perf_counter() - started, self.model.program, self.cache.length
        touched = weight_bytes_per_token(p, on_vm(EXECUTOR)) + kv_bytes_per_token(p) * (self.draw.prompt + length) // 2
        prints = "".join(v for _, v in sorted(self.cache.fingerprints.items()))
        return Generation(
            ids=self.ids,
            text=self.text.text,
            finish_reason=reason,
            prompt_tokens=self.draw.prompt,
            logprobs=self.chosen,
            top=self.top,
            prefill_s=prefill,
            decode_s=spent,
            token_s=self.seconds,
            sampling=self.draw.rule,
            stream=self.draw.stream,
            reused_tokens=reused,
            cache_tokens=length,
            cache_capacity=self.cache.capacity,
            bytes_per_token=touched,
            fingerprint=blake2b(prints.encode(), digest_size=16).hexdigest(),
            stale_layers=self.cache.stale_runs,
        )

    def _loop(self, logits: np.ndarray, limit: int, cancel: Callable[[], bool] | None) -> str:
        for i in range(limit):
            if cancel is not None and cancel():
                return "cancelled"
            began = perf_counter()
            token = self._choose(logits)
            self.ids.append(token)
            end = "eos" if token in self.model.eos_ids else "stop" if self.text.add(token) else ""
            if not end and i + 1 < limit:
                made = self.cache.step(np.asarray([[token]]), allow_stale=self.allow_stale, draws=(self.draw,))
                logits = made.to_numpy("float32")[0, -1]
            self.seconds.append(perf_counter() - began)
            if end:
                return end
        return "length"

    def _choose(self, logits: np.ndarray) -> int:
        token = int(self.cache.drawn((self.draw,))[0])
        if self.logprobs:
            logp = log_softmax(logits)
            self.chosen.append(float(logp[token]))
            best = np.argsort(-logp, kind="stable")[: self.logprobs]
            self.top.append([(int(i), float(logp[i])) for i in best])
        return token
