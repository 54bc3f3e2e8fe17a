"""Metrics of a model's outputs, and checks for values that are not finite and files that contradict the config."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import takewhile
from math import exp, log, nan
from typing import TYPE_CHECKING, Any

import numpy as np

from graphwright.arguments import checked
from graphwright.array import NDArray, bfloat16, from_numpy
from graphwright.errors import NonFinite, UsageError
from graphwright.metrics import nll
from graphwright.models.errors import PromptError
from graphwright.models.generation.text import feeds_of, token_rows
from graphwright.models.loading import EMBEDDING, TIED_HEAD
from graphwright.models.tokenizer import ByteTokenizer, Tokenizer
from graphwright.ops import call
from graphwright.program.kinds import CONST, STORED
from graphwright.program.validate import Mismatch
from graphwright.progress import Progress, ProgressCallback
from graphwright.report import Report
from graphwright.settings import Range

if TYPE_CHECKING:
    from graphwright.models.model import Model
    from graphwright.program.program import Program
    from graphwright.program.validate import AssemblyReport


@dataclass(frozen=True, slots=True, repr=False)
class BitsPerByte(Report):
    """Score of a model on a text: bits per byte, nats / (ln 2 · bytes), and perplexity, exp(nats / tokens).

    `nats` is Σ -ln p over the scored tokens, `tokens` is their number and `bytes` the length of their text in UTF-8,
    0 for ids without a tokenizer, whose bits per byte are NaN. A format such as `f"{score:.2f}"` applies to both.
    """

    bits_per_byte: float
    perplexity: float
    nats: float
    tokens: int
    bytes: int

    def _text(self) -> str:
        return self._rounded(".4f", ".3f")

    def __format__(self, spec: str) -> str:
        return self._rounded(spec, spec) if spec else str(self)

    def _rounded(self, bits: str, perplexity: str) -> str:
        text = f"perplexity {self.perplexity:{perplexity}}, {self.tokens} tokens"
        return f"{self.bits_per_byte:{bits}} bits per byte ({text})" if self.bytes else text


@checked
def perplexity(
    model: Model, text: Any, *, window: int = 256, stride: int = 128, batch: int = 8,
    progress: ProgressCallback | None = None,
) -> BitsPerByte:  # fmt: skip
    """Score how well the model predicts texts, in windows of `window` tokens, `stride` apart.

    A window scores the positions that earlier windows did not, each with at least window - stride tokens of context.
    The first window of a text scores all but its first token.

    Args:
        text: a text, a list of texts, ids [T] or [B, T], or a list of rows of ids; each text or row is scored alone.
            Without a tokenizer the bytes of ids are unknown: `bytes` is 0 and `bits_per_byte` NaN.
        batch: number of windows that run together.
    Raises: PromptError for a text of fewer than two tokens, and for other data; UsageError for windows that do not
        overlap, a batch below 1, and a text without a tokenizer.
    """
    for name, value in (("window", window), ("stride", stride), ("batch", batch)):
        Range(1, whole=True).check(name, value)
    if not 0 < stride < window:  # the last token of a window predicts the first one that the next window scores
        got = f"window {window}, stride {stride}"
        raise UsageError("the windows do not overlap or do not advance", expected="0 < stride < window", got=got)
    rows = token_rows(text, model.tokenizer)
    for i, ids in enumerate(rows or [np.empty(0)]):
        if len(ids) < 2:
            raise PromptError("the text is too short to score", where=f"text {i}", expected="at least two tokens",
                              got=f"{len(ids)} tokens")  # fmt: skip
    windows = _overlapping(rows, window, stride)
    nats, scored, done = 0.0, 0, 0
    while done < len(windows):
        width = len(windows[done][0])
        chunk = [*takewhile(lambda w, width=width: len(w[0]) == width, windows[done : done + batch])]
        logits = model.logits(np.stack([ids for ids, _ in chunk]))
        for (ids, first), row in zip(chunk, logits, strict=True):
            nats += float(nll(row[first - 1 : -1], ids[first:]).sum())
            scored += len(ids) - first
        done += len(chunk)
        if progress is not None:
            progress(Progress("scoring", done, len(windows), {"bits per byte": nats / log(2) / max(scored, 1)}))
    size = scored_bytes(rows, model.tokenizer)
    return BitsPerByte(nats / (log(2) * size) if size else nan, exp(min(nats / scored, 700)), nats, scored, size)


def _overlapping(rows: Sequence[np.ndarray], window: int, stride: int) -> list[tuple[np.ndarray, int]]:
    """Cut rows of ids into windows; with each, the index of its first token that no earlier window of the row has."""
    found = []
    for ids in rows:
        width, upto = min(window, len(ids)), 1
        starts = [*range(0, len(ids) - width + 1, stride)]
        if starts[-1] + width < len(ids):
            starts.append(len(ids) - width)
        for start in starts:
            found.append((ids[start : start + width], upto - start))
            upto = start + width
    return found


def scored_bytes(rows: Sequence[np.ndarray], tokenizer: Tokenizer | None) -> int:
    """Return the UTF-8 length of the scored tokens, which are all but the first of each row; 0 without a tokenizer."""
    if tokenizer is None or isinstance(tokenizer, ByteTokenizer):
        return 0 if tokenizer is None else sum(len(ids) - 1 for ids in rows)
    return sum(len(tokenizer.decode(ids[1:].tolist(), skip_special_tokens=False).encode()) for ids in rows)


def log_softmax(logits: np.ndarray) -> np.ndarray:
    """Return the log-probabilities of logits [..., V], computed in float64, in the dtype of the logits."""
    wide = from_numpy(logits.astype(np.float64))
    return call("log_softmax", wide, axis=-1).to_numpy().astype(logits.dtype, copy=False)


def kl(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Return KL(softmax a ‖ softmax b) of each row of logits, in nats."""
    la, lb = log_softmax(a), log_softmax(b)
    return (np.exp(la) * (la - lb)).sum(-1)


