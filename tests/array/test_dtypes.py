"""The dtype table: each column against the system it names, and bfloat16 bit by bit."""

from __future__ import annotations

import pickle

import numpy as np
import pytest
import torch

from graphwright.array import BY_TAG, DTYPES, bfloat16, dtype, empty, float32, float64, from_numpy
from graphwright.array.cpu.kernel import TORCH_DTYPE
from graphwright.errors import DTypeError
from graphwright.ops import call


@pytest.mark.parametrize("name", DTYPES)
def test_every_column_leads_back(name: str) -> None:
    row = DTYPES[name]
    assert dtype(name) is dtype(row) is row
    assert dtype(name + "_") is row
    assert BY_TAG[row.safetensors] is row
    assert row.numpy.itemsize == row.itemsize == TORCH_DTYPE[row].itemsize
    assert str(TORCH_DTYPE[row]) == f"torch.{name}"
    assert pickle.loads(pickle.dumps(row)) is row
    if row is not bfloat16:
        assert dtype(row.numpy) is row
        code, bits = row.dlpack
        assert bits == 8 * row.itemsize
        kinds = {0: "i", 1: "u", 2: "f", 6: "b"}
        assert kinds[code] == row.numpy.kind
    assert row.is_float == TORCH_DTYPE[row].is_floating_point


def test_unknown_dtypes_are_refused() -> None:
    for wrong in ("float33", np.complex64, object(), "f16x"):
        with pytest.raises(DTypeError):
            dtype(wrong)


@pytest.mark.parametrize("name", DTYPES)
def test_values_go_to_numpy_and_back_sharing_memory(name: str) -> None:
    row = DTYPES[name]
    host = np.arange(6).astype(row.numpy).reshape(2, 3)
    array = from_numpy(host, bits=row if row is bfloat16 else None)
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


def test_bfloat16_asks_numpy_users_what_they_want() -> None:
    with pytest.raises(DTypeError, match="bits=True"):
        empty((2,), bfloat16).to_numpy()


def test_rounding_to_bfloat16_is_torchs_to_nearest_even() -> None:
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


def test_wide_casts_keep_every_low_value() -> None:
    low = from_numpy(PATTERNS.copy(), bits=bfloat16)
    for kind in (float32, float64):
        back = call("cast", call("cast", low, dtype=kind), dtype=bfloat16).to_numpy(bits=True)
        number = (PATTERNS & 0x7FFF) <= 0x7F80
        assert np.array_equal(back[number], PATTERNS[number])


@pytest.mark.parametrize(
    ("short", "name"),
    [("bf16", "bfloat16"), ("f16", "float16"), ("fp16", "float16"), ("f32", "float32"), ("fp32", "float32")],
)
def test_the_short_names_that_specs_print_are_read(short: str, name: str) -> None:
    assert dtype(short) is DTYPES[name]
