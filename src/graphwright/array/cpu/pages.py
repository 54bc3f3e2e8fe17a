"""Large blocks in pages of 2 MiB where Linux gives them to who asks: fewer faults, fewer borders in a stream."""

from __future__ import annotations

import ctypes
import sys
from functools import cache
from typing import Any

import torch

MANY = 1 << 20
"""Elements that may be worth large pages."""
_LARGE = 4 << 20
"""Bytes of a block from which on they are asked for, as numpy does."""
_PAGE = 4096
_HUGEPAGE = 14  # MADV_HUGEPAGE


@cache
def _advise() -> Any:
    """Madvise, or None where there is none."""
    if not sys.platform.startswith("linux"):
        return None
    call = ctypes.CDLL(None).madvise
    call.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    return call


def in_large_pages(block: torch.Tensor) -> torch.Tensor:
    """A fresh block, of which the system is asked to make large pages; it may refuse."""
    size = block.nbytes
    if size >= _LARGE and (advise := _advise()) is not None:
        start = -(-block.data_ptr() // _PAGE) * _PAGE
        advise(start, block.data_ptr() + size - start & -_PAGE, _HUGEPAGE)
    return block
