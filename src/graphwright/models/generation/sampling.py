"""From logits to the next token: the order and formulas that transformers users know, and a draw that is reproducible.

The op `sample_token` does it, within a step or on the host. The draw is Gumbel-max over Philox keyed by (seed, stream,
position), so it does not depend on batch mates or chunking.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from numbers import Integral, Real
from typing import Any

import numpy as np

from graphwright.array import from_numpy
from graphwright.errors import ComputeError, ShapeError, UsageError
from graphwright.ops import compute, get
from graphwright.ops.sampling import RULES

_END = np.array([[-1, 0]], np.int32)


class Seen:
    """The ids of a text and how often each is in its output, kept up to date in place.

    Args:
        prompt: ids that are no output, from the beginning of the text.

    Attributes:
        length: ids that were counted.
    """

    def __init__(self, prompt: int) -> None:
        self.prompt, self.length = prompt, 0
        self._places: dict[int, int] = {}
        self._pairs = np.repeat(_END, 64, axis=0)

    def add(self, ids: Iterable[int]) -> None:
        """Count the ids that follow; those below 0 are not known."""
        for token in ids:
            place = self._places.setdefault(token, len(self._places)) if token >= 0 else -1
            if place == len(self._pairs) - 1:  # behind them stays an end
                self._pairs = np.concatenate([self._pairs, np.repeat(_END, len(self._pairs), axis=0)])
            if place >= 0:
                self._pairs[place, 0] = token
                self._pairs[place, 1] += self.length >= self.prompt
            self.length += 1

    @property
    def pairs(self) -> np.ndarray:
        """(id, count) int32 [n + 1, 2], ended by -1."""
        return self._pairs[: len(self._places) + 1]


Processor = Callable[[np.ndarray, np.ndarray], np.ndarray]
_MOST = float(np.finfo(np.float32).max)
_WORD = (1 << 64) - 1


class NonFinite(ComputeError):
    """A value that is NaN or infinite where a number is needed."""


def need(name: str, value: object, kind: type = Integral) -> None:
    """Raises: UsageError if an option is no number of this kind."""
    if not isinstance(value, kind):
        raise UsageError(f"{name} is no number of this kind", where=name, expected=kind.__name__.lower(), got=value)


@dataclass(frozen=True, slots=True)
class Sampling:
    """How a token is chosen; every default leaves the logits as they are, and temperature 0 takes the largest.

    The order is that of the attributes: penalties, processors, temperature, top_k, top_p, min_p.

    Attributes:
        repetition_penalty: divide (positive) or multiply (negative) logits of tokens in prompt or output.
        presence: subtract from logits of tokens in the output.
        frequency: subtract times the count in the output.
        processors: functions of (ids so far [T], logits float32 [V]) that return logits of that shape and dtype.
        temperature: 0 for the largest logit (lowest id on ties), else logits are divided by it.
        top_k: keep the k largest, lower ids on ties; 0 keeps all.
        top_p: keep the shortest prefix of the falling order whose probability reaches it, at least one.
        min_p: keep tokens of at least this share of the largest probability.
        seed: of the draw.
    """

    repetition_penalty: float = 1.0
    presence: float = 0.0
    frequency: float = 0.0
    processors: tuple[Processor, ...] = ()
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("temperature", "top_p", "min_p", "repetition_penalty", "presence", "frequency"):
            need(name, getattr(self, name), Real)
        for name in ("top_k", "seed"):
            need(name, getattr(self, name), Integral)
        if not isinstance(self.processors, tuple | list):
            raise UsageError("processors are several functions", where="processors", got=repr(self.processors))
        for processor in self.processors:
            if not callable(processor):
                raise UsageError(
                    "a processor is a function of ids and logits", where="processors", got=type(processor).__name__
                )
        ranges = {
            "temperature": (self.temperature >= 0, ">= 0"),
            "top_k": (self.top_k >= 0, ">= 0"),
            "top_p": (0 < self.top_p <= 1, "in (0, 1]"),
            "min_p": (0 <= self.min_p <= 1, "in [0, 1]"),
            "repetition_penalty": (0 < self.repetition_penalty < float("inf"), "> 0"),
            "presence": (abs(self.presence) < float("inf"), "a finite number"),
            "frequency": (abs(self.frequency) < float("inf"), "a finite number"),
        }
        for name, (fine, expected) in ranges.items():
            if not fine:
                raise UsageError(f"{name} is out of range", where=name, expected=expected, got=getattr(self, name))

    @property
    def penalises(self) -> bool:
        """True if it matters what the text has so far, apart from processors."""
        return self.repetition_penalty != 1 or self.presence != 0 or self.frequency != 0

    def numbers(self) -> list[float]:
        """The rules as the op `sample_token` takes them, in range of float32."""
        return [min(max(float(getattr(self, name)), -_MOST), _MOST) for name in RULES]

    def keys(self, stream: int, position: int) -> tuple[int, int, int, int]:
        """What else it takes, in range of int64."""
        seed = int(self.seed) & _WORD
        return seed - (_WORD + 1) * (seed >> 63), stream & 0xFFFFFFFF, position, min(int(self.top_k), _WORD >> 1)

    def filtered(
        self, logits: np.ndarray, prompt: np.ndarray | None = None, output: np.ndarray | None = None
    ) -> np.ndarray:
        """Logits [V] float32 after all rules; -inf where a token was dropped.

        Args:
            logits: of the model, [V].
            prompt, output: ids before and after the start of generation.
        Raises: ShapeError naming a processor.
        """
        return self._run(logits, 0, 0, prompt, output)[1]

    def choose(
        self,
        logits: np.ndarray,
        position: int,
        stream: int = 0,
        prompt: np.ndarray | None = None,
        output: np.ndarray | None = None,
    ) -> int:
        """The next token for logits [V] at an absolute position: what a step draws. Raises: NonFinite."""
        _check(logits, "the logits", position)
        token, z = self._run(logits, position, stream, prompt, output)
        if token < 0:
            _check(z, "the logits after all rules", position)
        return token

    def _run(
        self, logits: np.ndarray, position: int, stream: int, prompt: np.ndarray | None, output: np.ndarray | None
    ) -> tuple[int, np.ndarray]:
        """Id and kept logits by the op `sample_token`, between whose penalties and other rules the processors stand."""
        parts = [np.zeros(0, np.int64) if ids is None else np.asarray(ids, np.int64) for ids in (prompt, output)]
        seen = Seen(len(parts[0]))
        for part in parts if self.penalises else ():
            seen.add(part.tolist())
        z, keys = np.array(logits, np.float32), self.keys(stream, position)
        if not self.processors:
            return _choose(z, self.numbers(), keys, seen.pairs)
        penalties, ids = self.numbers()[:3], np.concatenate(parts)
        _, z = _choose(z, [*penalties, 0.0, 1.0, 0.0], keys, seen.pairs)
        for processor in self.processors:
            z = _processed(processor, ids, z)
        return _choose(z, [1.0, 0.0, 0.0, *self.numbers()[3:]], keys, seen.pairs)

    def to_json(self) -> dict[str, Any]:
        """The settings as plain values; processors by name."""
        return {**asdict(self), "processors": [getattr(p, "__name__", repr(p)) for p in self.processors]}


def _check(z: np.ndarray, what: str, position: int) -> None:
    """Raises: NonFinite for NaN, or where the largest is no number."""
    most = z.max()
    if not np.isfinite(most):  # NaN is the largest
        raise NonFinite(
            f"{what} are not finite",
            where=f"position {position}",
            got=f"max {most}",
            fix="model.program.run(...) shows every value; processors may also be at fault",
        )


def _choose(
    z: np.ndarray, rules: list[float], keys: tuple[int, int, int, int], seen: np.ndarray
) -> tuple[int, np.ndarray]:
    operands = (z, np.array(rules, np.float32), np.array(keys, np.int64), seen)
    ids, kept = compute(get("sample_token"), [from_numpy(x[None]) for x in operands], {})
    return int(ids.item()), kept.to_numpy()[0]


def _processed(processor: Processor, ids: np.ndarray, z: np.ndarray) -> np.ndarray:
    """Raises: ShapeError."""
    made = np.asarray(processor(ids, z))
    if made.shape != z.shape or made.dtype != z.dtype:
        raise ShapeError(
            "a processor returns logits of the shape and dtype it was given",
            where=getattr(processor, "__name__", repr(processor)),
            expected=f"float32 {list(z.shape)}",
            got=f"{made.dtype} {list(made.shape)}",
        )
    return made


def log_softmax(z: np.ndarray) -> np.ndarray:
    """Log-probabilities of logits [V]."""
    z = z.astype(np.float64)
    top = z.max()
    return (z - top - np.log(np.exp(z - top).sum())).astype(np.float32)


@dataclass(frozen=True, slots=True)
class Draw:
    """How the ids of one text are drawn.

    Attributes:
        rule: the rules.
        stream: number of the random stream.
        prompt: ids of the text that are no output, from its beginning.
    """

    rule: Sampling = field(default_factory=Sampling)
    stream: int = 0
    prompt: int = 0

    def keys(self, position: int) -> tuple[int, int, int, int]:
        """Operand of the op for the id at a position; processors are functions of the host, where it is drawn then."""
        return self.rule.keys(self.stream, -1 if self.rule.processors else position)

    def choose(self, logits: np.ndarray, ids: np.ndarray) -> int:
        """The id behind `ids` [T] for logits [V], on the host. Raises: NonFinite."""
        return self.rule.choose(logits, len(ids), self.stream, ids[: self.prompt], ids[self.prompt :])


def need_one_each(draws: Sequence[Draw], sequences: int) -> None:
    """Raises: UsageError unless there is a draw for every sequence, or none at all."""
    if len(draws) not in (0, sequences):
        raise UsageError("a draw for every sequence", where="draws", expected=sequences, got=len(draws))