def drift(source: Sequence[np.ndarray], now: Sequence[np.ndarray]) -> dict[str, Any]:
    """Compare logits [T, V] of each prompt: largest difference, mean KL in nats, share of equal top tokens.

    Returns a dict of these figures, which is empty if the shapes differ.
    """
    a, b = np.concatenate(source).astype(np.float64), np.concatenate(now).astype(np.float64)
    if a.shape != b.shape:
        return {}
    divergence = float(kl(a, b).mean())
    same = float((a.argmax(-1) == b.argmax(-1)).mean())
    return {"max_abs_dlogits": float(np.abs(a - b).max()), "mean_kl_nats": max(divergence, 0.0), "top1_agreement": same}


def check_finite(p: Program, result: np.ndarray, ids: np.ndarray | None = None) -> None:
    """Raise NonFinite if a result has NaN or infinity.

    The error names the first weight with such a value, with count and index. If all weights are finite and `ids` [B, T]
    are given, the error names the first node whose value is not finite.
    """
    if np.isfinite(result.max(initial=0)) and np.isfinite(result.min(initial=0)):
        return
    for key, count, first in non_finite(p):
        raise NonFinite("the logits are not finite, because a weight is not", where=key,
                        got=f"{count} values, the first at {first}",
                        fix=f"e.set_weight({key!r}, np.nan_to_num), or restore the file")  # fmt: skip
    where = None if ids is None else first_bad_node(p, ids)
    raise NonFinite("the logits are not finite, but all weights are", where=where,
                    got=f"max {result.max()}, min {result.min()}",
                    fix="find the overflow with program.run(...).value(path), and undo its edit")  # fmt: skip


def non_finite(p: Program) -> list[tuple[str, int, tuple[int, ...]]]:
    """Return (key, count, first index) of each weight with NaN or infinity; reads every weight.

    A constant may be infinite, as the score of what is masked.
    """
    found = []
    for key, node in sorted({p.key(n): n for kind in STORED for n in p.of_kind(kind)}.items()):
        array = p.weights.array(key)
        if not array.dtype.is_float:
            continue
        bad = np.isnan(array.to_numpy("float32")) if p.op(node) == CONST else _bad(array)
        if count := int(bad.sum()):
            found.append((key, count, tuple(int(i) for i in np.argwhere(bad)[0])))
    return found


def first_bad_node(p: Program, ids: np.ndarray) -> str | None:
    """Run the program on ids [B, T]; return the path of the first node whose value is not finite, or None."""
    run = p.run(feeds_of(p, ids))
    bad = {value.node for value, array in run.values.items() if array.dtype.is_float and _bad(array).any()}
    return next((p.path(node) for node in p.order() if node in bad), None)


def _bad(array: NDArray) -> np.ndarray:
    if array.dtype is bfloat16:
        return (array.to_numpy(bits=True) & 0x7F80) == 0x7F80
    return ~np.isfinite(array.to_numpy())


@checked
def validate(model: Model) -> AssemblyReport:
    """Run `program.validate()`, and report a tied head that differs from the embedding as `tied_mismatch`."""
    report = model.program.validate()
    return replace(report, mismatches=(*report.mismatches, *_tied_mismatch(model)))


def _tied_mismatch(model: Model) -> list[Mismatch]:
    """Return a mismatch if the file has a head that differs from the embedding, although the config ties them.

    Graphwright then uses the embedding, but transformers 5 leaves the two untied, so its logits differ.
    """
    source, embedding = model.checkpoint, model.keys.get(EMBEDDING)
    if source is None or embedding is None or not getattr(model.dims, "tied", False):
        return []
    found = []
    for head in (k for k in source if k.endswith(TIED_HEAD) and k not in model.keys.values()):
        tensors = [(source.info(k).tag, source.info(k).shape, source.bytes(k)) for k in (embedding, head)]
        if tensors[0][:2] != tensors[1][:2]:
            got = f"{tensors[1][0]}{list(tensors[1][1])} against {tensors[0][0]}{list(tensors[0][1])}"
        elif np.array_equal(np.asarray(tensors[0][2]), np.asarray(tensors[1][2])):
            continue
        else:
            rows = [np.asarray(data).reshape(shape[0], -1) for _, shape, data in tensors]
            differing = (rows[0] != rows[1]).any(axis=1)
            got = f"{int(differing.sum())} rows differ, the first is {int(differing.argmax())}"
        what = "the config ties head and embedding, but they differ: transformers uses both, Graphwright only one"
        found.append(Mismatch("tied_mismatch", head, what, expected=f"the bits of {embedding}", got=got))
    return found
