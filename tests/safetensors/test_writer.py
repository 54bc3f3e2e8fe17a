import os
import struct
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
import safetensors.torch
import torch
from hypothesis import given
from hypothesis import strategies as st
from raw_files import entry, raw_file

import safetensors
from graphwright.errors import UsageError
from graphwright.files import UnwritableTarget
from graphwright.safetensors import BITS, HeaderError, TensorData, TensorFile, write_tensors
from graphwright.testing.faults import check_atomic, inject, record


@st.composite
def tensors(draw: st.DrawFn) -> list[tuple[str, str, tuple[int, ...], Any]]:
    """Arguments of `TensorData`, with buffers of several kinds."""
    found = []
    keys = st.text(max_size=12).filter(lambda key: key != "__metadata__")
    for key in draw(st.lists(keys, max_size=6, unique=True)):
        tag = draw(st.sampled_from(sorted(BITS)))
        shape = draw(st.lists(st.integers(0, 3), max_size=5)) + (
            [8] if BITS[tag] < 8 else draw(st.sampled_from([[], [3]]))
        )
        size = prod(shape) * BITS[tag] // 8
        data = draw(st.binary(min_size=size, max_size=size))
        holders = [data, bytearray(data), np.frombuffer(data, np.uint8), lambda data=data: data]
        found.append((key, tag, tuple(shape), draw(st.sampled_from(holders))))
    return found


@given(tensors=tensors(), metadata=st.dictionaries(st.text(max_size=5), st.text(max_size=5), max_size=3))
def test_the_safetensors_library_reads_our_files_equally(tmp_path_factory, tensors, metadata):
    items = [TensorData(*arguments) for arguments in tensors]
    path = tmp_path_factory.mktemp("files") / "model.safetensors"
    header = write_tensors(path, items, metadata)
    data = path.read_bytes()
    found = {key: (row["dtype"], row["shape"], bytes(row["data"])) for key, row in safetensors.deserialize(data)}
    assert found == {item.key: (item.tag, list(item.shape), b"".join(map(bytes, item.chunks()))) for item in items}
    with safetensors.safe_open(path, "np") as file:
        assert file.metadata() == {"format": "pt", **metadata}
    assert header.payload_offset % 8 == 0
    file = TensorFile(path)
    assert (file.infos, file.metadata, file.payload_offset) == (header.infos, header.metadata, header.payload_offset)


def test_written_bytes_match_the_safetensors_library(tmp_path):
    tensors = {
        "b": np.arange(6, dtype=np.float32).reshape(2, 3),
        "a": np.array([1], np.float32),
        "z": np.zeros((0, 3), np.uint8),
    }
    order = [TensorData(key, "U8" if key == "z" else "F32", tensors[key].shape, tensors[key]) for key in "abz"]
    write_tensors(tmp_path / "ours", order)
    assert (tmp_path / "ours").read_bytes() == safetensors.numpy.save(tensors, {"format": "pt"})


def test_header_and_payload_keep_the_given_order(tmp_path):
    write_tensors(tmp_path / "f", [TensorData(key, "U8", (1,), key.encode()) for key in "zam"])
    data = (tmp_path / "f").read_bytes()
    assert data.endswith(b"zam")
    assert data.index(b'"z"') < data.index(b'"a"') < data.index(b'"m"')


def test_format_pt_is_added_only_if_no_format_is_given(tmp_path):
    assert write_tensors(tmp_path / "f", [], {"k": "v"}).metadata == {"k": "v", "format": "pt"}
    assert write_tensors(tmp_path / "f", [], {"format": "mlx"}).metadata == {"format": "mlx"}


def test_nan_payloads_and_negative_zero_survive_bit_for_bit(tmp_path):
    bits = np.array([0x7FC00001, 0xFFC12345, 0x80000000, 0x7F800001], np.uint32)
    write_tensors(tmp_path / "a", [TensorData("w", "F32", (4,), bits.view(np.float32))])
    write_tensors(tmp_path / "b", [TensorData.stored(TensorFile(tmp_path / "a"), "w")])
    assert TensorFile(tmp_path / "b").bytes("w") == bits.tobytes()
    assert safetensors.torch.load_file(tmp_path / "b")["w"].view(torch.int32).tolist() == bits.view(np.int32).tolist()


def test_tensors_of_known_and_unknown_tags_can_be_copied_and_renamed(tmp_path):
    rows, at = {}, 0
    for tag in [*BITS, "UNHEARD_OF"]:
        rows[tag] = entry(tag, (8,), at, at + BITS.get(tag, 24))
        at += BITS.get(tag, 24)
    (tmp_path / "a").write_bytes(raw_file(rows, np.random.default_rng(0).bytes(at)))
    source = TensorFile(tmp_path / "a")
    write_tensors(tmp_path / "b", [TensorData.stored(source, tag, f"new.{tag}") for tag in rows])
    copy = TensorFile(tmp_path / "b")
    for tag in rows:
        assert copy.info(f"new.{tag}").tag == tag
        assert copy.bytes(f"new.{tag}") == source.bytes(tag)


