"""Generating text: prefill, then one token at a time through the cache; greedy or sampled, streamed, stoppable."""

from __future__ import annotations

from codecs import getincrementaldecoder
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from time import perf_counter
from typing import TYPE_CHECKING, Any

import numpy as np

from graphwright.errors import UsageError
from graphwright.models.errors import PromptError
from graphwright.models.health import check_finite
from graphwright.models.sampling import Sampling, log_softmax

if TYPE_CHECKING:
    from graphwright.models.model import Model
    from graphwright.models.tokenizer import Tokenizer


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
        prefill_s, decode_s: seconds for the prompt, and for the tokens after the first.
    """

    ids: list[int]
    text: str
    finish_reason: str
    prompt_tokens: int
    logprobs: list[float] = field(default_factory=list)
    top: list[list[tuple[int, float]]] = field(default_factory=list)
    prefill_s: float = 0.0
    decode_s: float = 0.0

    @property
    def tokens_per_s(self) -> float:
        """Decoding speed after the first token."""
        return (len(self.ids) - 1) / self.decode_s if self.decode_s > 0 and len(self.ids) > 1 else 0.0

    def __str__(self) -> str:
        return self.text


def prompt_ids(model: Model, prompt: Any) -> np.ndarray:
    """Ids int64 [T] of a text or of ids. Raises: PromptError for an empty or overlong one."""
    from graphwright.models.model import need_tokenizer

    if isinstance(prompt, str):
        tokenizer = need_tokenizer(model)
        ids = tokenizer.encode(prompt)
        if not ids and tokenizer.bos_id is not None and prompt == "":
            raise PromptError("an empty prompt", fix=f"give text, or the start token [{tokenizer.bos_id}]")
        prompt = ids
    return model.check_ids(np.asarray(prompt, np.int64) if np.size(prompt) else np.zeros((1, 0), np.int64))[0]


def generate(model: Model, prompt: Any, max_new_tokens: int = 64, *, stop: Sequence[str] = (), n: int = 1,
             stream: Callable[[str], None] | None = None, logprobs: int = 0, **sampling: Any) -> Generation | list[Generation]:  # fmt: skip
    """Continue a prompt.

    Args:
        prompt: text, or ids.
        max_new_tokens: limit; 0 gives none.
        stop: strings that end the text, also across token borders; the text is cut before them.
        n: samples; sample i draws from stream i and does not depend on the others.
        stream: called with each piece of text as soon as it is complete UTF-8 and cannot begin a stop string.
        logprobs: also record the chosen token's log-probability and this many of the largest.
        sampling: fields of `Sampling`.
    Returns: one Generation, or a list for n > 1.
    Raises: PromptError, UsageError naming the range, NonFinite naming a weight.
    """
    if n < 1 or max_new_tokens < 0:
        raise UsageError("n is at least 1 and max_new_tokens at least 0", got=f"n={n}, max_new_tokens={max_new_tokens}")
    ids = prompt_ids(model, prompt)
    rule = Sampling(**sampling)
    cache = model.new_cache(len(ids) + max_new_tokens)
    started = perf_counter()
    logits = cache.step(ids[None]).to_numpy("float32")[0, -1]
    check_finite(model.program, logits)
    prefill = perf_counter() - started
    mark = cache.snapshot()
    results = []
    for sample in range(n):
        cache.restore(mark)
        results.append(_Sample(model, cache, ids, rule, sample, tuple(stop), stream, logprobs, prefill).run(logits, max_new_tokens))
    return results[0] if n == 1 else results


class _Sample:
    """One continuation."""

    def __init__(self, model: Model, cache: Any, prompt: np.ndarray, rule: Sampling, number: int, stop: tuple[str, ...],
                 stream: Callable[[str], None] | None, logprobs: int, prefill: float) -> None:  # fmt: skip
        self.model, self.cache, self.prompt, self.rule, self.number = model, cache, prompt, rule, number
        self.logprobs, self.prefill = logprobs, prefill
        self.ids: list[int] = []
        self.chosen: list[float] = []
        self.top: list[list[tuple[int, float]]] = []
        self.text = TextStream(model.tokenizer, stop, stream)

    def run(self, logits: np.ndarray, limit: int) -> Generation:
        """Draw tokens until an end."""
        reason = "length"
        ends = self.model.tokenizer.eos_ids if self.model.tokenizer is not None else ()
        started = perf_counter()
        for i in range(limit):
            token = self._choose(logits)
            self.ids.append(token)
            if token in ends:
                reason = "eos"
                break
            if self.text.add(token):
                reason = "stop"
                break
            if i + 1 < limit:
                logits = self.cache.step(np.asarray([[token]])).to_numpy("float32")[0, -1]
        self.text.close()
        spent = perf_counter() - started
        return Generation(self.ids, self.text.text, reason, len(self.prompt), self.chosen, self.top, self.prefill, spent)

    def _choose(self, logits: np.ndarray) -> int:
        position = len(self.prompt) + len(self.ids)
        seen = np.concatenate([self.prompt, np.asarray(self.ids, np.int64)])
        token = self.rule.choose(logits, position, self.number, seen)
        if self.logprobs:
            logp = log_softmax(logits)
            self.chosen.append(float(logp[token]))
            best = np.argsort(-logp, kind="stable")[: self.logprobs]
            self.top.append([(int(i), float(logp[i])) for i in best])
        return token


class TextStream:
    """Turns tokens into text piece by piece, holding back what may become part of a character or a stop string."""

    def __init__(self, tokenizer: Tokenizer | None, stop: tuple[str, ...], stream: Callable[[str], None] | None) -> None:
        self.tokenizer, self.stop, self.stream = tokenizer, stop, stream
        self.text = ""
        self._ids: list[int] = []
        self._done = 0  # characters of `text` already given out
        self._bytes = getincrementaldecoder("utf-8")("replace") if tokenizer is not None and tokenizer.size == 256 else None

    def add(self, token: int) -> bool:
        """Take one token; True if a stop string was met, the text is then cut before it."""
        if self.tokenizer is None:
            return False
        self._ids.append(token)
        if self._bytes is not None:
            self.text += self._bytes.decode(bytes([token]))
        else:
            whole = self.tokenizer.decode(self._ids)
            if whole.endswith("\ufffd"):  # an unfinished character
                return False
            self.text = whole
        found = [at for s in self.stop if (at := self.text.find(s)) >= 0]
        if found:
            self.text = self.text[: min(found)]
            self._give(len(self.text))
            return True
        held = max((k for s in self.stop for k in range(1, len(s)) if self.text.endswith(s[:k])), default=0)
        self._give(len(self.text) - held)
        return False

    def close(self) -> None:
        """Give out what was held back."""
        if self._bytes is not None and not any(s and s in self.text for s in self.stop):
            self.text += self._bytes.decode(b"", final=True)
        self._give(len(self.text))

    def _give(self, upto: int) -> None:
        if self.stream is not None and upto > self._done:
            self.stream(self.text[self._done : upto])
        self._done = max(self._done, upto)
