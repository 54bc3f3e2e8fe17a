"""Streaming: pieces add up to the text, nothing is taken back, stop strings are found at any token borders."""

from __future__ import annotations

from collections.abc import Sequence
from pydoc_data import topics
from typing import Any

import pytest
import tokenizers
from hypothesis import example, given
from hypothesis import strategies as st

from graphwright.models.generation.text import TextStream
from graphwright.models.tokenizer import ByteTokenizer, Tokenizer

BYTES = ByteTokenizer()


class Pieces:
    """A tokenizer whose tokens are byte strings of several lengths."""

    size, bos_id, eos_ids = 64, None, ()

    def __init__(self) -> None:
        text = topics.topics["yield"].encode() + "😀é日".encode() * 9
        self.table = [bytes([b]) for b in range(0x20, 0x3C)] + [text[i * 7 : i * 7 + 1 + i % 5] for i in range(20)]
        self.table += [bytes([b]) for b in (0xF0, 0x9F, 0x98, 0x80, 0xC3, 0xA9, 0xFF)]

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        raise NotImplementedError

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        return b"".join(self.table[i % len(self.table)] for i in ids).decode("utf-8", "replace")


def run(tokenizer: Any, ids: list[int], stop: tuple[str, ...] = ()) -> tuple[str, list[str], bool, int]:
    """(text, pieces, stopped, tokens taken)."""
    pieces: list[str] = []
    stream = TextStream(tokenizer, stop, pieces.append)
    for i, token in enumerate(ids):
        if stream.add(token):
            return stream.text, pieces, True, i + 1
    stopped = stream.close()
    return stream.text, pieces, stopped, len(ids)


@pytest.mark.parametrize("tokenizer", [BYTES, Pieces()], ids=["bytes", "pieces"])
@given(ids=st.lists(st.integers(1, 255), max_size=40))
@example(ids=[0xF0, 0x9F, 0x98, 0x80])
@example(ids=[0xF0, 0x9F])
@example(ids=[0xFF, 0x41])
def test_pieces_add_up_to_the_text(tokenizer: Tokenizer, ids: list[int]) -> None:
    text, pieces, stopped, _ = run(tokenizer, ids)
    assert "".join(pieces) == text == tokenizer.decode(ids)
    assert not stopped
    assert all(pieces)


@pytest.mark.parametrize("tokenizer", [BYTES, Pieces()], ids=["bytes", "pieces"])
@given(
    ids=st.lists(st.integers(0x20, 0x3B), max_size=30),
    stop=st.lists(st.text("!\"#$%&'()*", min_size=1, max_size=4), max_size=3),
)
def test_text_ends_before_the_first_stop_string(tokenizer: Tokenizer, ids: list[int], stop: list[str]) -> None:
    text, pieces, stopped, taken = run(tokenizer, ids, tuple(stop))
    whole = tokenizer.decode(ids[:taken])
    at = min((i for s in stop if (i := whole.find(s)) >= 0), default=-1)
    assert stopped == (at >= 0)
    assert "".join(pieces) == text == (whole if at < 0 else whole[:at])
    if stopped and taken:  # and it was noticed with the token that completed it
        assert all(s not in tokenizer.decode(ids[: taken - 1]) for s in stop)


def test_stop_strings_over_three_tokens_are_found() -> None:
    text, pieces, stopped, taken = run(BYTES, list(b"one<END>two"), ("<END>",))
    assert (text, stopped, taken) == ("one", True, 8)
    assert "".join(pieces) == "one"


def test_possible_beginnings_of_stop_strings_are_held_back() -> None:
    seen: list[tuple[str, str]] = []
    pieces: list[str] = []
    stream = TextStream(BYTES, ("<END>",), pieces.append)
    for byte in b"a<EN<END>":
        stream.add(byte)
        seen.append((chr(byte), "".join(pieces)))
    assert seen[:5] == [("a", "a"), ("<", "a"), ("E", "a"), ("N", "a"), ("<", "a<EN")]
    assert stream.text == "a<EN"


def test_an_emoji_of_four_tokens_is_one_piece() -> None:
    _, pieces, _, _ = run(BYTES, list("a😀b".encode()))
    assert pieces == ["a", "😀", "b"]


def test_unfinished_characters_of_library_tokens_are_held_back(tmp_path) -> None:
    raw = tokenizers.Tokenizer(tokenizers.models.BPE())
    raw.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = tokenizers.decoders.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    raw.train_from_iterator(
        ["a b"], tokenizers.trainers.BpeTrainer(vocab_size=300, initial_alphabet=alphabet, show_progress=False)
    )
    raw.save(str(tmp_path / "tokenizer.json"))
    from graphwright.models.tokenizer import LibraryTokenizer

    ours = LibraryTokenizer(tmp_path / "tokenizer.json", raw.get_vocab_size(), None, ())
    ids = ours.encode("a 😀é\ufffd ok 日")
    text, pieces, _, _ = run(ours, ids)
    assert text == "a 😀é\ufffd ok 日" == "".join(pieces)
    assert "😀" in pieces
    text, pieces, _, _ = run(ours, ids[:4])  # ends within the emoji
    assert "".join(pieces) == text == ours.decode(ids[:4])


def test_a_library_tokenizer_of_256_tokens_is_not_treated_as_bytes() -> None:
    class Small(Pieces):
        size = 256

    text, _, _, _ = run(Small(), [0x20, 0x21])
    assert text == Small().decode([0x20, 0x21])


def test_without_a_tokenizer_no_text_is_streamed() -> None:
    stream = TextStream(None, (), None)
    assert not stream.add(5)
    assert not stream.close()
    assert stream.text == ""
