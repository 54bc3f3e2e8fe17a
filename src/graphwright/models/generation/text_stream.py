"""Tokens to text, piece by piece: nothing is given out that may still become part of a character or a stop string.

Invariant: what was given out is a prefix of the final text, and at the end it is all of it.
"""

from __future__ import annotations

from codecs import getincrementaldecoder
from collections.abc import Callable

from graphwright.models.tokenizer import ByteTokenizer, Tokenizer

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
