"""Metrics of a model's outputs: bits per byte of a text, and the drift between two sets of logits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import exp, log
from typing import TYPE_CHECKING, Any

import numpy as np

from graphwright.errors import UsageError
from graphwright.models.errors import PromptError
from graphwright.models.tokenizer import ByteTokenizer, need_tokenizer
from graphwright.progress import Progress, Report

if TYPE_CHECKING:
    from graphwright.models.model import Model


@dataclass(frozen=True, slots=True)
class BitsPerByte:
    """How well a model predicts a text.

    Attributes:
        bits_per_byte: Σ nats / (ln 2 · bytes of the scored tokens).
        perplexity: exp(nats per token).
        nats: Σ -ln p of the scored tokens.
        tokens, bytes: number of scored ones.
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
    """Score a text in windows of `window` tokens, `stride` apart.

    A window scores the positions that earlier windows did not, each with at least window - stride tokens of context.
    The first window scores all but its first token.

    Raises: PromptError for a text of fewer than two tokens; UsageError for windows that do not overlap.
    """
    if not 0 < stride < window:  # the last token of a window predicts the first one that the next window scores
        got = f"window {window}, stride {stride}"
        raise UsageError("the windows do not overlap", expected="0 < stride < window", got=got)
    tokenizer = need_tokenizer(model)
    ids = np.asarray(tokenizer.encode(text), np.int64)
    if len(ids) < 2:
        raise PromptError("the text is too short to score", expected="at least two tokens", got=f"{len(ids)} tokens")
    window = min(window, len(ids))
    starts = list(range(0, max(len(ids) - window, 0) + 1, stride))
    if starts[-1] + window < len(ids):
        starts.append(len(ids) - window)
    nats, scored, upto = 0.0, 0, 1
    for at in range(0, len(starts), batch):
        chunk = starts[at : at + batch]
        logits = model.logits(np.stack([ids[s : s + window] for s in chunk]))
        for start, row in zip(chunk, logits, strict=True):
            first = upto - start  # the first position that no earlier window scored
            targets = ids[start + first : start + window]
            nats += float(_nll(row[first - 1 : window - 1], targets).sum())
            scored += len(targets)
            upto = start + window
        if report is not None:
            facts = {"bits per byte": nats / log(2) / max(scored, 1)}
            report(Progress("scoring", min(at + batch, len(starts)), len(starts), facts))
    size = scored
    if not isinstance(tokenizer, ByteTokenizer):
        size = len(tokenizer.decode(ids[1:].tolist(), skip_special_tokens=False).encode())
    return BitsPerByte(nats / (log(2) * size), exp(min(nats / scored, 700)), nats, scored, size)


def _nll(logits: np.ndarray, targets: np.ndarray) -> np.ndarray:
    wide = logits.astype(np.float64)
    top = wide.max(axis=-1, keepdims=True)
    lse = np.log(np.exp(wide - top).sum(axis=-1)) + top[:, 0]
    return lse - wide[np.arange(len(targets)), targets]


def drift(source: Sequence[np.ndarray], now: Sequence[np.ndarray]) -> dict[str, Any]:
    """Compare logits [T, V] per prompt: largest difference, mean KL in nats, share of equal top tokens."""
    a, b = np.concatenate(source).astype(np.float64), np.concatenate(now).astype(np.float64)
    if a.shape != b.shape:
        return {}
    la, lb = (x - x.max(-1, keepdims=True) for x in (a, b))
    la, lb = (x - np.log(np.exp(x).sum(-1, keepdims=True)) for x in (la, lb))
    divergence = float((np.exp(la) * (la - lb)).sum(-1).mean())
    return {
        "max_abs_dlogits": float(np.abs(a - b).max()),
        "mean_kl_nats": max(divergence, 0.0),
        "top1_agreement": float((a.argmax(-1) == b.argmax(-1)).mean()),
    }
