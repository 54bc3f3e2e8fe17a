"""Tokenizers: a built-in byte table, `tokenizer.json` by the tokenizers library, other files by transformers.

The libraries are imported at the first use. Code of a checkpoint is never run.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeGuard

from graphwright.errors import MissingExtra, UsageError
from graphwright.files import JsonError, UnreadableFile, read_json
from graphwright.models.architectures.config import Config
from graphwright.models.errors import ConfigError, PromptError, TokenizerMismatch

if TYPE_CHECKING:
    from graphwright.models.model import Model

_LIMIT = 256 << 20
OTHER_FILES = ("tokenizer.model", "vocab.json", "vocab.txt", "merges.txt", "spiece.model", "sentencepiece.bpe.model")
"""Tokenizer files that transformers reads if tokenizer.json is missing."""


class Tokenizer(Protocol):
    """The interface that models use."""

    @property
    def bos_id(self) -> int | None:
        """Start token, or None."""
        ...

    @property
    def eos_ids(self) -> tuple[int, ...]:
        """End tokens."""
        ...

    @property
    def size(self) -> int:
        """Number of ids, including gaps."""
        ...

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Ids of a text."""
        ...

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Text of ids; invalid UTF-8 becomes U+FFFD."""
        ...


class ByteTokenizer:
    """256 tokens, id = byte. Byte 0 is both start and end token."""

    size = 256
    special = 0

    def __init__(self, bos_id: int | None = 0, eos_ids: tuple[int, ...] = (0,)) -> None:
        self.bos_id, self.eos_ids = bos_id, eos_ids

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Ids of a text: its UTF-8 bytes. Raises: PromptError for lone surrogates."""
        return list(_valid(text).encode())

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Text of ids; ids above 255, of padding rows, are ignored."""
        return self.to_bytes(ids, skip_special_tokens).decode("utf-8", "replace")

    def to_bytes(self, ids: Sequence[int], skip_special_tokens: bool = True) -> bytes:
        """Bytes of ids."""
        return bytes(i for i in ids if i < self.size and not (skip_special_tokens and i == self.special))


class LibraryTokenizer:
    """A `tokenizer.json`, read by the tokenizers library."""

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
            try:
                self._loaded = Library.from_file(str(self.path))
            except Exception as error:  # the library raises plain Exception
                raise ConfigError(
                    "the tokenizers library cannot read this file", where=str(self.path), got=str(error)
                ) from error
            self._loaded.no_truncation()  # a training length stored in the file must not truncate prompts
            self._loaded.no_padding()
        return self._loaded

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Ids of a text. Raises: PromptError for lone surrogates."""
        return self._library.encode(_valid(text), add_special_tokens=add_special_tokens).ids

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Text of ids."""
        return self._library.decode(list(ids), skip_special_tokens=skip_special_tokens)


class AutoTokenizer:
    """Other tokenizer files, read by transformers; remote code is never run.

    The number of tokens is known only after the library has read the files, so a mismatch is raised at the first use.
    """

    def __init__(self, directory: Path, vocab: int, bos_id: int | None, eos_ids: tuple[int, ...]) -> None:
        self.directory, self.vocab, self.bos_id, self.eos_ids = directory, vocab, bos_id, eos_ids
        self._loaded: Any = None

    @property
    def _library(self) -> Any:
        if self._loaded is None:
            try:
                from transformers import AutoTokenizer as Library
            except ImportError:
                raise MissingExtra("hf", f"reading the tokenizer files of {self.directory.name}") from None
            try:
                loaded = Library.from_pretrained(str(self.directory), trust_remote_code=False, local_files_only=True)
            except Exception as error:  # the library raises various errors for damaged files
                raise ConfigError(
                    "transformers cannot read these tokenizer files", where=str(self.directory), got=str(error)[:200]
                ) from error
            _check_size(len(loaded), self.vocab, self.directory)
            self._loaded = loaded
        return self._loaded

    @property
    def size(self) -> int:
        """Number of tokens; loads the library."""
        return len(self._library)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Ids of a text. Raises: PromptError for lone surrogates; TokenizerMismatch."""
        return self._library.encode(_valid(text), add_special_tokens=add_special_tokens)

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Text of ids."""
        return self._library.decode(
            list(ids), skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False
        )


def _valid(text: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise PromptError("the text contains a lone surrogate, which UTF-8 cannot encode",
                          where=f"character {error.start}", got=repr(text[error.start]),
                          fix="text.encode('utf-8', 'replace').decode()") from error  # fmt: skip
    return text


def byte_tokenizer_json() -> str:
    """A `tokenizer.json` of the built-in byte table: byte-level BPE without merges."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    table = {b: chr(b) for b in printable}
    for i, b in enumerate(b for b in range(256) if b not in table):
        table[b] = chr(256 + i)
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    flags = ("single_word", "lstrip", "rstrip", "normalized")
    return json.dumps(
        {
            "version": "1.0",
            "truncation": None,
            "padding": None,
            "added_tokens": [{"id": 0, "content": table[0], "special": True, **dict.fromkeys(flags, False)}],
            "normalizer": None,
            "pre_tokenizer": byte_level,
            "post_processor": None,
            "decoder": byte_level,
            "model": {
                "type": "BPE",
                "dropout": None,
                "unk_token": None,
                "continuing_subword_prefix": None,
                "end_of_word_suffix": None,
                "fuse_unk": False,
                "byte_fallback": False,
                "ignore_merges": False,
                "vocab": {table[b]: b for b in range(256)},
                "merges": [],
            },
        },
        ensure_ascii=False,
        indent=1,
    )


