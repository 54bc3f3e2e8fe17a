"""The dtype table: each column against the system it names, and bfloat16 bit by bit."""

from __future__ import annotations

import ctypes
import pickle

import numpy as np
import pytest
import torch

from graphwright.array import (
    BY_TAG,
    CPU,
    DTYPES,
    Device,
    NDArray,
    Storage,
    bfloat16,
    dtype,
    float32,
    float64,
    from_numpy,
    uint8,
)
from graphwright.array.cpu.kernel import TORCH_DTYPE
from graphwright.autograd import Tensor
from graphwright.errors import DTypeError
from graphwright.ops import call

ELSEWHERE = {
    "float64": (11, "float64"),
    "float32": (1, "float32"),
    "bfloat16": (16, "bfloat16"),
    "float16": (10, "float16"),
    "float8_e4m3fn": (17, "float8e4nv"),
    "float8_e5m2": (19, "float8e5"),
    "int64": (7, "int64"),
    "int32": (6, "int32"),
    "int16": (5, "int16"),
    "int8": (3, "int8"),
    "uint8": (2, "uint8"),
    "bool": (9, "int1"),
}
"""Numbers of onnx.proto's TensorProto.DataType and names in triton.language; the tests depend on neither library."""


def torch_dlpack_code(kind: torch.dtype) -> tuple[int, int] | None:
    """(code, bits) in the capsule that torch makes; None for a dtype it does not export."""
    try:
        capsule = torch.zeros(1, dtype=kind).__dlpack__()
    except (BufferError, RuntimeError):
        return None
    get = ctypes.pythonapi.PyCapsule_GetPointer
    get.restype, get.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
    raw = ctypes.string_at(get(capsule, b"dltensor"), 24)  # void* data; int32 device[2]; int32 ndim; uint8 code, bits
    return raw[20], raw[21]


@pytest.mark.parametrize("name", DTYPES)
def test_every_name_of_a_dtype_resolves_to_it(name: str) -> None:
    row = DTYPES[name]
    assert dtype(name) is dtype(row) is row
    assert dtype(name + "_") is row
    assert BY_TAG[row.safetensors] is row
    assert row.numpy.itemsize == row.itemsize == TORCH_DTYPE[row].itemsize
    assert str(TORCH_DTYPE[row]) == f"torch.{name}"
    assert pickle.loads(pickle.dumps(row)) is row
    assert row.as_bits == (row.numpy.kind == "u" and row is not uint8)
    if not row.as_bits:
        assert dtype(row.numpy) is row
        code, bits = row.dlpack
        assert bits == 8 * row.itemsize
        kinds = {0: "i", 1: "u", 2: "f", 6: "b"}
        assert kinds[code] == row.numpy.kind
    assert (row.is_float or row.kind == "float8") == TORCH_DTYPE[row].is_floating_point
    assert torch_dlpack_code(TORCH_DTYPE[row]) in (row.dlpack, None)
    assert (row.onnx, row.triton) == ELSEWHERE[name]


def test_unknown_dtypes_are_refused() -> None:
    for wrong in ("float33", np.complex64, object(), "f16x"):
        with pytest.raises(DTypeError):
            dtype(wrong)


@pytest.mark.parametrize("name", DTYPES)
def test_values_round_trip_through_numpy_sharing_memory(name: str) -> None:
    row = DTYPES[name]
    host = np.arange(6).astype(row.numpy).reshape(2, 3)
    array = from_numpy(host, bits=row if row.as_bits else None)
    assert array.dtype is row
    back = array.to_numpy(bits=True)
    assert np.array_equal(back, host)
    host[0, 0] = 1
    assert back[0, 0] == 1
    assert array.tobytes() == host.tobytes()


PATTERNS = np.arange(65536, dtype=np.uint16)


def test_all_bfloat16_patterns_survive_the_round_trip() -> None:
    array = from_numpy(PATTERNS.copy(), bits=bfloat16)
    assert np.array_equal(array.copy().to_numpy(bits=True), PATTERNS)
    assert np.array_equal(
        from_numpy(np.frombuffer(array.tobytes(), np.uint16), bits=bfloat16).to_numpy(bits=True), PATTERNS
    )
    wide = array.to_numpy("float32")
    assert np.array_equal(wide.view(np.uint32) >> 16, PATTERNS.astype(np.uint32))
    theirs = torch.from_numpy(PATTERNS.view(np.int16).copy()).view(torch.bfloat16).float().numpy()
    assert np.array_equal(wide, theirs, equal_nan=True)


