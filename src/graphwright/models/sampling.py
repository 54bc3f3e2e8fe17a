"""From logits to the next token: the order and formulas that transformers users know, and a draw that is reproducible.

The draw is Gumbel-max over Philox keyed by (seed, stream, position), so it does not depend on batch mates or chunking.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from graphwright.array.random import gumbel
from graphwright.errors import ComputeError, UsageError


class NonFinite(ComputeError):
    """A value that is NaN or infinite where a number is needed."""


@dataclass(frozen=True, slots=True)
class Sampling:
    """How a token is chosen; every default leaves the logits as they are, and temperature 0 takes the largest.

    Attributes:
        temperature: 0 for the largest logit (lowest id on ties), else logits are divided by it.
        top_k: keep the k largest, lower ids on ties; 0 keeps all.
        top_p: keep the shortest prefix of the falling order whose probability reaches it, at least one.
        min_p: keep tokens of at least this share of the largest probability.
        repetition_penalty: divide (positive) or multiply (negative) logits of tokens seen.
        seed: of the draw.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        ranges = {
            "temperature": (self.temperature >= 0, ">= 0"),
            "top_k": (self.top_k >= 0, ">= 0"),
            "top_p": (0 < self.top_p <= 1, "in (0, 1]"),
            "min_p": (0 <= self.min_p <= 1, "in [0, 1]"),
            "repetition_penalty": (self.repetition_penalty > 0, "> 0"),
        }
        for name, (fine, expected) in ranges.items():
            if not fine:
                raise UsageError(f"{name} is out of range", expected=expected, got=getattr(self, name))

    def filtered(self, logits: np.ndarray, seen: np.ndarray | None = None) -> np.ndarray:
        """Logits [V] float32 after penalty, temperature, top_k, top_p and min_p; -inf where a token was dropped."""
        z = logits.astype(np.float32, copy=True)
        if self.repetition_penalty != 1.0 and seen is not None and seen.size:
            ids = np.unique(seen)
            z[ids] = np.where(z[ids] > 0, z[ids] / self.repetition_penalty, z[ids] * self.repetition_penalty)
        if self.temperature > 0 and self.temperature != 1.0:
            z /= np.float32(self.temperature)
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

    def choose(self, logits: np.ndarray, position: int, stream: int = 0, seen: np.ndarray | None = None) -> int:
        """The next token for logits [V] at an absolute position. Raises: NonFinite."""
        if np.isnan(logits).any() or not np.isfinite(logits.max()):
            raise NonFinite("the logits are not finite", where=f"position {position}", got=f"max {logits.max()}")
        z = self.filtered(logits, seen)
        if self.temperature == 0:
            return int(np.argmax(z))
        return int(np.argmax(z + gumbel(z.size, seed=self.seed, stream=stream, step=position)))


def _softmax(z: np.ndarray) -> np.ndarray:
    e = np.exp(z - z.max())
    return e / e.sum()


def log_softmax(z: np.ndarray) -> np.ndarray:
    """Log-probabilities of logits [V]."""
    z = z.astype(np.float64)
    top = z.max()
    return (z - top - np.log(np.exp(z - top).sum())).astype(np.float32)
