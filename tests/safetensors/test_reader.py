import hashlib
import mmap
import os
import subprocess
import sys
import zipfile
from math import prod
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from raw_files import HOSTILE, entry, raw_file

import graphwright
from graphwright.safetensors import (
    BITS,
    CheckpointChanged,
    CheckpointClosed,
    CheckpointError,
    CheckpointNotFound,
    HeaderError,
    TensorFile,
    UnknownKey,
    UnsafeFile,
)

PAYLOAD = bytes(range(100, 106))
HEADER = {"__metadata__": {"format": "pt"}, "a": entry("U8", (2,), 0, 2), "b": entry("BF16", (2, 1), 2, 6)}


@pytest.fixture
def path(tmp_path):
    file = tmp_path / "model.safetensors"
    file.write_bytes(raw_file(HEADER, PAYLOAD))
    return file


def test_an_opened_file_lists_the_contents_of_its_header(path):
    with TensorFile(path) as file:
        assert [(i.key, i.tag, i.shape, i.nbytes) for i in file.infos] == [
            ("a", "U8", (2,), 2),
            ("b", "BF16", (2, 1), 4),
        ]
        assert file.metadata == {"format": "pt"}
        assert file.payload_offset == path.stat().st_size - 6
        assert bytes(file.bytes("b")) == PAYLOAD[2:]
        assert b"".join(file.chunks("a")) == PAYLOAD[:2]
        assert b"".join(file.file_chunks()) == path.read_bytes()
        assert "a" in file
        assert "c" not in file


NUMPY = {"F64": "f8", "F32": "f4", "F16": "f2", "I64": "i8", "I32": "i4", "I16": "i2", "I8": "i1", "BOOL": "?"}
NUMPY |= {"U64": "u8", "U32": "u4", "U16": "u2", "U8": "u1"}


@st.composite
def arrays(draw: st.DrawFn) -> dict[str, np.ndarray]:
    found = {}
    for key in draw(st.lists(st.text(max_size=12), max_size=5, unique=True)):
        shape = draw(st.lists(st.integers(0, 3), max_size=6))
        dtype = np.dtype(draw(st.sampled_from(sorted(NUMPY.values()))))
        size = prod(shape) * dtype.itemsize
        bits = np.frombuffer(draw(st.binary(min_size=size, max_size=size)), np.uint8)
        found[key] = (bits & 1 if dtype.kind == "b" else bits).view(dtype).reshape(shape)
    return found


@given(tensors=arrays(), padding=st.integers(0, 9))
@example(tensors={"": np.zeros((0, 2), np.float32), "é": np.array(-0.0)}, padding=1)
def test_files_of_the_safetensors_library_are_read_equally_with_any_header_length(tmp_path_factory, tensors, padding):
    path = tmp_path_factory.mktemp("files") / "model.safetensors"
    data = safetensors.numpy.save(tensors, {"format": "pt"})
    length = int.from_bytes(data[:8], "little")
    path.write_bytes(raw_file(data[8 : 8 + length] + b" " * padding, data[8 + length :]))
    file = TensorFile(path)
    assert {info.key for info in file.infos} == set(tensors)
    for key, array in tensors.items():
        info = file.info(key)
        assert (np.dtype(NUMPY[info.tag]), info.shape) == (array.dtype, array.shape)
        assert bytes(file.bytes(key)) == array.tobytes()
        assert b"".join(file.chunks(key)) == array.tobytes()


def test_a_hostile_file_is_refused_with_its_path(tmp_path):
    for rule, key, data in HOSTILE:
        path = tmp_path / f"{rule}.safetensors"
        path.write_bytes(data)
        with pytest.raises(HeaderError) as caught:
            TensorFile(path)
        assert (caught.value.rule, caught.value.key, caught.value.where) == (rule, key, path)


def test_every_truncation_and_extension_of_a_file_is_refused(path):
    data = path.read_bytes()
    for size in range(len(data)):
        path.write_bytes(data[:size])
        with pytest.raises(HeaderError) as caught:
            TensorFile(path)
        assert caught.value.rule not in ("length", "tiling") or "truncated" in str(caught.value)
    path.write_bytes(data + b"\0")
    with pytest.raises(HeaderError, match="tiling"):
        TensorFile(path)


