import hashlib
import shutil
import subprocess

import numpy as np
import pytest

from graphwright.errors import UsageError
from graphwright.files import UnreadableFile, blake2b_128, flat_bytes, sha256_file


def test_blake2b_of_the_empty_string_is_the_published_value():
    assert blake2b_128(b"") == "cae66941d9efbd404e4d88758ea67670"


def test_blake2b_covers_the_bytes_in_memory_order_of_any_buffer():
    array = np.arange(12, dtype=np.float32).reshape(3, 4)
    expected = hashlib.blake2b(array.tobytes(), digest_size=16).hexdigest()
    holders = [array, array.reshape(2, 6), memoryview(array.data), bytearray(array.tobytes()), array.view(np.uint8)]
    assert {blake2b_128(holder) for holder in holders} == {expected}


def test_every_single_bit_flip_of_a_small_payload_is_found():
    payload = bytearray(range(64))
    seen = {blake2b_128(payload)}
    for bit in range(8 * len(payload)):
        payload[bit // 8] ^= 1 << bit % 8
        seen.add(blake2b_128(payload))
        payload[bit // 8] ^= 1 << bit % 8
    assert len(seen) == 1 + 8 * len(payload)


@pytest.mark.skipif(shutil.which("sha256sum") is None, reason="sha256sum is missing")
def test_sha256_of_a_file_matches_sha256sum(tmp_path):
    path = tmp_path / "f"
    path.write_bytes(np.random.default_rng(0).bytes(3_000_001))
    printed = subprocess.run(["sha256sum", path], capture_output=True, text=True, check=True).stdout
    assert sha256_file(path) == printed.split()[0]


def test_a_missing_file_is_a_typed_error(tmp_path):
    with pytest.raises(UnreadableFile):
        sha256_file(tmp_path / "none")


@pytest.mark.parametrize("shape", [(), (0,), (3, 0), (2, 3)])
def test_flat_bytes_shares_memory_with_arrays_of_every_rank(shape):
    array = np.ones(shape, np.float64)
    view = flat_bytes(array)
    assert view.nbytes == array.nbytes
    if array.nbytes:
        view[0] = 7
        assert array.reshape(-1).view(np.uint8)[0] == 7


@pytest.mark.parametrize("array", [np.ones((2, 3)).T, np.ones(4)[::2], np.ones(2, ">f8"), [1, 2], "text"])
def test_flat_bytes_refuses_non_contiguous_memory(array):
    with pytest.raises(UsageError, match="C-contiguous"):
        flat_bytes(array)
