"""Conversion between text and ids: checks of prompts and masks, and streaming of tokens as text."""

from __future__ import annotations

from codecs import getincrementaldecoder
from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from typing import TYPE_CHECKING, Any

import numpy as np

from graphwright.errors import UsageError
from graphwright.models.errors import PromptError
from graphwright.models.tokenizer import ByteTokenizer, Tokenizer, need_tokenizer
from graphwright.ops import get, traits

if TYPE_CHECKING:
    from graphwright.models.model import Model
    from graphwright.program import Program


def per_version(fact: Callable[[Program], int]) -> Callable[[Program], int]:
    """Cache a number that depends on a program until the next edit, since every generated token asks for it."""

    def cached(p: Program) -> int:
        if p.history.open is not None:  # the edit may change it, or be rolled back
            return fact(p)
        version, value = p.derived.get(fact.__name__, (-1, 0))
        if version != p.version:
            p.derived[fact.__name__] = p.version, (value := fact(p))
        return value

    return wraps(fact)(cached)


IDS, MASK = "input_ids", "attention_mask"
"""Inputs of models of texts that do not predict the next token."""
FILLED = {MASK: 1, "token_type_ids": 0}
"""Optional input of these models -> the number that fills it."""
UNBOUNDED = (1 << 63) - 1
"""Number of token ids of a program without an embedding."""


@per_version
def vocabulary(p: Program) -> int:
    """Return the number of token ids: rows of the embedding that `ids` indexes, or `UNBOUNDED` without an embedding.

    Models of other tasks than predicting the next token call these ids `input_ids`.
    """
    ids = next((name for name in ("ids", IDS) if name in p.input_names()), None)
    return UNBOUNDED if ids is None else indexed_rows(p, ids)


def longest_text(p: Program) -> int:
    """Return the number of positions that a program has an embedding for, or its fixed length, or `UNBOUNDED`."""
    rows = indexed_rows(p, "positions") if "positions" in p.input_names() else UNBOUNDED
    return min(rows, fixed_length(p) or UNBOUNDED)


def fixed_length(p: Program) -> int | None:
    """Return the number of tokens for which alone a program runs; None if its length is a named size.

    The code of some model classes is a loop over the tokens, which a captured graph has for one length.
    """
    shape = p.spec("ids").shape if "ids" in p.input_names() else ()
    return shape[1] if len(shape) == 2 and isinstance(shape[1], int) else None


def padded_ids(p: Program, ids: np.ndarray) -> np.ndarray:
    """Return ids [B, T] with padding after them up to the fixed length of a program, which earlier tokens do not read.

    Raises: PromptError for a longer text.
    """
    length = fixed_length(p)
    if length is None or ids.shape[1] == length:
        return ids
    if ids.shape[1] > length:
        raise PromptError("the text is longer than the fixed length of this program", where=p.name,
                          expected=f"<= {length} tokens", got=ids.shape[1], fix=OTHER_LENGTH)  # fmt: skip
    return np.pad(ids, ((0, 0), (0, length - ids.shape[1])))


OTHER_LENGTH = (
    "load the class with transformers, and capture it with graphwright.from_torch(module, (ids,)) for longer ids"
)
"""How to open a class whose code fixes the length of a text at another length."""


def indexed_rows(p: Program, name: str) -> int:
    """Return the rows of the smallest table that an input, or a view of it, indexes; `UNBOUNDED` without one."""
    rows, queue = list[int](), [*p.consumers(name)]
    for node in queue:
        if traits(p.op(node)).lookup:
            size = p.spec(p.operands(node)[0]).shape[0]
            rows += [size] if isinstance(size, int) else []
        elif get(p.op(node)).view is not None or traits(p.op(node)).casts:
            queue += p.consumers(node)
    return min(rows, default=UNBOUNDED)


def check_ids(ids: Any, vocab: int) -> np.ndarray:
    """Convert ids to a contiguous int64 array [B, T]. Raises: PromptError."""
    try:
        batch = np.atleast_2d(np.asarray(ids))
    except ValueError as error:  # ragged
        raise PromptError("the rows of ids have different lengths", expected="ids [B, T] or [T]",
                          fix="pad them and give a mask") from error  # fmt: skip
    if batch.size == 0:
        raise PromptError("the prompt is empty", fix="give at least one token, e.g. model.tokenizer.bos_id")
    if batch.ndim != 2 or batch.dtype.kind not in "iu":
        text = batch.dtype.kind == "U"
        raise PromptError("the prompt is not an array of token ids", expected="integers [B, T] or [T]",
                          got="text" if text else f"{batch.dtype} {list(batch.shape)}",
                          fix="pass model.tokenizer.encode(text)" if text else None)  # fmt: skip
    if batch.min() < 0 or batch.max() >= vocab:
        wrong = (batch < 0) | (batch >= vocab)
        row, at = divmod(int(np.argmax(wrong)), batch.shape[1])
        raise PromptError("a token id is out of range", where=f"row {row}, position {at}",
                          expected=f"0..{vocab - 1}", got=int(batch[row, at]))  # fmt: skip
    return np.ascontiguousarray(batch, np.int64)


def encoded(model: Model, prompt: Any) -> Any:
    """Return the ids of a text, and anything else as it is. Raises: PromptError; UsageError without a tokenizer."""
    if not isinstance(prompt, str):
        return prompt
    tokenizer = need_tokenizer(model)
    if ids := tokenizer.encode(prompt):
        return ids
    start = "" if tokenizer.bos_id is None else f", or the start token as ids: [{tokenizer.bos_id}]"
    raise PromptError("the prompt is empty", fix=f"give text{start}")


