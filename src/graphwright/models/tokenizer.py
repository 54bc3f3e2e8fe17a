"""Tokenizers: a built-in byte table, `tokenizer.json` read by tokenizers, and other files read by transformers."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from graphwright.arguments import checked
from graphwright.errors import MissingExtra, UsageError
from graphwright.models.architectures.architecture import Config, read_object
from graphwright.models.errors import ConfigError, PromptError, TokenizerMismatch
from graphwright.settings import Range

if TYPE_CHECKING:
    from graphwright.models.model import Model

_LIMIT = 256 << 20
SPECIAL_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")
"""Fields of a config that hold token ids."""
END = "<|endoftext|>"
"""The start and end token of trained tokenizers."""
OTHER_FILES = ("tokenizer.model", "vocab.json", "vocab.txt", "merges.txt", "spiece.model", "sentencepiece.bpe.model")
"""Tokenizer files that transformers reads if tokenizer.json is missing."""


class ByteTokenizer:
    """A tokenizer of 256 tokens whose ids are byte values; byte 0 is both start and end token."""

    size = 256
    special = 0

    def __init__(self, bos_id: int | None = 0, eos_ids: tuple[int, ...] = (0,)) -> None:
        self.bos_id, self.eos_ids = bos_id, eos_ids

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Return the ids of a text, which are its UTF-8 bytes. Raises: PromptError for lone surrogates."""
        return list(_valid(text).encode())

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Return the text of ids; ids above 255, which only pad the embedding, are ignored."""
        return self.to_bytes(ids, skip_special_tokens).decode("utf-8", "replace")

    def to_bytes(self, ids: Sequence[int], skip_special_tokens: bool = True) -> bytes:
        """Return the bytes of ids, ignoring ids above 255."""
        return bytes(i for i in ids if i < self.size and not (skip_special_tokens and i == self.special))


class _LazyTokenizer:
    """Base of tokenizers that a library reads; the library is imported at first use. Checkpoint code is never run."""

    LIBRARY: ClassVar[tuple[str, str]]

    def __init__(self, path: Path, tokens: int, bos_id: int | None, eos_ids: tuple[int, ...]) -> None:
        self.path, self.tokens, self.bos_id, self.eos_ids = path, tokens, bos_id, eos_ids

    @cached_property
    def _loaded(self) -> Any:
        module, name = self.LIBRARY
        try:
            library = getattr(import_module(module), name)
        except ImportError:
            raise MissingExtra("hf", f"reading the tokenizer {self.path.name}") from None
        try:
            return self._load(library)
        except TokenizerMismatch:
            raise
        except Exception as error:  # the libraries raise various errors, the plain Exception among them
            what = f"{module} cannot read this tokenizer"
            raise ConfigError(what, where=str(self.path), got=str(error)[:200]) from error

    def _load(self, library: Any) -> Any:
        raise NotImplementedError


class LibraryTokenizer(_LazyTokenizer):
    """A `tokenizer.json` of `tokens` tokens, read by the tokenizers library."""

    LIBRARY = "tokenizers", "Tokenizer"

    def _load(self, library: Any) -> Any:
        loaded = library.from_file(str(self.path))
        loaded.no_truncation()  # a training length stored in the file must not truncate prompts
        loaded.no_padding()
        return loaded

    @property
    def size(self) -> int:
        """Number of ids, including unused ones."""
        return self.tokens

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Return the ids of a text. Raises: PromptError for lone surrogates."""
        return self._loaded.encode(_valid(text), add_special_tokens=add_special_tokens).ids

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Return the text of ids."""
        return self._loaded.decode(list(ids), skip_special_tokens=skip_special_tokens)


class TrainedTokenizer(LibraryTokenizer):
    """A tokenizer trained by `train_bpe`; models that have it write its files."""

    def __init__(self, loaded: Any, end: str) -> None:
        at = loaded.token_to_id(end)
        super().__init__(Path("tokenizer.json"), loaded.get_vocab_size(), at, (at,))
        self._trained, self._end = loaded, end

    @property
    def _loaded(self) -> Any:  # pyright: ignore[reportIncompatibleVariableOverride]  # no file to read it from
        return self._trained

    def files(self) -> dict[str, bytes]:
        """Return the contents of `tokenizer.json` and of `tokenizer_config.json`, which transformers reads."""
        names = dict.fromkeys(("bos_token", "eos_token"), self._end)
        config = {"tokenizer_class": "PreTrainedTokenizerFast", **names, "clean_up_tokenization_spaces": False}
        return {
            "tokenizer.json": self._trained.to_str().encode(),
            "tokenizer_config.json": (json.dumps(config, ensure_ascii=False, indent=1) + "\n").encode(),
        }


@checked
def train_bpe(
    texts: str | Iterable[str], vocab_size: int, *, min_frequency: int = 2, special_tokens: Sequence[str] = (END,)
) -> TrainedTokenizer:
    """Train a byte-level BPE tokenizer on texts by the tokenizers library; it encodes every text without loss.

    Args:
        texts: a text, or an iterable of texts, which is read once.
        vocab_size: largest number of tokens, of which 256 are bytes; short texts give fewer.
        min_frequency: smallest number of occurrences of a pair that is merged; >= 1.
        special_tokens: texts that are never divided, with ids 0, 1, ...; the first is start and end token.
    Returns: a tokenizer for `create(config, tokenizer=)` and for token files; `model.save` and `model.export` write it.
    Raises: UsageError for options out of range and items that are not strings; PromptError for lone surrogates;
        MissingExtra.
    Source: Sennrich, Haddow and Birch 2016, "Neural Machine Translation of Rare Words with Subword Units".
    """
    special = list(special_tokens) if isinstance(special_tokens, Sequence) else []
    if isinstance(special_tokens, str) or not special or not all(isinstance(t, str) and t for t in special) or (
            len(set(special)) < len(special)):  # fmt: skip
        raise UsageError("invalid special tokens", where="special_tokens", got=repr(special_tokens)[:80],
                         expected="a list of different texts, none of them empty")  # fmt: skip
    Range(256 + len(special), 2**31 - 1, whole=True).check("vocab_size", vocab_size)
    Range(1, whole=True).check("min_frequency", min_frequency)
    try:
        library = import_module("tokenizers")
    except ImportError:
        raise MissingExtra("hf", "training a tokenizer") from None
    made = library.Tokenizer(library.models.BPE())
    made.pre_tokenizer = library.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = library.decoders.ByteLevel()
    trainer = library.trainers.BpeTrainer(
        vocab_size=vocab_size, min_frequency=min_frequency, special_tokens=special, show_progress=False,
        initial_alphabet=sorted(library.pre_tokenizers.ByteLevel.alphabet()),
    )  # fmt: skip
    made.train_from_iterator(_texts(texts), trainer)
    return TrainedTokenizer(made, special[0])


def _texts(texts: str | Iterable[str]) -> Iterator[str]:
    for i, text in enumerate([texts] if isinstance(texts, str) else texts):
        if not isinstance(text, str):
            raise UsageError("not a text", where=f"text {i}", expected="str", got=type(text).__name__)
        yield _valid(text)


class AutoTokenizer(_LazyTokenizer):
    """A tokenizer in files other than `tokenizer.json`, read by transformers, for an embedding of `tokens` rows.

    The number of tokens is known only after the library has read the files, so a mismatch is raised at the first use.
    """

    LIBRARY = "transformers", "AutoTokenizer"

    def _load(self, library: Any) -> Any:
        loaded = library.from_pretrained(str(self.path), trust_remote_code=False, local_files_only=True)
        check_size(len(loaded), self.tokens, self.path)
        return loaded

    @property
    def size(self) -> int:
        """Number of tokens; loads the library."""
        return len(self._loaded)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Return the ids of a text. Raises: PromptError for lone surrogates; TokenizerMismatch."""
        return self._loaded.encode(_valid(text), add_special_tokens=add_special_tokens)

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Return the text of ids."""
        options = {"skip_special_tokens": skip_special_tokens, "clean_up_tokenization_spaces": False}
        return self._loaded.decode(list(ids), **options)


Tokenizer = ByteTokenizer | LibraryTokenizer | AutoTokenizer
"""Any tokenizer: it has start and end tokens `bos_id` and `eos_ids`, the number of ids `size`, `encode`, `decode`."""


def _valid(text: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise PromptError("the text contains a lone surrogate, which UTF-8 cannot encode",
                          where=f"character {error.start}", got=repr(text[error.start]),
                          fix="text.encode('utf-8', 'replace').decode()") from error  # fmt: skip
    return text


def byte_tokenizer_json() -> str:
    """Return the built-in byte table as the text of a `tokenizer.json`: byte-level BPE without merges."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    table = {b: chr(b) for b in printable}
    for i, b in enumerate(b for b in range(256) if b not in table):
        table[b] = chr(256 + i)
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    without = ("dropout", "unk_token", "continuing_subword_prefix", "end_of_word_suffix")
    model = {"type": "BPE", **dict.fromkeys(without)}
    model |= dict.fromkeys(("fuse_unk", "byte_fallback", "ignore_merges"), False)
    content = {
        "version": "1.0", "truncation": None, "padding": None,
        "added_tokens": [{"id": 0, "content": table[0], "special": True, **flags}],
        "normalizer": None, "pre_tokenizer": byte_level, "post_processor": None, "decoder": byte_level,
        "model": {**model, "vocab": {table[b]: b for b in range(256)}, "merges": []},
    }  # fmt: skip
    return json.dumps(content, ensure_ascii=False, indent=1)