def test_rounding_to_bfloat16_matches_torch() -> None:
    rng = np.random.default_rng(0)
    anywhere = rng.integers(0, 2**32, 1_000_000, dtype=np.uint32).view(np.float32)
    base = (PATTERNS.astype(np.uint32) << 16)[np.newaxis]
    halfway = (base + np.array([[0x7FFF], [0x8000], [0x8001]], np.uint32)).reshape(-1).view(np.float32)
    for host in (anywhere, halfway):
        ours = call("cast", from_numpy(host), dtype=bfloat16).to_numpy(bits=True)
        theirs = torch.from_numpy(host).to(torch.bfloat16).view(torch.uint16).numpy()
        number = ~np.isnan(host)
        assert np.array_equal(ours[number], theirs[number])
        bits = host.view(np.uint32)[number].astype(np.uint64)
        even = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)  # the rule itself
        assert np.array_equal(ours[number], even)
        assert np.isnan(from_numpy(ours[~number], bits=bfloat16).to_numpy("float32")).all()


def test_widening_casts_keep_every_16_bit_value() -> None:
    low = from_numpy(PATTERNS.copy(), bits=bfloat16)
    for kind in (float32, float64):
        back = call("cast", call("cast", low, dtype=kind), dtype=bfloat16).to_numpy(bits=True)
        number = (PATTERNS & 0x7FFF) <= 0x7F80
        assert np.array_equal(back[number], PATTERNS[number])


@pytest.mark.parametrize(
    ("short", "name"),
    [("bf16", "bfloat16"), ("f16", "float16"), ("fp16", "float16"), ("f32", "float32"), ("fp32", "float32")],
)
def test_short_dtype_names_are_parsed(short: str, name: str) -> None:
    assert dtype(short) is DTYPES[name]


@pytest.mark.parametrize("name", ["float8_e4m3fn", "float8_e5m2"])
def test_float8_values_are_stored_and_cast(name: str, tmp_path) -> None:
    codes = np.arange(256, dtype=np.uint8)
    array = from_numpy(codes, bits=DTYPES[name])
    theirs = torch.from_numpy(codes.copy()).view(TORCH_DTYPE[DTYPES[name]]).float().numpy()
    wide = array.to_numpy("float32")
    assert np.array_equal(wide, theirs, equal_nan=True)
    assert np.array_equal(np.signbit(wide[~np.isnan(wide)]), np.signbit(theirs[~np.isnan(theirs)]))
    assert np.array_equal(call("cast", array, dtype=float32).to_numpy(), theirs, equal_nan=True)
    spread = np.random.default_rng(0).normal(size=10_000).astype(np.float32) * 30
    low = call("cast", from_numpy(spread), dtype=DTYPES[name])
    assert np.array_equal(
        low.to_numpy(bits=True), torch.from_numpy(spread).to(TORCH_DTYPE[DTYPES[name]]).view(torch.uint8).numpy()
    )
    assert low.text() is not None
    array.copy().to_numpy(bits=True).tofile(tmp_path / "codes")
    assert (tmp_path / "codes").read_bytes() == codes.tobytes()
    with pytest.raises(DTypeError):
        Tensor(array, requires_grad=True)
    with pytest.raises(DTypeError):
        call("exp", array)


def test_bfloat16_patterns_survive_file_and_device(tmp_path) -> None:
    path = tmp_path / "patterns"
    array = from_numpy(PATTERNS.copy(), bits=bfloat16)
    path.write_bytes(array.tobytes())
    storage = Storage.mapped(lambda: memoryview(path.read_bytes()), 2 * len(PATTERNS), CPU)
    assert np.array_equal(NDArray(storage, bfloat16, PATTERNS.shape).to_numpy(bits=True), PATTERNS)
    there = array.to(Device("sim"))
    assert np.array_equal(there.to(CPU).to_numpy(bits=True), PATTERNS)