def test_stored_tensors_are_copied_from_the_file_not_from_a_written_mapping(tmp_path):
    write_tensors(tmp_path / "a", [TensorData("w", "U8", (3,), b"abc")])
    source = TensorFile(tmp_path / "a")
    source.bytes("w")[:] = b"zzz"
    write_tensors(tmp_path / "b", [TensorData.stored(source, "w")])
    assert TensorFile(tmp_path / "b").bytes("w") == b"abc"


def test_tensor_functions_are_called_just_before_their_tensor_is_written(tmp_path):
    events = []

    def make(key: str) -> bytes:
        events.append((key, sum(path.stat().st_size for path in tmp_path.iterdir())))
        return key.encode() * size

    size = 1 << 16
    parts = [TensorData(key, "U8", (size,), lambda key=key: make(key)) for key in "ab"]
    header = write_tensors(tmp_path / "f", parts)
    assert events == [("a", header.payload_offset), ("b", header.payload_offset + size)]


def test_small_tensors_are_written_together_and_large_ones_alone(tmp_path):
    rng = np.random.default_rng(0)
    sizes = [*rng.integers(0, 9, 500), 1 << 16, 3, 0, (1 << 16) - 1, 1, 1 << 17, *rng.integers(0, 5000, 40)]
    arrays = {f"t{i}": rng.integers(0, 255, n, np.uint8) for i, n in enumerate(sizes)}
    with record(tmp_path) as operations:
        write_tensors(tmp_path / "f", [TensorData(k, "U8", a.shape, a) for k, a in arrays.items()])
    assert sum(op.name == "write" for op in operations) < 10
    for key, found in safetensors.numpy.load_file(tmp_path / "f").items():
        np.testing.assert_array_equal(found, arrays[key])


@pytest.mark.parametrize("data", [b"abc", b"abcde", lambda: b"abc", np.zeros(4, np.float32)])
def test_a_buffer_of_the_wrong_size_is_refused_and_the_old_file_stays(tmp_path, data):
    path = tmp_path / "f"
    path.write_bytes(b"old")
    with pytest.raises(HeaderError) as caught:
        write_tensors(path, [TensorData("ok", "U8", (1,), b"x"), TensorData("bad", "U8", (4,), data)])
    assert (caught.value.rule, caught.value.key) == ("size", "bad")
    assert [p.read_bytes() for p in tmp_path.iterdir()] == [b"old"]


@pytest.mark.parametrize(
    ("bad", "rule"),
    [
        ([TensorData("a", "U8", (1,), b"x"), TensorData("a", "U8", (1,), b"x")], "duplicate"),
        ([TensorData("__metadata__", "U8", (1,), b"x")], "name"),
        ([TensorData("a", "F4", (3,), b"x")], "alignment"),
        ([TensorData("a", "", (1,), b"x")], "dtype"),
        ([TensorData("a", "U8", (-1,), b"x")], "shape"),
    ],
)
def test_invalid_files_are_refused_before_a_byte_is_written(tmp_path, bad, rule):
    with inject(tmp_path, "EIO", 0) as operations, pytest.raises(HeaderError) as caught:
        write_tensors(tmp_path / "f", bad)
    assert caught.value.rule == rule
    assert operations == []


def test_a_computed_tensor_of_unknown_tag_needs_its_size(tmp_path):
    with pytest.raises(UsageError, match="pass nbytes"):
        write_tensors(tmp_path / "f", [TensorData("a", "NEW", (1,), lambda: b"abc")])
    write_tensors(
        tmp_path / "f", [TensorData("a", "NEW", (1,), lambda: b"abc", 3), TensorData("b", "NEW", (1,), b"de")]
    )
    assert TensorFile(tmp_path / "f").bytes("b") == b"de"


def test_transposed_arrays_are_refused(tmp_path):
    with pytest.raises(UsageError, match="C-contiguous"):
        write_tensors(tmp_path / "f", [TensorData("a", "F32", (3, 2), np.ones((2, 3), np.float32).T)])
    assert os.listdir(tmp_path) == []


def test_the_old_or_new_file_is_complete_after_every_fault_and_power_loss(tmp_path):
    def save(folder: Path) -> None:
        parts = [TensorData(key, "F32", (1 << 14,), np.full(1 << 14, i, np.float32)) for i, key in enumerate("abc")]
        write_tensors(folder / "model.safetensors", parts)

    def before(folder: Path) -> None:
        write_tensors(folder / "model.safetensors", [TensorData("a", "U8", (3,), b"old")])

    survived = check_atomic(tmp_path, before, save)
    assert survived.faults > 20
    assert survived.crashes > 8


def test_a_full_disk_is_a_typed_error(tmp_path):
    with inject(tmp_path, "ENOSPC", 2), pytest.raises(UnwritableTarget, match="No space left"):
        write_tensors(tmp_path / "f", [TensorData("a", "U8", (3,), b"abc")])
    assert os.listdir(tmp_path) == []


def test_header_lengths_exclude_the_eight_length_bytes(tmp_path):
    header = write_tensors(tmp_path / "f", [TensorData("a", "U8", (3,), b"abc")])
    data = (tmp_path / "f").read_bytes()
    assert struct.unpack("<Q", data[:8])[0] + 8 == header.payload_offset == len(data) - 3
