"""Many arrays to a device: chunks tile exactly, each byte goes once, at any size."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from graphwright.array import DTYPES, Device, NDArray, bfloat16, from_numpy, upload
from graphwright.array.memory_pool import MOST_ARRAYS, MOST_BYTES, chunks
from graphwright.testing.simulated_device import SimBackend

SIM = Device("sim")
ITEMS = 213_304
SIZES = [0, 1, 63, 64, 65, MOST_BYTES // 3, MOST_BYTES - 1, MOST_BYTES, 2 * MOST_BYTES]


@given(st.lists(st.sampled_from(SIZES), max_size=40))
def test_chunks_cover_the_arrays_within_both_limits(sizes: list[int]) -> None:
    parts = list(chunks(sizes))
    assert [at for part in parts for at in part] == list(range(len(sizes)))
    for part in parts:
        assert 0 < len(part) <= MOST_ARRAYS
        assert len(part) == 1 or sum(sizes[at] for at in part) <= MOST_BYTES


def test_chunks_are_as_large_as_the_limits_allow() -> None:
    assert [len(p) for p in chunks([8] * (2 * MOST_ARRAYS + 5))] == [MOST_ARRAYS, MOST_ARRAYS, 5]
    assert [len(p) for p in chunks([MOST_BYTES // 4] * 9)] == [4, 4, 1]
    assert [len(p) for p in chunks([8, 2 * MOST_BYTES, 8, 8])] == [1, 1, 2]


@pytest.mark.deep
def test_every_byte_of_213304_arrays_arrives_once(sim: SimBackend) -> None:
    values = np.arange(ITEMS, dtype=np.int64)
    host = [from_numpy(values[at : at + 1]) for at in range(ITEMS)]
    there = upload(host, SIM)
    parts = list(chunks([8] * ITEMS))
    assert sim.pool.stats().allocs == len({id(a.storage) for a in there}) == len(parts) == -(-ITEMS // MOST_ARRAYS)
    assert sim.driver.syncs == 0
    assert sum(a.nbytes for a in there) == values.nbytes
    for part in parts:
        for at in (part.start, part.start + 1, part.stop - 2, part.stop - 1):
            assert there[at].to_numpy().tolist() == [at]
    blocks = (NDArray(there[p.start].storage, host[0].dtype, (8 * len(p),)).to_numpy() for p in parts)
    whole = np.concatenate([b[::8] for b in blocks])  # one every 64 bytes
    np.testing.assert_array_equal(whole, values)


@pytest.mark.parametrize("kind", DTYPES)
def test_uploads_keep_shape_dtype_and_bits_of_any_layout(kind: str) -> None:
    rng = np.random.default_rng(0)
    plain = [_bits(rng, s, kind) for s in ((), (3,), (2, 0), (5, 4))]
    given_ = [from_numpy(a, bits=DTYPES[kind]) for a in plain]
    given_ += [given_[3].permute(1, 0), given_[3][::-2, 1:], given_[1].expand(2, 3)]
    for mine, other in zip(upload(given_, SIM), given_, strict=True):
        assert (mine.spec, mine.device, mine.contiguous) == (other.spec, SIM, True)
        assert mine.tobytes() == other.tobytes()


def _bits(rng: np.random.Generator, shape: tuple[int, ...], kind: str) -> np.ndarray:
    if kind == "bool":
        return rng.integers(0, 2, shape).astype(bool)
    size = DTYPES[kind].itemsize
    raw = rng.integers(0, 256, (*shape, size), dtype=np.uint8)
    return raw.view(DTYPES[kind].numpy).reshape(shape)


def test_arrays_already_on_the_device_are_returned_unchanged(sim: SimBackend) -> None:
    there = from_numpy(np.ones(3)).to(SIM)
    both = upload([there, from_numpy(np.zeros(2, np.uint16), bits=bfloat16)], SIM)
    assert both[0] is there
    assert both[1].device == SIM
    assert upload([], SIM) == []