def test_torch_tensors_share_the_mapping_without_warning_and_never_write_the_file(path):
    before = hashlib.sha256(path.read_bytes()).hexdigest()
    file = TensorFile(path)
    tensor = torch.frombuffer(file.bytes("b"), dtype=torch.bfloat16)  # warnings are errors in this suite
    tensor += 1
    file.bytes("a")[:] = b"zz"
    assert hashlib.sha256(path.read_bytes()).hexdigest() == before
    assert b"".join(file.chunks("b")) == PAYLOAD[2:]
    assert bytes(TensorFile(path).bytes("b")) == PAYLOAD[2:]


def test_views_outlive_the_file_object_and_close_refuses_only_new_ones(path):
    file = TensorFile(path)
    view = file.bytes("a")
    file.close()
    file.close()
    assert bytes(view) == PAYLOAD[:2]
    with pytest.raises(CheckpointClosed):
        file.bytes("a")


def test_a_file_larger_than_memory_opens_and_maps(tmp_path):
    size = 140 * 10**9
    path = tmp_path / "model.safetensors"
    start = raw_file({"big": entry("BF16", (size // 2,), 0, size)})
    with open(path, "wb") as stream:
        stream.write(start)
        stream.truncate(len(start) + size)
    view = TensorFile(path).bytes("big")
    assert view.nbytes == size
    assert bytes(view[-4:]) == bytes(4)


def resident_pages(path: Path) -> int:
    """Pages of the file in the page cache, by mincore."""
    import ctypes

    size = path.stat().st_size
    with open(path, "rb") as stream, mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_COPY) as mapped:
        pages = (ctypes.c_ubyte * -(-size // mmap.PAGESIZE))()
        address = ctypes.c_char.from_buffer(mapped)
        try:
            result = ctypes.CDLL(None).mincore(ctypes.byref(address), ctypes.c_size_t(size), pages)
        finally:
            del address
    assert result == 0
    return sum(page & 1 for page in pages)


@pytest.mark.linux  # mincore and posix_fadvise
def test_opening_reads_no_page_of_the_payload(tmp_path):
    size = 64 << 20
    path = tmp_path / "model.safetensors"
    start = raw_file({"big": entry("U8", (size,), 0, size)})
    with open(path, "wb") as stream:
        stream.write(start)
        stream.truncate(len(start) + size)
    TensorFile(path).bytes("big")
    # The first read of a file makes the system fetch some pages ahead; the payload has 16384.
    assert resident_pages(path) <= 64


def test_opening_imports_neither_torch_nor_numpy(path):
    code = (
        "import sys; from graphwright.safetensors import Checkpoint; "
        f"print(Checkpoint({str(path)!r}).info('b').tag); "
        "print({'torch', 'numpy', 'safetensors', 'pickle'} & set(sys.modules))"
    )
    kept = {k: v for k, v in os.environ.items() if not k.startswith("COVERAGE")}  # measuring imports pickle
    environment = {**kept, "PYTHONPATH": str(Path(graphwright.__file__).parent.parent)}
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=True)
    assert run.stdout == "BF16\nset()\n"


def replaced(path: Path) -> None:
    other = path.with_name("other")
    other.write_bytes(path.read_bytes())
    os.utime(other, ns=(path.stat().st_atime_ns, path.stat().st_mtime_ns))  # same size, same time: only the inode tells
    other.rename(path)


def truncated(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 3)


def touched(path: Path) -> None:
    os.utime(path, ns=(0, path.stat().st_mtime_ns + 1))


def removed(path: Path) -> None:
    path.unlink()


@pytest.mark.parametrize("change", [replaced, removed])
@pytest.mark.parametrize("mapped", [False, True])
def test_a_file_that_was_replaced_or_removed_is_read_as_it_was_opened(path, change, mapped):
    file, whole = TensorFile(path), path.read_bytes()
    first = bytes(TensorFile(path).bytes("b"))
    if mapped:
        file.bytes("a")
    change(path)
    if path.exists():
        path.write_bytes(b"other")
    assert bytes(file.bytes("b")) == b"".join(file.chunks("b")) == first
    assert b"".join(file.file_chunks()) == whole


def test_closing_or_dropping_a_file_closes_its_descriptor(path):
    file = TensorFile(path)
    for drop in (file.close, lambda: None):
        fd = file._fd
        os.fstat(fd)
        drop()
        if drop is not file.close:
            del file
        with pytest.raises(OSError, match="descriptor"):
            os.fstat(fd)
        file = TensorFile(path)


@pytest.mark.parametrize("change", [truncated, touched])
@pytest.mark.parametrize("mapped", [False, True])
def test_files_changed_after_opening_raise_instead_of_returning_bytes(path, change, mapped):
    file = TensorFile(path)
    if mapped:
        file.bytes("a")
    change(path)
    for read in (lambda: file.bytes("b"), lambda: list(file.chunks("b")), lambda: list(file.file_chunks())):
        with pytest.raises(CheckpointChanged, match="changed after it was opened"):
            read()


def test_files_that_change_while_copied_raise(path):
    chunks = TensorFile(path).chunks("b")
    next(chunks)
    with open(path, "r+b") as stream:
        stream.write(b"x")
    os.utime(path)
    with pytest.raises(CheckpointChanged, match="while it was read"):
        next(chunks)


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_a_renamed_pickle_is_refused_by_its_first_bytes(tmp_path, protocol):
    path = tmp_path / "model.safetensors"
    torch.save({"w": torch.ones(50)}, path, pickle_protocol=protocol, _use_new_zipfile_serialization=False)
    with pytest.raises(UnsafeFile, match="pickle"):
        TensorFile(path)


@pytest.mark.parametrize("suffix", [".bin", ".pt", ".pth", ".ckpt", ".PT"])
def test_a_pickle_is_refused_by_its_name_before_it_is_opened(tmp_path, suffix):
    with pytest.raises(UnsafeFile, match="may run code"):
        TensorFile(tmp_path / f"not-even-there{suffix}")


def test_the_suggested_conversion_command_gives_equal_tensors(tmp_path):
    path = tmp_path / "it's a model.bin"
    weight = torch.arange(6.0).reshape(2, 3)
    torch.save({"w": weight.T, "tied": weight}, path)
    assert zipfile.is_zipfile(path)
    path.rename(path.with_suffix(".zip"))
    with pytest.raises(UnsafeFile, match="zip archive") as caught:
        TensorFile(path.with_suffix(".zip"))
    assert caught.value.fix is not None
    command = caught.value.fix.replace("python ", f"{sys.executable} ", 1)
    subprocess.run(command, shell=True, check=True, timeout=60)
    file = TensorFile(path.with_suffix(".safetensors"))
    assert bytes(file.bytes("w")) == weight.T.contiguous().numpy().tobytes()
    assert bytes(file.bytes("tied")) == weight.numpy().tobytes()


@pytest.mark.parametrize("length", [0x280, 0x380, 0x480, 0x580])
def test_headers_whose_length_resembles_a_pickle_are_read(tmp_path, length):
    path = tmp_path / "model.safetensors"
    path.write_bytes(raw_file(b"{}".ljust(length)))
    assert TensorFile(path).infos == ()


def test_missing_files_and_named_pipes_raise_typed_errors(tmp_path):
    with pytest.raises(CheckpointNotFound):
        TensorFile(tmp_path / "none.safetensors")
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path, tmp_path / "pipe"):
        with pytest.raises(CheckpointError, match="not a regular file"):
            TensorFile(path)


def test_unknown_keys_name_similar_ones(path):
    path.write_bytes(raw_file({"layers.3.q.weight": entry()}, b"ab"))
    with pytest.raises(UnknownKey, match=r"nearest keys: layers\.3\.q\.weight") as caught:
        TensorFile(path).bytes("layer.3.q.weight")
    assert isinstance(caught.value, KeyError)


def test_tensors_of_every_tag_are_readable_as_bytes(tmp_path):
    rows, at = {}, 0
    for tag in [*BITS, "UNHEARD_OF"]:
        nbytes = BITS.get(tag, 24)
        rows[tag] = entry(tag, (8,), at, at + nbytes)
        at += nbytes
    payload = np.random.default_rng(0).bytes(at)
    path = tmp_path / "model.safetensors"
    path.write_bytes(raw_file(rows, payload))
    file = TensorFile(path)
    assert b"".join(bytes(file.bytes(tag)) for tag in rows) == payload
