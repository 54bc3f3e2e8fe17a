"""IDX files: every type and rank, plain and gzipped; damaged files are refused or read correctly."""

from __future__ import annotations

import gzip
import struct
import tracemalloc
from pathlib import Path

import numpy as np
import pytest

from graphwright.data import CorruptIdx, read_idx
from graphwright.data.files import DTYPES
from graphwright.files import UnreadableFile

rng = np.random.default_rng(0)


def idx(array: np.ndarray) -> bytes:
    code = next(c for c, kind in DTYPES.items() if np.dtype(kind).newbyteorder("=") == array.dtype)
    sizes = b"".join(struct.pack(">I", n) for n in array.shape)
    return bytes([0, 0, code, array.ndim]) + sizes + array.astype(DTYPES[code]).tobytes()


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("shape", [(), (7,), (3, 2), (0, 4), (2, 3, 4, 2)])
@pytest.mark.parametrize("code", DTYPES)
def test_idx_round_trips(tmp_path: Path, code: int, shape: tuple[int, ...], packed: bool) -> None:
    array = rng.integers(-100, 100, shape).astype(np.dtype(DTYPES[code]).newbyteorder("="))
    path = tmp_path / "x"
    path.write_bytes(gzip.compress(idx(array)) if packed else idx(array))
    found = read_idx(path)
    assert (found.dtype, found.shape) == (array.dtype, shape)
    assert found.dtype.isnative
    assert found.flags.writeable
    np.testing.assert_array_equal(found, array)


@pytest.mark.parametrize("packed", [False, True])
def test_truncated_and_changed_files_are_refused_or_harmless(tmp_path: Path, packed: bool) -> None:
    array = rng.integers(0, 256, (3, 4, 2), dtype=np.uint8)
    whole = gzip.compress(idx(array), mtime=0) if packed else idx(array)
    path = tmp_path / "x"
    for length in range(len(whole)):
        path.write_bytes(whole[:length])
        with pytest.raises(CorruptIdx):
            read_idx(path)
    for at in range(len(whole)):
        for change in (1, 0x80, 0xFF):
            path.write_bytes(whole[:at] + bytes([whole[at] ^ change]) + whole[at + 1 :])
            try:
                found = read_idx(path)
            except CorruptIdx:
                continue
            if packed:  # a name, a time or a flag of gzip's, which its sum does not cover
                np.testing.assert_array_equal(found, array)
            else:  # an element, which a plain file has no sum of
                assert at >= 16 or found.size == array.size
    path.write_bytes(whole + b"\0" * 3 if not packed else gzip.compress(idx(array) + b"\0"))
    with pytest.raises(CorruptIdx, match="extra"):
        read_idx(path)


@pytest.mark.parametrize("packed", [False, True])
def test_a_header_with_false_sizes_allocates_no_memory(tmp_path: Path, packed: bool) -> None:
    path = tmp_path / "x"
    for shape in [(2**32 - 1,), (2**31, 2**31, 2**31), (2**12, 2**19)]:
        lie = bytes([0, 0, 8, len(shape)]) + b"".join(struct.pack(">I", n) for n in shape) + b"12345"
        path.write_bytes(gzip.compress(lie) if packed else lie)
        tracemalloc.start()
        with pytest.raises(CorruptIdx):
            read_idx(path)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < 2**23


def test_decompression_is_limited(tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_bytes(gzip.compress(idx(np.zeros(2**24, np.uint8))))
    with pytest.raises(CorruptIdx, match="at most"):
        read_idx(path, most=2**20)
    assert read_idx(path).size == 2**24


def test_missing_and_foreign_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UnreadableFile):
        read_idx(tmp_path / "none")
    (tmp_path / "x").write_bytes(b"\x89PNG\r\n\x1a\n")
    with pytest.raises(CorruptIdx, match="not an IDX file"):
        read_idx(tmp_path / "x")
