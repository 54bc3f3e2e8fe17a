"""Tokenizers against the libraries that others read the same files with."""

from __future__ import annotations

import contextlib
import json
import random
from collections.abc import Callable
from pathlib import Path
from pydoc_data import topics
from typing import Any

import checkpoints
import pytest
import tokenizers
import transformers
from checkpoints import edit_config
from hypothesis import given
from hypothesis import strategies as st

import graphwright as gw
from graphwright.errors import MissingExtra, UsageError
from graphwright.models import ConfigError, PromptError, TokenizerMismatch
from graphwright.models.export.write import write_model
from graphwright.models.open import config_from, create
from graphwright.models.tokenizer import (
    AutoTokenizer,
    ByteTokenizer,
    LibraryTokenizer,
    TrainedTokenizer,
    byte_tokenizer_json,
    train_bpe,
)


def strings() -> list[str]:
    """200 texts: real ones, and those that break tokenizers."""
    odd = [
        "",
        " ",
        "\n",
        "\r\n",
        "a\r\nb\r",
        "\t\t",
        " " * 10_000,
        "é",
        "e\u0301",
        "ﬁ",
        "👩‍👩‍👧‍👦🇫🇷",
        "😀" * 50,
        "日本語のテキスト",
        "שלום",
        "\u200b\ufeff",
        "\x01\x7f\x1b[0m",
        "ÿþ",
        "<s></s><|endoftext|>",
        "'s 're I'LL",
        "1234567890" * 20,
        "\ufffd",
        "a" * 3000,
        "\u2028",
        "𝔘𝔫𝔦",
        "\\n\\t",
        "def f(x):\n    return x\n",
    ]
    source = "".join(topics.topics[k] for k in sorted(topics.topics))
    draw = random.Random(0)
    return odd + [source[(at := draw.randrange(len(source))) : at + draw.randrange(300)] for _ in range(200 - len(odd))]


@pytest.fixture(scope="module")
def byte_library() -> Any:
    return tokenizers.Tokenizer.from_str(byte_tokenizer_json())


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a small BPE tokenizer, its template adding a start token, in transformers' own files."""
    raw = tokenizers.Tokenizer(tokenizers.models.BPE())
    raw.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<s>", "</s>"],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    raw.train_from_iterator([topics.topics[k] for k in sorted(topics.topics)[:20]], trainer)
    raw.post_processor = tokenizers.processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", 0)])
    raw.add_tokens(["graphwright"])
    path = tmp_path_factory.mktemp("bpe")
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=raw, bos_token="<s>", eos_token="</s>")
    fast.save_pretrained(path)
    return path


def with_tokenizer(path: Path, trained: Path, vocab: int, *names: str) -> Path:
    """A llama checkpoint with `vocab` rows and tokenizer files."""
    from checkpoints import make

    make(path, "llama", vocab_size=vocab)
    for name in names or ("tokenizer.json", "tokenizer_config.json"):
        (path / name).write_bytes((trained / name).read_bytes())
    edit_config(path, bos_token_id=0, eos_token_id=[1, 7])
    return path


# -- bytes -------------------------------------------------------------------------------------------------------------
def test_the_byte_tokenizer_matches_the_library(byte_library: Any) -> None:
    ours = ByteTokenizer()
    for text in strings():
        ids = ours.encode(text)
        assert ids == byte_library.encode(text).ids
        assert ours.decode(ids) == byte_library.decode(ids) == text


@given(st.lists(st.integers(0, 255), max_size=40))
def test_any_bytes_decode_as_in_the_library(ids: list[int]) -> None:
    library = tokenizers.Tokenizer.from_str(byte_tokenizer_json())
    for skip in (True, False):
        assert ByteTokenizer().decode(ids, skip) == library.decode(ids, skip_special_tokens=skip)


def test_the_start_token_is_byte_0_whatever_its_name_in_the_file(byte_library: Any) -> None:
    """In the library a text with U+0100, under which the file lists byte 0, is that token; here it is two bytes."""
    assert ByteTokenizer().encode("Ā") == [0xC4, 0x80]
    assert byte_library.encode("Ā").ids == [0]


def test_ids_beyond_256_decode_to_nothing() -> None:
    assert ByteTokenizer().decode([72, 300, 105]) == "Hi"