def find_tokenizer(directory: Path, config: Config, vocab: int) -> Tokenizer | None:
    """The tokenizer of a model directory, or None.

    Raises: TokenizerMismatch for more tokens than embedding rows; ConfigError for a damaged file.
    """
    path = directory / "tokenizer.json"
    bos, eos = special_ids(directory, config)
    if not path.is_file():
        others = any((directory / name).is_file() for name in OTHER_FILES)
        return AutoTokenizer(directory, vocab, bos, eos) if others else None
    data = _read(path, _LIMIT, nesting=32)
    model, added = data.get("model"), data.get("added_tokens") or []
    if not isinstance(model, dict) or not isinstance(model.get("vocab"), dict | list) or not isinstance(added, list):
        raise ConfigError("tokenizer.json has an unexpected form", where=str(path),
                          expected="an object model.vocab and a list added_tokens")  # fmt: skip
    if len(model["vocab"]) == 256 and not model.get("merges") and data == json.loads(byte_tokenizer_json()):
        found: Tokenizer = ByteTokenizer(bos, eos)
    else:
        ids = [t["id"] for t in added if isinstance(t, dict) and isinstance(t.get("id"), int)]
        found = LibraryTokenizer(path, max([len(model["vocab"]) - 1, *ids]) + 1, bos, eos)
    _check_size(found.size, vocab, path)
    return found


def _check_size(tokens: int, vocab: int, where: Path) -> None:
    if tokens > vocab:
        raise TokenizerMismatch(
            "the tokenizer has more tokens than the embedding has rows",
            where=str(where),
            expected=f"<= {vocab}",
            got=tokens,
            fix="use this model's tokenizer, or gw.open(..., tokenizer=False) with ids",
        )


def special_ids(directory: Path, config: Config) -> tuple[int | None, tuple[int, ...]]:
    """(bos, eos ids); generation_config.json overrides config.json. Raises: ConfigError."""
    fields = {**config.fields, **{k: v for k, v in generation_defaults(directory).items() if v is not None}}
    bos, eos = fields.get("bos_token_id"), fields.get("eos_token_id")
    ends = eos if isinstance(eos, list) else [eos]
    return (bos if _is_id(bos) else None), tuple(e for e in ends if _is_id(e))


def generation_defaults(directory: Path) -> dict[str, Any]:
    """Fields of generation_config.json; empty without the file. Raises: ConfigError."""
    path = directory / "generation_config.json"
    return _read(path, 8 << 20, nesting=16) if path.is_file() else {}


def _is_id(value: Any) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool)


def _read(path: Path, limit: int, nesting: int) -> dict[str, Any]:
    try:
        data = read_json(path, limit, nesting=nesting)
    except (JsonError, UnreadableFile) as error:
        raise ConfigError(f"{path.name} cannot be read", where=str(path), got=str(error)) from error
    if not isinstance(data, dict):
        raise ConfigError(f"{path.name} is not an object", where=str(path), got=type(data).__name__)
    return data


def need_tokenizer(model: Model) -> Tokenizer:
    """The model's tokenizer. Raises: UsageError without one."""
    if model.tokenizer is None:
        raise UsageError("the model has no tokenizer", where=str(model.directory),
                         fix="put its tokenizer.json beside config.json, or use token ids")  # fmt: skip
    return model.tokenizer
