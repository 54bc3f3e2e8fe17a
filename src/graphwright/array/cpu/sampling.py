"""The choice of the next id, where it is no part of a plan of the VM: the VM's own loops, compiled by themselves."""

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
    """A row of code, as the VM has it."""
    (ids, kept), (logits, _, _, seen) = outs, ins
    places = (*(t.data_ptr() for t in ins), seen.shape[1], ids.data_ptr(), kept.data_ptr())
    row = np.array([0, *logits.shape, *places], np.int64)
    return partial(build(), row, row.ctypes.data, work[0].data_ptr())


@cache
def build() -> Any:
    """The loops, compiled now if they were not before: some seconds, once per install."""
    from graphwright.array.vm.machine import source  # loads numba

    began = perf_counter()
    code = _compiled(source())
    if not code.stats.cache_hits:
        spent = perf_counter() - began
        logging.getLogger(__name__).info("compiled the choice of tokens in %.1f s", spent)
    return code


def _compiled(source: int) -> Any:
    """The loops; `source` is part of what numba knows them by."""
    from numba import types

    from graphwright.array.vm import sampling as loops
    from graphwright.native import njit

    @njit(types.int64(types.int64[::1], types.int64, types.int64), cache=True, nogil=True, error_model="numpy")
    def run(row: Any, place: Any, scratch: Any) -> Any:  # `row` is what keeps its place alive
        loops.sample_token(place, scratch)
        return source

    return run