@pytest.mark.parametrize("text", ["a\ud800", "\udfff", "x" * 9 + "\udc80y"])
def test_lone_surrogates_are_refused(text: str, trained: Path, tmp_path: Path) -> None:
    library = LibraryTokenizer(trained / "tokenizer.json", 401, None, ())
    auto = AutoTokenizer(trained, 401, None, ())
    for tokenizer in (ByteTokenizer(), library, auto):
        with pytest.raises(PromptError) as caught:
            tokenizer.encode(text)
        at = next(i for i, c in enumerate(text) if "\ud800" <= c <= "\udfff")
        assert caught.value.where == f"character {at}"
        assert caught.value.got == repr(text[at])
        assert "replace" in str(caught.value.fix)


def test_the_file_of_the_byte_tokenizer_is_recognised(tmp_path: Path) -> None:
    from checkpoints import make

    make(tmp_path, "llama", vocab_size=260, bos_token_id=0, eos_token_id=0)
    (tmp_path / "tokenizer.json").write_text(byte_tokenizer_json())
    m = gw.open(tmp_path)
    assert isinstance(m.tokenizer, ByteTokenizer)
    assert (m.tokenizer.bos_id, m.eos_ids) == (0, (0,))
    assert m.notes == ("4 rows of the embedding have no token: padding",)


# -- tokenizer.json ----------------------------------------------------------------------------------------------------
def test_the_library_tokenizer_matches_auto_tokenizer(trained: Path, tmp_path: Path) -> None:
    m = gw.open(with_tokenizer(tmp_path, trained, 401))
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    assert isinstance(m.tokenizer, LibraryTokenizer)
    assert m.tokenizer.size == 401 == len(theirs)
    for text in strings():
        for special in (True, False):
            ids = m.tokenizer.encode(text, add_special_tokens=special)
            assert ids == theirs.encode(text, add_special_tokens=special)
        for skip in (True, False):
            assert m.tokenizer.decode(ids, skip) == theirs.decode(ids, skip, clean_up_tokenization_spaces=False)
    assert m.tokenizer.encode("graphwright") == [0, 400]
    assert (m.tokenizer.bos_id, m.tokenizer.eos_ids) == (0, (1, 7))


def test_truncation_left_in_the_file_does_not_cut_prompts(trained: Path, tmp_path: Path) -> None:
    path = with_tokenizer(tmp_path, trained, 401)
    data = json.loads((path / "tokenizer.json").read_text())
    data["truncation"] = {"direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": 0}
    data["padding"] = {
        "strategy": {"Fixed": 30},
        "direction": "Right",
        "pad_to_multiple_of": None,
        "pad_id": 1,
        "pad_type_id": 0,
        "pad_token": "</s>",
    }
    (path / "tokenizer.json").write_text(json.dumps(data))
    tokenizer = gw.open(path).tokenizer
    text = "one two three four five six seven eight"
    assert tokenizer is not None
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.encode(text) == transformers.AutoTokenizer.from_pretrained(path).encode(text)


def test_tokenizers_with_more_tokens_than_the_vocabulary_are_refused(trained: Path, tmp_path: Path) -> None:
    path = with_tokenizer(tmp_path, trained, 400)
    with pytest.raises(TokenizerMismatch) as caught:
        gw.open(path)
    assert (caught.value.expected, caught.value.got) == ("<= 400", 401)
    assert caught.value.where == str(path / "tokenizer.json")
    assert "tokenizer=False" in str(caught.value.fix)
    assert gw.open(path, tokenizer=False).tokenizer is None


@pytest.mark.parametrize(
    "text", ["{", "[]", "{}", '{"model": {"vocab": 3}}', '{"model": {"vocab": {}}, "added_tokens": 5}']
)
def test_damaged_tokenizer_files_are_refused(text: str, copy: Callable[[str], Path]) -> None:
    path = copy("llama")
    (path / "tokenizer.json").write_text(text)
    with pytest.raises(ConfigError, match="tokenizer") as caught:
        gw.open(path)
    assert caught.value.where == str(path / "tokenizer.json")


def test_files_that_the_library_refuses_raise_typed_errors(copy: Callable[[str], Path]) -> None:
    path = copy("llama")
    (path / "tokenizer.json").write_text('{"model": {"vocab": {"a": 0}}, "added_tokens": []}')
    tokenizer = gw.open(path).tokenizer
    assert tokenizer is not None
    with pytest.raises(ConfigError):
        tokenizer.encode("a")


