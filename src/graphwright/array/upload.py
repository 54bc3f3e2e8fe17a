"""Many arrays brought to a device in few copies: neighbours share a block there, so a small one costs no launch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from graphwright.array.device import Device
from graphwright.array.dtype import uint8
from graphwright.array.ndarray import NDArray, empty, from_numpy

MOST_BYTES = 64 * 2**20
MOST_ARRAYS = 4096
_ALIGN = 64  # bytes, as single arrays are


def chunks(sizes: Sequence[int]) -> Iterator[range]:
    """Ranges that tile the arrays in their order, each of at most 4096 and 64 MiB; a larger array stands alone.

    Args:
        sizes: bytes of each array.
    """
    start, used = 0, 0
    for at, size in enumerate(sizes):
        room = _aligned(size)
        if at > start and (used + room > MOST_BYTES or at - start == MOST_ARRAYS):
            yield range(start, at)
            start, used = at, 0
        used += room
    if start < len(sizes):
        yield range(start, len(sizes))


def upload(arrays: Sequence[NDArray], device: Device) -> list[NDArray]:
    """The arrays on a device, in their order, shape and dtype: row-major, one copy a chunk; those there stay.

    Arrays of one chunk lie in one block, which lives as long as one of them. Raises: DeviceUnavailable.
    """
    moving = [place for place, array in enumerate(arrays) if array.device != device]
    result = list(arrays)
    for part in chunks([arrays[place].nbytes for place in moving]):
        places = [moving[at] for at in part]
        ends = np.cumsum([_aligned(arrays[place].nbytes) for place in places])
        host = np.zeros(int(ends[-1]), np.uint8)
        starts = [0, *map(int, ends[:-1])]
        for place, start in zip(places, starts, strict=True):
            host[start : start + arrays[place].nbytes] = np.frombuffer(arrays[place].tobytes(), np.uint8)
        block = empty(host.shape, uint8, device).copy_from(from_numpy(host))
        for place, start in zip(places, starts, strict=True):
            array = arrays[place]
            result[place] = NDArray(block.storage, array.dtype, array.shape, offset=start // array.dtype.itemsize)
    return result


def _aligned(nbytes: int) -> int:
    return -(-nbytes // _ALIGN) * _ALIGN