def find_tokenizer(directory: Path, config: Config, vocab: int) -> Tokenizer | None:
    """Return the tokenizer of a model directory, or None if it has none; `vocab` is the number of embedding rows.

    Raises: TokenizerMismatch if it has more tokens than the embedding has rows; ConfigError for a damaged file.
    """
    path = directory / "tokenizer.json"
    bos, eos = special_ids(directory, config)
    if not path.is_file():
        others = any((directory / name).is_file() for name in OTHER_FILES)
        return AutoTokenizer(directory, vocab, bos, eos) if others else None
    data = read_object(path, _LIMIT, nesting=32)
    model, added = data.get("model"), data.get("added_tokens") or []
    if not isinstance(model, dict) or not isinstance(model.get("vocab"), dict | list) or not isinstance(added, list):
        raise ConfigError("tokenizer.json has an unexpected form", where=str(path),
                          expected="an object model.vocab and a list added_tokens")  # fmt: skip
    if len(model["vocab"]) == 256 and not model.get("merges") and data == json.loads(byte_tokenizer_json()):
        found: Tokenizer = ByteTokenizer(bos, eos)
    else:
        ids = [t["id"] for t in added if isinstance(t, dict) and isinstance(t.get("id"), int)]
        found = LibraryTokenizer(path, max([len(model["vocab"]) - 1, *ids]) + 1, bos, eos)
    check_size(found.size, vocab, path)
    return found


