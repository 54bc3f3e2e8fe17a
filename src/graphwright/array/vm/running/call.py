"""Calls of the VM's machine with a context (the arguments of a call, see `sharing.py`), and the helper threads.

A quick call takes some 30 ns: it is a builtin method whose `self` is a bytes object with the context's address, and
whose C function is the machine, which returns None, or NotImplemented for a failure. It holds the GIL, so only short
code is called like this. Where CPython's object layout is unknown, and for long code, the call goes through ctypes.
"""

from __future__ import annotations

import ctypes
import sys
import sysconfig
from collections.abc import Callable
from functools import cache
from threading import Lock, Thread
from typing import Any

import numpy as np
import torch

from graphwright.array.vm import sharing as at
from graphwright.array.vm.code import SCRATCH
from graphwright.array.vm.machine import build

Call = Callable[[], Any]
"""A function that runs the code and returns None, or another object if an instruction failed."""

_NOARGS = 4  # METH_NOARGS
_LASTING = (3, 12)  # from this version on None is immortal: references to it are not counted


class _Method(ctypes.Structure):
    _fields_ = (
        ("name", ctypes.c_char_p),
        ("function", ctypes.c_void_p),
        ("flags", ctypes.c_int),
        ("doc", ctypes.c_char_p),
    )


@cache
def _make_method() -> Any:
    """Return CPython's constructor (method, self) -> builtin method; None unless this is 64-bit CPython with a GIL."""
    plain = sys.implementation.name == "cpython" and not sysconfig.get_config_var("Py_GIL_DISABLED")
    if not plain or bytes.__basicsize__ - 1 != at.PAYLOAD or ctypes.sizeof(ctypes.c_void_p) != 8:
        return None
    make = ctypes.pythonapi.PyCFunction_NewEx
    make.restype, make.argtypes = ctypes.py_object, (ctypes.c_void_p, ctypes.py_object, ctypes.py_object)
    return make


@cache
def _method() -> _Method:
    return _Method(b"run", build().address, _NOARGS, None)


def guarded(context: np.ndarray, memory: Any, otherwise: Callable[[], None]) -> Call:
    """Return a call that runs the code of `context` if its guard holds, else calls `otherwise`.

    The guard holds if the number at the address `context[GUARD]` equals `context[SEEN]`. `otherwise` is also called
    after a failed instruction. The call holds the GIL and keeps `memory`, used by `context`, alive; its check is native
    code. Without 64-bit CPython and its GIL, `otherwise` itself is returned.
    """
    context[at.GUARD], context[at.SEEN] = context.ctypes.data, -1  # no segment yet: the guard, the first word, is 0
    context[at.ASK] = ctypes.cast(ctypes.pythonapi.PyObject_CallNoArgs, ctypes.c_void_p).value
    context[at.OTHERWISE] = id(otherwise)
    return quick(context, (memory, otherwise)) or otherwise


def quick(context: np.ndarray, memory: Any) -> Call | None:
    """Return a call of the VM that holds the GIL; it keeps `memory`, used by `context`, alive.

    None if Python is not 64-bit CPython with the GIL, or if the layout of its bytes objects is unknown.
    """
    make = _make_method()
    if make is None:
        return None
    context[at.FINE], context[at.FAILED], context[at.TABLE] = id(None), id(NotImplemented), build().table.ctypes.data
    context[at.COUNTED] = sys.version_info < _LASTING
    me = int(context.ctypes.data).to_bytes(8, sys.byteorder)
    return make(ctypes.addressof(_method()), me, (context, memory))


_Plain = ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.c_int64)


def patient(context: np.ndarray, memory: Any) -> Call:
    """Return a call of the VM that releases the GIL; it keeps `memory`, used by `context`, alive."""
    machine, block = build(), np.array([context.ctypes.data], np.int64)
    context[at.FINE], context[at.FAILED], context[at.COUNTED], context[at.TABLE] = 0, 1, 0, machine.table.ctypes.data
    run, me = _Plain(machine.address), int(block.ctypes.data) - at.PAYLOAD

    def call(keep: Any = (block, context, memory)) -> Any:
        return NotImplemented if run(me) else None

    return call


get_num_threads = torch.get_num_threads
"""The number of threads of a kernel, this one included: the same as of ATen's kernels."""

_lock = Lock()
_state: dict[str, np.ndarray] = {}
_helpers: list[Thread] = []


def team(threads: int) -> int:
    """Return the address of the helper threads' shared memory; 0 where the platform has no semaphores.

    Missing helpers are started, so that with the caller there are `threads` threads.
    """
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
        for cell, name in ((at.SEM_WAIT, "sem_wait"), (at.SEM_POST, "sem_post"), (at.USLEEP, "usleep")):
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
