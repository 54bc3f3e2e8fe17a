"""Anything that holds bytes, seen as one flat run of them, without a copy."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, Any

from graphwright.errors import UsageError

if TYPE_CHECKING:
    from numpy import ndarray
    from typing_extensions import Buffer as _Buffer

    Buffer = _Buffer | ndarray  # an array is one, though numpy's stubs say so only from 3.12 on
elif sys.version_info >= (3, 12):
    from collections.abc import Buffer
else:
    Buffer = Any  # the protocol has no name before Python 3.12

StrPath = str | os.PathLike[str]


def flat_bytes(data: Buffer) -> memoryview:
    """[nbytes] uint8 view of `data` in memory order; nothing is copied.

    Raises: UsageError if `data` is not a C-contiguous buffer of native numbers (a transposed or byte-swapped array).
    """
    try:
        view = memoryview(data)  # pyright: ignore[reportArgumentType]  # see the import
        if view.nbytes == 0:  # cast refuses a zero in the shape
            return memoryview(b"")
        if view.format.startswith((">", "!")):  # cast does not mind, and every file here is little-endian
            raise TypeError(f"big-endian format {view.format}")
        return view.cast("B")
    except TypeError as error:
        raise UsageError(
            "these are not plain bytes in memory order",
            expected="a C-contiguous buffer of native numbers",
            got=f"{type(data).__name__}: {error}",
            fix="np.ascontiguousarray(x).view(np.uint8)",
        ) from error