# -- other files -------------------------------------------------------------------------------------------------------
def old_files(path: Path, trained: Path) -> Path:
    """vocab.json and merges.txt instead of tokenizer.json, as GPT-2 tokenizers were published."""
    model = json.loads((trained / "tokenizer.json").read_text())["model"]
    (path / "vocab.json").write_text(json.dumps(model["vocab"]))
    merges = [m if isinstance(m, str) else " ".join(m) for m in model["merges"]]
    (path / "merges.txt").write_text("\n".join(["#version: 0.2", *merges]) + "\n")
    special = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "</s>"}
    (path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "GPT2Tokenizer", **special}))
    return path


def test_other_tokenizer_files_are_read_by_transformers(trained: Path, tmp_path: Path) -> None:
    path = old_files(with_tokenizer(tmp_path, trained, 410, "tokenizer_config.json"), trained)
    m = gw.open(path)
    assert isinstance(m.tokenizer, AutoTokenizer)
    theirs = transformers.AutoTokenizer.from_pretrained(path)
    for text in strings():
        ids = m.tokenizer.encode(text)
        assert ids == theirs.encode(text)
        assert m.tokenizer.decode(ids) == theirs.decode(
            ids, skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
    assert m.tokenizer.size == len(theirs)


def test_other_tokenizer_files_never_run_remote_code(trained: Path, tmp_path: Path) -> None:
    path = old_files(with_tokenizer(tmp_path, trained, 410, "tokenizer_config.json"), trained)
    ran = path / "ran"
    (path / "evil.py").write_text(f"open({str(ran)!r}, 'w')\nclass Evil: pass\n")
    config = json.loads((path / "tokenizer_config.json").read_text())
    config.update(tokenizer_class="Evil", auto_map={"AutoTokenizer": ["evil.Evil", None]})
    (path / "tokenizer_config.json").write_text(json.dumps(config))
    tokenizer = gw.open(path).tokenizer
    assert tokenizer is not None
    with contextlib.suppress(ConfigError):  # the library may also fall back to a class of its own
        tokenizer.encode("a")
    assert not ran.exists()


def test_other_tokenizer_files_with_too_many_tokens_are_refused(trained: Path, tmp_path: Path) -> None:
    path = old_files(with_tokenizer(tmp_path, trained, 390, "tokenizer_config.json"), trained)
    tokenizer = gw.open(path).tokenizer
    assert tokenizer is not None
    with pytest.raises(TokenizerMismatch):
        tokenizer.encode("a")


def test_a_model_without_a_tokenizer_returns_ids_only(model: gw.Model) -> None:
    assert model.tokenizer is None
    with pytest.raises(UsageError, match="no tokenizer"):
        model.generate("text")
    assert model.generate([1, 2], 3).text == ""


def test_a_missing_extra_names_the_install_command(
    trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import sys

    for module in ("tokenizers", "transformers"):
        monkeypatch.setitem(sys.modules, module, None)
    for tokenizer in (LibraryTokenizer(trained / "tokenizer.json", 9, None, ()), AutoTokenizer(trained, 9, None, ())):
        with pytest.raises(MissingExtra) as caught:
            tokenizer.encode("a")
        assert "graphwright[hf]" in str(caught.value.fix)


# -- special ids -------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("config", "generation", "expected"),
    [
        ({}, None, (None, ())),
        ({"eos_token_id": 5, "bos_token_id": 4}, None, (4, (5,))),
        ({"eos_token_id": 5}, {"eos_token_id": [6, 7]}, (None, (6, 7))),
        ({"eos_token_id": 5}, {"eos_token_id": None, "bos_token_id": 2}, (2, (5,))),
        ({"eos_token_id": [-1, 3], "bos_token_id": -1}, {}, (None, (3,))),
    ],
)
def test_special_ids_are_read_from_the_config(
    config: dict, generation: dict | None, expected: tuple, copy: Callable[[str], Path]
) -> None:
    from graphwright.models.architectures.architecture import Config
    from graphwright.models.tokenizer import special_ids

    path = copy("llama")
    edit_config(path, remove=("eos_token_id", "bos_token_id"))
    edit_config(path, **config)
    (path / "generation_config.json").unlink(missing_ok=True)
    if generation is not None:
        (path / "generation_config.json").write_text(json.dumps(generation))
    assert special_ids(path, Config.read(path)) == expected


def test_damaged_generation_configs_are_refused(copy: Callable[[str], Path]) -> None:
    path = copy("llama")
    (path / "generation_config.json").write_text("[1]")
    with pytest.raises(ConfigError, match="generation_config"):
        gw.open(path)


# -- training ----------------------------------------------------------------------------------------------------------
TEXTS = [text for name, text in sorted(topics.topics.items())][:20]


def small_bpe(size: int = 600) -> TrainedTokenizer:
    return train_bpe(TEXTS, size)


def test_a_trained_tokenizer_equals_that_of_the_library() -> None:
    ours, theirs = small_bpe(), tokenizers.ByteLevelBPETokenizer()
    theirs.train_from_iterator(TEXTS, 600, min_frequency=2, show_progress=False, special_tokens=["<|endoftext|>"])
    assert ours.size == 600
    for text in [*TEXTS[:3], *strings()[:40]]:
        ids = ours.encode(text)
        assert ids == theirs.encode(text).ids == small_bpe().encode(text)
        assert ours.decode(ids, skip_special_tokens=False) == text
    assert len(ours.encode(TEXTS[0])) < 0.7 * len(TEXTS[0].encode())
    assert (ours.bos_id, ours.eos_ids, ours.encode("a<|endoftext|>b")[1]) == (0, (0,), 0)


def test_a_trained_tokenizer_is_saved_with_its_model_and_loaded_by_transformers(tmp_path: Path) -> None:
    sizes = {**checkpoints.SIZES, "vocab_size": 640, "bos_token_id": 0, "eos_token_id": 0}
    fields = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", **sizes}
    m = create(config_from(fields), tokenizer=small_bpe())
    assert m("The text").shape == (len(small_bpe().encode("The text")), 640)
    (tmp_path / "written").mkdir()
    write_model(m, tmp_path / "written")
    m.save(tmp_path / "saved")
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "written")
    again = [gw.open(tmp_path / name) for name in ("written", "saved")]
    for text in [TEXTS[1][:500], "naïve\n\t😀"]:
        ids = small_bpe().encode(text)
        assert theirs(text)["input_ids"] == ids
        assert theirs.decode(ids) == text
        assert all(model.tokenizer is not None and model.tokenizer.encode(text) == ids for model in again)
    assert theirs.eos_token_id == 0
    again[0].tokenizer = small_bpe(500)  # replaced: its files are written in place of those of the directory
    again[0].save(tmp_path / "replaced")
    third = gw.open(tmp_path / "replaced").tokenizer
    assert third is not None
    assert third.size == 500
    assert third.encode(TEXTS[1]) == small_bpe(500).encode(TEXTS[1])


