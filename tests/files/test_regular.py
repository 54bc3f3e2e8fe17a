"""Readers of whole files: a named pipe, a directory, a missing file or what is no path is one typed error, at once."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from graphwright.cli.common import read_text
from graphwright.data import TokenWindows, read_idx
from graphwright.errors import UsageError
from graphwright.evolve import tasks
from graphwright.files import UnreadableFile, read_file, read_json, sha256_file

READERS = {
    "read_file": read_file,
    "read_text": read_text,
    "read_json": read_json,
    "read_idx": read_idx,
    "sha256_file": sha256_file,
    "TokenWindows": lambda path: TokenWindows([path], 4),
    "csv": lambda path: tasks.csv(path, "target"),
}


@pytest.mark.parametrize("name", READERS)
@pytest.mark.timeout(20)
def test_a_file_that_cannot_be_read_is_a_typed_error(tmp_path, name):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "folder").mkdir()
    for path in (tmp_path / "pipe", tmp_path / "folder", tmp_path / "missing", Path(os.devnull), "nul\0"):
        with pytest.raises(UnreadableFile) as caught:
            READERS[name](path)
        assert str(path) in str(caught.value.where)
        assert caught.value.got
    with pytest.raises((UnreadableFile, UsageError)):
        READERS[name](7)


def test_text_has_plain_line_ends_and_must_be_utf8(tmp_path):
    (tmp_path / "text").write_bytes("é\r\nb\rc".encode())
    assert read_text(tmp_path / "text") == "é\nb\nc"
    assert read_file(tmp_path / "text") == "é\r\nb\rc".encode()
    (tmp_path / "text").write_bytes(b"\xff")
    with pytest.raises(UnreadableFile, match="utf-8"):
        read_text(tmp_path / "text")
