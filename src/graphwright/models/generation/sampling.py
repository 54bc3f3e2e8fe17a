"""From logits to the next token: the order and formulas that transformers users know, and a draw that is reproducible.

The draw is Gumbel-max over Philox keyed by (seed, stream, position), so it does not depend on batch mates or chunking.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from numbers import Integral, Real
from typing import Any

import numpy as np

from graphwright.array.random import gumbel
from graphwright.errors import ComputeError, ShapeError, UsageError

Processor = Callable[[np.ndarray, np.ndarray], np.ndarray]


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

    def penalised(self, logits: np.ndarray, prompt: np.ndarray, output: np.ndarray) -> np.ndarray:
        """Logits [V] float32 after penalties and processors. Raises: ShapeError naming a processor."""
        z = logits.astype(np.float32, copy=True)
        seen = np.concatenate([prompt, output]).astype(np.int64)
        if self.repetition_penalty != 1.0 and seen.size:
            ids = np.unique(seen)
            z[ids] = np.where(z[ids] > 0, z[ids] / self.repetition_penalty, z[ids] * self.repetition_penalty)
        if (self.presence or self.frequency) and output.size:
            ids, counts = np.unique(output, return_counts=True)
            z[ids] -= np.float32(self.presence) + np.float32(self.frequency) * counts.astype(np.float32)
        for processor in self.processors:
            made = np.asarray(processor(seen, z))
            if made.shape != z.shape or made.dtype != z.dtype:
                raise ShapeError(
                    "a processor returns logits of the shape and dtype it was given",
                    where=getattr(processor, "__name__", repr(processor)),
                    expected=f"float32 {list(z.shape)}",
                    got=f"{made.dtype} {list(made.shape)}",
                )
            z = made
        return z

    def filtered(
        self, logits: np.ndarray, prompt: np.ndarray | None = None, output: np.ndarray | None = None
    ) -> np.ndarray:
        """Logits [V] float32 after all rules; -inf where a token was dropped.

        Args:
            logits: of the model, [V].
            prompt, output: ids before and after the start of generation.
        """
        none = np.zeros(0, np.int64)
        z = self.penalised(logits, none if prompt is None else prompt, none if output is None else output)
        if self.temperature > 0 and self.temperature != 1.0:
            z = z / np.float32(self.temperature)
        if 0 < self.top_k < z.size:
            z[np.argsort(-z, kind="stable")[self.top_k :]] = -np.inf
        if self.top_p < 1:
            order = np.argsort(-z, kind="stable")
            reached = np.cumsum(_softmax(z)[order])
            z[order[1:][reached[:-1] >= np.float32(self.top_p)]] = -np.inf
        if self.min_p > 0:
            p = _softmax(z)
            z[p < np.float32(self.min_p) * p.max()] = -np.inf
        return z

    def choose(
        self,
        logits: np.ndarray,
        position: int,
        stream: int = 0,
        prompt: np.ndarray | None = None,
        output: np.ndarray | None = None,
    ) -> int:
        """The next token for logits [V] at an absolute position. Raises: NonFinite."""
        for z, what in ((logits, "the logits"), (self.filtered(logits, prompt, output), "the logits after all rules")):
            if np.isnan(z).any() or not np.isfinite(z.max()):
                raise NonFinite(
                    f"{what} are not finite",
                    where=f"position {position}",
                    got=f"max {z.max()}",
                    fix="model.program.run(...) shows every value; processors may also be at fault",
                )
        if self.temperature == 0:
            return int(np.argmax(z))
        return int(np.argmax(z + gumbel(z.size, seed=self.seed, stream=stream, step=position)))

    def to_json(self) -> dict[str, Any]:
        """The settings as plain values; processors by name."""
        return {**asdict(self), "processors": [getattr(p, "__name__", repr(p)) for p in self.processors]}


def _softmax(z: np.ndarray) -> np.ndarray:
    e = np.exp(z - z.max())
    return e / e.sum()


def log_softmax(z: np.ndarray) -> np.ndarray:
    """Log-probabilities of logits [V]."""
    z = z.astype(np.float64)
    top = z.max()
    return (z - top - np.log(np.exp(z - top).sum())).astype(np.float32)
