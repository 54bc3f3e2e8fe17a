"""What goes into a model: ids that are checked before anything runs."""

from __future__ import annotations

from codecs import getincrementaldecoder
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from graphwright.models.errors import PromptError
from graphwright.models.tokenizer import ByteTokenizer
from graphwright.ops import traits

if TYPE_CHECKING:
    from graphwright.models.model import Model
    from graphwright.models.tokenizer import Tokenizer
    from graphwright.program import Program


def vocabulary(p: Program) -> int:
    """Ids that a program takes: rows of the table that `ids` looks up, as it is now; 2^63 - 1 if no table does."""
    rows = [p.spec(p.operands(n)[0]).shape[0] for n in p.consumers("ids") if traits(p.op(n)).lookup]
    return min((r for r in rows if isinstance(r, int)), default=(1 << 63) - 1)


def check_ids(ids: Any, vocab: int) -> np.ndarray:
    """Ids as a contiguous int64 array [B, T]. Raises: PromptError for none, one out of range, or what is no integer."""
    try:
        batch = np.atleast_2d(np.asarray(ids))
    except ValueError as error:  # ragged
        raise PromptError(
            "ids are integers [B, T] or [T]", got="rows of different lengths", fix="pad them and give a mask"
        ) from error
    if batch.size == 0:
        raise PromptError("an empty prompt", fix="give at least one token; model.tokenizer.bos_id is a start")
    if batch.ndim != 2 or batch.dtype.kind not in "iu":
        text = batch.dtype.kind == "U"
        raise PromptError(
            "ids are integers [B, T] or [T]",
            got="text" if text else f"{batch.dtype} {list(batch.shape)}",
            fix="model.tokenizer.encode(text) gives ids" if text else None,
        )
    wrong = (batch < 0) | (batch >= vocab)
    if wrong.any():
        row, place = divmod(int(np.argmax(wrong)), batch.shape[1])
        raise PromptError(
            "a token id out of range",
            where=f"row {row}, position {place}",
            expected=f"0..{vocab - 1}",
            got=int(batch[row, place]),
        )
    return np.ascontiguousarray(batch, np.int64)


def check_mask(mask: Any, shape: tuple[int, ...]) -> np.ndarray:
    """A padding mask as bool [B, T]. Raises: PromptError for another shape, or what is neither true nor false."""
    try:
        seen = np.atleast_2d(np.asarray(mask))
    except ValueError as error:  # ragged
        raise PromptError("a mask has the shape of the ids", expected=list(shape), got=str(error)) from error
    if seen.shape != shape:
        raise PromptError("the mask has another shape than the ids", expected=list(shape), got=list(seen.shape))
    if seen.dtype.kind not in "biuf" or not np.isin(seen, (0, 1)).all():
        raise PromptError("a mask is true for tokens and false for padding", expected="0 and 1", got=f"{seen.dtype}")
    return np.ascontiguousarray(seen.astype(bool))


def prompt_ids(model: Model, prompt: Any) -> np.ndarray:
    """Ids int64 [T] of a text or of one row of ids.

    Raises: PromptError for an empty prompt, several rows, ids out of range; UsageError for text without a tokenizer.
    """
    from graphwright.models.model import need_tokenizer

    if isinstance(prompt, str):
        tokenizer = need_tokenizer(model)
        prompt = tokenizer.encode(prompt)
        if not prompt:
            start = "" if tokenizer.bos_id is None else f", or the start token as ids: [{tokenizer.bos_id}]"
            raise PromptError("an empty prompt", fix=f"give text{start}")
    batch = check_ids(prompt, model.vocab)
    if len(batch) != 1:
        raise PromptError(
            "one prompt at a time",
            expected="ids [T]",
            got=f"{len(batch)} rows",
            fix="call generate for each; n=... gives several samples of one prompt",
        )
    return batch[0]


_UNFINISHED = "\ufffd"


class TextStream:
    """The text of a growing list of tokens.

    Attributes:
        text: of the tokens so far, cut before a stop string.
    """

    def __init__(
        self, tokenizer: Tokenizer | None, stop: tuple[str, ...], stream: Callable[[str], object] | None
    ) -> None:
        self.tokenizer, self.stop, self.stream = tokenizer, stop, stream
        self.text = ""
        self._ids: list[int] = []
        self._done = 0  # characters of `text` already given out
        self._bytes = getincrementaldecoder("utf-8")("replace") if isinstance(tokenizer, ByteTokenizer) else None

    def add(self, token: int) -> bool:
        """Take one token; True if a stop string was met, the text is then cut before it."""
        if self.tokenizer is None:
            return False
        if isinstance(self.tokenizer, ByteTokenizer) and self._bytes is not None:
            self.text += self._bytes.decode(self.tokenizer.to_bytes([token]))
        else:
            self._ids.append(token)
            self.text = self.tokenizer.decode(self._ids)
        if self._cut():
            return True
        ready = len(self.text) - max(
            (k for s in self.stop for k in range(1, len(s)) if self.text.endswith(s[:k])), default=0
        )
        while self._bytes is None and ready and self.text[ready - 1] == _UNFINISHED:
            ready -= 1
        self._give(ready)
        return False

    def close(self) -> bool:
        """Give out what was held back; True if that completed a stop string."""
        if self._bytes is not None:
            self.text += self._bytes.decode(b"", final=True)
        stopped = self._cut()
        self._give(len(self.text))
        return stopped

    def _cut(self) -> bool:
        found = [at for s in self.stop if (at := self.text.find(s)) >= 0]
        if found:
            self.text = self.text[: min(found)]
            self._give(len(self.text))
        return bool(found)

    def _give(self, upto: int) -> None:
        piece, self._done = self.text[self._done : upto], max(self._done, upto)
        if piece and self.stream is not None:
            self.stream(piece)
