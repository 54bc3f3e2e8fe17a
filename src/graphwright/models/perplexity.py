"""Bits per byte of a text, over overlapping windows, so that every scored position has context."""

from __future__ import annotations

from dataclasses import dataclass
from math import exp, log
from typing import TYPE_CHECKING

import numpy as np

from graphwright.errors import UsageError
from graphwright.models.errors import PromptError
from graphwright.models.tokenizer import ByteTokenizer
from graphwright.progress import Progress

if TYPE_CHECKING:
    from graphwright.models.model import Model
    from graphwright.progress import Report


@dataclass(frozen=True, slots=True)
class BitsPerByte:
    """How well a text was predicted.

    Attributes:
        bits_per_byte: Σ nats / (ln 2 · bytes of the scored tokens).
        perplexity: exp(nats per token).
        nats: Σ -ln p of the scored tokens.
        tokens, bytes: scored.
    """

    bits_per_byte: float
    perplexity: float
    nats: float
    tokens: int
    bytes: int

    def __str__(self) -> str:
        return f"{self.bits_per_byte:.4f} bits per byte (perplexity {self.perplexity:.3f}, {self.tokens} tokens)"


def bits_per_byte(
    model: Model, text: str, *, window: int = 256, stride: int = 128, batch: int = 8, report: Report | None = None
) -> BitsPerByte:
    """Score a text in windows of `window` tokens, `stride` apart; a window scores the positions that the one before did
    not, each with at least window - stride tokens before it (the first window: all but its first token).

    Raises: PromptError for a text of fewer than two tokens; UsageError for windows that do not overlap.
    """
    from graphwright.models.model import need_tokenizer

    if not 0 < stride < window:  # the last token of a window predicts the first that the next one scores
        raise UsageError(
            "windows must overlap", expected="0 < stride < window", got=f"window {window}, stride {stride}"
        )
    tokenizer = need_tokenizer(model)
    ids = np.asarray(tokenizer.encode(text), np.int64)
    if len(ids) < 2:
        raise PromptError("a text of at least two tokens is needed", got=f"{len(ids)} tokens")
    window = min(window, len(ids))
    starts = list(range(0, max(len(ids) - window, 0) + 1, stride))
    if starts[-1] + window < len(ids):
        starts.append(len(ids) - window)
    nats, scored, upto = 0.0, 0, 1
    for at in range(0, len(starts), batch):
        chunk = starts[at : at + batch]
        logits = model.logits(np.stack([ids[s : s + window] for s in chunk]))
        for start, row in zip(chunk, logits, strict=True):
            first = upto - start  # the first position of this window that nobody scored
            targets = ids[start + first : start + window]
            nats += float(_nll(row[first - 1 : window - 1], targets).sum())
            scored += len(targets)
            upto = start + window
        if report is not None:
            report(
                Progress(
                    "scoring",
                    min(at + batch, len(starts)),
                    len(starts),
                    {"bits per byte": nats / log(2) / max(scored, 1)},
                )
            )
    size = (
        len(tokenizer.decode(ids[1:].tolist(), skip_special_tokens=False).encode())
        if not isinstance(tokenizer, ByteTokenizer)
        else scored
    )
    return BitsPerByte(nats / (log(2) * size), exp(min(nats / scored, 700)), nats, scored, size)


def _nll(logits: np.ndarray, targets: np.ndarray) -> np.ndarray:
    wide = logits.astype(np.float64)
    top = wide.max(axis=-1, keepdims=True)
    lse = np.log(np.exp(wide - top).sum(axis=-1)) + top[:, 0]
    return lse - wide[np.arange(len(targets)), targets]
