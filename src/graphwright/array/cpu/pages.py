"""Request 2 MiB pages for large blocks on Linux: fewer page faults and TLB misses."""

from __future__ import annotations

import ctypes
import sys
from functools import cache
from typing import Any

import torch

MANY = 1 << 20
"""Elements from which on large pages may pay."""
_LARGE = 4 << 20
"""Bytes from which on large pages are requested, as in numpy."""
_PAGE = 4096
_HUGEPAGE = 14  # MADV_HUGEPAGE


@cache
def _advise() -> Any:
    """Return madvise, or None if the system has none."""
    if not sys.platform.startswith("linux"):
        return None
    call = ctypes.CDLL(None).madvise
    call.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    return call


def in_large_pages(block: torch.Tensor) -> torch.Tensor:
    """Request large pages for a new block; the system may refuse."""
    size = block.nbytes
    if size >= _LARGE and (advise := _advise()) is not None:
        start = -(-block.data_ptr() // _PAGE) * _PAGE
        advise(start, block.data_ptr() + size - start & -_PAGE, _HUGEPAGE)
    return block
