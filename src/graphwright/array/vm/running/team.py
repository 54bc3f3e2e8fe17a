"""The threads that large rows are shared among: as many as ATen's kernels may take, this one included."""

from __future__ import annotations

import ctypes
import sys
from threading import Lock, Thread

import numpy as np
import torch

from graphwright.array.vm import context as at
from graphwright.array.vm.code import SCRATCH
from graphwright.array.vm.running.call import patient

get_num_threads = torch.get_num_threads
"""How many threads a kernel may take."""

_lock = Lock()
_state: dict[str, np.ndarray] = {}
_helpers: list[Thread] = []


def team(threads: int) -> int:
    """Address of the team, with helpers for so many threads; 0 where there are no semaphores to sleep on."""
    if len(_helpers) + 1 < threads and sys.platform == "linux":
        with _lock:
            _grow(threads)
    return int(_state["team"].ctypes.data) if "team" in _state else 0


def _grow(threads: int) -> None:
    if "team" not in _state:
        cells = np.zeros(at.TEAM_CELLS, np.int64)
        libc = ctypes.CDLL(None)
        if libc.sem_init(ctypes.c_void_p(cells.ctypes.data + 8 * at.SEMAPHORE), 0, 0):
            return
        for cell, name in ((at.SEM_WAIT, "sem_wait"), (at.SEM_POST, "sem_post"), (at.YIELD, "sched_yield")):
            cells[cell] = ctypes.cast(getattr(libc, name), ctypes.c_void_p).value or 0
        _state["team"] = cells
    while len(_helpers) + 1 < threads:
        context = np.zeros(at.CELLS, np.int64)
        scratch = np.zeros(SCRATCH + 64, np.uint8)
        context[at.HELPER], context[at.TEAM] = len(_helpers) + 1, _state["team"].ctypes.data
        context[at.SCRATCH] = -(-scratch.ctypes.data // 64) * 64
        helper = Thread(target=patient(context, (scratch, _state["team"])), name="graphwright-vm", daemon=True)
        helper.start()
        _helpers.append(helper)
