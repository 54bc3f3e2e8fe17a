"""Prompts with prefixes and targets as rows of one batch: the target of step t is never in the input of step t."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from graphwright.data import GridTask
from graphwright.data.loader import Indexed
from graphwright.errors import UsageError

if TYPE_CHECKING:
    from graphwright.models.model import Model

Pairs = list[tuple[np.ndarray, np.ndarray]]
"""Prompt and answer of each example, ids int64 [P] and [T]."""


def pairs_of(given: Any, model: Model, pad: int | None = None, count: int | None = None) -> Pairs:
    """Return the prompts and answers of a batch or a dataset.

    Args:
        given: {"prompt": rows, "answer": rows}, where rows are ids [B, T] with padding at the end or a list of ids; or
            a dataset or list whose items are grid tasks or pairs (prompt, answer).
        model: checks the range of ids.
        pad: id of the padding at the end of rows; by default `pad_token_id` of the model's config.
        count: largest number of items that are read of a dataset.
    Raises: UsageError for anything else; PromptError for an empty row, or ids that the model does not have.
    """
    pad = model.config.get("pad_token_id") if pad is None else pad
    if isinstance(given, Mapping):
        if given.keys() != {"prompt", "answer"} or len(given["prompt"]) != len(given["answer"]):
            expected = '{"prompt": rows, "answer": rows} with one answer per prompt'
            got = {name: len(rows) for name, rows in given.items()}
            raise UsageError("this is not a batch of prompts and answers", where="batch", expected=expected, got=got)
        found: Iterable[Any] = zip(*(_rows(given[name]) for name in ("prompt", "answer")), strict=True)
    else:
        found = _items(given, count)
    pairs = [(_ids(prompt, pad, model), _ids(answer, pad, model)) for prompt, answer in found]
    if not pairs:
        raise UsageError("there are no prompts", where="batch", expected="at least one")
    return pairs


def _rows(rows: Any) -> Sequence[Any]:
    return rows.numpy() if hasattr(rows, "numpy") else rows


def _items(given: Indexed, count: int | None) -> Iterable[Any]:
    size = len(given) if count is None else min(count, len(given))
    for i in range(size):
        item = given[i]
        yield item.encode() if isinstance(item, GridTask) else item


def _ids(ids: Any, pad: int | None, model: Model) -> np.ndarray:
    row = np.asarray(_rows(ids))
    if row.ndim != 1:
        raise UsageError("this is not one row of ids", where="batch", expected="[T]", got=list(row.shape))
    tokens = np.arange(len(row)) if pad is None else np.flatnonzero(row != pad)
    return model.check_ids(row[: tokens[-1] + 1] if len(tokens) else row[:0])[0]


@dataclass(frozen=True, slots=True)
class TrainingRows:
    """Rows of ids with the target of each position and its weight, which is 0 where nothing is predicted.

    Attributes:
        ids, targets: int64 [R, L].
        weights: float32 [R, L].
    """

    ids: np.ndarray
    targets: np.ndarray
    weights: np.ndarray

    @staticmethod
    def of(
        rows: Sequence[tuple[np.ndarray, np.ndarray, np.ndarray, float]], length: int = 0, round_to: int = 1
    ) -> TrainingRows:
        """Return the rows of (prompt [P], prefix [n], answer [T], weight).

        The input is the prompt and the first T' - 1 ids of the prefix, T' = min(T, n + 1). Position P - 1 + t predicts
        answer[t] for t < T', each with the weight / T'. For teacher forcing the prefix is the answer.

        Args:
            length: smallest L.
            round_to: L is a multiple of this.
        """
        spans = [min(len(answer), len(prefix) + 1) for _, prefix, answer, _ in rows]
        needed = max(len(row[0]) + span - 1 for row, span in zip(rows, spans, strict=True))
        shape = len(rows), -(-max(needed, length) // round_to) * round_to
        made = TrainingRows(np.zeros(shape, np.int64), np.zeros(shape, np.int64), np.zeros(shape, np.float32))
        for i, ((prompt, prefix, answer, weight), span) in enumerate(zip(rows, spans, strict=True)):
            first = len(prompt) - 1
            made.ids[i, : first + span] = np.concatenate([prompt, prefix[: span - 1]])
            made.targets[i, first : first + span] = answer[:span]
            made.weights[i, first : first + span] = weight / span
        return made