def check_size(tokens: int, vocab: int, where: Path) -> None:
    """Raise TokenizerMismatch if a tokenizer has more tokens than the embedding has rows."""
    if tokens > vocab:
        what = "the tokenizer has more tokens than the embedding has rows"
        fix = f"use this model's tokenizer, or gw.open(..., tokenizer=False) and model.resize_vocab({tokens})"
        raise TokenizerMismatch(what, where=str(where), expected=f"<= {vocab}", got=tokens, fix=fix)


def special_ids(directory: Path, config: Config) -> tuple[int | None, tuple[int, ...]]:
    """Return (start id or None, end ids) from generation_config.json, or else config.json. Raises: ConfigError."""
    given = generation_defaults(directory)
    found: dict[str, tuple[int, ...]] = {}
    for name in SPECIAL_IDS:
        for path, fields in ((config.path, config.fields), (directory / "generation_config.json", given)):
            if fields.get(name) is not None:
                found[name] = _token_ids(name, fields[name], path)
    return next(iter(found.get("bos_token_id", ())), None), found.get("eos_token_id", ())


def _token_ids(name: str, value: Any, where: Path) -> tuple[int, ...]:
    values: list[Any] = value if isinstance(value, list) and name == "eos_token_id" else [value]
    if not all(isinstance(v, int) and not isinstance(v, bool) and -1 <= v < 1 << 31 for v in values):
        expected = "a token id, -1 or null for none" + (", or a list of ids" if name == "eos_token_id" else "")
        raise ConfigError(f"{name} is not a token id", where=str(where), expected=expected, got=value)
    return tuple(v for v in values if v >= 0)


def known_special_ids(config: Config, vocab: int) -> dict[str, Any]:
    """Return the fields of special token ids that an embedding of `vocab` rows lacks, without these ids."""
    found = {}
    for name in SPECIAL_IDS:
        ids = _token_ids(name, value, config.path) if (value := config.get(name)) is not None else ()
        if any(i >= vocab for i in ids):
            found[name] = [i for i in ids if i < vocab] or None
    return found


def generation_defaults(directory: Path) -> dict[str, Any]:
    """Return the fields of generation_config.json, or an empty dict without this file. Raises: ConfigError."""
    path = directory / "generation_config.json"
    found = read_object(path, 8 << 20, nesting=16) if path.is_file() else {}
    if not isinstance(found.get("do_sample"), bool | None):
        raise ConfigError("field 'do_sample' is invalid", where=str(path), expected="true or false",
                          got=repr(found["do_sample"])[:80])  # fmt: skip
    return found


def need_tokenizer(model: Model) -> Tokenizer:
    """Return the model's tokenizer. Raises: UsageError if it has none."""
    if model.tokenizer is None:
        raise UsageError("the model has no tokenizer", where=str(model.directory),
                         fix="put its tokenizer.json beside config.json, or use token ids")  # fmt: skip
    return model.tokenizer
