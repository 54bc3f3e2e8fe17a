"""Text to ids and back: a built-in byte-level table, `tokenizer.json` through the tokenizers library, else none."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from graphwright.errors import MissingExtra
from graphwright.files import read_json
from graphwright.models.config import Config
from graphwright.models.errors import PromptError, TokenizerMismatch

_LIMIT = 256 << 20


class Tokenizer(Protocol):
    """What a model needs of a tokenizer."""

    size: int
    bos_id: int | None
    eos_ids: tuple[int, ...]

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Ids of a text."""
        ...

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Text of ids; bytes that are no UTF-8 become U+FFFD."""
        ...


class ByteTokenizer:
    """256 tokens, id = byte. Byte 0 begins and ends a text."""

    size = 256

    def __init__(self, bos_id: int | None = 0, eos_ids: tuple[int, ...] = (0,)) -> None:
        self.bos_id, self.eos_ids = bos_id, eos_ids

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """UTF-8 bytes. Raises: PromptError for lone surrogates."""
        try:
            return list(text.encode())
        except UnicodeEncodeError as error:
            raise PromptError("the text is no valid Unicode", where=f"character {error.start}", got=repr(error.object[error.start]),
                              fix="text.encode('utf-8', 'replace').decode()") from error  # fmt: skip

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Bytes as text."""
        drop = {self.bos_id, *self.eos_ids} if skip_special_tokens else set()
        return bytes(i for i in ids if i not in drop).decode("utf-8", "replace")


class LibraryTokenizer:
    """A `tokenizer.json` through the tokenizers library, which is loaded at the first use."""

    def __init__(self, path: Path, size: int, bos_id: int | None, eos_ids: tuple[int, ...]) -> None:
        self.path, self.size, self.bos_id, self.eos_ids = path, size, bos_id, eos_ids
        self._loaded: Any = None

    @property
    def _library(self) -> Any:
        if self._loaded is None:
            try:
                from tokenizers import Tokenizer as Library
            except ImportError:
                raise MissingExtra("hf", f"reading {self.path.name}") from None
            self._loaded = Library.from_file(str(self.path))
        return self._loaded

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Ids of a text. Raises: PromptError for lone surrogates."""
        try:
            return self._library.encode(text, add_special_tokens=add_special_tokens).ids
        except (UnicodeEncodeError, TypeError) as error:
            raise PromptError("the text is no valid Unicode", got=str(error)) from error

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Text of ids."""
        return self._library.decode(list(ids), skip_special_tokens=skip_special_tokens)


def byte_tokenizer_json() -> str:
    """A `tokenizer.json` of the built-in byte table, for tools that read that file: byte-level BPE without merges."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    table = {b: chr(b) for b in printable}
    for i, b in enumerate(b for b in range(256) if b not in table):
        table[b] = chr(256 + i)
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    return json.dumps({
        "version": "1.0", "truncation": None, "padding": None,
        "added_tokens": [{"id": 0, "content": table[0], "single_word": False, "lstrip": False, "rstrip": False,
                          "normalized": False, "special": True}],
        "normalizer": None, "pre_tokenizer": byte_level, "post_processor": None, "decoder": byte_level,
        "model": {"type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None,
                  "end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": False, "ignore_merges": False,
                  "vocab": {table[b]: b for b in range(256)}, "merges": []},
    }, ensure_ascii=False, indent=1)  # fmt: skip


def find_tokenizer(directory: Path, config: Config, vocab: int) -> Tokenizer | None:
    """The tokenizer of a model directory, or None.

    Raises: TokenizerMismatch for more tokens than embedding rows; MissingExtra if a tokenizer.json needs the library.
    """
    path = directory / "tokenizer.json"
    bos, eos = special_ids(directory, config)
    if not path.is_file():
        return None
    data = read_json(path, _LIMIT, nesting=32)
    model = data.get("model", {}) if isinstance(data, dict) else {}
    if len(model.get("vocab", ())) == 256 and not model.get("merges") and data == json.loads(byte_tokenizer_json()):
        found: Tokenizer = ByteTokenizer(bos, eos)
    else:
        added = {t["id"] for t in data.get("added_tokens", ()) if isinstance(t, dict) and isinstance(t.get("id"), int)}
        size = max([len(model.get("vocab", ())) - 1, *added]) + 1
        found = LibraryTokenizer(path, size, bos, eos)
    if found.size > vocab:
        raise TokenizerMismatch("the tokenizer has more tokens than the embedding has rows", where=str(path), expected=f"<= {vocab}",
                                got=found.size)  # fmt: skip
    return found


def special_ids(directory: Path, config: Config) -> tuple[int | None, tuple[int, ...]]:
    """(bos, eos ids): generation_config.json wins over config.json."""
    fields = dict(config.fields)
    path = directory / "generation_config.json"
    if path.is_file():
        extra = read_json(path, 8 << 20, nesting=16)
        fields.update({k: v for k, v in extra.items() if k in ("bos_token_id", "eos_token_id") and v is not None})
    bos, eos = fields.get("bos_token_id"), fields.get("eos_token_id")
    ends = eos if isinstance(eos, list) else [eos]
    return (bos if isinstance(bos, int) else None), tuple(e for e in ends if isinstance(e, int) and not isinstance(e, bool))
