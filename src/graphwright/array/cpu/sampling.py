"""Sampling of tokens outside plans of the VM: the VM's loop, compiled on its own."""

from __future__ import annotations

import logging
from functools import cache, partial
from time import perf_counter
from typing import Any

import numpy as np

from graphwright.array.backend import Call
from graphwright.array.cpu.kernel import Attrs, Tensors, kernel
from graphwright.array.dtype import int64
from graphwright.array.spec import Spec
from graphwright.array.vm.code import SCRATCH


@kernel("sample_token", lambda outs, ins, attrs: [Spec((SCRATCH // 8,), int64)])
def sample_token(outs: Tensors, ins: Tensors, attrs: Attrs, work: Tensors) -> Call:
    """Run the loop on a row of code."""
    (ids, kept), (logits, _, _, seen) = outs, ins
    addresses = (*(t.data_ptr() for t in ins), seen.shape[1], ids.data_ptr(), kept.data_ptr())
    row = np.array([0, *logits.shape, *addresses], np.int64)
    return partial(build(), row, row.ctypes.data, work[0].data_ptr())


@cache
def build() -> Any:
    """Return the loop, compiling it if it is not cached: some seconds, once per install."""
    from graphwright.array.vm.machine import source  # loads numba

    began = perf_counter()
    code = _compiled(source())
    if not code.stats.cache_hits:
        spent = perf_counter() - began
        logging.getLogger(__name__).info("compiled the sampling of tokens in %.1f s", spent)
    return code


def _compiled(source: int) -> Any:
    """Define the loop; `source` is a closure variable because numba's cache key contains closures."""
    from numba import types

    from graphwright.array.vm import sampling as loops
    from graphwright.native import njit

    @njit(types.int64(types.int64[::1], types.int64, types.int64), cache=True, nogil=True, error_model="numpy")
    def run(row: Any, address: Any, scratch: Any) -> Any:  # `row` owns the memory at the address
        loops.sample_token(address, scratch)
        return source

    return run
