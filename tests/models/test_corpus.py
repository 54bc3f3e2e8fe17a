"""The text that every machine has: split by content, so that nothing held out is trained on."""

from __future__ import annotations

import platform
from hashlib import sha256

import pytest

from graphwright.models.bundled import pydoc_split, text_sha256

TRAIN, HELD_OUT = pydoc_split()


@pytest.mark.skipif(platform.python_version() != "3.11.7", reason="topics of another CPython: figures are of 3.11.7")
def test_the_corpus_has_the_sizes_of_cpython_3_11_7():
    assert len(TRAIN.encode()) == 341_373
    assert len(HELD_OUT.encode()) == 32_588


def test_less_than_5_percent_of_held_out_windows_occur_in_the_training_text():
    windows = [HELD_OUT[i : i + 50] for i in range(len(HELD_OUT) - 49)]
    known = {TRAIN[i : i + 50] for i in range(len(TRAIN) - 49)}
    share = sum(w in known for w in windows) / len(windows)
    assert 0 < share < 0.05


def test_each_paragraph_is_assigned_to_one_split_by_its_text():
    seen: set[str] = set()
    for side, text in ((False, TRAIN), (True, HELD_OUT)):
        for paragraph in text.split("\n\n"):
            key = " ".join(paragraph.split())
            assert key
            assert key not in seen
            assert (sha256(key.encode()).digest()[0] < 26) == side
            seen.add(key)
    assert 0.05 < len(HELD_OUT) / len(TRAIN) < 0.15


def test_the_digest_is_computed_from_utf_8():
    assert text_sha256("é") == sha256(b"\xc3\xa9").hexdigest()
    assert pydoc_split() == (TRAIN, HELD_OUT)