def feeds_of(p: Program, ids: np.ndarray, **extra: np.ndarray) -> dict[str, np.ndarray]:
    """Return the inputs of a program for ids [B, T]: positions count from 0 in each row, unless given."""
    positions = np.ascontiguousarray(np.broadcast_to(np.arange(ids.shape[1]), ids.shape))
    feeds = {"ids": ids, "positions": positions, **extra}
    return feeds if "positions" in p.input_names() else {name: a for name, a in feeds.items() if name != "positions"}


def with_mask(p: Program, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return inputs by name, with absent inputs of `FILLED` that the program has, where `input_ids` are given."""
    if IDS not in given:
        return dict(given)
    absent = {name: value for name, value in FILLED.items() if name in p.input_names() and name not in given}
    return {**given, **{name: np.full(np.shape(given[IDS]), value, np.int64) for name, value in absent.items()}}


def check_mask(mask: Any, shape: tuple[int, ...]) -> np.ndarray:
    """Convert a padding mask to bool [B, T]. Raises: PromptError for a wrong shape, or entries other than 0 and 1."""
    try:
        seen = np.atleast_2d(np.asarray(mask))
    except ValueError as error:  # ragged
        what = "the rows of the mask have different lengths"
        raise PromptError(what, expected=list(shape), got=str(error)) from error
    if seen.shape != shape:
        raise PromptError("the mask and the ids have different shapes", expected=list(shape), got=list(seen.shape))
    if seen.dtype.kind not in "biuf" or not np.isin(seen, (0, 1)).all():
        what = "the mask has entries other than true (token) and false (padding)"
        raise PromptError(what, expected="0 and 1", got=f"entries of dtype {seen.dtype}")
    return np.ascontiguousarray(seen.astype(bool))


def prompt_ids(model: Model, prompt: Any) -> np.ndarray:
    """Convert a text or one row of ids to int64 [T]. Raises: PromptError; UsageError for text without a tokenizer."""
    batch = model.check_ids(prompt)
    if len(batch) != 1:
        raise PromptError("generate was given several prompts", expected="ids [T]", got=f"{len(batch)} rows",
                          fix="call generate for each; generate_many gives several samples of one prompt")  # fmt: skip
    return batch[0]


def token_rows(source: Any, tokenizer: Tokenizer | None) -> list[np.ndarray]:
    """Convert a text, a list of texts, ids [T] or [B, T], or a list of rows of ids to rows of int64 [T].

    Raises: PromptError for anything else; UsageError for a text without a tokenizer.
    """
    texts = [source] if isinstance(source, str) else source
    if isinstance(texts, Sequence) and texts and all(isinstance(text, str) for text in texts):
        if tokenizer is None:
            raise UsageError("a text was given without a tokenizer", fix="pass a model that has one, or token ids")
        return [np.asarray(tokenizer.encode(text), np.int64) for text in texts]
    try:
        rows = [*np.atleast_2d(np.asarray(source))]
    except ValueError:  # rows of different lengths
        rows = [np.asarray(row) for row in source]
    for i, row in enumerate(rows):
        if row.ndim != 1 or (row.size and row.dtype.kind not in "iu"):
            raise PromptError("neither text nor token ids", where=f"row {i}", got=f"{row.dtype} {list(row.shape)}",
                              expected="a text, a list of texts, or integers [T] or [B, T]")  # fmt: skip
    return [np.ascontiguousarray(row, np.int64) for row in rows]


_UNFINISHED = "\ufffd"


class TextStream:
    """Decodes tokens one by one and streams each complete piece of text; `text` is cut before a stop string."""

    def __init__(
        self, tokenizer: Tokenizer | None, stop: tuple[str, ...], stream: Callable[[str], object] | None
    ) -> None:
        self.tokenizer, self.stop, self.stream = tokenizer, stop, stream
        self.text = ""
        self._ids: list[int] = []
        self._done = 0  # characters of `text` already streamed
        self._bytes = getincrementaldecoder("utf-8")("replace") if isinstance(tokenizer, ByteTokenizer) else None

    def add(self, *tokens: int) -> bool:
        """Add tokens; return True if a stop string appeared, before which the text was cut."""
        if self.tokenizer is None:
            return False
        if isinstance(self.tokenizer, ByteTokenizer) and self._bytes is not None:
            self.text += self._bytes.decode(self.tokenizer.to_bytes(tokens))
        else:
            self._ids.extend(tokens)
            self.text = self.tokenizer.decode(self._ids)
        if self._cut():
            return True
        begun = (k for s in self.stop for k in range(1, len(s)) if self.text.endswith(s[:k]))
        ready = len(self.text) - max(begun, default=0)
        while self._bytes is None and ready and self.text[ready - 1] == _UNFINISHED:
            ready -= 1
        self._emit(ready)
        return False

    def close(self) -> bool:
        """Stream the rest of the text; return True if the rest completed a stop string."""
        if self._bytes is not None:
            self.text += self._bytes.decode(b"", final=True)
        stopped = self._cut()
        self._emit(len(self.text))
        return stopped

    def _cut(self) -> bool:
        found = [at for s in self.stop if (at := self.text.find(s)) >= 0]
        if found:
            self.text = self.text[: min(found)]
            self._emit(len(self.text))
        return bool(found)

    def _emit(self, upto: int) -> None:
        piece, self._done = self.text[self._done : upto], max(self._done, upto)
        if piece and self.stream is not None:
            self.stream(piece)