@pytest.mark.parametrize(
    "make",
    [
        lambda: train_bpe(TEXTS, 256),
        lambda: train_bpe(TEXTS, 300, min_frequency=0),
        lambda: train_bpe(TEXTS, 300, special_tokens=[]),
        lambda: train_bpe(TEXTS, 300, special_tokens=["<a>", "<a>"]),
        lambda: train_bpe(TEXTS, 300, special_tokens=[""]),
        lambda: train_bpe(TEXTS, 300, special_tokens=5),  # pyright: ignore[reportArgumentType]
        lambda: train_bpe(TEXTS, 300.5),  # pyright: ignore[reportArgumentType]
        lambda: train_bpe([b"bytes"], 300),  # pyright: ignore[reportArgumentType]
        lambda: train_bpe(["\ud800"], 300),
        lambda: create(config_from({"architectures": ["LlamaForCausalLM"], "model_type": "llama", **checkpoints.SIZES}),
                       tokenizer=small_bpe()),
    ],
)  # fmt: skip
def test_invalid_trainings_are_refused(make: Callable[[], object]) -> None:
    with pytest.raises((UsageError, PromptError, TokenizerMismatch)):
        make()


def test_a_single_text_and_unseen_bytes() -> None:
    short = train_bpe("abab abab", 1000)
    assert 257 < short.size < 300
    assert short.decode(short.encode("日本語 \x00")) == "日本語 \x00"
