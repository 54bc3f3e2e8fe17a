"""Sampling: draw the next token from logits reproducibly, by the rules of transformers, applied in the same order.

The op `sample_token` applies the rules, within a compiled step or on the host. It uses the Gumbel-max trick with Philox
numbers keyed by (seed, stream, position), so a token does not depend on chunking or on other sequences of the batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TypedDict

import numpy as np

from graphwright.arguments import checked
from graphwright.array import from_numpy
from graphwright.errors import NonFinite, ShapeError, UsageError
from graphwright.ops import compute, get
from graphwright.ops.sampling import RULES
from graphwright.settings import Count, NotNegative, Number, Positive, PositiveShare, Range, Settings, Share, Whole

_END = np.array([[-1, 0]], np.int32)


class TokenCounts:
    """The distinct token ids of a text, each with its count in the output, i.e. after the first `prompt` tokens."""

    def __init__(self, prompt: int) -> None:
        self.prompt, self.length = prompt, 0
        self._index: dict[int, int] = {}
        self._pairs = np.repeat(_END, 64, axis=0)

    def add(self, ids: Iterable[int]) -> None:
        """Count further ids; ids below 0 are unknown and only add to the length."""
        for token in ids:
            at = self._index.setdefault(token, len(self._index)) if token >= 0 else -1
            if at == len(self._pairs) - 1:  # the last row remains an end mark
                self._pairs = np.concatenate([self._pairs, np.repeat(_END, len(self._pairs), axis=0)])
            if at >= 0:
                self._pairs[at, 0] = token
                self._pairs[at, 1] += self.length >= self.prompt
            self.length += 1

    @property
    def pairs(self) -> np.ndarray:
        """Rows (id, count in the output) of the n distinct ids, and an end mark with id -1; int32 [n + 1, 2]."""
        return self._pairs[: len(self._index) + 1]


Processor = Callable[[np.ndarray, np.ndarray], np.ndarray]
_MOST = float(np.finfo(np.float32).max)
_WORD = (1 << 64) - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling(Settings):
    """Rules for sampling a token; with the defaults, the token with the largest logit is taken.

    Rules apply in the order of the attributes: penalties, processors, temperature, top_k, top_p, min_p.

    Attributes:
        repetition_penalty: divisor of positive, factor on negative logits of tokens that occur in prompt or output.
        presence: number that is subtracted from the logits of tokens that occur in the output.
        frequency: number that is subtracted from a token's logit once for each occurrence in the output.
        processors: functions of (ids so far [T], logits float32 [V]) that return logits of the same shape and dtype.
        temperature: divisor of the logits; 0 takes the largest logit (lowest id on ties).
        top_k: keep the k largest logits, lower ids on ties; 0 keeps all.
        top_p: keep the smallest set of most probable tokens whose total probability is at least `top_p`.
        min_p: keep tokens with a probability of at least `min_p` times the largest one.
        seed: seed of the random numbers.
    """

    repetition_penalty: Positive = 1.0
    presence: Number = 0.0
    frequency: Number = 0.0
    processors: Sequence[Processor] = ()
    temperature: NotNegative = 0.0
    top_k: Count = 0
    top_p: PositiveShare = 1.0
    min_p: Share = 0.0
    seed: Whole = 0

    def __post_init__(self) -> None:
        Settings.__post_init__(self)
        if not isinstance(self.processors, tuple | list) or not all(map(callable, self.processors)):
            raise self.out_of_range("processors", "a list of functions (ids, logits)")
        object.__setattr__(self, "processors", tuple(self.processors))

    @property
    def penalises(self) -> bool:
        """True if a penalty depends on earlier tokens; processors are not considered."""
        return self.repetition_penalty != 1 or self.presence != 0 or self.frequency != 0

    def numbers(self) -> list[float]:
        """Return penalties, temperature, top_p, min_p, clipped to float32: the operand `rules` of `sample_token`."""
        return [min(max(float(getattr(self, name)), -_MOST), _MOST) for name in RULES]

    @checked
    def keys(self, stream: int, position: int) -> tuple[int, int, int, int]:
        """Return (seed, stream, position, top_k) as int64 numbers: the operand `keys` of the op `sample_token`."""
        seed = int(self.seed) & _WORD
        return seed - (_WORD + 1) * (seed >> 63), stream & 0xFFFFFFFF, position, min(int(self.top_k), _WORD >> 1)

    @checked
    def filtered(
        self, logits: np.ndarray, prompt: np.ndarray | None = None, output: np.ndarray | None = None
    ) -> np.ndarray:
        """Apply all rules to logits [V]; return float32, with -inf for dropped tokens. Raises: ShapeError.

        `prompt` and `output` are the ids before and after the start of generation.
        """
        return self._run(logits, 0, 0, prompt, output)[1]

    @checked
    def sample(
        self, logits: np.ndarray, position: int, stream: int = 0, prompt: np.ndarray | None = None,
        output: np.ndarray | None = None,
    ) -> int:  # fmt: skip
        """Sample the next token for logits [V] at an absolute position, as a compiled step does. Raises: NonFinite."""
        Range(0, _WORD >> 1, whole=True).check("position", position)
        _check(logits, "the logits", position)
        if self.temperature == 0 and not self.penalises and not self.processors:
            return int(np.argmax(np.asarray(logits, np.float32)))
        token, z = self._run(logits, position, stream, prompt, output)
        if token < 0:
            _check(z, "the logits after all rules", position)
        return token

    def _run(
        self, logits: np.ndarray, position: int, stream: int, prompt: np.ndarray | None, output: np.ndarray | None
    ) -> tuple[int, np.ndarray]:
        """Return the sampled id and the filtered logits from `sample_token`; processors run after the penalties."""
        parts = [np.zeros(0, np.int64) if ids is None else np.ravel(ids).astype(np.int64) for ids in (prompt, output)]
        seen = TokenCounts(len(parts[0]))
        for part in parts if self.penalises else ():
            seen.add(part.tolist())
        z, keys = np.array(logits, np.float32), self.keys(stream, position)
        if not self.processors:
            return _sample_token(z, self.numbers(), keys, seen.pairs)
        penalties, ids = self.numbers()[:3], np.concatenate(parts)
        _, z = _sample_token(z, [*penalties, 0.0, 1.0, 0.0], keys, seen.pairs)
        for processor in self.processors:
            z = _processed(processor, ids, z)
        return _sample_token(z, [1.0, 0.0, 0.0, *self.numbers()[3:]], keys, seen.pairs)


def _check(z: np.ndarray, what: str, position: int) -> None:
    """Raise NonFinite if a logit is NaN or the largest logit is infinite."""
    most = z.max()
    if not np.isfinite(most):  # max() returns NaN if there is one
        raise NonFinite(f"{what} are not finite", where=f"position {position}", got=f"max {most}",
                        fix="inspect the values with model.program.run(...), and check the processors")  # fmt: skip


def _sample_token(z: np.ndarray, rules: list[float], keys: tuple[int, ...], seen: np.ndarray) -> tuple[int, np.ndarray]:
    operands = (z, np.array(rules, np.float32), np.array(keys, np.int64), seen)
    ids, kept = compute(get("sample_token"), [from_numpy(x[None]) for x in operands], {})
    return int(ids.item()), kept.to_numpy()[0]


def _processed(processor: Processor, ids: np.ndarray, z: np.ndarray) -> np.ndarray:
    """Apply a processor to logits. Raises: ShapeError if it changes their shape or dtype."""
    made = np.asarray(processor(ids, z))
    if made.shape != z.shape or made.dtype != z.dtype:
        raise ShapeError("a processor changed the shape or dtype of the logits",
                         where=getattr(processor, "__name__", repr(processor)), expected=f"float32 {list(z.shape)}",
                         got=f"{made.dtype} {list(made.shape)}")  # fmt: skip
    return made


class SamplingKeywords(TypedDict, total=False):
    """The fields of `Sampling` as keyword arguments."""

    repetition_penalty: Positive
    presence: Number
    frequency: Number
    processors: Sequence[Processor]
    temperature: NotNegative
    top_k: Count
    top_p: PositiveShare
    min_p: Share
    seed: Whole


@dataclass(frozen=True, slots=True)
class SamplingRequest:
    """A request to sample ids of one text: sampling rule, number of the random stream, length of the prompt."""

    rule: Sampling = field(default_factory=Sampling)
    stream: int = 0
    prompt: int = 0

    def keys(self, position: int) -> tuple[int, int, int, int]:
        """Return (seed, stream, position, top_k) as a step needs them."""
        return self.rule.keys(self.stream, self.position(position))

    def position(self, position: int) -> int:
        """Return the position as a step needs it: -1 if there are processors, so that the host samples."""
        return -1 if self.rule.processors else position

    def sample(self, logits: np.ndarray, ids: np.ndarray) -> int:
        """Sample on the host the id that follows `ids` [T], from logits [V]. Raises: NonFinite."""
        return self.rule.sample(logits, len(ids), self.stream, ids[: self.prompt], ids[self.prompt :])


Requests = Sequence[SamplingRequest]
"""One request per sequence, or none at all."""


def check_one_each(requests: Requests, sequences: int, *, none: bool = True) -> None:
    """Raise UsageError unless there is one request per sequence, or `none` at all."""
    if len(requests) != sequences and (requests or not none):
        what, expected = "the number of sampling requests is not the number of sequences", str(sequences)
        raise UsageError(what, where="requests", expected=expected + (", or none" if none else ""), got=len(requests))
